"""Gradients that are sums over tokens: narrow ones against float64, and bit for bit with several threads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlctl.backends import cpu_sums
from rlctl.backends.megatron.lean import look_up

TOKENS, WIDTH = 4096, 32


@pytest.fixture
def installed() -> Iterator[None]:
    usual, fills = (F.embedding, F.layer_norm), torch.utils.deterministic.fill_uninitialized_memory
    cpu_sums.install()
    yield
    F.embedding, F.layer_norm = usual
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


class ShiftedNorm(nn.LayerNorm):
    """A layer norm whose weight is around 0, as Nemotron's."""

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight + 1, self.bias, self.eps)


def tokens(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    often = torch.rand(TOKENS, generator=generator) < 0.9
    return torch.where(often, 2, torch.randint(0, 6, (TOKENS,), generator=generator)).view(4, -1)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(6, WIDTH),
    "embedding with padding": lambda: nn.Embedding(6, WIDTH, padding_idx=-1),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "layer norm without bias": lambda: nn.LayerNorm(WIDTH, bias=False),
    "layer norm around 0": lambda: ShiftedNorm(WIDTH),
    "RMS norm": lambda: nn.RMSNorm(WIDTH),
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "convolution": lambda: nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", MODULES)
def test_gradients_of_narrow_modules_are_within_rounding_of_float64(
    installed: None, kind: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    module = MODULES[kind]().to(dtype)
    with torch.no_grad():
        for one in module.parameters():
            one.copy_(torch.randn(one.shape, generator=generator))
    exact = MODULES[kind]().double()
    exact.load_state_dict({name: one.double() for name, one in module.state_dict().items()})
    given = tokens(kind) if "embedding" in kind else torch.randn(4, TOKENS // 4, WIDTH, generator=generator).to(dtype)
    if kind == "convolution":
        given = given.transpose(1, 2)
    # Each token pushes in one direction, as the end of a frequent phrase does: the sums grow with the tokens.
    for model, values in ((module, given), (exact, given if given.dtype == torch.int64 else given.double())):
        out = model(values)
        pushed = torch.Generator().manual_seed(2)
        (out * (0.25 + torch.rand(out.shape, generator=pushed).to(out.dtype) / 16)).sum().backward()
    for (name, found), expected in zip(module.named_parameters(), exact.parameters(), strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        error = (found.grad.double() - expected.grad).norm() / expected.grad.norm()
        assert error < 0.01, f"{name}: {error:.3f}"


CODE = """
import hashlib, json, sys, torch
from rlctl.backends import cpu_sums
from rlctl.backends.logprobs import ProjectedProbs, TokenLogprobs, VocabPart
from rlctl.backends.batching.packed_rows import VocabProjection

torch.set_num_threads(int(sys.argv[1]))
cpu_sums.install()
generator = torch.Generator().manual_seed(0)
R, U, V, H = 40_000, 40, 64, 16


class Alone:
    def size(self): return 1
    def rank(self): return 0


def whole(*shape): return torch.randn(*shape, generator=generator)


inverse, targets = (torch.randint(0, size, (R,), generator=generator) for size in (U, V))
rows, values, logits = whole(R, H), whole(R), whole(U, V)
vocab = VocabPart(Alone())


def gradient(function, of):
    of = of.clone().requires_grad_()
    function(of).backward()
    return of.grad


places = torch.randint(0, 8, (R, 2), generator=generator)
matrix = torch.rand(8, V, generator=generator).to_sparse()
operations = {
    "log-probs": lambda: gradient(lambda x: (TokenLogprobs.apply(x * 1, inverse, targets, vocab, 1.0, None)[0]
                                             * values).sum(), logits),
    "projected": lambda: gradient(lambda x: (ProjectedProbs.apply(x * 1, inverse, places, matrix, vocab, 1.0)
                                             * values[:, None]).sum(), logits),
    "indexing": lambda: gradient(lambda x: (x[inverse] * rows).sum(), whole(U, H) * 0),
    "index_put_": lambda: torch.zeros(U, V).index_put_((inverse, targets), values, accumulate=True),
    "index_add": lambda: torch.zeros(U, H).index_add(0, inverse, rows),
    "scatter_add": lambda: torch.zeros(U, H).scatter_add(0, inverse[:, None].expand(R, H), rows),
    "index_reduce": lambda: torch.full((U, H), -9.0).index_reduce_(0, inverse, rows, "amax"),
    "embedding": lambda: gradient(lambda x: (torch.nn.functional.embedding(inverse, x) * rows).sum(), whole(U, H)),
    "narrow embedding": lambda: gradient(lambda x: (torch.nn.functional.embedding(inverse, x) * rows).sum(),
                                         whole(U, H).bfloat16()),
    "cumsum": lambda: rows.cumsum(0),
    "bincount": lambda: torch.bincount(inverse, weights=values.double()),
}
found = {}
for name, operation in operations.items():
    bits = {hashlib.sha256(operation().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for _ in range(2)}
    found[name] = sorted(bits)
print(json.dumps(found))
"""


@pytest.mark.guard
@pytest.mark.slow
def test_operations_with_equal_places_give_the_same_bits_under_one_two_and_four_threads() -> None:
    """Each twice in a process with that many threads; 40,000 rows are beyond torch's grain of 32,768."""
    by_threads = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", CODE, str(threads)], capture_output=True, text=True, check=True, timeout=300
            ).stdout
        )
        for threads in (1, 2, 4)
    ]
    assert [name for name, bits in by_threads[0].items() if len(bits) > 1] == []
    assert by_threads[1] == by_threads[0]
    assert by_threads[2] == by_threads[0]


def test_rows_of_an_embedding_may_be_changed_in_place(installed: None) -> None:
    """Megatron-Core's vocabulary parallel embedding sets the rows of other ranks to 0 (0.16.1)."""
    weight = nn.Parameter(torch.randn(8, 4, dtype=torch.bfloat16))
    weight.main_grad = torch.zeros(8, 4)  # type: ignore[attr-defined]
    rows = look_up(torch.tensor([[1, 2, 1]]), weight)
    rows[torch.tensor([[False, True, False]]), :] = 0.0
    rows.backward(torch.ones_like(rows))
    assert weight.main_grad[:3].sum(1).tolist() == [0.0, 8.0, 0.0]  # type: ignore[attr-defined]
