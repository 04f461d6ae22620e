"""From a prompt row to tokens: the tokenizer, and a chat template or, for base models, a plain format."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rlctl.checkpoints.hf.hf_files import is_lfs_pointer, read_config, read_generation
from rlctl.checkpoints.hf.tokenizer_files import TEKKEN, by_its_file, has_both_forms
from rlctl.checkpoints.model_files import tokenizer_directory
from rlctl.config.files import read_text, user_path
from rlctl.data.control_tokens import KEY, ControlTokens, begun
from rlctl.data.image_rows import IN_TEXT, in_parts
from rlctl.data.image_sources import IMAGES, MARK, image_source, images_of
from rlctl.data.prompt_rows import TOOLS, Messages, PromptRow
from rlctl.data.rollouts import MediaPart
from rlctl.data.templates import PROMPT, PromptTemplate, template_of
from rlctl.data.written_messages import CallForm, shape_of, unwritten
from rlctl.errors import InputError, first_line
from rlctl.settings.data import DataConfig, ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlctl.data.images import ImageProcessor

log = logging.getLogger(__name__)
PLAIN_STOP = "\nQuestion:"
"""Stop for base models, which otherwise ask themselves the next question."""
PLAIN_NOTE = (
    "The tokenizer has no chat template: prompts are written as `Question: ...` and `Answer:`, and a completion ends "
    "at the next `Question:`. Give another with --chat-template."
)
CLOCK = "strftime_now"
"""Function of transformers' templates that formats the time."""
CALLS = "tool_calls"
XML_TOOLS = "xml_tools"
"""The name of the tools in SmolLM3's template."""
_MARKER = "rlctl-end-of-turn"


@dataclass(frozen=True)
class EncodedPrompt:
    """The tokens of a prompt as the model reads them, and its images."""

    tokens: tuple[int, ...]
    media: tuple[MediaPart, ...] = ()

    @property
    def text_tokens(self) -> list[int]:
        """Tokens outside images."""
        ends = [0, *(part.start + part.tokens for part in self.media)]
        starts = [*(part.start for part in self.media), len(self.tokens)]
        return [token for first, after in zip(ends, starts, strict=True) for token in self.tokens[first:after]]

    def last(self, tokens: int) -> EncodedPrompt:
        """Return the prompt's last `count` tokens at most; an image that would be cut is left out."""
        begin = max(0, len(self.tokens) - tokens)
        begin = max([begin, *(p.start + p.tokens for p in self.media if p.start < begin < p.start + p.tokens)])
        kept = tuple(replace(part, start=part.start - begin) for part in self.media if part.start >= begin)
        return EncodedPrompt(self.tokens[begin:], kept)


