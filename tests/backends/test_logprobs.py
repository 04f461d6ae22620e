"""Log-probs of further tokens, the most likely ones, and those that are sampled from, against torch's own softmax in
float64 and vLLM's sampler."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import rlctl.backends.logprobs as logprobs
from rlctl.backends.base import Teaching
from rlctl.backends.batching.batch import TeacherSpan
from rlctl.backends.batching.vocab_projection import VocabProjection
from rlctl.backends.logprobs import VocabPart, chunked_logprobs, top_tokens
from rlctl.backends.messages import Truncation

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


@pytest.mark.parametrize("entropy_weight", [0.0, 0.3])
@pytest.mark.parametrize(("chunk", "calls"), [(40, 1), (10, 8)])
def test_narrow_logits_on_a_cpu_are_computed_once_and_their_gradient_is_rounded_once(
    chunk: int, calls: int, entropy_weight: float
) -> None:
    """Up to four times the chunk, the backward pass recomputes nothing."""
    generator, counted = torch.Generator().manual_seed(1), []
    hidden = (3 * torch.randn(150, TOKENS, generator=generator)).bfloat16().requires_grad_()
    inverse = torch.cat([torch.randperm(150, generator=generator), torch.tensor([3, 3, 149])])
    targets = torch.randint(0, TOKENS, (153,), generator=generator)
    targets[-3:] = targets[(inverse[:150] == 3).nonzero()[0, 0]]  # one token chosen three times at one position

    def logits(rows: torch.Tensor) -> torch.Tensor:
        counted.append(len(rows))
        return rows * 1

    out = chunked_logprobs(hidden, inverse, targets, logits, ALONE, 0.7, chunk)
    weights = torch.randn(153, generator=generator)
    ((out[0] * weights).sum() + entropy_weight * out[1].sum()).backward()
    assert len(counted) == calls
    exact = hidden.detach().double().requires_grad_()
    table = (exact / 0.7).log_softmax(-1)[inverse]
    chosen, entropy = table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)
    ((chosen * weights).sum() + entropy_weight * entropy.sum()).backward()
    torch.testing.assert_close(out.double(), torch.stack([chosen, entropy]).detach(), rtol=1e-5, atol=1e-5)
    assert hidden.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(hidden.grad.double(), exact.grad, rtol=2**-8, atol=1e-6)


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
    own = torch.randint(0, TOKENS, (len(targets), 3), generator=generator)
    weights_R = torch.ones(len(targets))
    spans = [TeacherSpan(2, weights_R, weights_R, projection), TeacherSpan(3, weights_R),
             TeacherSpan(4, weights_R, weights_R, projection)]  # fmt: skip
    further = torch.cat([ids[:, :2], own, ids[:, 2:]], 1)
    out = chunked_logprobs(
        hidden, inverse, targets, lambda rows: rows @ matrix.T, ALONE, 0.7, chunk, further, spans=spans
    )
    table = torch.softmax((hidden.double() @ matrix.T.double()) / 0.7, -1)[inverse]
    projected = (table @ dense.double()).gather(1, ids)
    wanted = torch.cat([projected[:, :2], table.gather(1, own).log(), projected[:, 2:]], 1)
    torch.testing.assert_close(out[2:].T.double(), wanted, rtol=1e-5, atol=1e-7)
    weights = torch.linspace(0.5, 1.5, wanted.numel()).view_as(wanted)
    (out[0].sum() + (out[2:].T * weights).sum()).backward()
    assert hidden.grad is not None
    ours, hidden.grad = hidden.grad, None
    (table.gather(1, targets[:, None]).log().sum() + (wanted * weights).sum()).backward()
    torch.testing.assert_close(ours, hidden.grad, rtol=1e-4, atol=1e-5)


TRUNCATIONS = [
    Truncation(top_p=0.9),
    Truncation(top_p=0.3),
    Truncation(top_k=5),
    Truncation(min_p=0.2),
    Truncation(top_p=0.8, top_k=6, min_p=0.05),
    Truncation(top_k=5, exact_top_k=True),
    Truncation(top_k=9, min_p=0.2, exact_top_k=True),
    Truncation(top_p=0.8, top_k=6, min_p=0.05, exact_top_k=True),
]


def sampled_logprobs(logits: torch.Tensor, truncation: Truncation) -> torch.Tensor:
    """Log-probs of vLLM's sampler after the temperature: min_p, then top_k and top_p; -inf of tokens that it drops."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    probs = logits.softmax(-1)
    logits = logits.masked_fill(probs < truncation.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    if truncation.exact_top_k:  # as vLLM's Triton kernel; which of equal tokens it keeps is open
        dropped = logits.sort(dim=-1, descending=True, stable=True).indices[:, truncation.top_k :]
        logits = logits.scatter(1, dropped, -torch.inf)
    rows = len(logits)
    k = torch.full((rows,), truncation.top_k) if truncation.top_k > 0 else None
    p = torch.full((rows,), truncation.top_p) if truncation.top_p < 1 else None
    return apply_top_k_top_p_pytorch(logits, k, p).log_softmax(-1)


@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("candidates", [3, 1024])
@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_truncated_log_probs_are_of_the_tokens_that_vllm_samples_from(
    monkeypatch: pytest.MonkeyPatch, truncation: Truncation, candidates: int, chunk: int
) -> None:
    """A chosen token that the logits would drop is counted among those that are kept."""
    monkeypatch.setattr(logprobs, "CANDIDATES", candidates)
    hidden, matrix, inverse, targets = case()
    logits = (hidden.double() @ matrix.T.double() / 0.7)[inverse]
    targets[::2] = logits[::2].argmax(-1)
    out = chunked_logprobs(
        hidden, inverse, targets, lambda rows: rows @ matrix.T, ALONE, 0.7, chunk, truncation=truncation
    )
    chosen = torch.nn.functional.one_hot(targets, TOKENS).bool()
    with torch.no_grad():
        kept = sampled_logprobs(logits.clone(), truncation).isfinite()
        assert (~kept & chosen).any()
        assert (kept & chosen).any()
    wanted = logits.masked_fill(~(kept | chosen), -torch.inf).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    table = logits.log_softmax(-1)
    whole, entropy = table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)
    torch.testing.assert_close(out.double(), torch.stack([wanted, entropy, whole]), rtol=1e-5, atol=1e-5)

    weights = torch.linspace(0.5, 1.5, len(targets))
    ours = (out * torch.stack([weights, 0.3 * weights, 0.2 * weights])).sum()
    (found,) = torch.autograd.grad(ours, hidden)
    (expected,) = torch.autograd.grad((weights * (wanted + 0.3 * entropy + 0.2 * whole)).sum(), hidden)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("candidates", [3, 1024])
