"""Tokenizers read as `tokenizer.json` has them, whatever class transformers takes for them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, MistralConfig, PreTrainedTokenizerFast, Qwen2Config

from rlctl.checkpoints.hf.tokenizer_files import PROBE, by_its_file, take_files_as_they_are
from rlctl.checkpoints.identity import model_fingerprint
from rlctl.data.chat import load_tokenizer
from rlctl.errors import InputError
from rlctl.settings.data import ModelConfig

TEXTS = ("Hello  world, it is 12\n ok", "12345 a\t\tb", PROBE)
CASES = {
    "LlamaTokenizerFast": LlamaConfig,  # DeepSeek's distilled Llamas
    "LlamaTokenizer": LlamaConfig,
    "Qwen2Tokenizer": Qwen2Config,
    "PreTrainedTokenizerFast": Qwen2Config,
    "GemmaTokenizerFast": LlamaConfig,
}


def directory_of(place: Path, named: str, config: Any = None) -> Path:
    """Write a byte-level tokenizer with merges that cross Qwen2's and Llama's cuts, under a class and a model type."""
    merges = [("Ġ", "o"), ("1", "2"), ("12", "3"), ("Ċ", "Ġ"), ("Ġ", "Ġ")]
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    raw = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(letters)}, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", bos_token="<s>").save_pretrained(place)
    path = place / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": named}))
    if config is not None:
        config().save_pretrained(place)
    return place


@pytest.mark.parametrize("named", CASES)
def test_ids_and_texts_are_those_of_the_tokenizers_library(named: str, tmp_path: Path) -> None:
    directory = directory_of(tmp_path, named, CASES[named])
    truth, tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json")), load_tokenizer(directory, ModelConfig())
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == truth.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == truth.decode(ids, skip_special_tokens=False) == text
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("</s>", "<s>")


def test_a_tokenizer_that_reads_its_file_stays_as_it_was_loaded(tmp_path: Path, tiny_llama: Path) -> None:
    loaded = AutoTokenizer.from_pretrained(tiny_llama)
    assert by_its_file(loaded, tiny_llama) is loaded
    assert by_its_file(loaded, tmp_path) is loaded  # no tokenizer.json


def test_engines_load_the_same_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.tokenizers import get_tokenizer

    directory = directory_of(tmp_path, "LlamaTokenizerFast", LlamaConfig)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", AutoTokenizer.from_pretrained)
    take_files_as_they_are()
    take_files_as_they_are()  # another engine in the process
    tokenizer = get_tokenizer(str(directory))
    ids = tokenizer.encode(TEXTS[0], add_special_tokens=False)
    assert ids == load_tokenizer(directory, ModelConfig()).encode(TEXTS[0], add_special_tokens=False)
    assert tokenizer.decode(ids) == TEXTS[0]


def test_mistral_s_own_form_does_not_displace_tokenizer_json(tmp_path: Path) -> None:
    import mistral_common

    both, alone = directory_of(tmp_path / "both", "LlamaTokenizerFast", MistralConfig), tmp_path / "alone"
    tekken = next((Path(mistral_common.__file__).parent / "data").glob("tekken*.json"))
    MistralConfig().save_pretrained(alone)
    for place in (both, alone):
        shutil.copyfile(tekken, place / "tekken.json")
    assert type(AutoTokenizer.from_pretrained(both)).__name__ == "MistralCommonBackend"  # why this is a case
    truth, tokenizer = Tokenizer.from_file(str(both / "tokenizer.json")), load_tokenizer(both, ModelConfig())
    assert tokenizer.encode(PROBE, add_special_tokens=False) == truth.encode(PROBE, add_special_tokens=False).ids
    assert tokenizer.added_tokens_decoder
    with pytest.raises(InputError, match=r"has tekken\.json without tokenizer\.json: .* no chat template"):
        load_tokenizer(alone, ModelConfig())


def test_limits_in_a_tokenizer_s_file_cut_and_pad_no_text(tmp_path: Path) -> None:
    directory = directory_of(tmp_path, "PreTrainedTokenizerFast")
    limited = Tokenizer.from_file(str(directory / "tokenizer.json"))
    limited.enable_truncation(8)
    limited.enable_padding(length=64, pad_token="!", pad_id=0)
    limited.save(str(directory / "tokenizer.json"))
    tokenizer = load_tokenizer(directory, ModelConfig())
    assert tokenizer.decode(tokenizer.encode(PROBE, add_special_tokens=False)) == PROBE


def test_the_clean_up_flag_changes_no_text(tmp_path: Path) -> None:
    path = directory_of(tmp_path, "PreTrainedTokenizerFast") / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"clean_up_tokenization_spaces": True}))
    tokenizer, text = load_tokenizer(tmp_path, ModelConfig()), "yes , no ? I 'm fine ."
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_a_model_s_identity_covers_merges_where_no_tokenizer_json_decides(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    def identity(merges: str) -> str:
        (tmp_path / "merges.txt").write_text(merges)
        return model_fingerprint(tmp_path)

    assert identity("a b") != identity("b a")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert identity("a b") == identity("b a")
