"""Control tokens delimit turns or end a text. Only a chat template writes them. Their texts in message contents are
hidden during rendering and tokenized as ordinary text. Model tags such as `<think>` are not control tokens."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlctl.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

KEY = "data.special_tokens"
# Noncharacters of Unicode, which no text that is exchanged holds.
_OPENS, _CLOSES = "\ufdd0", "\ufdd1"
_THOUGHT = re.compile(r"think|thought|reason", re.IGNORECASE)


@dataclass(frozen=True)
class ControlTokens:
    """The control tokens of a tokenizer and its chat template."""

    ids: Mapping[str, int] = field(default_factory=dict)
    """Token of each text."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, ends: Iterable[int], skeletons: Iterable[str]) -> ControlTokens:
        """Return tokens that begin, end or pad a text, `ends`, and added tokens that a template writes around messages
        (`skeletons`)."""
        added = {token: str(entry.content) for token, entry in tokenizer.added_tokens_decoder.items()}
        end_ids: Sequence[Any] = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        texts = {added[token] for token in (*end_ids, *ends) if token in added}
        special = {entry.content for entry in tokenizer.added_tokens_decoder.values() if entry.special}
        written = [text for text in added.values() if any(text in skeleton for skeleton in skeletons)]
        texts.update(text for text in written if not _is_tag(text, special, added.values()))
        return cls({text: token for token, text in added.items() if text in texts and text.strip()})

    def hide(self, value: Any) -> Any:
        """Return a value for a chat template, with the texts of control tokens in its strings hidden."""
        if isinstance(value, str):
            return self._texts.sub(lambda match: f"{_OPENS}{self._numbers[match[0]]}{_CLOSES}", value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, list | tuple) else value

    def shown(self, text: str) -> str:
        return self._hidden.sub(lambda match: [*self.ids][int(match[1])], text)

    def in_strings(self, value: Any) -> Iterator[str]:
        """Yield the texts of control tokens in the strings of a value."""
        if isinstance(value, str):
            yield from self._texts.findall(value)
        elif isinstance(value, Mapping | list | tuple):
            for item in (*value, *value.values()) if isinstance(value, Mapping) else value:
                yield from self.in_strings(item)

    def inside(self, text: str) -> Iterator[str]:
        matches = [*self._texts.finditer(text)]
        matches = matches[1:] if matches and not text[: matches[0].start()].strip() else matches
        matches = matches[:-1] if matches and not text[matches[-1].end() :].strip() else matches
        yield from (match[0] for match in matches)

    def encode(self, tokenizer: PreTrainedTokenizerBase, text: str, where: str) -> list[int]:
        """Return the tokens of a text rendered from hidden values, without automatic special tokens. Raises InputError
        if a control token cannot be ordinary text."""
        written = [self.ids[part] for part in self._texts.findall(text)]
        hidden = self._hidden.findall(text)
        plain = [] if hidden else list(tokenizer.encode(text, add_special_tokens=False))
        expected = iter(written)
        if not hidden and all(token in expected for token in self._within(plain)):
            return plain
        encoded = self._encode_apart(tokenizer, text) if getattr(tokenizer, "is_fast", False) else None
        if encoded is not None and self._within(encoded) == written:
            return encoded
        if not hidden:
            return plain
        texts = [[*self.ids][int(number)] for number in hidden]
        raise InputError(
            f"{where}: the content holds {texts[0]!r}, which this tokenizer cannot write as text, and as a token it "
            "would delimit turns.",
            f"Leave the row out, or make it a token with --set {KEY}=tokens.",
        )

    def _encode_apart(self, tokenizer: Any, text: str) -> list[int]:
        apart = self._apart.get(id(tokenizer))
        if apart is None:
            apart = self._apart[id(tokenizer)] = _Apart.of(tokenizer.backend_tokenizer, self.ids)
        return apart.encode(self.shown(self._texts.sub(lambda match: apart.marks[match[0]], text)))

    def _within(self, tokens: Sequence[int]) -> list[int]:
        control_ids = {*self.ids.values()}
        return [token for token in tokens if token in control_ids]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {text: number for number, text in enumerate(self.ids)}

    @cached_property
    def _texts(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self.ids, key=len, reverse=True))) or r"(?!)")

    @cached_property
    def _hidden(self) -> re.Pattern[str]:
        return re.compile(f"{_OPENS}({'|'.join(map(str, reversed(range(len(self.ids))))) or '(?!)'}){_CLOSES}")

    @cached_property
    def _apart(self) -> dict[int, _Apart]:
        return {}

    def __getstate__(self) -> dict[str, Any]:  # tokenizers are made again in another process
        return {"ids": self.ids}


@dataclass(frozen=True)
class _Apart:
    """A copy of a tokenizer with random texts for control tokens. It reads their usual texts as ordinary text."""

    tokenizer: Tokenizer
    marks: Mapping[str, str]
    """The text of each control token in the copy."""
    ids: Mapping[int, int]
    """Original token by copy token."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, controls: Mapping[str, int]) -> _Apart:
        from tokenizers import Tokenizer

        nonce = secrets.token_hex(8)  # a text that nobody can write into data
        marks = {text: f"{_OPENS}{nonce}-{number}{_CLOSES}" for number, text in enumerate(controls)}
        tokenizer_json = json.loads(tokenizer.to_str()) | {"post_processor": None, "truncation": None, "padding": None}
        real = {}
        for entry in tokenizer_json["added_tokens"]:
            if (mark := marks.get(entry["content"])) is not None:
                entry |= {"content": mark, "normalized": False}
            real[entry["content"]] = entry["id"]
        copy = Tokenizer.from_str(json.dumps(tokenizer_json))
        ids = {copy.token_to_id(content): token for content, token in real.items()}
        return cls(copy, marks, {token: number for token, number in ids.items() if token is not None})

    def encode(self, text: str) -> list[int]:
        return [self.ids.get(token, token) for token in self.tokenizer.encode(text, add_special_tokens=False).ids]


def _is_tag(text: str, special: set[str], added: Iterable[str]) -> bool:
    """Return whether an added token is a content tag: of a thought, or a non-special pair such as `<tool_call>` and
    `</tool_call>`."""
    if _THOUGHT.search(text):
        return True
    opens, name = text[:1], text[1:].removeprefix("/")
    pair = {f"{opens}{name}", f"{opens}/{name}"}
    return text not in special and pair <= {*added}


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that a tokenizer puts before a text, without trailing ones, because a prompt continues."""
    alone, whole = (list(tokenizer.encode("a", add_special_tokens=around)) for around in (False, True))
    places = range(len(whole) - len(alone) + 1)
    return whole[: next((place for place in places if whole[place : place + len(alone)] == alone), 0)]


def begun(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[int]:
    """Return a text's tokens after the tokenizer's prefix, unless present."""
    front = beginning(tokenizer)
    return [*tokens] if [*tokens[: len(front)]] == front else [*front, *tokens]


def trimmed(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return a text without white space before its begin token or after its end token, as rendered conversations in
    files have it: white space would hide these tokens, and they would be added once more."""
    begin, end = tokenizer.bos_token, tokenizer.eos_token
    text = text.lstrip() if begin and text.lstrip().startswith(str(begin)) else text
    return text.rstrip() if end and text.rstrip().endswith(str(end)) else text
