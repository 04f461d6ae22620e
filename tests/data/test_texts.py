"""Texts to train on: which rows hold them, and which of their tokens have a loss."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rlctl.data.chat import PromptEncoder, load_tokenizer
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.prompts import open_prompts
from rlctl.data.row_types import PairRows, RowType, TextRows
from rlctl.data.texts import TrainedText, trained_texts, whole_text
from rlctl.errors import InputError
from rlctl.methods.kto import LabelRows
from rlctl.settings.data import DataConfig, ModelConfig, TextDataConfig
from rlctl.tiny_models.text import CHAT_TEMPLATE

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 2?"},
    {"role": "assistant", "content": "It is 3."},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": "assistant", "content": "4"},
]
ONLY_LAST = (  # as templates do that leave out the reasoning of earlier turns
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ 'Thought.\n' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BACKWARDS = CHAT_TEMPLATE.replace("in messages", "in messages[::-1]")
WITHOUT_END = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
CALLING = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}{{ '<call>' + call['function'] | tojson + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def written(answer: str, end: str = "<|im_end|>", header: str = "", opens: str = "") -> str:
    """A template with marks around its answers; `opens`: what its generation prompt has in addition to `header`."""
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
        + header
        + "{% generation %}"
        + answer
        + end
        + "{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
        + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        + opens
        + "{% endif %}"
    )


SAID = "{{ m['content'] }}"
PARTING = {
    "nemotron-3": written("</think>" + SAID, header="<think>", opens="{{ '<think>\n' }}"),
    "deepseek-r1": written(SAID, opens="{{ '<think>\n' }}"),
    "deepseek-v3.2": written("</think>" + SAID, opens="<think>"),
    "gemma4": written(SAID, opens="{{ '<|channel>thought\n<channel|>' }}"),
    "gpt-oss": written(
        "<|channel|>final<|message|>" + SAID, end="{{ '<|im_end|>' if loop.last else '<|endoftext|>' }}"
    ),
}
"""Templates that write an answer in a conversation otherwise than they prompt for it or end it."""
CUTTING = CHAT_TEMPLATE.replace("message['content']", "message['content'][:4]")


def encoder_of(model: Path, template: str | None = CHAT_TEMPLATE, **data: Any) -> PromptEncoder:
    settings = ModelConfig(chat_template=template)
    tokenizer = load_tokenizer(model, settings)
    if template is None:
        tokenizer.chat_template = None
    return PromptEncoder.build(tokenizer, settings, DataConfig.model_validate(data), model)


TYPES: dict[str, RowType] = {"texts": TextRows(), "pairs": PairRows(), "labels": LabelRows()}


def row_of(directory: Path, record: dict[str, Any], rows: str = "texts", **data: Any) -> PromptRow:
    path = directory / "rows.jsonl"
    path.write_text(json.dumps(record))
    return open_prompts(TextDataConfig.model_validate({"name": str(path), **data}), rows=TYPES[rows])[0]


def parts(encoder: PromptEncoder, text: TrainedText) -> tuple[str, list[str]]:
    """The whole text, and each stretch of tokens with a loss."""
    found: list[list[int]] = []
    before = False
    for token, trained in zip(text.tokens_T.tolist(), text.mask_T.tolist(), strict=True):
        if trained and not before:
            found.append([])
        if trained:
            found[-1].append(token)
        before = trained
    decode: Any = encoder.tokenizer.decode
    return decode(text.tokens_T.tolist()), [decode(one) for one in found]


def test_a_completion_has_a_loss_up_to_the_token_that_ends_it(tiny_llama: Path, tmp_path: Path) -> None:
    encoder = encoder_of(tiny_llama)
    row = row_of(tmp_path, {"prompt": "What is 1 + 2?", "completion": "It is 3."})
    (text,) = trained_texts(encoder, row)
    whole, trained = parts(encoder, text)
    assert trained == ["It is 3.<|im_end|>"]
    assert whole == "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n<|im_start|>assistant\nIt is 3.<|im_end|>"
    assert tuple(text.tokens_T[: text.prompt_tokens].tolist()) == encoder.encode(row)
    assert whole_text(encoder, row) == whole + "\n"
    (every,) = trained_texts(encoder, row, everything=True)
    assert every.mask_T.tolist() == [False] + [True] * (len(text.tokens_T) - 1)


@pytest.mark.parametrize(
    ("train_on", "trained"),
    [("assistant", ["It is 3.<|im_end|>", "4<|im_end|>"]), ("last", ["4<|im_end|>"])],
)
def test_messages_of_the_assistant_have_a_loss(
    tiny_llama: Path, tmp_path: Path, train_on: str, trained: list[str]
) -> None:
    encoder = encoder_of(tiny_llama)
    (text,) = trained_texts(encoder, row_of(tmp_path, {"messages": CHAT}, train_on=train_on))
    whole, found = parts(encoder, text)
    assert found == trained
    assert whole == encoder.render(CHAT, answered=True).removesuffix("\n")
    (cut,) = trained_texts(encoder, row_of(tmp_path, {"messages": CHAT[:4]}, train_on="assistant"))
    assert parts(encoder, cut)[1] == ["It is 3.<|im_end|>"]


def test_other_names_and_messages_as_prompt_and_completion(tiny_llama: Path, tmp_path: Path) -> None:
    encoder = encoder_of(tiny_llama)
    named = row_of(tmp_path, {"q": "What?", "a": "It is 3."}, prompt_field="q", answer_field="a")
    chat = row_of(tmp_path, {"prompt": CHAT[:4], "completion": CHAT[4:], "answer": "another"})
    assert [parts(encoder, trained_texts(encoder, row)[0])[1] for row in (named, chat)] == [
        ["It is 3.<|im_end|>"], ["4<|im_end|>"],
    ]  # fmt: skip


def test_a_plain_text_and_the_plain_format_end_with_the_end_token(tiny_llama: Path, tmp_path: Path) -> None:
    (text,) = trained_texts(encoder_of(tiny_llama), row_of(tmp_path, {"text": "A model reads tokens."}))
    assert text.mask_T.tolist() == [False] + [True] * (len(text.tokens_T) - 1)
    plain = encoder_of(tiny_llama, None)
    end = str(plain.tokenizer.eos_token)
    assert parts(plain, text)[0] == f"A model reads tokens.{end}"
    (answered,) = trained_texts(plain, row_of(tmp_path, {"prompt": "What?", "completion": "It is 3."}))
    assert parts(plain, answered) == (f"Question: What?\nAnswer: It is 3.{end}", [f" It is 3.{end}"])


@pytest.mark.parametrize("family", PARTING)
def test_answers_that_are_written_otherwise_than_prompted_have_the_mask_of_the_marks(
    tiny_llama: Path, tmp_path: Path, family: str
) -> None:
    encoder: Any = encoder_of(tiny_llama, PARTING[family])
    for messages in (CHAT[:3], CHAT):
        (text,) = trained_texts(encoder, row_of(tmp_path, {"messages": messages}))
        marked = encoder.tokenizer.apply_chat_template(
            messages, chat_template=PARTING[family], return_dict=True, return_assistant_tokens_mask=True
        )
        length = len(text.tokens_T)
        assert text.tokens_T.tolist() == marked["input_ids"][:length]
        assert text.mask_T.tolist() == [bool(one) for one in marked["assistant_masks"][:length]]
        assert not any(marked["assistant_masks"][length:])


def test_a_thought_in_an_answer_may_begin_in_the_prompt(tiny_llama: Path, tmp_path: Path) -> None:
    encoder = encoder_of(tiny_llama, written(SAID, opens="{{ '<think>\n' }}"))
    row = row_of(tmp_path, {"prompt": "What?", "completion": "<think>\nI add.\n</think>\nIt is 3."})
    assert parts(encoder, trained_texts(encoder, row)[0])[1] == ["I add.\n</think>\nIt is 3.<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (BACKWARDS, "does not say where message 5 stands.*"),
        (WITHOUT_END, "writes no token that ends an answer"),
        (CUTTING, "leaves out a part of message 3"),
    ],
)
def test_a_mask_that_does_not_follow_from_the_template_is_refused(
    tiny_llama: Path, tmp_path: Path, template: str, why: str
) -> None:
    with pytest.raises(InputError, match=why):
        trained_texts(encoder_of(tiny_llama, template), row_of(tmp_path, {"messages": CHAT}))


def test_what_a_template_writes_behind_a_whole_conversation_is_not_an_answer_s(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """The templates of Phi-3 and Phi-4 end a conversation with a second end token."""
    twice = encoder_of(tiny_llama, CHAT_TEMPLATE.replace("{% endif %}", "{% else %}<|endoftext|>{% endif %}"))
    row, plain = row_of(tmp_path, {"messages": CHAT}), encoder_of(tiny_llama)
    for scored in (False, True):
        (text,), (wanted,) = (trained_texts(one, row, scored=scored) for one in (twice, plain))
        assert text.tokens_T.tolist() == wanted.tokens_T.tolist()
    assert parts(twice, trained_texts(twice, row)[0])[1] == ["It is 3.<|im_end|>", "4<|im_end|>"]


def test_messages_without_a_weight_have_no_loss_and_thoughts_are_an_answer_s(tiny_llama: Path, tmp_path: Path) -> None:
    thinking = CHAT_TEMPLATE.replace("message['content']", "(message.reasoning_content or '') + message['content']")
    encoder = encoder_of(tiny_llama, thinking)
    told: list[dict[str, Any]] = [dict(one) for one in CHAT]
    told[2]["weight"], told[4]["reasoning_content"] = 0, "Easy: "
    row = row_of(tmp_path, {"messages": told})
    assert parts(encoder, trained_texts(encoder, row)[0])[1] == ["Easy: 4<|im_end|>"]
    with pytest.raises(InputError, match="leaves out a part of message 5"):
        trained_texts(encoder_of(tiny_llama), row)


def test_a_text_to_score_needs_no_place_where_its_answer_begins(tiny_llama: Path, tmp_path: Path) -> None:
    """NeMo-RL's recipe for reward models has a template whose generation prompt lacks a character."""
    wrong = CHAT_TEMPLATE.replace("<|im_start|>assistant", "<|im_start|assistant")
    encoder = encoder_of(tiny_llama, wrong)
    row = row_of(tmp_path, {"messages": CHAT}, train_on="last")
    plain = encoder_of(tiny_llama)
    (text,), (wanted,) = trained_texts(encoder, row, scored=True), trained_texts(plain, row)
    assert text.tokens_T.tolist() == wanted.tokens_T.tolist()
    assert text.scored().tokens_T[-1] == text.tokens_T[-1]


