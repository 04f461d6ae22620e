"""Calls in the form that a chat template takes, and messages that it does not write. The truth is transformers'
`apply_chat_template` on the message as the template's authors document it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.data.chat import PromptEncoder, load_tokenizer
from rlctl.data.prompt_records import row_from_record
from rlctl.data.texts import text_from_record, trained_texts
from rlctl.errors import InputError
from rlctl.settings.data import DataConfig, ModelConfig
from support.chat_formats import write_of_formats

BEGIN = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALLS = "{{ m['content'] or '' }}{% for t in m['tool_calls'] or [] %}<call>{{ t['function']['name'] }}\n"
HELD = "t['function']['arguments']"
FORMS = {
    "object": BEGIN + CALLS + "{{ " + HELD + " | tojson }}</call>{% endfor %}" + END,
    "items": BEGIN + CALLS + "{% for k, v in " + HELD + " | items %}<{{ k }}={{ v }}>{% endfor %}{% endfor %}" + END,
    "added": BEGIN + CALLS + "{{ '```' + " + HELD + " + '```' }}</call>{% endfor %}" + END,
    "written": BEGIN + CALLS + "{{ " + HELD + " }}</call>{% endfor %}" + END,
    "both": BEGIN + CALLS + "{{ X if X is string else X | tojson }}</call>{% endfor %}".replace("X", HELD) + END,
    "only null": BEGIN + "{% if m['content'] is none %}{% for t in m['tool_calls'] %}<call>{{ t['function']['name'] }}"
    "{{ " + HELD + " | tojson }}{% endfor %}{% else %}{{ m['content'] }}{% endif %}" + END,
    "null and added": BEGIN + "{% if m['content'] is none %}{% for t in m['tool_calls'] %}{{ t['function']['name'] + "
    + HELD + " }}{% endfor %}{% else %}{{ m['content'] }}{% endif %}" + END,
    "no null": BEGIN + "{{ m['content'] + '' }}{% for t in m['tool_calls'] %}{{ t['function']['name'] }}{{ " + HELD
    + " | tojson }}{% endfor %}" + END,
}  # fmt: skip
TEXT = '{"city":"Oslo",  "days": 2, "sure": true}'
TAKES_TEXT, TAKES_NULL = ("added", "written", "null and added"), ("only null", "null and added")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_of_formats(tmp_path_factory.mktemp("models") / "formats")
    (directory / "config.json").unlink()
    return directory


def encoder_of(model: Path, template: str | None, **data: Any) -> PromptEncoder:
    tokenizer, settings = load_tokenizer(model, ModelConfig()), ModelConfig(chat_template=template)
    return PromptEncoder.build(tokenizer, settings, DataConfig.model_validate(data), model)


def talk(arguments: Any, content: str | None) -> list[dict[str, Any]]:
    call = {"id": "call00000", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
    ]


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("given", [TEXT, json.loads(TEXT)], ids=["text", "object"])
@pytest.mark.parametrize("form", FORMS)
def test_calls_are_written_as_transformers_writes_the_form_of_the_template(
    form: str, given: Any, content: str | None, model: Path
) -> None:
    encoder = encoder_of(model, FORMS[form])
    taken = given
    if form in TAKES_TEXT and not isinstance(given, str):
        taken = json.dumps(given)
    elif form not in (*TAKES_TEXT, "both"):
        taken = json.loads(TEXT)
    known = talk(taken, None if form in TAKES_NULL else "")
    messages = talk(given, content)
    whole = encoder.tokenizer.apply_chat_template(known, chat_template=FORMS[form], tokenize=False)
    asked = encoder.tokenizer.apply_chat_template(
        [*known[:3], {"role": "user", "content": "So?"}], chat_template=FORMS[form], tokenize=False,
        add_generation_prompt=True,
    )  # fmt: skip
    assert "weather" in str(whole)
    (text,) = trained_texts(encoder, text_from_record({"messages": messages}, 0, "row", DataConfig()))
    assert encoder.tokenizer.decode(text.tokens_T) == str(whole).removesuffix("\n")
    prompt = {"prompt": [*messages[:3], {"role": "user", "content": "So?"}]}
    assert encoder.text(row_from_record(prompt, 0, "row", DataConfig())) == asked


def test_a_call_in_openai_s_older_form_is_a_call(model: Path) -> None:
    encoder = encoder_of(model, FORMS["object"])
    older = {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": TEXT}}
    newer = [talk(TEXT, None)[0], {**talk(TEXT, None)[1]}, {"role": "user", "content": "So?"}]
    rows = [row_from_record({"prompt": [newer[0], one, newer[2]]}, 0, "row", DataConfig()) for one in (newer[1], older)]
    assert encoder.text(rows[0]) == encoder.text(rows[1])
    assert "weather" in encoder.text(rows[1])


@pytest.mark.parametrize("arguments", ["[1]", "{", "7", [1], 7])
def test_arguments_that_are_no_object_are_refused(arguments: Any) -> None:
    with pytest.raises(InputError, match="`tool_calls` of a message is not a list of calls"):
        row_from_record({"prompt": talk(arguments, "")[:3]}, 0, "row", DataConfig())


ROLES = (
    "{% if messages[0]['role'] == 'system' %}<|im_start|>system\n{{ messages[0]['content'] }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m['role'] in ('user', 'assistant') %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKED = {"role": "user", "content": "What is 2+2?"}
SAID = {"role": "assistant", "content": "4"}
DROPPED = [
    ([{"role": "developer", "content": "Be brief."}, ASKED], 1, "developer"),
    ([ASKED, SAID, {"role": "system", "content": "Be brief."}, ASKED], 3, "system"),
    ([*talk(TEXT, "")[:1], SAID, {"role": "tool", "content": "5"}, ASKED], 3, "tool"),
    ([ASKED, {"role": "function", "name": "f", "content": "5"}, ASKED], 2, "function"),
    ([*talk(TEXT, "")[:2], ASKED], 2, "assistant"),
    ([*talk(TEXT, "Let me see.")[:2], ASKED], 2, "assistant"),
]


@pytest.mark.parametrize(("messages", "place", "role"), DROPPED)
def test_a_message_that_the_template_leaves_out_is_refused(
    messages: list[dict[str, Any]], place: int, role: str, model: Path
) -> None:
    encoder = encoder_of(model, ROLES)
    why = f"row: the chat template does not write message {place}, of the role '{role}'"
    row = row_from_record({"prompt": messages}, 0, "row", DataConfig())
    for read in (encoder.encode, encoder.prompt):
        with pytest.raises(InputError, match=why):
            read(row)
    with pytest.raises(InputError, match=why):
        trained_texts(encoder, text_from_record({"prompt": messages, "completion": "4"}, 0, "row", DataConfig()))


def test_messages_that_a_template_moves_or_joins_are_written(model: Path) -> None:
    moves = "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] | trim }}{% endif %}{% endfor %}" + (
        BEGIN.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}")
        + "{{ m['content'].split('</think>')[-1].lstrip() }}"
        + END
    )
    messages = [
        ASKED,
        {"role": "assistant", "content": "<think>so</think>\n\n4"},
        {"role": "system", "content": " X "},
        ASKED,
    ]
    assert encoder_of(model, moves).encode(row_from_record({"prompt": messages}, 0, "row", DataConfig()))


def test_a_configured_system_prompt_that_is_left_out_is_refused(model: Path) -> None:
    users = ROLES.partition("{% endif %}")[2]
    encoder = encoder_of(model, users, system_prompt="Be brief.")
    with pytest.raises(InputError, match="does not write message 1, of the role 'system'"):
        encoder.encode(row_from_record({"prompt": "What?"}, 0, "row", DataConfig()))


def test_the_format_without_a_template_writes_no_calls(model: Path) -> None:
    tokenizer = load_tokenizer(model, ModelConfig())
    tokenizer.chat_template = None
    encoder = PromptEncoder.build(tokenizer, ModelConfig(), DataConfig(), model)
    row = row_from_record({"prompt": [*talk(TEXT, None)[:2], ASKED]}, 0, "row", DataConfig())
    with pytest.raises(InputError, match="format of a model without chat template does not write message 2"):
        encoder.encode(row)
