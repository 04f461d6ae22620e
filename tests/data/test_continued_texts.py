"""Tokens of a text that continues another one, under tokenizers that put a blank before a text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlctl.data.chat import PromptEncoder
from rlctl.data.texts import text_from_record, trained_texts
from rlctl.data.turns import TurnEncoder
from rlctl.settings.data import ModelConfig, TextDataConfig

BYTES = [f"<0x{number:02X}>" for number in range(256)]
INSIDE = (  # the answer begins inside the token `It`
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST]' + m['content'] + '[/INST]I' }}"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)


def by_normalizer(raw: Tokenizer) -> None:
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # Llama 2


def by_first(raw: Tokenizer) -> None:
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)


def always(raw: Tokenizer) -> None:
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)


def without(raw: Tokenizer) -> None:
    raw.normalizer = normalizers.Replace(" ", "▁")  # Gemma


@pytest.fixture(params=[by_normalizer, by_first, always, without])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    letters = ["<unk>", "<s>", "</s>", *BYTES, "▁", *map(chr, range(33, 127)), "▁I", "▁It", "It"]
    merges = [("▁", "I"), ("▁I", "t"), ("I", "t")]
    vocab = {letter: number for number, letter in enumerate(letters)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    write: Callable[[Tokenizer], None] = request.param
    write(raw)
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    raw.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


def encoder_of(tokenizer: PreTrainedTokenizerFast, template: str | None) -> PromptEncoder:
    tokenizer.chat_template = template
    return PromptEncoder.build(tokenizer, ModelConfig(), TextDataConfig(), Path("no-model"))


@pytest.mark.parametrize("text", ["7 It", "It", " It", "\nIt", "<0x41>"])
def test_a_text_of_the_environment_is_appended_as_it_is(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    turns = TurnEncoder.build(encoder_of(tokenizer, INSIDE), raw=True)
    said = tokenizer.encode("abc", add_special_tokens=False)
    given = turns.between(said[-1], [{"role": "user", "content": text}])
    assert str(tokenizer.decode([*said, *given])).removeprefix(" ") == f"abc{text}"


def test_an_answer_that_begins_inside_a_token_is_what_would_be_sampled(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "t is"}]
    row = text_from_record({"messages": messages}, 0, "row 1", TextDataConfig())
    encoder = encoder_of(tokenizer, INSIDE)
    text = trained_texts(encoder, row)[0]
    prompt = encoder.encode_messages(messages[:1], "row 1")
    assert text.tokens_T[: len(prompt)].tolist() == list(prompt)
    answer = tokenizer.convert_ids_to_tokens(text.tokens_T[len(prompt) :].tolist())
    assert answer == ["t", "▁", "i", "s", "</s>"]
    assert text.mask_T.tolist() == [False] * len(prompt) + [True] * len(answer)


def test_turns_of_the_plain_format_have_one_blank(tokenizer: PreTrainedTokenizerFast) -> None:
    turns = TurnEncoder.build(encoder_of(tokenizer, None))  # whose turns end with the stop text `Question:`
    asked = tokenizer.encode("\nQuestion:", add_special_tokens=False)
    given = turns.between(None, [{"role": "user", "content": "b"}])
    assert str(tokenizer.decode([*asked, *given])).removeprefix(" ") == "\nQuestion: b\nAnswer:"
