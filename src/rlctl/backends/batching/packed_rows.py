"""Packed rows: the tensors of one micro-batch and their attention.

A row is a sequence of units: a prompt and its completions (one rollout, or a group that shares the prompt). Each
completion continues the prompt's positions and attends to the prompt and itself. Context parallelism splits a row in
Megatron's zigzag.

Suffixes: T tokens of the row, R response tokens, U predicting positions, L layers, K experts per token, k numbers per
position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from rlctl.backends.batching.batch import (
    BatchShard,
    Fetch,
    GroupLogprobs,
    MicroBatch,
    RolloutLogprobs,
    TokenBatch,
    ValueBatch,
    WeightedSequence,
)
from rlctl.data.cross_tokens import Projection
from rlctl.data.rollouts import CHUNK, LOSS_WEIGHTS, ROUTED_EXPERTS, TEACHER_SAMPLE, MediaPart, RolloutColumns
from rlctl.errors import InputError

FILLER = 1
"""Padding token of rows. Not 0, which is often a model's padding with a zero embedding, whose root mean square (Gemma
3n) has no finite gradient."""

Positions = Callable[[np.ndarray, Sequence[MediaPart]], np.ndarray]
"""(tokens [T], media) -> int64 [k, T], the model's positions. The first number counts tokens; text models have only
that."""


def counted_positions(tokens_T: np.ndarray, media: Sequence[MediaPart]) -> np.ndarray:
    """Return the positions of a model of texts [1, T]."""
    return np.arange(len(tokens_T))[None]


@dataclass(frozen=True)
class VocabProjection:
    """`Projection` on the device."""

    students_E: torch.Tensor
    teachers_E: torch.Tensor
    weights_E: torch.Tensor
    teacher_vocab: int

    @classmethod
    def of(cls, projection: Projection, device: torch.device) -> VocabProjection:
        entries = (projection.students_E, projection.teachers_E, projection.weights_E)
        students_E, teachers_E, weights_E = (torch.from_numpy(entry_array).to(device) for entry_array in entries)
        return cls(students_E, teachers_E, weights_E, projection.teacher_vocab)

    def part(self, wanted_K: torch.Tensor, start: int, width: int) -> torch.Tensor:
        """Return the sparse matrix [K, width] from a rank's part of the student's tokens to some of the teacher's."""
        place = torch.full((self.teacher_vocab,), -1, device=wanted_K.device)
        place[wanted_K] = torch.arange(len(wanted_K), device=wanted_K.device)
        rows_E, columns_E = place[self.teachers_E], self.students_E - start
        kept_E = (rows_E >= 0) & (columns_E >= 0) & (columns_E < width)
        indices = torch.stack([rows_E[kept_E], columns_E[kept_E]])
        size = (len(wanted_K), width)
        return torch.sparse_coo_tensor(indices, self.weights_E[kept_E], size, check_invariants=False).coalesce()


@dataclass(frozen=True)
class RowUnit:
    """Where a prompt and its completions stand in a row."""

    start: int
    prompt: int
    """Tokens of the prompt; all tokens of a unit that has no completions."""
    completions: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.completions)


