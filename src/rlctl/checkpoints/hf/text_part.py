"""The text part of a model that takes images or sound as well: its configuration, and the stored tensors that hold it.

transformers says both: the class of the text section, and under which names whole and part are published.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.checkpoints.hf.hf_files import copy_companions, read_config, read_object, refuse_quantised
from rlctl.checkpoints.hf.hf_model import SCALE
from rlctl.checkpoints.hf.published_tensors import CannotFollowError, listed_tensors
from rlctl.checkpoints.hf.safetensors_files import INDEX, SafetensorsDirectory, StoredTensor, read_header, shard_files
from rlctl.checkpoints.hf.transformers_model import body_path, head_path
from rlctl.child import call_in_child
from rlctl.errors import InputError, listed
from rlctl.models.facts import ListedTensor
from rlctl.models.families import sees
from rlctl.weights.layout import ParamSpec, Shape

if TYPE_CHECKING:
    import torch

SAME_TEXT = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Text sections without a class of their own in transformers, and the type of the model that computes the same of text:
a token of a text has the same position in time, height and width, so that their rotary embedding is the plain one."""
OUTER = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")
"""Keys that may stand around the text section, and mean the text."""
NO_TEXT = ("id2label", "label2id", "_name_or_path", "transformers_version")
"""Keys that say nothing of the text model, or nothing that stays when another version takes the text part out again."""
OTHER_FILES = ("preprocessor_config.json",)
"""Companions that speak of the other senses."""
TEMPLATES = ("chat_template.json", "processor_config.json")
"""Files of a processor that may hold the chat template, the first one first."""
HEAD = re.compile(r"(^|\.)lm_head\.weight$")
COMPUTED = (".rotary_emb.inv_freq",)
NEXT = "Name a text model, perhaps the one that it was made from."


def has_text_part(directory: Path) -> bool:
    """Return whether the model in a directory takes more than text, and is none that reads with one half and writes
    with another."""
    config = read_config(directory)
    return sees(config) and not config.get("is_encoder_decoder")


def text_config(directory: Path) -> dict[str, Any]:
    """Return the config.json of a model's text part. Raises InputError where it cannot be trained alone."""
    refuse_quantised(directory)
    config = read_config(directory)
    return _text_config(directory, json.dumps(config, sort_keys=True), _stores_head(directory))


