"""Training texts: rows, tokens, and loss masks.

The mask follows from the chat template: an answer lies between the rendering before it, with the generation prompt, and
the rendering up to its end-of-turn token. If these are not prefixes of the conversation, the row is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby, pairwise
from os.path import commonprefix
from typing import Any, cast

import numpy as np

from rlctl.data.chat import PromptEncoder
from rlctl.data.control_tokens import begun, trimmed
from rlctl.data.image_rows import with_images
from rlctl.data.image_sources import images_of
from rlctl.data.opened_thoughts import OpenedThought, begins_in_thought, in_opened_thoughts, squeezed
from rlctl.data.prompt_records import (
    MESSAGES,
    THOUGHTS,
    checked_messages,
    checked_prompt,
    decoded_messages,
    has_field,
    matched,
    value_of,
)
from rlctl.data.prompt_rows import TOOLS, Messages, PromptRow
from rlctl.data.refcoco import refcoco_record
from rlctl.data.rollouts import MediaPart
from rlctl.data.templates import ANSWER, PROMPT, template_of
from rlctl.data.written_messages import arguments_of
from rlctl.errors import InputError
from rlctl.settings.data import DataConfig

COMPLETION, TEXT, CHOSEN, REJECTED = "completion", "text", "chosen", "rejected"
SQUAD = {"context", "question", "answers"}
HELP_STEER = {"response1", "response2", "overall_preference"}
"""Fields of rows as SQuAD and HelpSteer3 have them."""
RANKED = "completions"
"""Field of a prompt's completions with their ranks; the best has the lowest rank."""
MARGIN = "margin"
"""Field of a pair, and column of its texts, with the least difference of scores that its loss asks for."""
REFERENCE = "reference_logps"
"""Column of a pair's texts: the log-prob of its completion under the reference, divided between its tokens."""
REFERENCE_FIELDS = ("ref_chosen_logps", "ref_rejected_logps")
"""Fields of a pair that bring it, under the names that TRL gives them."""
CONTEXT = "context"
"""Field of the prompt in rows of HelpSteer3 and in rows with ranked completions."""
ASSISTANT = "assistant"
WEIGHT = "weight"
"""Field of a message as in OpenAI's files for fine-tuning: one of weight 0 has no loss."""
LARGEST_NUMBER = float(np.finfo(np.float32).max)
"""Largest number that a field may hold: columns are float32."""
THINK = "<think>"
ANSWER_MARK = "rlctl-answer"
FORMS_OF_PAIRS = (
    "A row has `prompt`, `chosen` and `rejected`, or `chosen` and `rejected` conversations that begin alike, or a "
    "prompt with ranked `completions`, or HelpSteer3's fields. Rows with one answer are for `train sft`."
)
_MARK = re.compile(r"\{%-?\s*generation\b")
Completion = str | Messages
"""The text after a prompt: one answer, or an answer and the messages after it."""


@dataclass(frozen=True)
class TrainedText:
    """The tokens of a text. Suffix T: its tokens."""

    tokens_T: np.ndarray  # int32
    mask_T: np.ndarray  # bool: tokens with a loss; the first token has none
    prompt: int | None = None
    """Tokens of the prompt, where these are not all that have no loss."""
    media: tuple[MediaPart, ...] = ()
    """Their image parts, in order."""

    @property
    def prompt_tokens(self) -> int:
        if self.prompt is not None:
            return self.prompt
        return int(self.mask_T.argmax()) if self.mask_T.any() else len(self.tokens_T)

    @property
    def answered_tokens(self) -> int:
        """Tokens of the answer: with a loss, or scored together."""
        return int(self.mask_T.sum()) if self.prompt is None else len(self.tokens_T) - 1 - self.prompt

    def first(self, tokens: int) -> TrainedText:
        """Return its first `count` tokens at most; an image that would be cut is left out."""
        end = min([tokens, *(p.start for p in self.media if p.start < tokens < p.start + p.tokens)])
        media = tuple(part for part in self.media if part.start < end)
        return replace(self, tokens_T=self.tokens_T[:end], mask_T=self.mask_T[:end], media=media)

    def scored(self) -> TrainedText:
        """Return the text for a reward model with one more token, because a score's output stands at the position
        before a token with a loss."""
        tokens_T = np.append(self.tokens_T, self.tokens_T[-1:])
        mask_T = np.arange(len(tokens_T)) == len(self.tokens_T)
        return replace(self, tokens_T=tokens_T, mask_T=mask_T, prompt=self.prompt_tokens)