@dataclass
class PackedRow:
    """One micro-batch on the device, whole: context-parallel ranks slice it."""

    tokens_T: torch.Tensor  # int64, padded
    positions_kT: torch.Tensor  # int64
    units: tuple[RowUnit, ...]
    tokens: int
    """Without padding."""
    sources_U: torch.Tensor  # int64: index into T
    inverse_R: torch.Tensor  # int64: index into U of the position that predicts the token
    targets_R: torch.Tensor  # int64: the chosen tokens
    columns_R: dict[str, torch.Tensor] = field(default_factory=dict)
    """rollout, rollout_logprobs, advantages, token_weights; and, when used: nll_weights, old_logprobs,
    reference_logprobs, old_full_logprobs, rewards, values, returns, teacher_logprobs, teacher_top."""
    routing_TLK: torch.Tensor | None = None
    """With router replay: int16, the experts of each token in each layer (`row_routing`)."""
    extra_R: dict[str, torch.Tensor] = field(default_factory=dict)
    """float32: further columns of the rollouts."""
    further_RK: torch.Tensor | None = None
    """int64: further tokens at each position whose log-probs the loss needs."""
    projection: VocabProjection | None = None
    """Not None: the further tokens are of a teacher's vocabulary, into which this turns the policy's distribution."""
    filler_T: torch.Tensor | None = None
    """bool: padding tokens; None: no padding."""
    media: tuple[MediaPart, ...] = ()
    """The parts of the row that are not text, in order."""
    media_T: torch.Tensor | None = None
    """int64: each token's index over all tokens of `media`; -1: text. None: text only."""

    def token_batch(self, out: torch.Tensor) -> TokenBatch:
        """Return the policy loss's input from the output of `chunked_logprobs`, or values [1, R]."""
        columns = self.columns_R
        further = 0 if self.further_RK is None else self.further_RK.shape[1]
        return TokenBatch(
            logprobs_R=out[0],
            entropy_R=out[1] if len(out) > 1 else torch.zeros_like(out[0]),
            rollout_logprobs_R=columns["rollout_logprobs"],
            advantages_R=columns["advantages"],
            token_weights_R=columns["token_weights"],
            counted_R=columns["token_weights"] != 0,
            rollout_R=columns["rollout"],
            old_logprobs_R=columns.get("old_logprobs"),
            reference_logprobs_R=columns.get("reference_logprobs"),
            teacher_logprobs_R=columns.get("teacher_logprobs"),
            teacher_top_RK=columns.get("teacher_top"),
            top_logprobs_RK=out[2 : 2 + further].T if further else None,
            nll_weights_R=columns.get("nll_weights"),
            extra_R=self.extra_R,
            full_logprobs_R=out[-1] if len(out) > 2 + further else out[0],
            old_full_logprobs_R=columns.get("old_full_logprobs", columns.get("old_logprobs")),
        )

    def value_batch(self, out_1R: torch.Tensor) -> ValueBatch:
        """Return what advantages and a critic's loss are computed from; `out_1R` are a critic's values."""
        columns = self.columns_R
        return ValueBatch(
            values_R=out_1R[0],
            rewards_R=columns.get("rewards", columns["advantages"]),
            token_weights_R=columns["token_weights"],
            counted_R=columns["token_weights"] != 0,
            rollout_R=columns["rollout"],
            old_values_R=columns.get("values"),
            returns_R=columns.get("returns"),
            old_logprobs_R=columns.get("old_full_logprobs", columns.get("old_logprobs")),
            reference_logprobs_R=columns.get("reference_logprobs"),
        )


def fetch_rows(
    shard: BatchShard, fetch: Fetch, multiple: int, device: torch.device, positions: Positions, *, routing: bool
) -> list[list[PackedRow]]:
    """Fetch a rank's columns and pack rows for each mini-batch, with recorded experts if `routing`. Raises like
    `build_row` and `row_routing`."""
    columns = dict(zip(shard.columns, fetch(list(shard.columns.values())), strict=True))

    def packed(micro: MicroBatch) -> PackedRow:
        row = build_row(micro, columns, shard.share_prompts, multiple, device, shard.rectangular, positions)
        row.routing_TLK = row_routing(micro, columns, shard.share_prompts, row) if routing else None
        return row

    return [[packed(micro) for micro in minibatch] for minibatch in shard.minibatches]