@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_equally_likely_tokens_at_the_boundary_count_as_in_vllm(
    monkeypatch: pytest.MonkeyPatch, truncation: Truncation, candidates: int
) -> None:
    """Logits in bfloat16 are often equal. Which of them vLLM's top-p keeps is open, and how many is not."""
    monkeypatch.setattr(logprobs, "CANDIDATES", candidates)
    generator = torch.Generator().manual_seed(4)
    table = (2 * torch.randn(40, TOKENS, generator=generator)).round() / 2
    table[0] = 1.0
    wanted = sampled_logprobs(table.clone(), truncation)
    targets = wanted.argmax(-1)
    out = chunked_logprobs(
        table.clone(), torch.arange(40), targets, lambda rows: rows.clone(), ALONE, 1.0, 64, truncation=truncation
    )
    torch.testing.assert_close(out[0], wanted.gather(1, targets[:, None])[:, 0], rtol=1e-5, atol=1e-6)


KERNEL = """
import ast, sys, torch, triton
from pathlib import Path
source = Path(sys.argv[1]).read_text()
wanted = ("_update_min_larger_stats", "_topk_topp_kernel", "_PERCENTILE_TO_STD_TABLE", "_NORMAL_CDF_TO_SIGMA_TABLE")
parts = ["import triton, triton.language as tl"]
for node in ast.parse(source).body:
    name = getattr(node, "name", None) or getattr(getattr(node, "targets", [None])[0], "id", None)
    if name in wanted:
        text = ast.get_source_segment(source, node)
        parts.append("@triton.jit\\n" + text if isinstance(node, ast.FunctionDef) else text)
# Triton's interpreter has rows as plain numbers.
Path("kernel.py").write_text("\\n\\n".join(parts).replace("row_id.to(tl.int64)", "row_id"))
sys.path.insert(0, "")
import kernel
logits, cases = torch.load("logits.pt"), torch.load("cases.pt")
tables = torch.tensor(kernel._PERCENTILE_TO_STD_TABLE), torch.tensor(kernel._NORMAL_CDF_TO_SIGMA_TABLE)
found = []
for case, (top_k, top_p) in enumerate(cases):
    rows, vocab = logits[case].shape
    k, p = torch.full((rows,), top_k, dtype=torch.int32), torch.full((rows,), top_p)
    masked = logits[case].clone()
    kernel._topk_topp_kernel[(1,)](
        masked, masked.stride(0), torch.empty(1, vocab), *tables, k, p, rows, VOCAB_SIZE=vocab, MASK_VALUE=-torch.inf,
        BLOCK_SIZE=256, BLOCK_SIZE_TRUNC=256, TOPK_ENABLED=True, TOPP_ENABLED=top_p < 1, SPLIT_COVERS_PONLY=False)
    found.append(masked)
torch.save(torch.stack(found), "masked.pt")
"""


