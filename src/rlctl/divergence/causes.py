"""The likely cause of a difference: the change of the reference that makes it compute what the program computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlctl.backends.hidden_states import LOGITS
from rlctl.divergence.changes import Change, Edits, changes
from rlctl.divergence.compare import SUM, TRUTH, Examined, relative
from rlctl.divergence.reference import EMBEDDING, Reference

OTHER_DTYPES = (torch.bfloat16, torch.float16)
CLEARLY = 4.0
"""A format explains a difference that is up to this multiple of its noise, and at least a fourth of it."""
EXACT_FACTOR = 1e-3
"""A factor of the whole output explains a difference where this share of the output is left."""
ROUGH_FACTOR = 0.1
"""The same of a factor in the sum of hidden states, which are large beside what is added to them."""


@dataclass(frozen=True)
class Cause:
    """Why a program computes something else at a point."""

    operation: str
    """The part of the sub-layer: rotary embedding, norm, experts, ...; `unknown` where nothing fits."""
    words: str
    difference: float | None
    """Median relative difference of the program from the changed reference; None: nothing fits."""
    tried: int
    """Number of changes that were tried."""

    @property
    def known(self) -> bool:
        return self.difference is not None


def cause_of(reference: Reference, examined: Examined, dtype: torch.dtype, never: Sequence[int] = ()) -> Cause:
    """Return the change that explains a difference best, the first of equally good ones."""
    point, tried = examined.measure.point, 0
    if not all(part.isfinite().all() for part in examined.outputs):
        return Cause("numbers", "its output is not finite", None, 0)
    if point.endswith(SUM):
        return _other_sum(reference, examined)
    fitting: list[tuple[float, Cause]] = []
    for operation, words, outputs in _candidates(reference, examined, dtype, never):
        tried += 1
        fits, difference = examined.explained_by(outputs)
        if fits:
            fitting.append((difference, Cause(operation, words, difference, tried)))
    if fitting:
        least = min(difference for difference, _ in fitting)
        return next(cause for difference, cause in fitting if difference <= 2 * least)
    if (factor := _factor(reference, examined, dtype, never)) is not None:
        return factor
    if narrow := _narrow_format(reference, examined, dtype, never):
        return narrow
    return Cause("unknown", f"no known cause reproduces it ({tried} changes of {point} were tried)", None, tried)


Candidate = tuple[str, str, list[Tensor]]
"""(operation, words, outputs of the changed reference)"""


def _candidates(
    reference: Reference, examined: Examined, dtype: torch.dtype, never: Sequence[int]
) -> Iterator[Candidate]:
    point = examined.measure.point
    if point == EMBEDDING:
        return
    if point == LOGITS:
        yield from _heads(reference, examined, dtype, never)
        return
    live = reference.sublayers[point].copied(TRUTH[dtype])
    for change in changes(live):
        outputs = _changed(live, change, examined.inputs)
        if outputs is not None:
            yield change.operation, change.words, outputs


def _changed(live: Any, change: Change, inputs: Sequence[Tensor]) -> list[Tensor] | None:
    with Edits() as edits:
        try:
            change.apply(edits, live)
            return live.outputs(inputs)
        except (RuntimeError, IndexError, TypeError, ValueError):  # the module does not take this change
            return None


def _other_sum(reference: Reference, examined: Examined) -> Cause:
    """A sub-layer's output that is added with another factor."""
    output, moved = (torch.cat([part.double() for part in parts]) for parts in (examined.inputs, examined.outputs))
    factor = float((output * moved).sum() / output.square().sum())
    left = float((moved - factor * output).norm() / moved.norm().clamp(min=torch.finfo(torch.float32).tiny))
    usual = reference.added(examined.measure.point.removesuffix(SUM))
    words = f"its output is added {factor:.4g} times, and transformers adds it {usual:.4g} times"
    if left > ROUGH_FACTOR and abs(factor) > EXACT_FACTOR:
        return Cause("residual sum", "something else than its output is added", None, 1)
    return Cause("residual sum", words, left, 1)


def _heads(reference: Reference, examined: Examined, dtype: torch.dtype, never: Sequence[int]) -> Iterator[Candidate]:
    truth, config = TRUTH[dtype], reference.config
    table = reference.model.get_input_embeddings().weight.detach()

    def use_table(head: Any) -> None:
        head.weight = torch.nn.Parameter(table.to(head.weight.dtype))

    def drop_bias(head: Any) -> None:
        head.bias = None

    listed: list[tuple[str, Callable[[Any], None]]] = [("has the weights of the embedding", use_table)]
    if getattr(reference.model.get_output_embeddings(), "bias", None) is not None:
        listed.append(("is without its bias", drop_bias))
    for words, change in listed:
        yield "output layer", f"the output layer {words}", _logits(reference, truth, examined, never, change)
    for name, words in (("final_logit_softcapping", "are not capped"), ("logit_scale", "are not scaled")):
        if getattr(config, name, None):
            with Edits() as edits:
                edits.put(config, name, None if "cap" in name else 1.0)
                yield "output layer", f"logits {words}", _logits(reference, truth, examined, never)


def _logits(
    reference: Reference,
    dtype: torch.dtype,
    examined: Examined,
    never: Sequence[int],
    change: Callable[[Any], None] = lambda head: None,
) -> list[Tensor]:
    head = reference.head(dtype, change)
    kept_V = torch.ones(reference.logits[0].shape[-1], dtype=torch.bool)
    kept_V[list(never)] = False
    return [head(part)[:, kept_V] for part in examined.inputs]


def _truths(reference: Reference, examined: Examined, dtype: torch.dtype, never: Sequence[int]) -> list[Tensor]:
    point = examined.measure.point
    if point == EMBEDDING:
        return reference.embedded()
    if point == LOGITS:
        return _logits(reference, dtype, examined, never)
    return reference.sublayers[point].copied(dtype).outputs(examined.inputs)


def _factor(reference: Reference, examined: Examined, dtype: torch.dtype, never: Sequence[int]) -> Cause | None:
    """The whole output times a number: a sum over ranks that counts twice, or a missing multiplier."""
    truths = _truths(reference, examined, TRUTH[dtype], never)
    truth, output = (torch.cat([part.double() for part in parts]).flatten() for parts in (truths, examined.outputs))
    factor = float(truth @ output / (truth @ truth))
    scaled = [factor * part.double() for part in truths]
    fits, difference = examined.explained_by(scaled)
    if output.abs().max() == 0:
        return Cause("output", "its output is zero", 0.0, 0)
    if not fits and difference > EXACT_FACTOR:
        return None
    width = reference.config.hidden_size**0.5
    roots = {width: "the root of the hidden size", 1 / width: "one over the root of the hidden size"}
    named = next((f", {words}" for value, words in roots.items() if abs(factor / value - 1) < 0.01), "")
    return Cause("scale", f"its output is {factor:.4g} times the reference's{named}", difference, 0)


def _narrow_format(reference: Reference, examined: Examined, dtype: torch.dtype, never: Sequence[int]) -> Cause | None:
    """A part in a narrower format cannot be repeated exactly, but its noise has a size."""
    if dtype != torch.float32 or examined.measure.point == EMBEDDING:
        return None
    truths = _truths(reference, examined, torch.float64, never)
    for other in OTHER_DTYPES:
        noise = float(relative(_truths(reference, examined, other, never), truths).median())
        if noise / CLEARLY <= examined.measure.error <= CLEARLY * noise:
            name = str(other).removeprefix("torch.")
            words = f"the difference has the size of {name}'s noise ({noise:.1e}): a part is computed in {name}"
            return Cause("dtype", words, examined.measure.error, 0)
    return None
