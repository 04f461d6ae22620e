"""Where a program first computes something else than transformers.

Each sub-layer of the reference gets the program's own input, so an earlier difference is neither hidden nor carried on.
The reference runs in more precise arithmetic (the truth) and in the run's dtype; the difference of these two is the
noise of the format on this input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlctl.backends.hidden_states import IN, LOGITS, OUT
from rlctl.divergence.reference import ATTENTION, EMBEDDING, Reference

FACTOR = 8.0
"""Differences up to this multiple of the noise are no finding. Correct programs round at other places than the
reference: up to 3 times the noise in the tests' models."""
SUM = ".sum"
"""End of the name of the point where a sub-layer's output is added to the hidden states."""
STRAYS = 0.02
"""Share of tokens that may exceed the limit: experts of a token change where two scores are nearly equal."""
DRAWS = 2
"""Further measurements of the noise, with inputs moved by one rounding error."""
FLOOR = 0.25
"""Least noise, in units of the dtype's rounding error."""
TRUTH = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""Dtype of a run -> dtype that its results are compared in."""

States = Mapping[str, Sequence[Tensor]]
"""Name (point and `IN` or `OUT`) -> [T, H] for each sequence; NaN for tokens without a value."""


@dataclass(frozen=True)
class Measure:
    """One point of one program against the reference on the program's own input."""

    point: str
    error: float
    """Median over the tokens of |output - truth| / |truth|."""
    noise: float
    """The same of the reference in the run's dtype."""
    worst: float
    """Largest ratio of a token's error to the limit, without the strays: above 1 is a finding."""
    tokens_off: int
    """Tokens above the limit."""
    tokens: int
    since_start: float
    """Median relative difference of the output from the reference's own pass, in which errors add up."""

    @property
    def parts(self) -> bool:
        """Whether the program computes something else here."""
        return not self.worst <= 1  # also where it is not a number


@dataclass
class Examined:
    """A point with all that a search for the cause needs."""

    measure: Measure
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    limits_N: Tensor = field(default_factory=lambda: torch.zeros(0))
    """Largest relative error of each token."""

    def explained_by(self, outputs: Sequence[Tensor]) -> tuple[bool, float]:
        """Return whether these outputs are the program's up to the limits, and the median relative difference."""
        errors_N = relative(self.outputs, outputs)
        return exceeding(errors_N, self.limits_N)[0] <= 1, float(errors_N.median())


def examine(reference: Reference, states: States, dtype: torch.dtype, never: Sequence[int] = ()) -> list[Examined]:
    """Compare a program's states at each point of the reference, in order. Points without states are left out. `never`:
    tokens whose logits are lowered on purpose."""
    examined = []
    for point in reference.points:
        if point == EMBEDDING:
            first = next(iter(reference.sublayers))
            if first + IN in states:
                examined.append(_embedding(reference, states[first + IN], dtype))
        elif point + IN in states and point + OUT in states:
            examined.append(_point(reference, point, states[point + IN], states[point + OUT], dtype, never))
            following = reference.following(point)
            if following is not None and following + IN in states:
                parts = (states[point + IN], states[point + OUT], states[following + IN])
                examined += _sum(point, reference.added(point), *parts, dtype)
    return examined


def _sum(
    point: str,
    factor: float | None,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    sums: Sequence[Tensor],
    dtype: torch.dtype,
) -> list[Examined]:
    """Compare what enters the next sub-layer with the sum of what entered this one and what left it."""
    if factor is None:
        return []
    noise = torch.finfo(dtype).eps / 2
    added = [before.double() + factor * output.double() for before, output in zip(inputs, outputs, strict=True)]
    errors_N = relative(sums, added)
    limits_N = torch.full_like(errors_N, FACTOR * noise)
    moved = [after.double() - before.double() for before, after in zip(inputs, sums, strict=True)]
    return [Examined(_measure(point + SUM, errors_N, noise, limits_N, errors_N), list(outputs), moved, limits_N)]


def first_parting(examined: Sequence[Examined]) -> Examined | None:
    return next((one for one in examined if one.measure.parts), None)


def relative(outputs: Sequence[Tensor], truths: Sequence[Tensor]) -> Tensor:
    """[N] over the tokens of all sequences with values: |output - truth| / |truth|, where small truths count as a
    tenth of the median."""
    output_NH, truth_NH = (torch.cat([part.double() for part in parts]) for parts in (outputs, truths))
    size_N = truth_NH.norm(dim=-1)
    size_N = size_N.clamp(min=max(0.1 * float(size_N.median()), torch.finfo(torch.float32).tiny))
    return (output_NH - truth_NH).norm(dim=-1) / size_N


def exceeding(errors_N: Tensor, limits_N: Tensor) -> tuple[float, int]:
    """Return the largest ratio of an error to its limit without the strays, and how many errors exceed their limits."""
    ratios_N = torch.where(errors_N.isfinite(), errors_N / limits_N, torch.inf).sort(descending=True).values
    return float(ratios_N[int(STRAYS * len(ratios_N))]), int((ratios_N > 1).sum())