def test_the_last_answer_is_known_where_earlier_ones_are_not(tiny_llama: Path, tmp_path: Path) -> None:
    encoder = encoder_of(tiny_llama, ONLY_LAST)
    (text,) = trained_texts(encoder, row_of(tmp_path, {"messages": CHAT}, train_on="last"))
    assert parts(encoder, text)[1] == ["Thought.\n4<|im_end|>"]


def test_a_token_on_both_sides_of_an_answer_is_cut_as_the_model_sees_it(tiny_llama: Path, tmp_path: Path) -> None:
    merging = CHAT_TEMPLATE.replace("<|im_start|>assistant\n", "<|im_start|>the quick brown fo").replace(
        "'<|im_start|>' + message['role'] + '\n'",
        "('<|im_start|>the quick brown fo' if message['role'] == 'assistant' else '<|im_start|>user\n')",
    )
    encoder = encoder_of(tiny_llama, merging)
    row = row_of(tmp_path, {"prompt": "What?", "completion": "x jumps"})
    (text,) = trained_texts(encoder, row)
    assert tuple(text.tokens_T[: text.prompt_tokens].tolist()) == encoder.encode(row)
    assert parts(encoder, text)[1] == ["x jumps<|im_end|>"]


def test_pairs_share_their_prompt(tiny_llama: Path, tmp_path: Path) -> None:
    encoder = encoder_of(tiny_llama)
    plain = {"prompt": "What is 1 + 2?", "chosen": "It is 3.", "rejected": "I do not know."}
    chats = {"chosen": CHAT, "rejected": [*CHAT[:4], {"role": "assistant", "content": "5"}]}
    expected = [["It is 3.<|im_end|>", "I do not know.<|im_end|>"], ["4<|im_end|>", "5<|im_end|>"]]
    for record, answers in zip((plain, chats), expected, strict=True):
        row = row_of(tmp_path, record, rows="pairs")
        chosen, rejected = trained_texts(encoder, row)
        assert [parts(encoder, one)[1] for one in (chosen, rejected)] == [answers[:1], answers[1:]]
        assert chosen.prompt_tokens == rejected.prompt_tokens
        assert (chosen.tokens_T[: chosen.prompt_tokens] == rejected.tokens_T[: chosen.prompt_tokens]).all()


