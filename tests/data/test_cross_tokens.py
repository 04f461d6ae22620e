"""Tokens of two tokenizers that stand for the same characters, and tokens of one in the vocabulary of the other."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from rlctl.data.cross_tokens import Projection, chunks, read_text, token_bytes
from support.toy_tokenizers import by_bytes, by_words


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return by_bytes(tmp_path_factory.mktemp("ours"), 300)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return by_words(tmp_path_factory.mktemp("theirs"))


TEXT = "the sum of 12 and 30 is 42, naïve 日本 ok 🙂!"


def parts(tokenizer: PreTrainedTokenizerFast, tokens: list[int], chunk_T: np.ndarray) -> list[bytes]:
    """The bytes of each chunk, by its number."""
    contents = token_bytes(tokenizer)
    found = [b""] * (int(chunk_T.max()) + 1)
    for token, chunk in zip(tokens, chunk_T, strict=True):
        found[chunk] += b"" if token in tokenizer.all_special_ids else contents[token]
    return found


def test_chunks_have_the_same_characters_in_both_and_are_the_shortest(
    ours: PreTrainedTokenizerFast, theirs: PreTrainedTokenizerFast
) -> None:
    (a, *of_a), (b, *of_b) = read_text(ours, TEXT), read_text(theirs, TEXT)
    assert (a[-1], b[-1]) == (ours.eos_token_id, theirs.eos_token_id)
    chunk_a, chunk_b = chunks((of_a[0], of_a[1]), (of_b[0], of_b[1]))
    assert parts(ours, a, chunk_a) == parts(theirs, b, chunk_b)
    assert b"".join(parts(ours, a, chunk_a)).decode() == TEXT
    assert (chunk_a[-1], chunk_b[-1]) == (chunk_a.max(), chunk_a.max())
    borders = []
    for tokens, tokenizer in ((a[:-1], ours), (b[:-1], theirs)):
        contents = token_bytes(tokenizer)
        ends = np.cumsum([len(contents[token]) for token in tokens if token not in tokenizer.all_special_ids])
        whole = TEXT.encode()
        cuts = [int(end) for end in ends if whole[:end].decode(errors="ignore").encode() == whole[:end]]
        borders.append(set(cuts))
    assert len(borders[0] & borders[1]) + 1 == chunk_a.max() + 1  # and that of the end token
    assert 5 < chunk_a.max() < min(len(a), len(b)) - 1


def test_a_text_of_one_tokenizer_has_a_chunk_for_each_token(ours: PreTrainedTokenizerFast) -> None:
    tokens, begin_T, end_T = read_text(ours, "one and two")
    own_T, _ = chunks((begin_T, end_T), (begin_T, end_T))
    assert own_T.tolist() == list(range(len(tokens)))


def test_tokens_go_to_the_same_one_or_to_the_first_that_they_are_written_with(
    ours: PreTrainedTokenizerFast, theirs: PreTrainedTokenizerFast
) -> None:
    found = Projection.between(ours, theirs)
    ours_of, theirs_of = token_bytes(ours), token_bytes(theirs)
    rows: dict[int, dict[int, float]] = {}
    for student, teacher, weight in zip(found.students_E, found.teachers_E, found.weights_E, strict=True):
        rows.setdefault(int(student), {})[int(teacher)] = float(weight)
    same = set(ours_of.values()) & set(theirs_of.values())
    exact = written = 0
    for token, row in rows.items():
        assert sum(row.values()) == pytest.approx(1)
        if token == ours.eos_token_id:
            assert row == {theirs.eos_token_id: 1}
        elif ours_of[token] in same:
            exact += 1
            assert [theirs_of[one] for one in row] == [ours_of[token]]
        else:
            written += 1
            pieces = theirs(ours_of[token].decode(), add_special_tokens=False)["input_ids"]
            expected: dict[int, float] = {}
            for place, piece in enumerate(pieces[:4]):
                expected[piece] = expected.get(piece, 0) + 0.1**place / sum(0.1**n for n in range(min(4, len(pieces))))
            assert row.keys() == expected.keys()
    assert exact > 20
    assert written > 5
    assert found.teacher_vocab == len(theirs)