@dataclass(frozen=True)
class PromptEncoder:
    """How this run writes prompts. Make it with `build`."""

    tokenizer: PreTrainedTokenizerBase
    template: str | None
    """Jinja chat template; None: the plain question/answer format."""
    system_prompt: str | None
    prompt_suffix: str
    prompt_template: PromptTemplate | None
    """Text of a prompt, with places for the columns of its row."""
    prompt_field: str
    """Column that the prompt replaces in the template, like `{prompt}`."""
    stop: tuple[str, ...]
    """Texts that end a completion, in addition to `generation.stop`."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a completion, the model's own included."""
    vocab: int | None
    """The model's vocabulary size; None if not at the top of its configuration."""
    note: str | None
    """Note about the format for the user, if there is one."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template, such as enable_thinking."""
    in_parts: bool = False
    """Whether the template takes content as a list of parts, as multimodal models do."""
    control: ControlTokens = field(default_factory=ControlTokens)
    """The tokens that delimit turns or end a text."""
    keeps_tokens: bool = False
    """Whether control tokens in the content of messages are tokens (`data.special_tokens`)."""
    model_directory: str = ""
    """Directory of the model, whose processor reads images."""
    sees: bool = False
    """Whether the model takes images."""
    trusts_code: bool = False
    """Whether code that comes with the model may run (`model.trust_remote_code`)."""
    instructions: str = ""
    """Description of the tools at the end of each system prompt, for a template that has no place for them."""
    _probed: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """Findings on the template."""

    @classmethod
    def build(
        cls, tokenizer: PreTrainedTokenizerBase, model: ModelConfig, data: DataConfig, model_directory: Path | str
    ) -> PromptEncoder:
        """Return the encoder of a run. Raises InputError for a template that is missing or does not render."""
        template = read_template(model.chat_template) if model.chat_template else tokenizer.chat_template
        if isinstance(template, dict):  # some tokenizers name several
            template = template.get("default") or next(iter(template.values()))
        directory, own_end = Path(model_directory), cast(Any, tokenizer.eos_token_id)
        size = read_config(directory).get("vocab_size") if (directory / "config.json").is_file() else None
        ends: set[Any] = {own_end}
        listed = read_generation(directory).get("eos_token_id")
        ends |= set(listed if isinstance(listed, list) else [listed])
        encoder = cls(
            tokenizer=tokenizer,
            template=template,
            system_prompt=data.system_prompt,
            prompt_suffix=data.prompt_suffix or "",
            prompt_template=template_of(data),
            prompt_field=data.prompt_field,
            stop=() if template else (PLAIN_STOP,),
            stop_token_ids=tuple(sorted(token for token in ends if token is not None)),
            vocab=size if isinstance(size, int) else None,
            note=None if template else PLAIN_NOTE,
            variables={**model.chat_template_kwargs, CLOCK: template_time(model).strftime},
            keeps_tokens=data.special_tokens == "tokens",
            model_directory=str(directory),
            sees=reads_images(directory),
            trusts_code=model.trust_remote_code,
        )
        encoder = encoder._tried() if template else encoder
        return encoder.with_ends(encoder.stop_token_ids)

    def with_ends(self, tokens: Iterable[int]) -> PromptEncoder:
        ends = tuple(sorted(tokens))
        return replace(self, stop_token_ids=ends, control=ControlTokens.of(self.tokenizer, ends, self._skeletons()))

    def text(self, row: PromptRow) -> str:
        return self.control.shown(self.telling(row).render(self.messages(row), row.where))

    def encode(self, row: PromptRow) -> tuple[int, ...]:
        """Return token ids of the prompt; an image has all that the model reads it as."""
        return self.telling(row).encode_messages(self.messages(row), row.where)

    def encode_messages(self, messages: Messages, where: str) -> tuple[int, ...]:
        """Return a prompt's token ids. Images are not decoded; their sizes give the number of tokens."""
        tokens = self._written_tokens(messages, where)
        if sources := images_of(messages):
            tokens, _ = self.images(where).layout(tokens, [source.size() for source in sources], where)
        else:
            self.require_no_image(tokens, where)
        return tuple(tokens)

    def prompt(self, row: PromptRow) -> EncodedPrompt:
        return self.telling(row).prompt_of(self.messages(row), row.where)

    def fitted(self, row: PromptRow, tokens: Sequence[int]) -> EncodedPrompt:
        """Return a row's prompt for known tokens, perhaps without their beginning."""
        return self.prompt(row).last(len(tokens)) if row.images else EncodedPrompt(tuple(tokens))

    def prompt_of(self, messages: Messages, where: str) -> EncodedPrompt:
        """Return a prompt's token ids with its images. Raises InputError for an unreadable image."""
        return self.with_images(self._written_tokens(messages, where), messages, where)

    def with_images(self, tokens: Sequence[int], messages: Messages, where: str) -> EncodedPrompt:
        if not (sources := images_of(messages)):
            self.require_no_image(tokens, where)
            return EncodedPrompt(tuple(tokens))
        processor = self.images(where)
        expanded, media = processor.expand(tokens, [processor.read(source) for source in sources], where)
        return EncodedPrompt(tuple(expanded), media)

    def images(self, where: str = "a prompt") -> ImageProcessor:
        """Return what reads the images of prompts. Raises InputError where the model takes none."""
        from rlctl.data.images import ImageProcessor

        if not self.sees:
            raise InputError(
                f"{where}: it has images, and the model is one of text.",
                "Name a vision-language model, and set model.images=true; without it, the first rows decide.",
            )
        if self.template is None:
            raise InputError(f"{where}: it has images, but the model has no chat template to place them.",
                             "Give a template with --chat-template.")  # fmt: skip
        return ImageProcessor.open(self.model_directory, trust_remote_code=self.trusts_code)

    @property
    def never_sampled(self) -> tuple[int, ...]:
        """Tokens that represent images. In a completion they would be read as images that do not exist."""
        return self.images().never_sampled if self.template is not None and self.sees else ()

    @cached_property
    def image_text(self) -> str:
        """The text that the template writes for an image."""
        message = {"role": "user", "content": f"{_MARKER}{MARK}{_MARKER}", IMAGES: [None]}
        return self.render([message]).split(_MARKER)[1]

    def shown_image(self) -> EncodedPrompt | None:
        """Return a fixed prompt with an image, which checks a refit; None: the model takes no images."""
        if not self.sees or self.template is None:
            return None
        from PIL import Image

        where = "the prompt of a refit's check"
        image = Image.frombytes("RGB", (64, 40), bytes(place * 151 % 251 for place in range(3 * 40 * 64)))
        return self.prompt_of([{"role": "user", "content": MARK, IMAGES: [image_source(image, where, Path())]}], where)

    def _written_tokens(self, messages: Messages, where: str) -> list[int]:
        self.require_written(messages, where)
        tokens = self.encode_text(self.render(messages, where), where)
        self.require_known(tokens, where)
        return tokens

    def encode_text(self, text: str, where: str, *, begins: bool = True, continues: bool = False) -> list[int]:
        """Return token ids of a text that `render` has made, or of a part of one; `begins`: its beginning;
        `continues`: without the blank that SentencePiece's tokenizers put before a text."""
        tokens = self.control.encode(self.tokenizer, text, where)
        if continues and self._line_before_digit and tokens and tokens[0] not in self.special:
            joined, line = self.control.encode(self.tokenizer, f"\n{text}", where), self._line_before_digit
            return joined[len(line) :] if tuple(joined[: len(line)]) == line else tokens
        # A template writes the special tokens itself; the plain format leaves them to the tokenizer.
        return begun(self.tokenizer, tokens) if begins and self.template is None else tokens

    @cached_property
    def _line_before_digit(self) -> tuple[int, ...]:
        """The tokens of a line end at the start of a text; none if a text has the same tokens behind it as alone."""
        line, alone, behind = (self.tokenizer.encode(text, add_special_tokens=False) for text in ("\n", "7", "\n7"))
        return () if behind[len(line) :] == alone else tuple(line)

    def telling(self, row: PromptRow) -> PromptEncoder:
        """Return an encoder that shows a row's tools, unless the prompt template does. Raises InputError if the chat
        template cannot."""
        of_template = self.prompt_template is not None and TOOLS in self.prompt_template.names
        if of_template or not row.tools:
            return self
        telling, messages = self.telling_tools(row.tools), self.messages(row)
        if self.template is None or telling.render(messages, row.where) == self.render(messages, row.where):
            raise InputError(
                f"{row.where}: the chat template does not write the tools of the row.",
                f"Give another with --chat-template, or leave the field `{TOOLS}` out.",
            )
        return telling

    def telling_tools(self, tools: Iterable[Any]) -> PromptEncoder:
        """Return an encoder that passes tools to the template (the tokenizer's tool template if it has one)."""
        template: Any = self.tokenizer.chat_template
        tool_template = (
            template.get("tool_use")
            if isinstance(template, dict) and self.template == template.get("default")
            else None
        )
        return replace(self, template=tool_template or self.template, variables={**self.variables, TOOLS: [*tools]})

    def require_known(self, tokens: Sequence[int], where: str) -> None:
        """Raise InputError for a token that the model does not have."""
        if self.vocab is not None and (beyond := [token for token in tokens if token >= self.vocab]):
            written = repr(self.tokenizer.convert_ids_to_tokens(beyond[0]))
            raise InputError(
                f"{where}: the prompt becomes token {beyond[0]:,} ({written}), and the model has {self.vocab:,}.",
                "The tokenizer belongs to another model: name the right one with --tokenizer.",
            )

    def require_no_image(self, tokens: Sequence[int], where: str) -> None:
        """Raise InputError for an image token in a text without images."""
        if self.sees and self.template is not None and (image_reader := self.images(where)).placeholder_id in tokens:
            raise InputError(
                f"{where}: the token {image_reader.placeholder!r} stands for an image, and there is no image.",
                "Take its text out, or give the row an image.",
            )

    def messages(self, row: PromptRow) -> Messages:
        """Return the row's messages with system prompt, prompt template and suffix; none if the environment starts the
        conversation."""
        if not row.prompt:
            return self.instructed([{"role": "system", "content": self.system_prompt}] if self.system_prompt else [])
        messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else list(row.prompt)
        last = messages[-1]
        text = last["content"].lstrip(MARK)
        first = last["content"][: len(last["content"]) - len(text)]  # images in front stay there
        if self.prompt_template is not None:
            text = self.prompt_template.render({**row.fields, self.prompt_field: text, PROMPT: text}, row.where)
        messages[-1] = {**last, "content": first + text + self.prompt_suffix}
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return self.instructed(messages)

    def instructed(self, messages: Messages) -> Messages:
        """Return messages whose system prompt ends with `instructions`."""
        first = messages[0] if messages and messages[0]["role"] == "system" else {"role": "system", "content": ""}
        rest = messages[1:] if messages and messages[0]["role"] == "system" else messages
        if not self.instructions:
            return list(messages)
        return [{**first, "content": f"{first['content']}\n\n{self.instructions}".lstrip("\n")}, *rest]

    def render(self, messages: Messages, where: str = "a first message", *, answered: bool = False) -> str:
        """Render messages up to the next answer, or `answered` up to the last one's end. Control-token texts are hidden
        for `encode_text`."""
        messages, variables = self.hidden(messages), self.variables
        if variables.get(TOOLS):
            names = [TOOLS, *([XML_TOOLS] if XML_TOOLS in (self.template or "") else [])]
            variables = {**variables, **dict.fromkeys(names, self.hidden(variables[TOOLS]))}
        if self.template is None:  # lines that end where the answer begins; a system message goes first as it is
            labels = {"user": "Question: ", "assistant": "Answer: ", "system": ""}
            lines = [labels.get(message["role"], "") + message["content"] for message in messages if message["content"]]
            return "\n".join([*lines, "Answer:"])
        return self._rendered(self.taken(messages), variables, where, answered=answered)

    def taken(self, messages: Messages) -> list[dict[str, Any]]:
        """Return messages as the chat template takes them: images as parts, and calls in its form."""
        turns = [in_parts(message, always=self.in_parts) for message in messages]
        return [self.call_form.taken(turn) for turn in turns] if any(turn.get(CALLS) for turn in turns) else turns

    @property
    def call_form(self) -> CallForm:
        """The form of calls in the chat template."""
        key = (CALLS, self.template, self.in_parts)
        if key not in self._probed:
            variables = {name: value for name, value in self.variables.items() if name != TOOLS}
            self._probed[key] = CallForm.of(
                lambda messages: self._rendered(messages, variables, "a call", answered=True)
            )
        return self._probed[key]

    def require_written(self, messages: Messages, where: str, *, answered: bool = False) -> None:
        """Raise InputError for a message that is not in the text of a conversation, which transformers leaves out."""
        key = (self.template, bool(self.variables.get(TOOLS)), answered, *map(shape_of, messages))
        if key not in self._probed:
            self._probed[key] = unwritten(lambda turns: self.render(turns, where, answered=answered), messages)
        if (place := self._probed[key]) is None:
            return
        format_name = "chat template" if self.template else "format of a model without chat template"
        raise InputError(
            f"{where}: the {format_name} does not write message {place + 1}, of the role {messages[place]['role']!r}.",
            "Give another template with --chat-template, or leave the message out (data.system_prompt adds one of the "
            "role 'system').",
        )

    def _rendered(self, turns: Any, variables: Mapping[str, Any], where: str, *, answered: bool) -> str:
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                turns, chat_template=self.template, tokenize=False, add_generation_prompt=not answered, **variables
            )
            return cast(str, text)  # without `tokenize` it is a text
        # A template is a program: its variables may be missing or zero.
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InputError(
                f"The chat template cannot write {where} ({', '.join(m['role'] for m in turns)}): {error}",
                "Give another with --chat-template; a template may also refuse a system prompt (data.system_prompt).",
            ) from error

    def hidden(self, value: Any) -> Any:
        """Return messages or tools with the texts of control tokens hidden, unless they are to be tokens."""
        return value if self.keeps_tokens else self.control.hide(value)

    def controls_in(self, row: PromptRow, *, texts: bool = False) -> list[str]:
        """Return the texts of control tokens in the prompt and tools of a row, and (of `texts`) in its completions."""
        if texts and row.answer == ():
            return list(dict.fromkeys(self.control.inside(str(row.prompt))))
        answers = [self.without_end(turn) for turn in row.answer] if texts and isinstance(row.answer, tuple) else None
        templates = (row.prompt, row.fields.get(TOOLS), answers)
        return list(dict.fromkeys(self.control.in_strings(templates)))

    def notes_on(self, rows: Iterable[PromptRow], *, texts: bool = False) -> list[str]:
        places_by_effect: dict[str, list[str]] = {}
        for row in rows:
            whole = texts and row.answer == ()
            become = "are tokens, since a `text` is all that the model reads" if whole else self._become
            if tokens := self.controls_in(row, texts=texts):
                places_by_effect.setdefault(become, []).append(f"{row.where} ({', '.join(tokens)})")
        return [
            f"{len(places):,} row{'s' * (len(places) > 1)} with control tokens, which {become}: "
            f"{'; '.join(places[:3])}{'; ...' * (len(places) > 3)}"
            for become, places in places_by_effect.items()
        ]

    def notes_on_places(self, rows: Iterable[PromptRow]) -> list[str]:
        """Return a note on rows whose text has a place for an image, where the row has none."""
        places = [row.where for row in rows if self.sees and not row.images and IN_TEXT in row.question]
        many = f"{len(places):,} rows say" if len(places) > 1 else "1 row says"
        return [f"{many} {IN_TEXT} without an image, which stays text: {places[0]}"] if places else []

    def notes_on_instructions(self, text: str) -> list[str]:
        tokens = dict.fromkeys(self.control.in_strings(text))
        where = "data.system_prompt, data.prompt_template or data.prompt_suffix"
        return [f"control tokens in {where}, which {self._become}: {', '.join(tokens)}"] if tokens else []

    @property
    def _become(self) -> str:
        return f"are tokens ({KEY}=tokens)" if self.keeps_tokens else f"stay text ({KEY}=tokens makes them tokens)"

    def without_end(self, completion: Any) -> Any:
        """Return a completion, a text or messages, without the end tokens that its answers may bring: one follows
        anyway, and a second one would be learned as a part of the answer."""
        if isinstance(completion, list | tuple):
            return [
                {**message, "content": self.without_end(message["content"])}
                if message["role"] == "assistant"
                else message
                for message in completion
            ]
        shorter = self._ends.sub("", completion) if isinstance(completion, str) else completion
        return shorter if shorter else completion

    @cached_property
    def _ends(self) -> re.Pattern[str]:
        texts = (str(self.tokenizer.decode([token])) for token in self.stop_token_ids)
        return re.compile(rf"\s*(?:(?:{'|'.join(re.escape(text) for text in texts if text.strip()) or '(?!)'})\s*)+\Z")

    def closing_token(self) -> int | None:
        """Return the special token directly after an answer in the template; None: none."""
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARKER}]
        _, marker, tail = self.render(turn, "an answer", answered=True).rpartition(_MARKER)
        ids = self.tokenizer.encode(tail, add_special_tokens=False)[:1] if marker else []
        return ids[0] if ids and ids[0] in self.special else None

    @property
    def writes_time(self) -> bool:
        return CLOCK in (self.template or "")

    @cached_property
    def opens_thought(self) -> bool:
        """Whether prompts end with the mark that begins a thought, so that completions begin inside of it."""
        return self.render([{"role": "user", "content": "?"}]).rstrip().endswith("<think>")

    @cached_property
    def special(self) -> set[int]:
        added = self.tokenizer.added_tokens_decoder.items()
        return {*self.tokenizer.all_special_ids, *(token for token, entry in added if entry.special)}

    @property
    def special_texts(self) -> list[str]:
        return [str(token) for token in self.tokenizer.convert_ids_to_tokens(sorted(self.special))]

    def _skeletons(self) -> list[str]:
        if self.template is None:
            return []
        user, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": _MARKER}
        talk = [user, answer, user]
        beginnings = self._written([{"role": "system", "content": "?"}, *talk]) or self._written(talk)
        beginnings = beginnings if _MARKER in beginnings else self._written([user], answered=False)
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"a": "?"}}}
        called = [user, {"role": "assistant", "content": "", "tool_calls": [call]}]
        result = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": "?"}
        texts = self._written(called), self._written([*called, result])
        image_turn = self._written([{"role": "user", "content": MARK, IMAGES: [None]}]) if self.sees else ""
        return [beginnings, texts[1][len(commonprefix(texts)) :], image_turn]  # noqa: RUF071 - of texts, not of paths

    def _written(self, messages: Messages, *, answered: bool = True) -> str:
        try:
            return self.render(messages, answered=answered)
        except InputError:
            return ""

    def _tried(self) -> PromptEncoder:
        """Return this encoder after trying its template, with what that showed."""
        if len({self.render([{"role": "user", "content": text}]) for text in "?!"}) == 1:  # it leaves the text out
            if self.in_parts:
                reason = "The chat template drops user messages, so all prompts would be equal."
                raise InputError(reason, "Give another with --chat-template.")
            return replace(self, in_parts=True)._tried()
        # The special token that the template writes after an answer need not be the tokenizer's end token.
        user, closing = {"role": "user", "content": "?"}, self.closing_token()
        ends = {*self.stop_token_ids, *([] if closing is None else [closing])}
        encoder = replace(self, stop_token_ids=tuple(sorted(ends)))
        if self.system_prompt is None:
            return encoder
        text = self.render([user])
        with_system = self.render([{"role": "system", "content": self.system_prompt}, user])  # it may be refused
        # An empty system message only displaces the template's own; without one it costs tokens.
        pointless = self.system_prompt == "" and len(text) <= len(with_system)
        return replace(encoder, system_prompt=None) if pointless else encoder