def test_top_k_counts_equal_tokens_as_vllm_does_on_gpus(tmp_path: Path) -> None:
    """Its Triton kernel, under Triton's interpreter: bfloat16 logits whose k-th largest value occurs several times."""
    pytest.importorskip("triton")
    package = importlib.util.find_spec("vllm")
    assert package is not None
    assert package.submodule_search_locations
    source = Path(package.submodule_search_locations[0]) / "v1/sample/ops/topk_topp_triton.py"
    if "SPLIT_COVERS_PONLY" not in source.read_text():
        pytest.skip("the kernel of vLLM before 0.32 has other arguments")
    generator = torch.Generator().manual_seed(1)
    truncations = [Truncation(1.0, 20, exact_top_k=True), Truncation(0.8, 20, exact_top_k=True),
                   Truncation(0.9, 12, 0.15, exact_top_k=True)]  # fmt: skip
    plain = 1.5 * torch.randn(3, 6, 512, generator=generator).bfloat16().float()
    logits = plain.clone()
    for case, one in enumerate(truncations):
        probs = plain[case].softmax(-1)
        logits[case][probs < one.min_p * probs.amax(-1, keepdim=True)] = -torch.inf
    torch.save(logits, tmp_path / "logits.pt")
    torch.save([(one.top_k, one.top_p) for one in truncations], tmp_path / "cases.pt")
    command = [sys.executable, "-c", KERNEL, str(source)]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    masked = torch.load(tmp_path / "masked.pt")
    assert (masked[0].isfinite().sum(-1) == 20).all()
    tied = (plain[0] == plain[0].sort(-1).values[:, -20, None]).sum(-1)
    assert (tied > 1).any()
    for case, one in enumerate(truncations):
        kept = masked[case].isfinite()
        targets = masked[case].argmax(-1)
        out = chunked_logprobs(
            plain[case].clone(), torch.arange(6), targets, lambda rows: rows.clone(), ALONE, 1.0, 64, truncation=one
        )
        wanted = plain[case].double().masked_fill(~kept, -torch.inf).log_softmax(-1).gather(1, targets[:, None])[:, 0]
        torch.testing.assert_close(out[0].double(), wanted, rtol=1e-6, atol=1e-6)
