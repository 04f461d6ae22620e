"""From a prompt row to the tokens that the engine gets: through a chat template, or a plain format for base models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.config.schema import DataConfig, ModelConfig
from rlctl.data.rows import Messages, PromptRow
from rlctl.data.tokenizer import end_token_ids
from rlctl.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN_STOP = "\nQuestion:"
"""A base model that goes on after its answer asks itself the next question."""
PLAIN_NOTE = (
    "The tokenizer has no chat template: prompts are written as `Question: ...` and `Answer:`, and a completion ends "
    "at the next `Question:`. Give another with --chat-template."
)
_MARKER = "rlctl-end-of-turn"


@dataclass(frozen=True)
class PromptEncoder:
    """How this run writes prompts. Make it with `build`."""

    tokenizer: PreTrainedTokenizerBase
    template: str | None
    """Jinja chat template; None: the plain question/answer format."""
    system_prompt: str | None
    prompt_suffix: str
    stop: tuple[str, ...]
    """Texts that end a completion, besides `generation.stop`."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a completion, the model's own included."""
    note: str | None
    """What a user should be told of the format, if anything."""

    @classmethod
    def build(
        cls, tokenizer: PreTrainedTokenizerBase, model: ModelConfig, data: DataConfig, model_directory: Path | str
    ) -> PromptEncoder:
        """The encoder of a run; tries it on one message, so that a broken template is refused here.

        Raises InputError for a template that is missing or does not render.
        """
        template = read_template(model.chat_template) if model.chat_template else tokenizer.chat_template
        if isinstance(template, dict):  # some tokenizers name several
            template = template.get("default") or next(iter(template.values()))
        encoder = cls(
            tokenizer=tokenizer,
            template=template,
            system_prompt=data.system_prompt,
            prompt_suffix=data.prompt_suffix or "",
            stop=() if template else (PLAIN_STOP,),
            stop_token_ids=end_token_ids(tokenizer, model_directory),
            note=None if template else PLAIN_NOTE,
        )
        return encoder._tried() if template else encoder

    def text(self, row: PromptRow) -> str:
        """The whole prompt as the model reads it."""
        return self._render(self._messages(row), row.where)

    def encode(self, row: PromptRow) -> tuple[int, ...]:
        """Token ids of the prompt."""
        text = self.text(row)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"{row.where}: the prompt holds {text[error.start]!r}, which is half of a character.",
                "Write the file's text as UTF-8, with both halves of each surrogate pair.",
            ) from error
        # A template writes the special tokens itself; the plain format leaves them to the tokenizer.
        return tuple(self.tokenizer.encode(text, add_special_tokens=self.template is None))

    def _messages(self, row: PromptRow) -> Messages:
        """The row's messages with the suffix on the last one, and the system prompt where the row has none."""
        messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else list(row.prompt)
        last = messages[-1]
        messages[-1] = {"role": last["role"], "content": last["content"] + self.prompt_suffix}
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages

    def _render(self, messages: Messages, where: str = "a first message", *, answered: bool = False) -> str:
        if self.template is None:
            return _plain(messages)
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                messages, chat_template=self.template, tokenize=False, add_generation_prompt=not answered
            )
        # A template is a program: what it computes with may be missing or zero.
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InputError(
                f"The chat template cannot write {where} ({', '.join(m['role'] for m in messages)}): {error}",
                "Give another with --chat-template; a template may also refuse a system prompt (data.system_prompt).",
            ) from error

    def _tried(self) -> PromptEncoder:
        """This encoder after trying its template, with what that showed."""
        user = {"role": "user", "content": "?"}
        text = self._render([user])
        encoder = self._with_end_of_turn()
        if self.system_prompt is None:
            return encoder
        with_system = self._render([{"role": "system", "content": self.system_prompt}, user])
        # An empty system message is there to displace the template's own; where there is none it only costs tokens.
        pointless = self.system_prompt == "" and len(text) <= len(with_system)
        return replace(encoder, system_prompt=None) if pointless else encoder

    def _with_end_of_turn(self) -> PromptEncoder:
        """Adds the special token that the template writes after an answer; it need not be the tokenizer's end token."""
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARKER}]
        _, found, tail = self._render(turn, "an answer", answered=True).rpartition(_MARKER)
        ids = self.tokenizer.encode(tail, add_special_tokens=False)[:1] if found else []
        special = set(self.tokenizer.all_special_ids) | {
            token for token, added in self.tokenizer.added_tokens_decoder.items() if added.special
        }
        stop_token_ids = tuple(sorted({*self.stop_token_ids, *(token for token in ids if token in special)}))
        return replace(self, stop_token_ids=stop_token_ids)


def _plain(messages: Messages) -> str:
    """`Question:` and `Answer:` lines, ending where the answer begins; a system message goes first as it is."""
    names = {"user": "Question: ", "assistant": "Answer: ", "system": ""}
    lines = [names.get(message["role"], "") + message["content"] for message in messages if message["content"]]
    return "\n".join([*lines, "Answer:"])


def read_template(template: str) -> str:
    """The template itself, or the text of the file that it names. Raises InputError where it is neither."""
    if "{{" in template or "{%" in template:
        return template
    path = Path(template)
    if not path.is_file():
        raise InputError(
            f"--chat-template {template}: no such file, and not a template itself.", "A template contains {{ or {%."
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a UTF-8 text"
        raise InputError(f"--chat-template {template} cannot be read: {reason}.") from error