def text_from_record(record: Mapping[str, Any], index: int, where: str, data: DataConfig) -> PromptRow:
    """Return a record's text; `answer` is the completion, or none for plain text. Raises InputError naming row and
    field."""
    record = refcoco_record(record, index, where, data)
    return with_images(_text_from_record(record, index, where, data), record, data)


def _text_from_record(record: Mapping[str, Any], index: int, where: str, data: DataConfig) -> PromptRow:
    fields = dict(record)
    if record.keys() >= SQUAD and data.answer_field == ANSWER and not record.keys() & {COMPLETION, MESSAGES}:
        texts = record["answers"].get(TEXT) if isinstance(record["answers"], Mapping) else None
        if not texts:
            raise InputError(f"{where}: the question has no answer in `answers`.", "Leave out such rows.")
        prompt = [{"role": "system", "content": record["context"]}, {"role": "user", "content": record["question"]}]
        return PromptRow(index, where, checked_messages(prompt, "question", where), (str(texts[0]),), fields)
    usual = data.answer_field == ANSWER and COMPLETION in record
    completion = data.answer_field if has_field(record.keys(), data.answer_field) and not usual else COMPLETION
    if has_field(record.keys(), completion) and (prompt := _prompt(record, where, data)) is not None:
        return PromptRow(
            index, where, prompt, (_completion(matched(value_of(record, completion), data), completion, where),), fields
        )
    if data.answer_field != ANSWER and not has_field(record.keys(), data.answer_field):
        raise without_field(data.answer_field, "--answer-field", record, where)
    if MESSAGES in record:
        messages = _messages(record[MESSAGES], MESSAGES, where)
        first = _first_trained(messages, where, last=data.trained_part == "last")
        return PromptRow(index, where, messages[:first], (messages[first:],), fields)
    if isinstance(record.get(TEXT), str) and record[TEXT]:
        return PromptRow(index, where, record[TEXT], (), fields)
    raise InputError(
        f"{where}: no text to train on. Its fields are {', '.join(record) or 'none'}.",
        "A row has `prompt` and `completion` (--prompt-field and --answer-field name others), `messages`, or `text`.",
    )


def pair_from_record(record: Mapping[str, Any], index: int, where: str, data: DataConfig) -> PromptRow:
    """Return a record's prompt with chosen and rejected completion as `answer`; the prompt can be their common
    beginning. Raises InputError naming row and field."""
    return with_images(_pair_from_record(record, index, where, data), record, data)


def _pair_from_record(record: Mapping[str, Any], index: int, where: str, data: DataConfig) -> PromptRow:
    if not record.keys() & {CHOSEN, REJECTED} and (RANKED in record or record.keys() >= HELP_STEER):
        pair = _ranked(record, where) if RANKED in record else _preferred(record, where)
        record = {**({PROMPT: record[CONTEXT]} if CONTEXT in record else {}), **record, **pair}
    for name in (CHOSEN, REJECTED):
        if name not in record:
            raise without_field(name, "", record, where, FORMS_OF_PAIRS)
    chosen, rejected = (_completion(record[name], name, where) for name in (CHOSEN, REJECTED))
    if not isinstance(chosen, str) and not isinstance(rejected, str) and chosen[0]["role"] != ASSISTANT:
        pairs = zip(chosen, rejected, strict=False)
        shared = next((place for place, (pair, other) in enumerate(pairs) if pair != other), 0)
        if shared == 0 or chosen[shared]["role"] != ASSISTANT or rejected[shared]["role"] != ASSISTANT:
            raise InputError(
                f"{where}: {CHOSEN} and {REJECTED} are not two answers to the same messages.",
                "They begin with the same messages and then differ in an answer, or hold only the answers "
                "next to a `prompt`.",
            )
        return PromptRow(index, where, chosen[:shared], (chosen[shared:], rejected[shared:]), dict(record))
    prompt = _prompt(record, where, data)
    if prompt is None:
        raise without_field(data.prompt_field, "--prompt-field", record, where)
    return PromptRow(index, where, prompt, (chosen, rejected), dict(record))


