"""Texts in two tokenizations: chunks of equal characters, and a map between vocabularies. Suffixes: T tokens of a text,
E entries of a sparse matrix."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlctl.data.control_tokens import begun
from rlctl.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECES = 4
"""Tokens of the other vocabulary that a token is divided between, at most."""
DECAY = 0.1
"""Weight of each further token relative to the one before."""


@dataclass(frozen=True, eq=False)
class Projection:
    """A sparse matrix from a student's token probabilities to a teacher's."""

    students_E: np.ndarray  # int64
    teachers_E: np.ndarray  # int64
    weights_E: np.ndarray  # float32
    teacher_vocab: int
    """Tokens that the teacher's tokenizer has."""

    @classmethod
    def between(cls, ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> Projection:
        """Return the matrix between two tokenizers: a token maps to the token with the same bytes, else to the first
        `PIECES` of the teacher's tokens for its text, with weights that fall by `DECAY` and sum to 1. Unwritable tokens
        map to nothing."""
        our_bytes, their_bytes = token_bytes(ours), token_bytes(theirs)
        same = {content: token for token, content in sorted(their_bytes.items(), reverse=True)}
        spans: dict[int, tuple[int, ...]] = {}
        others: dict[int, str] = {}
        for token, content in our_bytes.items():
            if content in same:
                spans[token] = (same[content],)
            elif content and "\ufffd" not in (text := content.decode(errors="replace")):
                others[token] = text
        written: Any = theirs([*others.values()], add_special_tokens=False)["input_ids"] if others else []
        for token, pieces in zip(others, written, strict=True):
            if b"".join(their_bytes.get(piece, b"\0") for piece in pieces) == our_bytes[token]:
                spans[token] = tuple(pieces[:PIECES])
        ends: Any = (ours.eos_token_id, theirs.eos_token_id)
        if None not in ends:
            spans[ends[0]] = (ends[1],)
        entries = [
            (token, piece, weight)
            for token, pieces in sorted(spans.items())
            for piece, weight in zip(pieces, _decaying(len(pieces)), strict=True)
        ]
        students, teachers, weights = zip(*entries, strict=True)
        return cls(
            np.array(students, np.int64), np.array(teachers, np.int64), np.array(weights, np.float32),
            max(their_bytes) + 1,
        )  # fmt: skip


def _decaying(count: int) -> np.ndarray:
    weights = DECAY ** np.arange(count)
    return weights / weights.sum()


def require_aligning(tokenizer: PreTrainedTokenizerBase, whose: str) -> None:
    """Raise InputError for a tokenizer without character offsets or an end token."""
    if tokenizer.eos_token_id is None:
        raise InputError(f"The tokenizer of {whose} has no end token.", "Take another model.")
    if not tokenizer.is_fast:
        raise InputError(
            f"The tokenizer of {whose} has no character offsets, so its tokens cannot be aligned.",
            "A model with a tokenizer.json has one that does.",
        )


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """Return the bytes of each token; special tokens have their names."""
    fast: Any = tokenizer
    added = fast.get_added_vocab()
    by_bytes = '"ByteLevel"' in fast.backend_tokenizer.to_str()
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(hidden)}

    def content(token: str) -> bytes:
        if not by_bytes and (single := re.fullmatch(r"<0x([0-9A-F]{2})>", token)):
            return bytes.fromhex(single[1])
        if token in added:
            return token.encode()
        if by_bytes:
            return bytes(byte_of[letter] for letter in token) if set(token) <= byte_of.keys() else token.encode()
        return token.replace("\u2581", " ").encode()

    return {number: content(token) for token, number in fast.get_vocab().items()}


def read_text(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Return a text's tokens with the end token, and their character ranges; a token without characters has an empty
    range, the end token one character after the text."""
    encoded: Any = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    tokens, end = begun(tokenizer, encoded["input_ids"]), tokenizer.eos_token_id
    front = [(0, 0)] * (len(tokens) - len(encoded["input_ids"]))
    spans_T = np.array([*front, *encoded["offset_mapping"], (0, 0)], np.int64)[: len(tokens)]
    if tokens[-1:] != [end]:
        tokens.append(end)  # pyright: ignore[reportArgumentType] - texts need one
        spans_T = np.append(spans_T, [[0, 0]], 0)
    narrow_T = spans_T[:, 1] <= spans_T[:, 0]
    spans_T[narrow_T] = np.maximum.accumulate(spans_T[:, 1])[narrow_T, None]
    behind = len(tokens) - int(narrow_T[::-1].argmin())
    spans_T[behind:] = len(text), len(text) + 1
    return tokens, spans_T[:, 0], spans_T[:, 1]


def chunks(ours: tuple[np.ndarray, np.ndarray], theirs: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return each token's chunk number in both tokenizations, given by token character ranges. A chunk is the shortest
    part with a token border in both."""
    ends, borders = [], []
    for begin_T, end_T in (ours, theirs):
        until_T = np.maximum.accumulate(end_T)
        rest_T = np.append(np.minimum.accumulate(begin_T[::-1])[::-1], np.iinfo(np.int64).max)[1:]
        ends.append(until_T)
        borders.append(until_T[rest_T >= until_T])  # tokens of one character's bytes have no border between them
    common = np.intersect1d(*borders)
    return np.searchsorted(common, ends[0]), np.searchsorted(common, ends[1])
