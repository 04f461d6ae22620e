"""The tokenizer in a directory: `tokenizer.json` decides.

AutoTokenizer of transformers 5 rebuilds the tokenizer of many classes from vocabulary and merges alone, with the
class's normalizer, pre-tokenizer and decoder. The class follows from `tokenizer_config.json`, the model type and, for
some published models, the spelling of the path. A byte-level Llama whose files name LlamaTokenizerFast (DeepSeek's
distilled models) then loses blanks and line ends, and every file under model type qwen2 gets Qwen2's pre-tokenizer.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.checkpoints.hf.hf_files import (
    GENERATION_CONFIG,
    TEMPLATES,
    TOKENIZER,
    copy_matching,
    read_object,
    remove_matching,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
TOKENIZER_JSON, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
TEKKEN = "tekken.json"
PLAIN_CLASS = "PreTrainedTokenizerFast"
"""The class that takes `tokenizer.json` as it is, in every version of transformers."""
PROBE = (
    "Hello  world, it is 1234\n\n\tok?  It's THEIR'S (x_1 = -2.50e3); na\u00efve caf\u00e9 e\u0301 \u00df\u0130 "
    "\u4f60\u597d\u3002 \u0645\u0631\u062d\u0628\u0627 \U0001f600\r\n  def f(a):\n    return a[0] \u2028 \u00a0 end \n"
)
"""A text that distinguishes normalizers and pre-tokenizers: blanks, line ends, digits, contractions, accents,
scripts."""


def by_its_file(tokenizer: PreTrainedTokenizerBase, directory: Path | str) -> PreTrainedTokenizerBase:
    """Return a directory's tokenizer with the results of its `tokenizer.json`: the loaded tokenizer, or the plain class
    if the loaded one encodes or decodes a text differently. Code of the model's repository stays."""
    file, backend = Path(directory) / TOKENIZER_JSON, getattr(tokenizer, "backend_tokenizer", None)
    of_library = type(tokenizer).__module__.startswith("transformers.")
    from transformers import PreTrainedTokenizerFast

    if backend is None or not of_library or type(tokenizer) is PreTrainedTokenizerFast or not file.is_file():
        return tokenizer
    from tokenizers import Tokenizer

    for loaded in (backend, truth := Tokenizer.from_file(str(file))):  # each call of transformers sets both anew
        loaded.no_truncation()
        loaded.no_padding()
    if _shown(backend) == _shown(truth):
        return tokenizer
    plain = PreTrainedTokenizerFast.from_pretrained(directory, _from_auto=True)
    log.warning(
        "%s: transformers reads %s as %s and gives a text other tokens than the file; the file decides",
        directory, TOKENIZER_JSON, type(tokenizer).__name__,
    )  # fmt: skip
    return plain


def write_tokenizer(
    source: Path, destination: Path, *, template: str | None, plain: bool, generation: dict[str, Any]
) -> None:
    """Write the tokenizer of `source` for an export: with `template` as chat template, under the class that reads its
    file unchanged (`plain`), and with a generation_config.json of `generation`."""
    copy_matching(source, destination, TOKENIZER)
    path = destination / TOKENIZER_CONFIG
    values = read_object(destination, TOKENIZER_CONFIG) if path.is_file() else {}
    if plain:
        values["tokenizer_class"] = PLAIN_CLASS
    if template is not None:
        values.pop("chat_template", None)
        remove_matching(destination, TEMPLATES)
        (destination / "chat_template.jinja").write_text(template)
    if values:
        path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n")
    (destination / GENERATION_CONFIG).write_text(json.dumps(generation, indent=2) + "\n")


def replace_tokenizer(directory: Path, by: Path) -> None:
    """Replace the tokenizer, chat template and generation configuration in `directory` by the files of
    `write_tokenizer`."""
    remove_matching(directory, TOKENIZER)
    copy_matching(by, directory, (*TOKENIZER, GENERATION_CONFIG))


def names_other_class(tokenizer: PreTrainedTokenizerBase, directory: Path) -> bool:
    """Return whether transformers loads the tokenizer of a directory with another class than `by_its_file` took."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = directory / TOKENIZER_CONFIG
    class_name = read_object(directory, TOKENIZER_CONFIG).get("tokenizer_class") if path.is_file() else None
    if type(tokenizer) is not PreTrainedTokenizerFast or class_name in (
        None,
        PLAIN_CLASS,
        PreTrainedTokenizerFast.__name__,
    ):
        return False
    return type(AutoTokenizer.from_pretrained(directory)) is not PreTrainedTokenizerFast


def _shown(backend: Any) -> tuple[list[int], str] | None:
    try:
        ids = backend.encode(PROBE, add_special_tokens=False).ids
    except Exception:  # noqa: BLE001 - of the library's own plain kind: a class's unknown token that the file lacks
        return None
    return ids, backend.decode(ids, skip_special_tokens=False)


def has_both_forms(directory: Path | str) -> bool:
    """Return whether a directory has `tokenizer.json` next to Mistral's `tekken.json`, which transformers 5 and vLLM
    prefer where mistral-common is installed. Their tokenizer has no chat template and other methods."""
    return all((Path(directory) / name).is_file() for name in (TOKENIZER_JSON, TEKKEN))


def take_files_as_they_are() -> None:
    """Have `AutoTokenizer` of this process, which engines and processors load with, return tokenizers of
    `by_its_file`."""
    from transformers import AutoTokenizer

    plain = AutoTokenizer.from_pretrained
    if getattr(plain, "by_its_file", False):
        return

    def from_pretrained(name: Any, *arguments: Any, **options: Any) -> Any:
        return by_its_file(plain(name, *arguments, **options), name)

    from_pretrained.by_its_file = True  # type: ignore[attr-defined]
    AutoTokenizer.from_pretrained = from_pretrained  # type: ignore[method-assign]
