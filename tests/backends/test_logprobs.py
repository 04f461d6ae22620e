"""Log-probs of further tokens, and the most likely ones, against torch's own softmax in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlctl.backends.base import Teaching
from rlctl.backends.logprobs import VocabPart, chunked_logprobs, top_tokens
from rlctl.backends.rows import VocabProjection

ALONE = VocabPart(SimpleNamespace(size=lambda: 1))
POSITIONS, WIDTH, TOKENS = 11, 6, 17


def case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden states, output matrix, positions of 13 response tokens, the tokens)."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(POSITIONS, WIDTH, generator=generator, requires_grad=True)
    matrix = torch.randn(TOKENS, WIDTH, generator=generator)
    inverse = torch.tensor([3, 0, 1, 1, 2, 5, 4, 6, 10, 9, 8, 7, 7])
    return hidden, matrix, inverse, torch.randint(0, TOKENS, (13,), generator=generator)


@pytest.mark.parametrize("chunk", [4, 64])
def test_further_tokens_have_log_probs_with_gradient_and_the_top_ones_are_named(chunk: int) -> None:
    hidden, matrix, inverse, targets = case()

    def logits(rows: torch.Tensor) -> torch.Tensor:
        return rows @ matrix.T

    top = chunked_logprobs(hidden, inverse, targets, logits, ALONE, 0.7, chunk, top=Teaching(TOKENS, 3))
    table = torch.log_softmax((hidden.double() @ matrix.T.double()) / 0.7, -1)[inverse]
    values, ids = table.topk(3)
    torch.testing.assert_close(top[5:].T.long(), ids)
    torch.testing.assert_close(top[2:5].T.double(), values, rtol=1e-5, atol=1e-5)

    out = chunked_logprobs(hidden, inverse, targets, logits, ALONE, 0.7, chunk, ids)
    torch.testing.assert_close(out[2:].T.double(), values, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(0.5, 1.5, 3 * len(targets)).view(-1, 3)
    (out[0].sum() + (out[2:].T * weights).sum()).backward()
    assert hidden.grad is not None
    ours, hidden.grad = hidden.grad, None
    (table.gather(1, targets[:, None]).sum() + (values * weights).sum()).backward()
    torch.testing.assert_close(ours, hidden.grad, rtol=1e-4, atol=1e-5)


def test_padding_of_a_larger_vocabulary_is_never_among_the_top() -> None:
    """A teacher may have more rows than the student, which no text leads to."""
    logits = torch.arange(float(TOKENS)).repeat(2, 1)
    assert top_tokens(logits, ALONE, Teaching(TOKENS, 3)).tolist() == [[16, 15, 14]] * 2
    assert top_tokens(logits, ALONE, Teaching(9, 3)).tolist() == [[8, 7, 6]] * 2


@pytest.mark.parametrize("chunk", [4, 64])
def test_probabilities_are_projected_to_another_vocabulary_with_gradient(chunk: int) -> None:
    hidden, matrix, inverse, targets = case()
    generator = torch.Generator().manual_seed(5)
    dense = torch.rand(TOKENS, 23, generator=generator) * (torch.rand(TOKENS, 23, generator=generator) < 0.2)
    students, teachers = dense.nonzero(as_tuple=True)
    projection = VocabProjection(students, teachers, dense[students, teachers], 23)
    ids = torch.randint(0, 23, (len(targets), 6), generator=generator)
    out = chunked_logprobs(
        hidden, inverse, targets, lambda rows: rows @ matrix.T, ALONE, 0.7, chunk, ids, projection=projection
    )
    table = torch.softmax((hidden.double() @ matrix.T.double()) / 0.7, -1)[inverse]
    wanted = (table @ dense.double()).gather(1, ids)
    torch.testing.assert_close(out[2:].T.double(), wanted, rtol=1e-5, atol=1e-7)
    weights = torch.linspace(0.5, 1.5, wanted.numel()).view_as(wanted)
    (out[0].sum() + (out[2:].T * weights).sum()).backward()
    assert hidden.grad is not None
    ours, hidden.grad = hidden.grad, None
    (table.gather(1, targets[:, None]).log().sum() + (wanted * weights).sum()).backward()
    torch.testing.assert_close(ours, hidden.grad, rtol=1e-4, atol=1e-5)