@pytest.mark.parametrize(
    ("record", "rows", "why"),
    [
        ({"question": "What?"}, "texts", "no text to train on. Its fields are question"),
        ({"messages": CHAT[:2]}, "texts", "has no message of the assistant"),
        ({"messages": CHAT[2:]}, "texts", "begins with a message of the assistant"),
        ({"prompt": "What?", "completion": ""}, "texts", "field 'completion' is not a completion"),
        ({"prompt": "What?", "chosen": "a"}, "pairs", "no field 'rejected'"),
        ({"prompt": "What?", "completion": "a"}, "pairs", "no field 'chosen'.*A row has `prompt`, `chosen` and `rej"),
        ({"chosen": "a", "rejected": "b"}, "pairs", "no field 'prompt'"),
        (
            dict.fromkeys(("prompt", "response1", "response2"), "a") | {"overall_preference": None},
            "pairs",
            "is not a number",
        ),
        ({"messages": [CHAT[0], CHAT[2] | {"weight": 0.5}]}, "texts", "neither 0 nor 1"),
        ({"prompt": "\ud800", "completion": "a"}, "texts", "not JSON"),
        ({"chosen": CHAT, "rejected": CHAT}, "pairs", "not two answers to the same messages"),
    ],
)
def test_a_row_without_a_text_is_refused_by_its_line(
    tmp_path: Path, record: dict[str, Any], rows: str, why: str
) -> None:
    with pytest.raises(InputError, match=f"rows.jsonl, line 1: .*({why})"):
        row_of(tmp_path, record, rows=rows)