def write_companions(source: Path, destination: Path, config: dict[str, Any]) -> None:
    """Write configuration, generation configuration, tokenizer and chat template of the text part of `source`."""
    copy_companions(source, destination)
    for name in OTHER_FILES:
        (destination / name).unlink(missing_ok=True)
    (destination / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    legacy = destination / TEMPLATES[0]
    legacy.unlink(missing_ok=True)
    own = read_object(source, "tokenizer_config.json") if (source / "tokenizer_config.json").is_file() else {}
    if own.get("chat_template") or any(destination.glob("chat_template*")):
        return
    for name in TEMPLATES:
        if (source / name).is_file() and isinstance(found := read_object(source, name).get("chat_template"), str):
            (destination / "chat_template.jinja").write_text(found)
            return


def _stores_head(directory: Path) -> bool | None:
    """Whether the files hold an output layer, as far as an index or headers tell; None: they do not."""
    if (directory / INDEX).is_file():
        names = read_object(directory, INDEX).get("weight_map")
        return any(map(HEAD.search, names)) if isinstance(names, dict) else None
    if not any(directory.glob("*.safetensors")):
        return None
    return any(HEAD.search(name) for file in shard_files(directory) for name in read_header(file))


@cache
def _text_config(directory: Path, config: str, stores_head: bool | None) -> dict[str, Any]:
    if "torch" in sys.modules:
        return _made_config(json.loads(config), stores_head)
    doing = f"asking transformers about the text part of {directory}"
    return call_in_child(doing, partial(_made_config, json.loads(config), stores_head), quiet=True)


def _made_config(config: dict[str, Any], stores_head: bool | None) -> dict[str, Any]:
    """The config.json of the text part of a model with `config`."""
    import transformers
    from transformers import CONFIG_MAPPING

    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise _refusal(config, f"transformers {transformers.__version__} knows no model type `{kind}`")
    try:
        whole = CONFIG_MAPPING[kind].from_dict(config)
        text = whole.get_text_config(decoder=True)
    except Exception as error:
        raise _refusal(config, f"transformers cannot read its config.json: {_first_line(error)}") from error
    if text is whole:
        raise _refusal(config, "its config.json has no section for the text")
    if text.is_encoder_decoder:
        raise _refusal(config, "its text part is an encoder-decoder model")
    architecture, values = _of_class(config, text)
    own = config.get("text_config")
    section: dict[str, Any] = own if isinstance(own, dict) else config
    values |= {key: config[key] for key in OUTER if section.get(key) is None and config.get(key) is not None}
    dtype = section.get("dtype") or section.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    values |= {"architectures": [architecture], "dtype": dtype}
    values["tie_word_embeddings"] = _tied(config, section, stores_head, whole)
    return {key: value for key, value in sorted(values.items()) if key not in NO_TEXT}


def _of_class(config: dict[str, Any], text: Any) -> tuple[str, dict[str, Any]]:
    """The architecture of a text section's class, and the values of its configuration."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = SAME_TEXT.get(text.model_type, str(text.model_type))
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if not isinstance(architecture, str) or sees({"architectures": [architecture]}):
        raise _refusal(config, f"transformers has no class that writes text for its text part (`{text.model_type}`)")
    values = json.loads(text.to_json_string(use_diff=False))
    if kind != text.model_type:
        rope = values.get("rope_parameters") or {}
        plain = {key: value for key, value in rope.items() if not key.startswith("mrope")}
        own = CONFIG_MAPPING[kind].from_dict(values | {"model_type": kind, "rope_parameters": plain})
        values = json.loads(own.to_json_string(use_diff=False))
    return architecture, values


def _tied(config: dict[str, Any], section: dict[str, Any], stores_head: bool | None, whole: Any) -> bool:
    """Whether embedding and output layer are the same: as the model says, outside of the text section or in it. Where
    it says both or nothing, the files decide."""
    said = {part["tie_word_embeddings"] for part in (config, section) if "tie_word_embeddings" in part}
    if len(said) == 1:
        return bool(said.pop())
    return bool(getattr(whole, "tie_word_embeddings", False)) if stores_head is None else not stores_head


def _refusal(config: dict[str, Any], why: str) -> InputError:
    name = next(iter(config.get("architectures") or ()), str(config.get("model_type")))
    what = f"`{name}` is a model that takes images, sound or video, and its text part cannot be trained alone: {why}."
    return InputError(what, NEXT)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0].rstrip('.')}"


# The tensors


@dataclass(frozen=True)
class TextTensor:
    """A tensor of the text part, and where it is stored: whole, or in a stack of all experts."""

    stored: StoredTensor
    shape: Shape
    expert: int | None = None
    """Its place in the stack [E, O, I]; None: it is stored alone."""
    row: int = 0
    """Its first of the O rows of an expert: gate and up projection lie one behind the other."""
    transposed: bool = False
    """The stack is [E, I, O]."""

    def of(self, stored: torch.Tensor) -> torch.Tensor:
        """The view of it in the stored tensor."""
        if self.expert is None:
            return stored
        stack = stored[self.expert].T if self.transposed else stored[self.expert]
        return stack[self.row : self.row + self.shape[0]]


@dataclass(frozen=True)
class TextPart:
    """The files of a whole model, as a source of the tensors of its text part."""

    files: SafetensorsDirectory
    tensors: dict[str, TextTensor]
    """By published name of the text model, in the order of the files."""

    @staticmethod
    def open(directory: Path) -> TextPart:
        """Find the tensors of the text part. Raises InputError for any that the text model needs and the files lack or
        hold in another shape, and for any that it does not know."""
        files = SafetensorsDirectory.open(directory)
        return TextPart(files, _tensors(directory, files, text_config(directory)))

    def at(self, directory: Path) -> TextPart:
        """The same tensors in other files of the same names."""
        return TextPart(SafetensorsDirectory.open(directory), self.tensors)

    @cached_property
    def specs(self) -> dict[str, ParamSpec]:
        """Shape and dtype of each tensor."""
        return {name: ParamSpec(tensor.shape, tensor.stored.dtype) for name, tensor in self.tensors.items()}

    @cached_property
    def stored(self) -> frozenset[str]:
        """Names of the stored tensors that belong to it."""
        return frozenset(tensor.stored.name for tensor in self.tensors.values())

    def read(self, name: str) -> torch.Tensor:
        """A tensor, contiguous."""
        tensor = self.tensors[name]
        return tensor.of(self.files.read(tensor.stored.name)).contiguous()

    def drop(self, name: str) -> None:
        """Say that a tensor has been read."""
        self.files.drop(self.tensors[name].stored.name)


def _tensors(directory: Path, files: SafetensorsDirectory, config: dict[str, Any]) -> dict[str, TextTensor]:
    """Published name of the text model with `config` -> where the files of the whole one hold it."""
    whole, text = _meta(read_config(directory)), _meta(config)
    in_order = sorted(files.tensors.values(), key=lambda tensor: (tensor.file.name, tensor.position))
    found: dict[str, TextTensor] = {}
    body, head, own_head = _body_path(whole), head_path(whole), head_path(text)
    runtime = _runtime_names(whole, [stored.name for stored in in_order])
    inner = {name: held.removeprefix(f"{body}.") for name, held in runtime.items() if held.startswith(f"{body}.")}
    prefix = _usual_prefix(inner)
    own_body, published = body_path(text), _published(text)
    shapes = {name: box.tensor_shape or box.shape for boxes in published.values() for name, (box, _) in boxes.items()}
    below = {name: held.removeprefix(f"{own_body}.") for held, boxes in published.items() for name in boxes}
    own_prefix = _usual_prefix({name: end for name, end in below.items() if not name.startswith(f"{own_head}.")})
    for stored in in_order:
        name, held = stored.name, runtime[stored.name]
        if head and held.startswith(f"{head}."):
            found[own_head + held.removeprefix(head)] = TextTensor(stored, stored.shape)
        elif name in inner:
            outside = name.removesuffix(inner[name]) if name.endswith(inner[name]) else prefix
            own_name = own_prefix + name.removeprefix(outside)
            boxes = {} if own_name in shapes else published.get(f"{own_body}.{inner[name]}", {})
            found |= _unstacked(stored, boxes) or {own_name: TextTensor(stored, stored.shape)}
    repeated = {f"{own_head}.weight"} if config["tie_word_embeddings"] else set()
    ignored = tuple(getattr(text, "_keys_to_ignore_on_load_unexpected", None) or ())
    _require_all(directory, found, shapes, repeated, ignored)
    return {
        name: tensor for name, tensor in found.items() if name in shapes or name in repeated or name.endswith(SCALE)
    }


def _published(text: Any) -> dict[str, dict[str, tuple[ListedTensor, int | None]]]:
    """Parameter or stored buffer of a text model -> the tensors of it that are published, by name: the box that each is
    of it, and its expert."""
    try:
        listed_of_model = listed_tensors(text, {})
    except CannotFollowError as error:
        raise _refusal(text.config.to_dict(), error.message) from error
    found: dict[str, dict[str, tuple[ListedTensor, int | None]]] = {}
    for tensor in listed_of_model:
        for layer in tensor.layers or (0,):
            held = (tensor.module or tensor.name).format(layer=layer)
            experts = range(text.get_parameter(held).shape[0]) if "{expert}" in tensor.name else (None,)
            boxes = found.setdefault(held, {})
            boxes |= {tensor.name.format(layer=layer, expert=expert): (tensor, expert) for expert in experts}
    return found


def _meta(config: dict[str, Any]) -> Any:
    """The transformers model of a config.json, without memory for its tensors."""
    import torch
    import transformers
    from transformers import CONFIG_MAPPING

    named = next(iter(config.get("architectures") or ()), "")
    made = getattr(transformers, named, None)
    if made is None:
        raise _refusal(config, f"transformers {transformers.__version__} has no class `{named}`")
    try:
        with torch.device("meta"):
            return made(CONFIG_MAPPING[config["model_type"]].from_dict(config))
    except Exception as error:
        raise _refusal(config, f"transformers cannot build {named}: {_first_line(error)}") from error


def _body_path(inner: Any) -> str:
    """The path of the module that turns tokens into hidden states."""
    body = inner.get_decoder()
    path = next((path for path, module in inner.named_modules() if module is body), "")
    if not path:
        raise _refusal(inner.config.to_dict(), "transformers does not tell which of its modules reads the text")
    return f"{path}.{body_path(body)}" if head_path(body) else path  # Llama 4 holds a whole text model


def _runtime_names(inner: Any, names: list[str]) -> dict[str, str]:
    """Stored name -> the name in transformers' modules, whether or not there is such a module."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    changes = get_model_conversion_mapping(inner)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    held = inner.state_dict()
    found: dict[str, str] = {}
    for name in names:
        runtime, _ = rename_source_key(name, renamings, converters, inner.base_model_prefix, held)
        if runtime not in held and name in held:
            runtime, _ = rename_source_key(name, [], [], inner.base_model_prefix, held)
        found[name] = runtime
    return found


def _usual_prefix(inner: dict[str, str]) -> str:
    """The text that most names have in front of their ends; empty: there are none."""
    prefixes = Counter(name.removesuffix(end) for name, end in inner.items() if name.endswith(end))
    return prefixes.most_common(1)[0][0] if prefixes else ""


def _unstacked(stored: StoredTensor, boxes: dict[str, tuple[ListedTensor, int | None]]) -> dict[str, TextTensor]:
    """The tensors of every expert, where a stored tensor is a stack [E, O, I] or [E, I, O] of them; empty: it is not.

    As for transformers, the shape says which of the two it is.
    """
    found: dict[str, TextTensor] = {}
    for name, (box, expert) in boxes.items():
        outputs, inputs = box.module_shape[-2:] if expert is not None else (0, 0)
        if stored.shape[1:] in ((outputs, inputs), (inputs, outputs)):
            transposed = stored.shape[1:] != (outputs, inputs)
            found[name] = TextTensor(stored, box.shape, expert, box.module_start[0], transposed)
    return found


def _require_all(
    directory: Path,
    found: dict[str, TextTensor],
    shapes: dict[str, Shape],
    repeated: set[str],
    ignored: tuple[str, ...],
) -> None:
    """Raise InputError where tensors of the text model are absent or of another shape, or others would be lost."""
    if absent := sorted(shapes.keys() - found.keys()):
        why = f"{directory}: the text part lacks {listed(absent)}."
        raise InputError(why, "Is a shard absent, or does config.json belong to another model? Download it again.")
    for name, shape in shapes.items():
        if (stored := found[name].shape) != shape:
            held = f"tensor {found[name].stored.name} has shape {list(stored)}"
            raise InputError(f"{directory}: {held}, but config.json implies {list(shape)}.", "Download it again.")
    known = (SCALE, *COMPUTED)
    extra = sorted(name for name in found.keys() - shapes.keys() - repeated if not name.endswith(known))
    if lost := [found[name].stored.name for name in extra if not any(re.search(each, name) for each in ignored)]:
        why = f"{directory}: {listed(lost)} belongs to the text part, but transformers' text model has no such tensor."
        raise InputError(why, "A newer transformers may know it; without it the text part would not be the same.")