def _embedding(reference: Reference, outputs: Sequence[Tensor], dtype: torch.dtype) -> Examined:
    """The table has no input. Its values, and the product with a scale, are rounded once each."""
    outputs, truths = _known(outputs, reference.embedded())
    noise = 2 * torch.finfo(dtype).eps
    errors_N = relative(outputs, truths)
    limits_N = torch.full_like(errors_N, 2 * noise)
    return Examined(_measure(EMBEDDING, errors_N, noise, limits_N, errors_N), [], list(outputs), limits_N)


def _point(
    reference: Reference,
    point: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    dtype: torch.dtype,
    never: Sequence[int],
) -> Examined:
    if point == LOGITS:
        inputs, outputs, expected = _at_predictions(inputs, outputs, reference.logits)
        compute: Any = _Head(reference, never)
        outputs, expected = [_without(part, never) for part in outputs], [_without(part, never) for part in expected]
    else:
        sublayer = reference.sublayers[point]
        compute, expected = sublayer, sublayer.outputs(reference.streams[point])
    if any(part.isnan().all() for part in inputs):  # nothing finite comes in: an earlier point has the finding
        nan_N = torch.full((1,), torch.nan)
        return Examined(_measure(point, nan_N, torch.nan, nan_N, nan_N))
    truth, narrow = compute.copied(TRUTH[dtype]), compute.copied(dtype)
    truths = truth.outputs(inputs)
    noises_N = relative(narrow.outputs(inputs), truths)
    for draw in range(DRAWS):
        noises_N = torch.maximum(noises_N, relative(truth.outputs(moved(inputs, dtype, draw)), truths))
    typical = float(noises_N.median())
    least = torch.finfo(dtype).eps * FLOOR
    if point.endswith(ATTENTION):  # angles are float32 in every program: position p is off by p rounding errors
        least = max(least, torch.finfo(torch.float32).eps * max(len(part) for part in inputs) / 8)
    limits_N = FACTOR * noises_N.clamp(min=max(typical, least))
    errors_N = relative(outputs, truths)
    measure = _measure(point, errors_N, typical, limits_N, relative(outputs, expected))
    return Examined(measure, list(inputs), list(outputs), limits_N)


def _measure(point: str, errors_N: Tensor, noise: float, limits_N: Tensor, since_N: Tensor) -> Measure:
    worst, off = exceeding(errors_N, limits_N)
    return Measure(point, float(errors_N.median()), noise, worst, off, len(errors_N), float(since_N.median()))


def moved(inputs: Sequence[Tensor], dtype: torch.dtype, draw: int) -> list[Tensor]:
    """Return the inputs, each number moved by up to one rounding error of `dtype`."""
    generator = torch.Generator().manual_seed(draw)
    error = torch.finfo(dtype).eps
    return [
        part.double() * (1 + error * (torch.rand(part.shape, generator=generator, dtype=torch.float64) - 0.5))
        for part in inputs
    ]


class _Head:
    """The output layer with the interface of `SubLayer`."""

    def __init__(self, reference: Reference, never: Sequence[int], head: Any = None) -> None:
        self.reference, self.never, self.head = reference, never, head

    def copied(self, dtype: torch.dtype) -> _Head:
        return _Head(self.reference, self.never, self.reference.head(dtype))

    def outputs(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return [_without(self.head(part), self.never) for part in inputs]


def _without(logits_UV: Tensor, never: Sequence[int]) -> Tensor:
    kept_V = torch.ones(logits_UV.shape[-1], dtype=torch.bool)
    kept_V[list(never)] = False
    return logits_UV[:, kept_V]


def _known(outputs: Sequence[Tensor], *others: Sequence[Tensor]) -> tuple[list[Tensor], ...]:
    """Keep the tokens that have values in `outputs`."""
    kept = [~part.isnan().all(-1) for part in outputs]
    return tuple([part[keep] for part, keep in zip(parts, kept, strict=True)] for parts in (outputs, *others))


def _at_predictions(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], expected: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Keep the tokens with logits, and the columns of the vocabulary: programs pad it."""
    known_inputs, known_outputs, known_expected = _known(inputs, outputs, expected)
    width = expected[0].shape[-1]
    return known_inputs, [part[:, :width] for part in known_outputs], known_expected


def logprobs(reference: Reference, states: States, never: Sequence[int]) -> list[tuple[int, int, float, float]]:
    """Return (sequence, token, the program's log-prob of the next token, the reference's) where there are logits."""
    pairs = []
    for number, logits_TV in enumerate(states.get(LOGITS + OUT, ())):
        own_TV = reference.logits[number].double()
        for token in (~logits_TV.isnan().all(-1)).nonzero()[:, 0].tolist():
            target = reference.sequences[number][token + 1]
            both = []
            for row in (logits_TV[token, : own_TV.shape[-1]].double(), own_TV[token]):
                row = row.clone()
                row[list(never)] = -torch.inf
                both.append(float(row.log_softmax(-1)[target]))
            pairs.append((number, token, *both))
    return pairs
