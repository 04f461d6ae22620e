"""Hidden states of one forward pass: what enters and leaves each sub-layer, recorded by hooks in a policy's ranks or an
engine's workers.

Suffixes: T tokens of a row, N recorded tokens, U positions with logits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rlctl.backends.batching.batch import MicroBatch
    from rlctl.backends.batching.packed_rows import PackedRow

IN, OUT = ".in", ".out"
"""Ends of names of recorded values: a sub-layer's input (before its norm) and its output, which is added to it."""
NORM, LOGITS = "norm", "logits"
"""The points after the layers."""
Paths = Mapping[str, tuple[str, str]]
"""Point -> paths of the first and the last module of transformers that it spans."""
Spans = dict[str, tuple[Any, Any]]
"""Point -> the modules of a rank that it spans, first and last."""


@dataclass(frozen=True)
class States:
    """Values of one point on one rank."""

    name: str
    """The point and `IN` or `OUT`."""
    sequence_N: np.ndarray  # int64: which sequence
    token_N: np.ndarray  # int64: which of its tokens
    column: int
    """First column in the whole; logits are divided over the vocabulary."""
    values_NH: Tensor  # on the host


def layer_point(layer: int, kind: str) -> str:
    return f"layers.{layer}.{kind}"


class HeadTap:
    """A function on an object that computes a rank's logits from hidden states, called with them first."""

    def __init__(self, owner: Any, name: str, column: int) -> None:
        """`column`: the rank's first token of the vocabulary."""
        self.owner, self.name, self.column = owner, name, column

    @contextlib.contextmanager
    def recorded(self, values: dict[str, list[Tensor]]) -> Iterator[None]:
        plain: Callable[..., Tensor] = getattr(self.owner, self.name)
        overridden = self.name in vars(self.owner)

        def recording(hidden_UH: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            logits = plain(hidden_UH, *args, **kwargs)
            values.setdefault(LOGITS + IN, []).append(_copied(hidden_UH))
            values.setdefault(LOGITS + OUT, []).append(_copied(logits))
            return logits

        setattr(self.owner, self.name, recording)
        try:
            yield
        finally:
            if overridden:
                setattr(self.owner, self.name, plain)
            else:
                delattr(self.owner, self.name)


@contextlib.contextmanager
def recorded(spans: Spans, heads: Iterable[HeadTap] = ()) -> Iterator[dict[str, list[Tensor]]]:
    """Yield a dictionary that the forward passes in the block fill: name -> one [T, H] for each pass of a module."""
    values: dict[str, list[Tensor]] = {}
    with contextlib.ExitStack() as stack:
        for point, (first, last) in spans.items():
            stack.callback(first.register_forward_pre_hook(_entering(values, point + IN), with_kwargs=True).remove)
            # Before the backend's own hooks, which multiply the output where it is added (Granite).
            hook = last.register_forward_hook(_leaving(values, point + OUT), prepend=True)
            stack.callback(hook.remove)
        for head in heads:
            stack.enter_context(head.recorded(values))
        yield values


def _entering(values: dict[str, list[Tensor]], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        sums = "Norm" in type(module).__name__
        values.setdefault(name, []).append(_copied(entering(args, kwargs, sums=sums)))

    return hook


def _leaving(values: dict[str, list[Tensor]], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        values.setdefault(name, []).append(_copied(leaving(output)))

    return hook


def entering(args: Sequence[Any], kwargs: Mapping[str, Any], *, sums: bool = False) -> Tensor:
    """Return the hidden states among a module's arguments. `sums`: a second one of this shape is added, as vLLM's norms
    do."""
    hidden, *others = given_states(args, kwargs)
    residual = others[0] if sums and others and others[0].shape == hidden.shape else None
    return hidden if residual is None else (hidden.float() + residual.float()).to(residual.dtype)


def given_states(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments that are tensors of numbers. Raises ValueError where there is none."""
    import torch

    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    states = [value for value in given if value.is_floating_point()]
    if not states:
        raise ValueError("The module gets no hidden states.")
    return states


def leaving(output: Any) -> Tensor:
    """Return a module's output. Megatron's modules return a bias beside it."""
    if not isinstance(output, tuple | list):
        return output
    hidden, second = output[0], output[1] if len(output) > 1 else None
    is_bias = getattr(second, "shape", None) == hidden.shape[-1:]
    return hidden + second if is_bias else hidden


def _copied(values: Tensor) -> Tensor:
    """[T, H] on the host; a copy, because engines add in place."""
    return values.detach().reshape(-1, values.shape[-1]).to("cpu", copy=True)


def policy_states(
    values: Mapping[str, list[Tensor]],
    rows: Sequence[PackedRow],
    micro_batches: Sequence[MicroBatch],
    *,
    cp: tuple[int, int],
    tp: tuple[int, int],
    column: int,
) -> list[States]:
    """Return a policy rank's values with their places. `cp`, `tp`: size of the group, and the rank in it; `column`: the
    first of its logits. Values that every tensor-parallel rank has are returned by the first."""
    states: list[States] = []
    for number, (row, micro_batch) in enumerate(zip(rows, micro_batches, strict=True)):
        if not micro_batch:
            continue
        sequence_T, token_T = _places(row, micro_batch)
        held_T = _held(len(sequence_T), *cp)
        for name, passes in values.items():
            if name.startswith(LOGITS):
                continue
            of_row = passes[number]
            whole = len(of_row) == len(held_T)
            if whole and tp[1]:
                continue
            chosen_T = held_T if whole else np.split(held_T, tp[0])[tp[1]]
            states += _counted(name, sequence_T[chosen_T], token_T[chosen_T], 0, of_row)
    return states + _logits_of(values, rows, micro_batches, cp, tp[1], column)


def _logits_of(
    values: Mapping[str, list[Tensor]],
    rows: Sequence[PackedRow],
    micro_batches: Sequence[MicroBatch],
    cp: tuple[int, int],
    tp_rank: int,
    column: int,
) -> list[States]:
    import torch

    if LOGITS + OUT not in values:
        return []
    hidden, logits = (torch.cat(values[LOGITS + end]) for end in (IN, OUT))
    states, at = list[States](), 0
    for row, micro_batch in zip(rows, micro_batches, strict=True):
        sequence_T, token_T = _places(row, micro_batch)
        place_T = np.full(len(sequence_T), -1)
        held_T = _held(len(sequence_T), *cp)
        place_T[held_T] = np.arange(len(held_T))
        sources_U = row.sources_U.cpu().numpy()
        sources_U = sources_U[place_T[sources_U] >= 0]
        part = slice(at, at + len(sources_U))
        at = part.stop
        if tp_rank == 0:
            states += _counted(LOGITS + IN, sequence_T[sources_U], token_T[sources_U], 0, hidden[part])
        states += _counted(LOGITS + OUT, sequence_T[sources_U], token_T[sources_U], column, logits[part])
    return states


def _held(length: int, cp_size: int, cp_rank: int) -> np.ndarray:
    from rlctl.backends.batching.context_parallel import zigzag

    return np.arange(length) if cp_size == 1 else zigzag(length, cp_size, cp_rank)


def _places(row: PackedRow, micro_batch: MicroBatch) -> tuple[np.ndarray, np.ndarray]:
    """Return the sequence and the token of each token of a row; -1 for padding. Each sequence is a group alone."""
    length = len(row.tokens_T)
    sequence_T, token_T = np.full(length, -1), np.full(length, -1)
    for unit, rollout in zip(row.units, micro_batch, strict=False):  # the last unit may be padding
        chosen = slice(unit.start, unit.start + rollout.tokens)
        sequence_T[chosen], token_T[chosen] = rollout.position, np.arange(rollout.tokens)
    return sequence_T, token_T


def _counted(
    name: str, sequence_N: np.ndarray, token_N: np.ndarray, column: int, values_NH: Tensor
) -> Iterator[States]:
    import torch

    kept_N = sequence_N >= 0
    if kept_N.any():
        yield States(name, sequence_N[kept_N], token_N[kept_N], column, values_NH[torch.from_numpy(kept_N)])


def joined(states: Iterable[States], lengths: Sequence[int]) -> dict[str, list[Tensor]]:
    """Return name -> one [tokens, H] for each sequence, from the values of all ranks; NaN where no rank has a value."""
    import torch

    by_name: dict[str, list[States]] = {}
    for part in states:
        by_name.setdefault(part.name, []).append(part)
    whole: dict[str, list[Tensor]] = {}
    for name, parts in by_name.items():
        width = max(part.column + part.values_NH.shape[1] for part in parts)
        dtype = parts[0].values_NH.dtype
        filled = [torch.full((length, width), float("nan"), dtype=dtype) for length in lengths]
        for part in parts:
            columns = slice(part.column, part.column + part.values_NH.shape[1])
            for sequence in np.unique(part.sequence_N):
                of_it = part.sequence_N == sequence
                filled[sequence][torch.from_numpy(part.token_N[of_it]), columns] = part.values_NH[of_it]
        whole[name] = filled
    return whole