def test_answers_of_a_task_are_texts_too(tiny_llama: Path) -> None:
    data = DataConfig(name="reasoning-gym:chain_sum", size=3)
    encoder, row = encoder_of(tiny_llama), open_prompts(data)[0]
    (text,) = trained_texts(encoder, row)
    assert parts(encoder, text)[1] == [f"{row.answer}<|im_end|>"]


def test_rows_of_squad_are_a_context_a_question_and_the_first_answer(tmp_path: Path) -> None:
    path = tmp_path / "squad.jsonl"
    row = {"id": "1", "context": "It rained.", "question": "What fell?", "answers": {"text": ["Rain", "Water"]}}
    path.write_text(json.dumps(row) + "\n")
    found = open_prompts(DataConfig(name=str(path)), rows=TextRows())[0]
    assert found.prompt == [{"role": "system", "content": "It rained."}, {"role": "user", "content": "What fell?"}]
    assert found.answer == ("Rain",)
    path.write_text(json.dumps(row | {"answers": {"text": []}}) + "\n")
    with pytest.raises(InputError, match="the question has no answer"):
        open_prompts(DataConfig(name=str(path)), rows=TextRows())


def with_calls(arguments: Any) -> dict[str, Any]:
    """A conversation in OpenAI's form, with a call and what the tool says to it."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    return {"messages": messages, "tools": [{"type": "function", "function": {"name": "add"}}]}


@pytest.mark.parametrize("arguments", [{"a": 1, "b": 2}, '{"a": 1, "b": 2}'])
def test_calls_of_tools_are_trained_on_and_what_tools_say_is_not(
    tiny_llama: Path, tmp_path: Path, arguments: Any
) -> None:
    encoder = encoder_of(tiny_llama, CALLING)
    row = row_of(tmp_path, with_calls(arguments))
    whole, trained = parts(encoder, trained_texts(encoder, row)[0])
    assert trained == [
        '<call>{"name": "add", "arguments": {"a": 1, "b": 2}}</call><|im_end|>', "It is 3.<|im_end|>",
    ]  # fmt: skip
    assert whole.startswith('<|im_start|>system\n[{"type": "function", "function": {"name": "add"}}]<|im_end|>')
    assert whole_text(encoder, row) == whole + "\n"


def test_arguments_in_a_table_have_no_nulls_for_those_of_other_calls(tiny_llama: Path, tmp_path: Path) -> None:
    rows = [{"messages": with_calls(arguments)["messages"]} for arguments in ({"a": 1}, {"b": 2})]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path := tmp_path / "calls.parquet")
    encoder, source = encoder_of(tiny_llama, CALLING), open_prompts(DataConfig(name=str(path)), rows=TextRows())
    found = [parts(encoder, trained_texts(encoder, source[index])[0])[1][0] for index in range(2)]
    assert found == [
        f'<call>{{"name": "add", "arguments": {one}}}</call><|im_end|>' for one in ('{"a": 1}', '{"b": 2}')
    ]


def test_calls_and_tools_that_a_template_leaves_out_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    asked = with_calls({"a": 1})
    with pytest.raises(InputError, match="does not write the tools"):
        trained_texts(encoder_of(tiny_llama), row_of(tmp_path, asked))
    without = {"messages": asked["messages"]}
    with pytest.raises(InputError, match="leaves out a part of message 2"):
        trained_texts(encoder_of(tiny_llama), row_of(tmp_path, without))
    asked["messages"][1]["tool_calls"] = ["add"]
    with pytest.raises(InputError, match="a list of calls"):
        row_of(tmp_path, asked)


def test_what_a_template_marks_has_a_loss(tiny_llama: Path, tmp_path: Path) -> None:
    encoder, row = encoder_of(tiny_llama, MARKED), row_of(tmp_path, {"messages": CHAT}, train_on="marked")
    marked, found = (trained_texts(encoder, row, marked=one)[0] for one in (True, False))
    assert parts(encoder, marked) == parts(encoder, found)
    assert parts(encoder, marked)[1] == ["It is 3.<|im_end|>", "4<|im_end|>"]
    whole = MARKED.replace("+ '<|im_end|>' }}{% endgeneration %}", "+ '<|im_end|>\n' }}{% endgeneration %}")
    assert parts(encoder, trained_texts(encoder_of(tiny_llama, whole), row, marked=True)[0])[1] == [
        "It is 3.<|im_end|>", "4<|im_end|>",
    ]  # fmt: skip
    for template, why in (
        (CHAT_TEMPLATE, "has no {% generation %}"),
        (
            MARKED.replace("+ '<|im_end|>' }}{% endgeneration %}", "}}{% endgeneration %}{{ '<|im_end|>' }}"),
            "without an end token",
        ),
        (MARKED.replace("== 'assistant'", "== 'nobody'"), "marks nothing"),
    ):
        with pytest.raises(InputError, match=re.escape(why)):
            trained_texts(encoder_of(tiny_llama, template), row, marked=True)


def test_questions_of_a_task_have_the_answer_of_another_as_the_rejected_one() -> None:
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    given = open_prompts(DataConfig(name="reasoning-gym:chain_sum", params=params, size=50))
    source = open_prompts(DataConfig(name="reasoning-gym:chain_sum", params=params, size=50), rows=PairRows())
    for index in range(50):
        chosen, rejected = source[index].answer
        assert (chosen, source[index].prompt) == (given[index].answer, given[index].prompt)
        assert chosen != rejected
    constant = open_prompts(DataConfig(name="reasoning-gym:chain_sum", params=params, size=1), rows=PairRows())
    with pytest.raises(InputError, match="all have its answer"):
        constant[0]


def test_ranked_completions_are_a_pair_of_the_best_and_the_worst(tmp_path: Path) -> None:
    path, said = tmp_path / "ranked.jsonl", {"context": [{"role": "user", "content": "Hi"}]}
    ranked = [{"rank": rank, "completion": [{"role": "assistant", "content": str(rank)}]} for rank in (2, 0, 1)]
    path.write_text(json.dumps(said | {"completions": ranked}) + "\n")
    row = open_prompts(DataConfig(name=str(path)), rows=PairRows())[0]
    assert [one[0]["content"] for one in row.answer] == ["0", "2"]
    for wrong, why in (([ranked[0], ranked[0]], "the same rank"), (["a", "b"], "a list of objects with `rank`")):
        path.write_text(json.dumps(said | {"completions": wrong}) + "\n")
        with pytest.raises(InputError, match=why):
            open_prompts(DataConfig(name=str(path)), rows=PairRows())[0]


def test_rows_of_help_steer_are_ordered_by_their_preference(tmp_path: Path) -> None:
    path = tmp_path / "steer.jsonl"
    row = {"context": [{"role": "user", "content": "Hi"}], "response1": "one", "response2": "two"}
    path.write_text("".join(json.dumps(row | {"overall_preference": value}) + "\n" for value in (-2, 0, 3)))
    source = open_prompts(DataConfig(name=str(path)), rows=PairRows())
    assert [source[index].answer for index in range(3)] == [("one", "two"), ("one", "one"), ("two", "one")]


def test_a_field_may_be_inside_another_one(tmp_path: Path) -> None:
    """Parquet of verl has question and answer in `extra_info`, next to a `prompt` of another form."""
    extra = {"question": "1 + 1?", "answer": "2"}
    rows = [{"prompt": [{"role": "user", "content": "other"}], "extra_info": extra, "data_source": "gsm8k"}]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    fields: dict[str, Any] = {"prompt_field": "extra_info.question", "answer_field": "extra_info.answer"}
    (row,) = open_prompts(TextDataConfig(name=str(path), **fields), rows=TextRows()).sample(5)
    assert (row.prompt, row.answer) == ("1 + 1?", ("2",))
    prompt = open_prompts(DataConfig(name=str(path), **fields))[0]
    assert (prompt.prompt, prompt.answer) == ("1 + 1?", "2")
    with pytest.raises(InputError, match=r"field 'extra_info\.asked' is empty"):
        open_prompts(TextDataConfig(name=str(path), prompt_field="extra_info.asked", answer_field="extra_info.answer"),
                     rows=TextRows())[0]  # fmt: skip