def number_in(value: Any) -> Any:
    """Return the number that a text says, as in a CSV file, None for an empty one, and any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return float(value) if value.strip() else None
    except ValueError:
        return value


def is_number(value: Any) -> bool:
    """Return whether a field holds a number that a loss can be computed from: neither NaN nor infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_NUMBER


def _preferred(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return HelpSteer3's better and worse response. Raises InputError without a preference."""
    better, worse, preference = record["response1"], record["response2"], number_in(record["overall_preference"])
    if not is_number(preference):
        raise InputError(f"{where}: the field 'overall_preference' is not a number: {preference!r:.40}.",
                         "Leave the row out.")  # fmt: skip
    if preference >= 0:  # of two equal answers the first is both
        better, worse = (worse if preference else better), better
    return {CHOSEN: better, REJECTED: worse}


def _ranked(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    try:
        ranked = sorted(record[RANKED], key=lambda completion: completion["rank"])
        best, worst = ranked[0], ranked[-1]
        pair = {CHOSEN: best[COMPLETION], REJECTED: worst[COMPLETION]}
    except (TypeError, KeyError, IndexError) as error:
        raise InputError(
            f"{where}: {RANKED!r} is not a list of objects with `rank` and `{COMPLETION}`.", "Leave the row out."
        ) from error
    if odd := [
        completion["rank"]
        for completion in ranked
        if isinstance(completion["rank"], float) and not is_number(completion["rank"])
    ]:
        raise InputError(f"{where}: the rank of a completion is {odd[0]!r}, which orders none.", "Leave the row out.")
    if best["rank"] == worst["rank"]:
        raise InputError(f"{where}: the completions have the same rank, so that none is preferred.", "Leave it out.")
    return pair


def _prompt(record: Mapping[str, Any], where: str, data: DataConfig) -> str | Messages | None:
    """Return the prompt of a record; None: it has none."""
    if has_field(record.keys(), data.prompt_field):
        return checked_prompt(value_of(record, data.prompt_field), data.prompt_field, where)
    template = template_of(data)
    return template.render(dict(record), where) if template is not None and PROMPT not in template.names else None


def _completion(value: Any, field: str, where: str) -> Completion:
    value = decoded_messages(value, field, where)
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise InputError(f"{where}: field {field!r} is not a completion.", "It is a text or a list of chat messages.")
    return _messages(value, field, where)


def _messages(value: Any, field: str, where: str) -> Messages:
    value = decoded_messages(value, field, where)
    checked = checked_messages(value, field, where)
    weights = ({WEIGHT: message[WEIGHT]} if message.get(WEIGHT) is not None else {} for message in value)
    messages = [message | weight for message, weight in zip(checked, weights, strict=True)]
    if any(message.get(WEIGHT, 1) not in (0, 1) for message in messages):
        raise InputError(f"{where}: the `{WEIGHT}` of a message is neither 0 nor 1.", "Leave it out.")
    return messages


def _has_loss(message: Mapping[str, Any]) -> bool:
    return message["role"] == ASSISTANT and message.get(WEIGHT) != 0


def _first_trained(messages: Messages, where: str, *, last: bool) -> int:
    places = [place for place, message in enumerate(messages) if _has_loss(message)]
    if not places or places[0] == 0 or (last and places[-1] != len(messages) - 1):
        wrong = "begins with a" if places and not places[0] else "does not end with a" if places else "has no"
        raise InputError(f"{where}: the conversation {wrong} message of the assistant.", "Leave the row out.")
    return places[-1] if last else places[0]


def without_field(name: str, flag: str, record: Mapping[str, Any], where: str, forms: str = "") -> InputError:
    """Return the error of a record that lacks a field; `flag` names another field, `forms` the forms of a row."""
    hint = f"Its fields are {', '.join(record) or 'none'}{f'; name the right one with {flag} NAME' if flag else ''}."
    return InputError(f"{where}: no field {name!r}.", f"{hint} {forms}".strip())


def trained_texts(
    encoder: PromptEncoder, row: PromptRow, *, everything: bool = False, marked: bool = False, scored: bool = False
) -> tuple[TrainedText, ...]:
    """Return the text of a row, or both of a pair. `everything`: loss on all tokens but the first; `marked`: on the
    template's marked tokens; `scored`: answer positions are not needed. Raises InputError if the template does not
    reveal answers."""
    if row.answer == ():
        return (_plain_text(encoder, row),)
    encoder = encoder.telling(row)
    completions: tuple[Completion, ...] = (row.answer,) if isinstance(row.answer, str) else row.answer
    if not isinstance(completions, tuple):  # of a reasoning-gym task
        raise InputError(f"{row.where}: there is no answer to train on.", "Name data with answers.")
    written = _with_plain_answer if encoder.template is None else _with_marks if marked else _with_answers
    if scored and encoder.template is not None:
        written = partial(_with_answers, headed=True)
    trained = []
    messages = encoder.messages(row)
    for completion in _told(encoder, row, messages, completions, marked=marked, strict=not scored):
        read = [*messages, *_up_to_answer(completion, marked=marked)]
        text = written(encoder, messages, completion, row.where)
        encoder.require_written(read, row.where, answered=True)
        if everything:
            text.mask_T[1:] = True
        if images_of(read):
            text = _expanded(encoder, text, read, row.where)
        else:
            encoder.require_no_image(text.tokens_T.tolist(), row.where)
        encoder.require_known(text.tokens_T.tolist(), row.where)
        trained.append(text)
    return tuple(trained)


def _told(
    encoder: PromptEncoder,
    row: PromptRow,
    prompt: Messages,
    completions: Sequence[Completion],
    *,
    marked: bool = False,
    strict: bool = True,
) -> list[Messages]:
    """Return the messages of completions without end tokens, behind the thought that the prompt opens where they
    continue it: both of a pair where one does."""
    whole_completions = [encoder.without_end(_said(completion)) for completion in completions]
    if encoder.template is None:
        return whole_completions
    read = [_up_to_answer(completion, marked=marked) for completion in whole_completions]
    begin = len(read) > 1 and any(
        opening and begins_in_thought(encoder, prompt, opening, row.where) for opening in read
    )
    placed = (
        in_opened_thoughts(encoder, prompt, opening, row.where, all_begin=begin, strict=strict) for opening in read
    )
    return [[*opening, *whole[len(opening) :]] for opening, whole in zip(placed, whole_completions, strict=True)]


def _said(completion: Completion) -> Messages:
    return [{"role": ASSISTANT, "content": completion}] if isinstance(completion, str) else completion


def _up_to_answer(completion: Messages, *, marked: bool) -> Messages:
    """Return the messages of a completion that are in its text, which ends with the last answer."""
    answers = (
        place
        for place, message in enumerate(completion)
        if (message["role"] == ASSISTANT if marked else _has_loss(message))
    )
    return completion[: max(answers, default=-1) + 1]


def _expanded(encoder: PromptEncoder, text: TrainedText, messages: Messages, where: str) -> TrainedText:
    """Return a text with its images in their places; their tokens have no loss."""
    expanded = encoder.with_images(text.tokens_T.tolist(), messages, where)
    mask_T, after = np.zeros(len(expanded.tokens), bool), 0
    unexpanded = 0
    for part in expanded.media:
        kept = part.start - after
        mask_T[after : part.start] = text.mask_T[unexpanded : unexpanded + kept]
        unexpanded, after = unexpanded + kept + len(part.written), part.start + part.tokens
    mask_T[after:] = text.mask_T[unexpanded:]
    return replace(text, tokens_T=np.array(expanded.tokens, np.int32), mask_T=mask_T, media=expanded.media)


def whole_text(encoder: PromptEncoder, row: PromptRow) -> str:
    """Return the longest text of a row as the model reads it, without the end token of a plain one."""
    if row.answer == ():
        return cast(str, row.prompt)
    encoder = encoder.telling(row)
    completions = (row.answer,) if isinstance(row.answer, str) else row.answer or ("",)
    messages = encoder.messages(row)
    whole_completions = _told(encoder, row, messages, completions, strict=False)
    if encoder.template is None:
        texts = [f"{encoder.text(row)} {completion[0]['content']}" for completion in whole_completions]
    else:
        texts = [encoder.render([*messages, *completion], row.where, answered=True) for completion in whole_completions]
    return encoder.control.shown(max(texts, key=len))


def _plain_text(encoder: PromptEncoder, row: PromptRow) -> TrainedText:
    end, text = _end_token(encoder, row.where), trimmed(encoder.tokenizer, cast(str, row.prompt))
    tokens = begun(encoder.tokenizer, encoder.tokenizer.encode(text, add_special_tokens=False))
    tokens += [end] if tokens[-1:] != [end] else []
    encoder.require_known(tokens, row.where)
    encoder.require_no_image(tokens, row.where)
    mask_T = np.ones(len(tokens), bool)
    mask_T[0] = False
    return TrainedText(np.array(tokens, np.int32), mask_T)


def _with_plain_answer(encoder: PromptEncoder, prompt: Messages, completion: Messages, where: str) -> TrainedText:
    if len(completion) != 1:
        raise InputError(
            f"{where}: the tokenizer has no chat template, and the row has several messages to train on.",
            "Give a template with --chat-template.",
        )
    before = encoder.render(prompt, where)
    answer = encoder.hidden(completion[0]["content"])
    text = before + (answer if answer[:1].isspace() else f" {answer}")
    tokens, (first, _) = _cut(encoder, text, [len(before), len(text)], where)
    tokens = [*tokens, _end_token(encoder, where)]
    return TrainedText(np.array(tokens, np.int32), np.arange(len(tokens)) >= first)


def _with_answers(
    encoder: PromptEncoder, prompt: Messages, completion: Messages, where: str, *, headed: bool = False
) -> TrainedText:
    """Render a conversation up to its last answer's end. `headed`: the header counts as part of an answer."""
    completion = _up_to_answer(completion, marked=False)
    if not completion:
        raise InputError(f"{where}: the completion has no message of the assistant.", "Leave the row out.")
    messages = encoder.hidden([*prompt, *completion])
    whole = encoder.render(messages, where, answered=True)
    cuts: list[int] = []
    ends = set(encoder.stop_token_ids)
    for place in range(len(prompt), len(messages)):
        if not _has_loss(messages[place]):
            continue
        heads = (
            encoder.render(messages[:place], where, answered=way) for way in ((True, False) if headed else (False,))
        )
        before = next((head for head in heads if whole.startswith(head)), None)
        before = before or _header(encoder, messages[:place], whole, where)
        after = encoder.render(messages[: place + 1], where, answered=True)
        # What both write: a template may end a conversation with one token more.
        shared = _shared(whole, after)[len(before or "") :]
        answer = _ended(encoder, shared)
        if before is not None and not answer and (end := _other_end(encoder, whole, after)):
            answer = whole[len(before) : end[0]]
            ends.add(end[1])
        if before is None or not (answer or whole.startswith(after)):
            located = _located(encoder, messages, place, whole, where)
            if located is None or len(located[0]) < max(cuts, default=0):
                raise _no_place(encoder, place, len(messages), where)
            before, answer = located
        calls = [call["function"] for call in messages[place].get("tool_calls", ())]
        said_there = [messages[place][name] for name in ("content", *THOUGHTS) if name in messages[place]]
        said_there += [word for call in calls for word in (call["name"], *arguments_of(call))]
        if opened := OpenedThought.of(before):
            said_there = [text.lstrip().removeprefix(opened.tag) for text in said_there]
        if any(squeezed(text) not in squeezed(answer or shared) for text in said_there):
            raise InputError(
                f"{where}: the chat template leaves out a part of message {place + 1}, which is to be trained on.",
                "Give another with --chat-template, or leave the row out.",
            )
        cuts += [len(before), len(before) + len(answer)]
    tokens, places = _cut(encoder, whole, cuts, where)
    mask_T, end = np.zeros(len(tokens), bool), places[-1]
    for first, after in zip(places[::2], places[1::2], strict=True):
        if first == after or tokens[after - 1] not in ends:
            raise InputError(
                f"{where}: the chat template writes no token that ends an answer, so the model would never learn to "
                "stop.",
                "Give another with --chat-template.",
            )
        mask_T[first:after] = True
    return TrainedText(np.array(tokens[:end], np.int32), mask_T[:end])


def _no_place(encoder: PromptEncoder, place: int, messages: int, where: str) -> InputError:
    ways = [
        *(["data.train_on=last trains only on the last answer"] if place + 1 < messages else []),
        *(["data.train_on=marked on the template's marked tokens"] if _MARK.search(encoder.template or "") else []),
        "--chat-template gives another",
    ]
    return InputError(
        f"{where}: the chat template does not say where message {place + 1} stands: what it writes up to there "
        "is not the beginning of the whole conversation.",
        f"{', '.join(ways)}.",
    )


def _shared(*texts: str) -> str:
    return commonprefix(texts)  # noqa: RUF071 - of texts, not of paths


def _header(encoder: PromptEncoder, before: Messages, whole: str, where: str) -> str | None:
    """Return a conversation up to its next answer, for templates whose generation prompt opens an optional thought;
    None: unknown."""
    prompt = encoder.render(before, where)
    closed = encoder.render(before, where, answered=True)
    answered = encoder.render([*before, {"role": ASSISTANT, "content": ANSWER_MARK}], where, answered=True)
    header = re.sub(r"<[^<>]*\Z", "", _shared(prompt, answered))  # `<think>` and `</think>` begin alike
    is_header = len(closed) < len(header) and header.startswith(closed) and whole.startswith(header)
    return header if is_header and ANSWER_MARK in answered else None


def _located(encoder: PromptEncoder, messages: Messages, place: int, whole: str, where: str) -> tuple[str, str] | None:
    """Locate an answer, and return the conversation up to it and the answer with its end token. The place is the first
    difference from a rendering with another answer; None: unknown. Some templates write an earlier answer differently:
    Qwen3's leaves out the thought once a question follows."""
    other = [*messages]
    other[place] = {"role": ASSISTANT, "content": ANSWER_MARK}
    another = encoder.render(other, where, answered=True)
    first = len(_shared(whole, another))
    last = max(first, len(whole) - len(_shared(whole[::-1], another[::-1])))
    closed, prompt = (encoder.render(messages[:place], where, answered=way) for way in (True, False))
    header, think, _ = prompt.removeprefix(closed).partition(THINK)
    begin = whole.rfind(header, 0, first) + len(header)
    if not header or not prompt.startswith(closed) or begin < len(header):
        return None
    if think and whole.startswith(thought := prompt[len(closed) + len(header) :], begin):
        begin += len(thought)  # the prompt writes it
    stops = [text for token in encoder.stop_token_ids if (text := str(encoder.tokenizer.decode([token])))]
    end = re.compile("|".join(map(re.escape, stops))).search(whole, begin) if stops else None
    return (whole[:begin], whole[begin : end.end()]) if end is not None and end.end() > last else None


def _other_end(encoder: PromptEncoder, whole: str, alone: str) -> tuple[int, int] | None:
    """Return the end-of-turn token inside a conversation and its end, for templates with another last token; `alone`:
    the conversation so far."""
    parted = len(_shared(whole, alone))
    stops = [str(encoder.tokenizer.decode([token])) for token in encoder.stop_token_ids]
    for token in encoder.special:
        text = str(encoder.tokenizer.decode([token]))
        for place in range(max(0, parted - len(text) + 1), parted + 1):
            if text and whole.startswith(text, place) and any(alone.startswith(stop, place) for stop in stops if stop):
                return place + len(text), token
    return None


def _ended(encoder: PromptEncoder, answer: str) -> str:
    """Return an answer up to the model's stop token (the first of several at the end); empty without one."""
    texts = (str(encoder.tokenizer.decode([token])) for token in encoder.stop_token_ids)
    ends = "|".join(re.escape(text) for text in texts if text)
    match = re.match(f".*(?:{ends})", answer, re.DOTALL) if ends else None
    return re.sub(rf"({ends})(?:\s*(?:{ends}))+\Z", r"\1", match[0]) if match else ""


def _with_marks(encoder: PromptEncoder, prompt: Messages, completion: Messages, where: str) -> TrainedText:
    """Return a conversation with a loss where its chat template has {% generation %} around, up to the last mark."""
    template = encoder.template or ""
    if not _MARK.search(template):
        raise InputError(
            "data.train_on = marked: the chat template has no {% generation %} marks for answers.",
            "Leave it out: answers are then found by rendering, or refused. Or give another with --chat-template.",
        )
    tokens_T, mask_T = _marked(encoder, template, [*prompt, *completion], where)
    ends_T, first = np.isin(tokens_T, encoder.stop_token_ids), 0
    marks: list[slice] = []
    for trained, stretch in groupby(mask_T):
        after = first + len([*stretch])
        marks += [slice(first, after)] if trained else []
        first = after
    if not marks or mask_T[0] or not all(ends_T[mark].any() for mark in marks):
        reason = (
            "marks nothing" if not marks else "begins with a mark" if mask_T[0] else "has a mark without an end token"
        )
        raise InputError(
            f"{where}: the chat template {reason}, so that the model would not learn to answer and stop.",
            "Leave data.train_on = marked out, or give another template with --chat-template.",
        )
    for mark in marks:  # text after the end token is the template's, not the model's
        mask_T[mark] &= np.logical_or.accumulate(ends_T[mark][::-1])[::-1]
    end = int(np.flatnonzero(mask_T)[-1]) + 1
    return TrainedText(tokens_T[:end], mask_T[:end])


def _marked(encoder: PromptEncoder, template: str, messages: Messages, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a conversation's tokens, and the mask of tokens that its template marks."""
    turns = encoder.taken(messages)
    hidden = encoder.hidden({"messages": turns, TOOLS: encoder.variables.get(TOOLS)})
    variables = {**encoder.variables, TOOLS: hidden[TOOLS]}
    if hidden["messages"] == turns and hidden[TOOLS] == encoder.variables.get(TOOLS):
        rendered: Any = encoder.tokenizer.apply_chat_template(
            turns, chat_template=template, return_dict=True, return_assistant_tokens_mask=True, **variables
        )
        return np.array(rendered["input_ids"], np.int32), np.array(rendered["assistant_masks"], bool)
    from transformers.utils.chat_template_utils import render_jinja_template

    constants: Any = encoder.tokenizer.special_tokens_map | variables
    made: Any = render_jinja_template(
        [hidden["messages"]], chat_template=template, return_assistant_tokens_mask=True, **constants
    )
    text, marks = made[0][0], made[1][0]
    tokens, places = _cut(encoder, text, [place for mark in marks for place in mark], where)
    mask_T = np.zeros(len(tokens), bool)
    for first, after in zip(places[::2], places[1::2], strict=True):
        mask_T[first:after] = True
    return np.array(tokens, np.int32), mask_T


def _cut(encoder: PromptEncoder, text: str, cuts: Sequence[int], where: str) -> tuple[list[int], list[int]]:
    """Return a text's tokens, and token positions of characters `cuts`. A token across a cut is split by tokenizing the
    parts, as during generation. Raises InputError if that changes the text."""
    encode = partial(encoder.encode_text, where=where)
    tokens = encode(text)
    heads = [encode(text[:cut]) for cut in cuts]
    if all(tokens[: len(head)] == head for head in heads):
        return tokens, [len(head) for head in heads]
    edges = sorted({0, *cuts, len(text)})
    for continues in (True, False):  # behind a special token, some tokenizers put a blank, too
        parts = [encode(text[a:b], begins=a == 0, continues=continues and a > 0) for a, b in pairwise(edges)]
        joined = [token for part in parts for token in part]
        if encoder.tokenizer.decode(joined) == encoder.tokenizer.decode(tokens):
            break
    else:
        raise InputError(
            f"{where}: a token crosses the start of an answer, and the tokenizer splits the two parts differently.",
            "Give another template with --chat-template, or leave the row out.",
        )
    place_of = dict(zip(edges[1:], accumulate(len(part) for part in parts), strict=True))
    return joined, [place_of[cut] for cut in cuts]


def _end_token(encoder: PromptEncoder, where: str) -> int:
    end: Any = encoder.tokenizer.eos_token_id
    if end is None:
        raise InputError(f"{where}: the tokenizer has no end token.", "Name one with --tokenizer.")
    return end