def read_template(template: str) -> str:
    """Return the template itself, or the text of the file that it names. Raises InputError where it is neither."""
    if "{{" in template or "{%" in template:
        return template
    path = Path(template)
    if not path.exists():
        raise InputError(
            f"--chat-template {template}: no such file, and not a template itself.", "A template contains {{ or {%."
        )
    return read_text(path, "--chat-template")


def template_time(model: ModelConfig) -> datetime:
    """Return the time that a chat template writes; now if the configuration has none."""
    return datetime.fromisoformat(model.chat_template_time) if model.chat_template_time else datetime.now()


def template_digest(template: str) -> str:
    return hashlib.sha256(read_template(template).encode()).hexdigest()


def load_tokenizer(model_directory: Path | str, model: ModelConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of `model.tokenizer` or the model's directory. Raises InputError if missing."""
    # transformers takes seconds to import, and only runs need it
    if Process.reads_tokenizers_alone and "torch" not in sys.modules and not reads_images(model_directory):
        _import_without_torch()
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    name = model.tokenizer or str(model_directory)
    origin = f"--tokenizer {name}" if model.tokenizer else f"The model directory {name}"
    # transformers asks the hub again and again for a name that it does not find, and this asks once.
    directory = (
        tokenizer_directory(model.tokenizer, trust_remote_code=model.trust_remote_code)
        if model.tokenizer
        else model_directory
    )
    log.info("reading the tokenizer of %s", name)
    try:
        form = {"mistral_format": False} if has_both_forms(directory) else {}
        loaded = AutoTokenizer.from_pretrained(directory, trust_remote_code=model.trust_remote_code, **form)
        loaded = by_its_file(loaded, directory)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, StrictDataclassError) as error:
        # what transformers raises for files missing or damaged, unknown classes, untrusted code, a hub out of reach
        if pointer := next((file for file in Path(directory).glob("tokenizer*") if is_lfs_pointer(file)), None):
            reason = f"{origin}: {pointer.name} is a pointer of Git LFS in place of the file."
            raise InputError(reason, f"Fetch it: git -C {pointer.parent} lfs pull") from error
        raise InputError(
            f"{origin} has no tokenizer that can be loaded: {first_line(error)}",
            "Give a directory with tokenizer.json, or a hub name, with --tokenizer.",
        ) from error
    if type(loaded).__name__ == "MistralCommonBackend":
        raise InputError(
            f"{origin} has {TEKKEN} without tokenizer.json: mistral-common, with which transformers reads it, has no "
            "chat template that prompts could be written with.",
            "Name the tokenizer of the same model in Hugging Face's form, with tokenizer.json, by --tokenizer.",
        )
    return loaded


def reads_images(model_directory: Path | str) -> bool:
    has_config = (Path(model_directory) / "config.json").is_file()
    return has_config and bool(read_config(Path(model_directory)).get("vision_config"))


class Process:
    """The use that this process makes of transformers."""

    reads_tokenizers_alone = False
    """This process loads no model, so transformers is imported as without torch, whose import takes seconds."""


def _import_without_torch() -> None:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would say that it found no torch
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType] - so imports find none
    try:
        from transformers import AutoTokenizer  # noqa: F401
    finally:
        del sys.modules["torch"]


def require_directory(tokenizer: str | None) -> None:
    """Raise InputError if `model.tokenizer` is a path that does not exist; a hub name is tried at loading."""
    if tokenizer and tokenizer.startswith(("/", ".", "~")) and not user_path(tokenizer).is_dir():
        raise InputError(f"--tokenizer {tokenizer}: there is no such directory.", "Give one with tokenizer.json.")
