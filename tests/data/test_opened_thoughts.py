"""Completions that go on inside the thought that the generation prompt opens: their tokens are the generation prompt's
of transformers and then their text, as in sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlctl.data.chat import PromptEncoder, load_tokenizer
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.texts import TrainedText, pair_from_record, text_from_record, trained_texts, whole_text
from rlctl.errors import InputError
from rlctl.methods.kto import LabelRows
from rlctl.settings.data import DataConfig, ModelConfig, TextDataConfig

END = "<|im_end|>"
ASKED = [{"role": "user", "content": "What is 2+2?"}]
CONTINUED = "2+2 equals 4.\n</think>\n\nThe answer is 4."


def template(answer: str, opens: str = "<think>\n") -> str:
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' %}" + answer + "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n" + opens + "' }}{% endif %}"
    )


AS_IT_IS = template("{{ m.content }}")
SPLIT = (  # at the closing tag, as Qwen3's
    "{% set parts = m.content.split('</think>') %}{% set thought = parts[0] if parts | length > 1 else '' %}"
    "{{ '<think>\n' + thought.split('<think>')[-1].strip('\n') + '\n</think>\n\n' + parts[-1].lstrip('\n') }}"
)
BOTH_TAGS = (  # a thought only where both tags are there, as TRL's training templates before their repair
    "{% if '<think>' in m.content and '</think>' in m.content %}" + SPLIT + "{% else %}"
    "{{ '<think>\n\n</think>\n\n' + m.content }}{% endif %}"
)
BY_KEY = "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' + m.content }}"
TEMPLATES = {
    "as it is": AS_IT_IS,
    "split": template(SPLIT),
    "both tags": template(BOTH_TAGS),
    "by key": template(BY_KEY),
}


def encoder_of(model: Path, chat_template: str) -> PromptEncoder:
    settings = ModelConfig(chat_template=chat_template)
    return PromptEncoder.build(load_tokenizer(model, settings), settings, DataConfig(), model)


def sft(encoder: PromptEncoder, record: dict[str, Any], **more: Any) -> TrainedText:
    return trained_texts(encoder, text_from_record(record, 0, "row 1", TextDataConfig()), **more)[0]


def pair(encoder: PromptEncoder, chosen: Any, rejected: Any) -> tuple[TrainedText, ...]:
    record = {"prompt": ASKED[0]["content"], "chosen": chosen, "rejected": rejected}
    return trained_texts(encoder, pair_from_record(record, 0, "row 1", TextDataConfig()))


def prompt_in(encoder: PromptEncoder, messages: list[dict[str, Any]], *, opened: bool = True) -> str:
    tokenizer: Any = encoder.tokenizer
    return tokenizer.apply_chat_template(
        messages, chat_template=encoder.template, tokenize=False, add_generation_prompt=opened
    )


def require_sampled(encoder: PromptEncoder, text: TrainedText, prompt: str, answer: str) -> None:
    """A text has the tokens of a prompt of transformers, and then those of an answer with a loss."""
    before, after = (encoder.tokenizer.encode(one, add_special_tokens=False) for one in (prompt, answer + END))
    assert text.tokens_T.tolist() == [*before, *after]
    assert text.mask_T.tolist() == [False] * len(before) + [True] * len(after)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "content", [CONTINUED, f"<think>\n{CONTINUED}", f"<think>{CONTINUED}", f"\n<think>\n{CONTINUED}"]
)
def test_a_completion_continues_the_thought_of_its_prompt(tiny_llama: Path, name: str, content: str) -> None:
    encoder = encoder_of(tiny_llama, TEMPLATES[name])
    messages = [*ASKED, {"role": "assistant", "content": content}]
    for record in ({"prompt": "What is 2+2?", "completion": content}, {"messages": messages}):
        row = text_from_record(record, 0, "row 1", TextDataConfig())
        require_sampled(encoder, trained_texts(encoder, row)[0], prompt_in(encoder, ASKED), CONTINUED)
        assert whole_text(encoder, row) == f"{prompt_in(encoder, ASKED)}{CONTINUED}{END}\n"


@pytest.mark.parametrize(
    ("opens", "closing"),
    [
        ("<think>", "</think>"),
        ("<think>\n\n", "</think>"),
        ("<reasoning>\n", "</reasoning>"),
        ("[THINK]", "[/THINK]"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
    ],
)
def test_a_thought_may_have_other_tags(tiny_llama: Path, opens: str, closing: str) -> None:
    encoder = encoder_of(tiny_llama, template("{{ m.content }}", opens))
    answer = f"I add.{closing} It is 4."
    for content in (answer, opens.rstrip() + answer):
        text = sft(encoder, {"prompt": "What is 2+2?", "completion": content})
        require_sampled(encoder, text, prompt_in(encoder, ASKED), answer)


@pytest.mark.parametrize(
    "content",
    [
        "\n</think>\n\nThe answer is 4.",
        "</think>4",
        "About <think> and </think>: tags.\n</think>\n4",
        "a</think>b</think>c",
        "a</think>b<think>c",
        "<think>a",
    ],
)
def test_other_places_of_the_tags(tiny_llama: Path, content: str) -> None:
    encoder = encoder_of(tiny_llama, AS_IT_IS)
    text = sft(encoder, {"prompt": "What is 2+2?", "completion": content})
    require_sampled(encoder, text, prompt_in(encoder, ASKED), content.removeprefix("<think>"))


@pytest.mark.parametrize("content", ["It is 4.", "I say: <think>a</think> b", "x < 4 and [b]"])
def test_an_answer_without_the_thought_stays_as_the_template_writes_it(tiny_llama: Path, content: str) -> None:
    encoder = encoder_of(tiny_llama, AS_IT_IS)
    text = sft(encoder, {"prompt": "What is 2+2?", "completion": content})
    header = prompt_in(encoder, ASKED).removesuffix("<think>\n")
    require_sampled(encoder, text, header, content)
    whole = prompt_in(encoder, [*ASKED, {"role": "assistant", "content": content}], opened=False)
    assert encoder.tokenizer.decode(text.tokens_T.tolist()) == whole.rstrip("\n")


def test_each_of_several_answers_continues_its_thought(tiny_llama: Path) -> None:
    encoder = encoder_of(tiny_llama, AS_IT_IS)
    first, second = "I add.\n</think>\n4", "I add more.\n</think>\n6"
    talk = [*ASKED, {"role": "assistant", "content": first}, {"role": "user", "content": "3+3?"}]
    opened = [*ASKED, {"role": "assistant", "content": f"<think>\n{first}"}, talk[2]]
    text = sft(encoder, {"messages": [*talk, {"role": "assistant", "content": second}]})
    whole = prompt_in(encoder, opened) + second + END
    assert text.tokens_T.tolist() == encoder.tokenizer.encode(whole, add_special_tokens=False)
    assert encoder.tokenizer.decode(text.tokens_T[text.mask_T].tolist()) == first + END + second + END
    # of earlier answers that are a part of the prompt, the text is what the template writes at sampling
    row = text_from_record({"prompt": talk, "completion": second}, 0, "row 1", TextDataConfig())
    (last,) = trained_texts(encoder, row)
    assert tuple(last.tokens_T[: last.prompt_tokens].tolist()) == encoder.encode(row)
    require_sampled(encoder, last, prompt_in(encoder, talk), second)


@pytest.mark.parametrize("other", ["It is 5.", "<think>I guess.\n</think>\n5", "I guess.\n</think>\n5"])
def test_a_pair_shares_the_thought_of_its_prompt(tiny_llama: Path, other: str) -> None:
    encoder = encoder_of(tiny_llama, AS_IT_IS)
    for told in ((CONTINUED, other), (other, CONTINUED)):
        for text, answer in zip(pair(encoder, *told), told, strict=True):
            require_sampled(encoder, text, prompt_in(encoder, ASKED), answer.removeprefix("<think>"))


def test_labeled_completions_do_not_depend_on_each_other(tiny_llama: Path) -> None:
    encoder, data, rows = encoder_of(tiny_llama, AS_IT_IS), TextDataConfig(), LabelRows()

    def row(completion: str) -> PromptRow:
        return rows.read({"prompt": "What is 2+2?", "completion": completion, "label": True}, 0, "row 1", data)

    opened, header = prompt_in(encoder, ASKED), prompt_in(encoder, ASKED).removesuffix("<think>\n")
    found = rows.texts(row(CONTINUED), row("It is 4."), encoder, data, False)
    require_sampled(encoder, found[0], opened, CONTINUED)
    require_sampled(encoder, found[1], header, "It is 4.")


def test_all_tokens_and_scores_have_the_thought_too(tiny_llama: Path) -> None:
    encoder, record = encoder_of(tiny_llama, AS_IT_IS), {"prompt": "What is 2+2?", "completion": CONTINUED}
    wanted = sft(encoder, record).tokens_T.tolist()
    assert wanted == sft(encoder, record, everything=True).tokens_T.tolist()
    assert wanted == sft(encoder, record, scored=True).tokens_T.tolist()


def test_marks_are_around_the_whole_thought(tiny_llama: Path) -> None:
    marked = template("{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}").replace(
        "{{ '<|im_end|>\n' }}", "{{ ('' if m.role == 'assistant' else '<|im_end|>') + '\n' }}"
    )
    text = sft(encoder_of(tiny_llama, marked), {"prompt": "What is 2+2?", "completion": CONTINUED}, marked=True)
    plain = sft(encoder_of(tiny_llama, AS_IT_IS), {"prompt": "What is 2+2?", "completion": CONTINUED})
    assert text.tokens_T.tolist() == plain.tokens_T.tolist()


def test_a_template_that_writes_the_thought_elsewhere_is_refused(tiny_llama: Path) -> None:
    encoder = encoder_of(tiny_llama, template("{{ '<think></think>' + m.content }}"))
    record = {"prompt": "What is 2+2?", "completion": CONTINUED}
    with pytest.raises(InputError, match="row 1: message 2 continues the thought that the prompt opens with <think>"):
        sft(encoder, record)
    assert "4." in encoder.tokenizer.decode(sft(encoder, record, scored=True).tokens_T.tolist())