def build_row(
    micro_batch: MicroBatch,
    columns: dict[int, RolloutColumns],
    share: bool,
    multiple: int,
    device: torch.device,
    rectangular: bool = False,
    positions: Positions = counted_positions,
) -> PackedRow:
    """Pack rollouts into a row padded to a multiple of `multiple`. `rectangular` (without `share`) pads each rollout to
    the longest. Raises InputError for different prompts in a group or wrong lengths."""
    tokens: list[np.ndarray] = []
    units: list[RowUnit] = []
    sources: list[np.ndarray] = []
    chosen: dict[str, list[np.ndarray]] = {
        name: [] for name in ("targets", "rollout", "logprobs", "advantages", "weights", "nll_weights")
    }
    start = padding = 0
    fillers: list[slice] = []
    width = max((rollout.tokens for rollout in micro_batch), default=0) if rectangular else 0
    for index, rollouts in units_of(micro_batch, share):
        prompt, parts = _unit_parts(rollouts, columns[rollouts[0].position], share)
        offset = start + len(prompt)
        for number, (rollout, (completion, mask, logprobs)) in enumerate(zip(rollouts, parts, strict=True)):
            where = np.flatnonzero(mask)
            before = offset + where - 1
            before[where == 0] = start + len(prompt) - 1
            sources.append(before)
            chosen["targets"].append(completion[where])
            chosen["logprobs"].append(logprobs[where])
            for name, value in (
                ("rollout", index + number),
                ("advantages", rollout.advantage),
                ("weights", rollout.token_weight),
                ("nll_weights", rollout.nll_weight),
            ):
                chosen[name].append(np.full(len(where), value, np.int64 if name == "rollout" else np.float32))
            offset += len(completion)
        tokens += [prompt, *(part[0] for part in parts)]
        if (short := width - (offset - start)) > 0:  # behind the rollout, where causal attention never looks
            tokens.append(np.full(short, FILLER))
            fillers.append(slice(offset, offset + short))
            offset, padding = offset + short, padding + short
        lengths = tuple(len(part[0]) for part in parts)
        units.append(RowUnit(start, len(prompt), lengths) if share else RowUnit(start, offset - start))
        start = offset
    used = start - padding
    if short := max(multiple, -(-start // multiple) * multiple) - start:
        units.append(RowUnit(start, short))
        tokens.append(np.full(short, FILLER))
        fillers.append(slice(start, start + short))
    positions_kT, media = _placed(micro_batch, columns, share, units, positions)
    row = _to_device(tokens, positions_kT, units, sources, chosen, used, device)
    row.media, row.media_T = media, _media_tokens(media, row)
    row.filler_T = _filler_mask(row, fillers)
    row.extra_R = _extra_columns(micro_batch, columns, row)
    if LOSS_WEIGHTS in row.extra_R:
        row.columns_R["token_weights"] *= row.extra_R.pop(LOSS_WEIGHTS)
    return row


def _filler_mask(row: PackedRow, fillers: Sequence[slice]) -> torch.Tensor:
    mask_T = torch.zeros_like(row.tokens_T, dtype=torch.bool)
    for place in fillers:
        mask_T[place] = True
    return mask_T


def _placed(
    micro_batch: MicroBatch,
    columns: Mapping[int, RolloutColumns],
    share: bool,
    units: Sequence[RowUnit],
    positions: Positions,
) -> tuple[np.ndarray, tuple[MediaPart, ...]]:
    """Return the positions [k, T] and the media of a row of `units`; the last unit may be padding."""
    found_kT: list[np.ndarray] = []
    media: list[MediaPart] = []
    of_units = units_of(micro_batch, share)
    for unit, (_, rollouts) in zip(units, of_units, strict=False):
        at = unit.start
        for number, rollout in enumerate(rollouts):
            group = columns[rollout.position]
            tokens, ids = group.tokens_T[rollout.span(group)], rollout.media(group)
            shared = rollout.prompt_tokens if number else 0  # the prompt stands there once
            short = 0 if unit.completions else unit.tokens - len(tokens)
            padded = np.append(tokens, np.full(short, FILLER, tokens.dtype)) if short else tokens
            found_kT.append(positions(padded, ids)[:, shared:])
            media += [replace(part, start=at + part.start - shared) for part in ids if part.start >= shared]
            at += len(tokens) - shared
    found_kT += [positions(np.full(unit.tokens, FILLER), ()) for unit in units[len(of_units) :]]
    return np.concatenate(found_kT, 1), tuple(media)


def _media_tokens(media: Sequence[MediaPart], row: PackedRow) -> torch.Tensor | None:
    if not media:
        return None
    media_T, count = np.full(len(row.tokens_T), -1), 0
    for part in media:
        media_T[part.start : part.start + part.tokens] = count + np.arange(part.tokens)
        count += part.tokens
    return torch.from_numpy(media_T).to(row.tokens_T.device)


def _extra_columns(
    micro_batch: MicroBatch, columns: Mapping[int, RolloutColumns], row: PackedRow
) -> dict[str, torch.Tensor]:
    """Return the further columns [R] that any of the rollouts has; for the others 0, or 1 as the weight of a loss."""
    columns_T: dict[str, torch.Tensor] = {}
    groups = {rollout.position: columns[rollout.position] for rollout in micro_batch}.values()
    for name in sorted({name for group in groups for name, values in group.extra_T.items() if values.ndim == 1}):
        missing, parts = float(name == LOSS_WEIGHTS), []
        for rollout in micro_batch:
            group = columns[rollout.position]
            span = rollout.span(group)
            mask = group.loss_mask_T[span]
            extra = group.extra_T.get(name)
            parts.append(np.full(int(mask.sum()), missing) if extra is None else extra[span][mask])
        columns_T[name] = _joined(row, parts).float()
    return columns_T


def logprobs_by_group(
    shard: BatchShard, rows: Sequence[Sequence[PackedRow]], outputs: Sequence[torch.Tensor]
) -> list[GroupLogprobs]:
    """Return a teacher's log-probs by group from float32 [2 + 2 K, R] per row (`chunked_logprobs`), or a reward model's
    scores from [1, R]."""
    logprobs: dict[int, GroupLogprobs] = {position: {} for position in shard.columns}
    pairs = [
        pair
        for minibatch_pairs in zip(shard.minibatches, rows, strict=True)
        for pair in zip(*minibatch_pairs, strict=True)
    ]
    for (micro, row), output in zip(pairs, outputs, strict=True):
        top = max(0, len(output) - 2) // 2
        logprobs_R, tops_RK, ids_RK = output[0], output[2 : 2 + top].T, output[2 + top :].T.int()
        for index, rollout in enumerate(micro):
            own_R = row.columns_R["rollout"] == index
            if CHUNK in row.extra_R:
                chunk_means = _chunk_means(row.extra_R[CHUNK][own_R], logprobs_R[own_R], ids_RK[own_R], tops_RK[own_R])
            else:
                chunk_means = RolloutLogprobs(*(part[own_R].cpu().numpy() for part in (logprobs_R, ids_RK, tops_RK)))
            logprobs[rollout.position][rollout.key] = chunk_means
    return list(logprobs.values())


def _chunk_means(
    chunk_R: torch.Tensor, logprobs_R: torch.Tensor, ids_RK: torch.Tensor, tops_RK: torch.Tensor
) -> RolloutLogprobs:
    chunks_C, chunk_of_R, count_C = chunk_R.unique(return_inverse=True, return_counts=True)
    sums_CK = tops_RK.new_zeros(len(chunks_C), tops_RK.shape[1]).index_add(0, chunk_of_R, tops_RK.log_softmax(-1))
    parts = (logprobs_R, ids_RK[:1], sums_CK / count_C[:, None], chunks_C)
    return RolloutLogprobs(*(part.cpu().numpy() for part in parts))


def add_teacher_logprobs(
    shard: BatchShard,
    rows: Sequence[Sequence[PackedRow]],
    handles: Mapping[int, Sequence[object]],
    fetch: Fetch,
    projection: VocabProjection | None = None,
) -> None:
    """Add a teacher's log-probs (`handles` by group) to each row. `projection`: the teacher has another tokenizer."""
    groups: dict[int, GroupLogprobs] = {}
    for position in shard.columns:
        groups[position] = {key: column for part in fetch(list(handles[position])) for key, column in part.items()}
    for micros, minibatch_rows in zip(shard.minibatches, rows, strict=True):
        for micro, row in zip(micros, minibatch_rows, strict=True):
            if not micro:
                continue
            if projection is not None:
                _add_chunks(row, [groups[rollout.position][TEACHER_SAMPLE, 0] for rollout in micro])
                row.projection = projection
                continue
            parts = [groups[rollout.position][rollout.key] for rollout in micro]
            row.columns_R["teacher_logprobs"] = _joined(row, [part.logprobs_R for part in parts])
            if parts[0].top_ids_RK.shape[1]:
                row.columns_R["teacher_top"] = _joined(row, [part.top_logprobs_RK for part in parts])
                row.further_RK = _joined(row, [part.top_ids_RK for part in parts]).long()


def _add_chunks(row: PackedRow, logprobs: Sequence[RolloutLogprobs]) -> None:
    chunk_R, text_R = row.extra_R[CHUNK].cpu().numpy(), row.columns_R["rollout"].cpu().numpy()
    chunks, tops, ids = [], [], []
    for text, rollout_logprobs in enumerate(logprobs):
        own_R = chunk_R[text_R == text]
        assert rollout_logprobs.chunks_C is not None  # the teacher's columns have them, too
        place_R = np.searchsorted(rollout_logprobs.chunks_C, own_R).clip(max=len(rollout_logprobs.chunks_C) - 1)
        chunks.append(np.where(rollout_logprobs.chunks_C[place_R] == own_R, own_R, -1))
        tops.append(rollout_logprobs.top_logprobs_RK[place_R])
        ids.append(rollout_logprobs.top_ids_RK.repeat(len(own_R), 0))
    row.extra_R[CHUNK] = _joined(row, chunks)
    row.columns_R |= {"teacher_logprobs": row.columns_R["rollout_logprobs"], "teacher_top": _joined(row, tops)}
    row.further_RK = _joined(row, ids).long()


def _joined(row: PackedRow, parts: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(row.tokens_T.device)


def units_of(micro_batch: MicroBatch, share: bool) -> list[tuple[int, list[WeightedSequence]]]:
    """(index of the first rollout, rollouts) of each unit."""
    units: list[tuple[int, list[WeightedSequence]]] = []
    for index, rollout in enumerate(micro_batch):
        if share and units and units[-1][1][0].position == rollout.position:
            units[-1][1].append(rollout)
        else:
            units.append((index, [rollout]))
    return units


def row_routing(
    micro_batch: MicroBatch, columns: Mapping[int, RolloutColumns], share: bool, row: PackedRow
) -> torch.Tensor | None:
    """int16 [T, L, K]: recorded experts, -1 where missing; None for an empty row. Raises InputError without a
    record."""
    routing_TLK: np.ndarray | None = None
    for unit, (_, rollouts) in zip(row.units, units_of(micro_batch, share), strict=False):  # the last may be padding
        at = unit.start
        for number, rollout in enumerate(rollouts):
            group = columns[rollout.position]
            if ROUTED_EXPERTS not in group.extra_T:
                raise InputError(
                    f"the rollouts of group {rollout.position} came without a record of their experts.",
                    "Turn training.router_replay off, or generate with an engine that records them.",
                )
            routing = group.extra_T[ROUTED_EXPERTS][rollout.span(group)]
            routing = routing[rollout.prompt_tokens :] if number else routing  # the prompt stands there once
            if routing_TLK is None:
                routing_TLK = np.full((len(row.tokens_T), *routing.shape[1:]), -1, np.int16)
            routing_TLK[at : at + len(routing)] = routing
            at += len(routing)
    return None if routing_TLK is None else torch.from_numpy(routing_TLK).to(row.tokens_T.device)


def _unit_parts(
    rollouts: Sequence[WeightedSequence], columns: RolloutColumns, share: bool
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """Prompt tokens, and (tokens, loss mask, engine log-probs) of each completion."""
    prompt: np.ndarray | None = None
    parts = []
    for rollout in rollouts:
        span, split = rollout.span(columns), rollout.prompt_tokens
        tokens, mask = columns.tokens_T[span], columns.loss_mask_T[span]
        if span.stop > columns.slice(rollout.sample).stop or mask[:split].any():
            raise InputError(
                f"rollout {rollout.sample} of group {rollout.position} has {len(tokens)} tokens, the first chosen one "
                f"at {int(np.argmax(mask))}; the driver counts {rollout.tokens} and {split}."
            )
        if prompt is not None and not np.array_equal(prompt, tokens[:split]):
            raise InputError(
                f"the rollouts of group {rollout.position} have different prompts and cannot share one.",
                "Set training.share_prompts to false.",
            )
        prompt = tokens[:split]
        parts.append((tokens[split:], mask[split:], columns.logprobs_T[span][split:]))
    assert prompt is not None
    return prompt, parts


def _to_device(
    tokens: list[np.ndarray],
    positions_kT: np.ndarray,
    units: list[RowUnit],
    sources: list[np.ndarray],
    chosen: dict[str, list[np.ndarray]],
    used: int,
    device: torch.device,
) -> PackedRow:
    """Return the row. `used` are its tokens without padding."""

    def tensor(parts: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
        joined = np.concatenate(parts) if parts else np.zeros(0)
        return torch.from_numpy(joined).to(device=device, dtype=dtype)

    sources_U, inverse_R = torch.unique(tensor(sources, torch.int64), return_inverse=True)
    nll_weights = chosen["nll_weights"]
    return PackedRow(
        tokens_T=tensor(tokens, torch.int64),
        positions_kT=tensor([positions_kT], torch.int64),
        units=tuple(units),
        tokens=used,
        sources_U=sources_U,
        inverse_R=inverse_R,
        targets_R=tensor(chosen["targets"], torch.int64),
        columns_R={
            "rollout": tensor(chosen["rollout"], torch.int64),
            "rollout_logprobs": tensor(chosen["logprobs"], torch.float32),
            "advantages": tensor(chosen["advantages"], torch.float32),
            "token_weights": tensor(chosen["weights"], torch.float32),
            **(
                {"nll_weights": tensor(nll_weights, torch.float32)}
                if any(weights_of_text.any() for weights_of_text in nll_weights)
                else {}
            ),
        },
    )
