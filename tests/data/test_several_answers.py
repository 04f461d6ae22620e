"""Masks of conversations with several answers, where a template writes earlier answers otherwise than the last one."""

from __future__ import annotations

import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlctl.data.chat import PromptEncoder
from rlctl.data.texts import TrainedText, text_from_record, trained_texts
from rlctl.errors import InputError
from rlctl.settings.data import ModelConfig, TextDataConfig

# As Qwen3's, in own words: earlier answers lose their thoughts, and the last answer has one, which may be empty.
MARKED = """
{%- set after = namespace(at=0) -%}
{%- for m in messages if m.role == 'user' and not m.content.startswith('<result>') -%}
  {%- set after.at = messages.index(m) -%}
{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {%- set thought = m.reasoning_content or '' -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- generation -%}
      {%- if loop.index0 > after.at and (loop.last or thought) -%}
        {{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}
      {%- endif -%}
      {{- m.content -}}
      {%- for call in m.tool_calls or [] -%}
        {{- ('\\n' if m.content or not loop.first else '') + '<call>' + call.function | tojson + '</call>' -}}
      {%- endfor -%}
      {{- '<|im_end|>' -}}
    {%- endgeneration -%}
    {{- '\\n' -}}
  {%- else -%}
    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' + opened -}}{%- endif -%}
"""
PUBLISHED = re.sub(r"\{%-? (?:end)?generation -?%\}", "", MARKED)
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def say(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TALKS = {
    "three answers": [
        say("user", "2+2?"), say("assistant", "It is 4."), say("user", "3+3?"), say("assistant", "It is 6."),
        say("user", "bye"), say("assistant", "Bye, bye."),
    ],
    "equal answers": [
        say("user", "a"), say("assistant", "rlctl"), say("user", "a"), say("assistant", "rlctl"),
        say("user", "rlctl"), say("assistant", "rlctl"),
    ],
    "calls": [
        say("user", "1+?"), say("assistant", "", tool_calls=[CALL]), say("tool", "7"), say("assistant", "It is 7."),
        say("user", "and?"), say("assistant", "I add.", tool_calls=[CALL, CALL]), say("tool", "8"),
        say("assistant", "8"),
    ],
    "a thought at the end": [
        say("user", "1"), say("assistant", "2"), say("user", "3"),
        say("assistant", "4", reasoning_content="3 is odd."),
    ],
    "system": [
        say("system", "Count."), say("user", "1"), say("assistant", "2"), say("user", "3"), say("assistant", "4"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>")
    found.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    found.chat_template = PUBLISHED
    return found


def encoder_of(tokenizer: PreTrainedTokenizerFast, opened: str = "") -> PromptEncoder:
    model = ModelConfig(chat_template_kwargs={"opened": opened})
    return PromptEncoder.build(tokenizer, model, TextDataConfig(), Path("no-model"))


def text_of(encoder: PromptEncoder, talk: list[dict[str, Any]]) -> TrainedText:
    row = text_from_record({"messages": json.loads(json.dumps(talk))}, 0, "row 1", TextDataConfig())
    return trained_texts(encoder, row)[0]


@pytest.mark.parametrize("name", TALKS)
def test_tokens_and_mask_are_those_of_the_template_with_marks(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    text, talk = text_of(encoder_of(tokenizer), TALKS[name]), TALKS[name]
    truth: Any = tokenizer.apply_chat_template(
        talk, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True, opened=""
    )
    whole = tokenizer.apply_chat_template(talk, tokenize=False, opened="")
    assert tokenizer.decode(text.tokens_T.tolist()) == str(whole).rstrip("\n")
    length = len(text.tokens_T)
    assert truth["input_ids"][:length] == text.tokens_T.tolist()
    assert truth["assistant_masks"][:length] == text.mask_T.astype(int).tolist()
    assert not any(truth["assistant_masks"][length:])


def test_a_thought_that_the_prompt_opens_is_no_part_of_an_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    for opened, last in (
        ("<think>\n", "\n</think>\n\nBye, bye.<|im_end|>"),
        ("<think>\n\n</think>\n\n", "Bye, bye.<|im_end|>"),
    ):
        text = text_of(encoder_of(tokenizer, opened), TALKS["three answers"])
        pieces = groupby(zip(text.tokens_T.tolist(), text.mask_T.tolist(), strict=True), lambda one: one[1])
        trained = [tokenizer.decode([token for token, _ in piece]) for has_loss, piece in pieces if has_loss]
        assert trained == ["It is 4.<|im_end|>", "It is 6.<|im_end|>", last]


def test_a_thought_that_the_template_drops_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    talk = [
        say("user", "1"),
        say("assistant", "2", reasoning_content="I count."),
        say("user", "3"),
        say("assistant", "4"),
    ]
    with pytest.raises(InputError, match="leaves out a part of message 2"):
        text_of(encoder_of(tokenizer), talk)


def test_an_answer_of_weight_0_has_no_loss(tokenizer: PreTrainedTokenizerFast) -> None:
    talk = [*TALKS["three answers"]]
    talk[3] = {**talk[3], "weight": 0}
    text = text_of(encoder_of(tokenizer), talk)
    assert (
        tokenizer.decode(text.tokens_T[text.mask_T].tolist())
        == "It is 4.<|im_end|><think>\n\n</think>\n\nBye, bye.<|im_end|>"
    )
    assert np.array_equal(text.tokens_T, text_of(encoder_of(tokenizer), TALKS["three answers"]).tokens_T)
