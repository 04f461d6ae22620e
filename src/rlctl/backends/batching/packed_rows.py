"""Packed rows: the tensors of one micro-batch and their attention.

A row is a sequence of units: a prompt and its completions (one rollout, or a group that shares the prompt). Each
completion continues the prompt's positions and attends to the prompt and itself. Context parallelism splits a row in
Megatron's zigzag.

Suffixes: T tokens of the row, R response tokens, U predicting positions, L layers, K experts per token, k numbers per
position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from rlctl.backends.batching.batch import (
    BatchShard,
    Fetch,
    GroupLogprobs,
    MicroBatch,
    RolloutLogprobs,
    TeacherSpan,
    TokenBatch,
    ValueBatch,
    WeightedSequence,
)
from rlctl.backends.batching.mixtures import Mixture, Taught, mixed
from rlctl.backends.batching.vocab_projection import VocabProjection
from rlctl.data.rollouts import LOSS_WEIGHTS, ROUTED_EXPERTS, MediaPart, RolloutColumns, chunk_column
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
    spans: tuple[TeacherSpan, ...] = ()
    """The teachers that the further tokens belong to, where each is compared by itself."""
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
            spans=self.spans,
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
    shard: BatchShard,
    rows: Sequence[Sequence[PackedRow]],
    outputs: Sequence[torch.Tensor],
    chunk: str | None = None,
) -> list[GroupLogprobs]:
    """Return a teacher's log-probs by group from float32 [2 + 2 K, R] per row (`chunked_logprobs`), or a reward model's
    scores from [1, R]. `chunk`: the column of chunks, for a teacher with another tokenizer."""
    logprobs: dict[int, GroupLogprobs] = {position: {} for position in shard.columns}
    pairs = [
        pair
        for minibatch_pairs in zip(shard.minibatches, rows, strict=True)
        for pair in zip(*minibatch_pairs, strict=True)
    ]
    for (micro, row), output in zip(pairs, outputs, strict=True):
        given = row.further_RK is not None  # tokens of all teachers: the output has no ids then
        top = max(0, len(output) - 2) // (1 if given else 2)
        logprobs_R, tops_RK, ids_RK = output[0], output[2 : 2 + top].T, output[2 + top :].T.int()
        if row.further_RK is not None:
            ids_RK = row.further_RK.int()
        for index, rollout in enumerate(micro):
            own_R = row.columns_R["rollout"] == index
            if chunk is not None:
                chunk_means = _chunk_means(row.extra_R[chunk][own_R], logprobs_R[own_R], ids_RK[own_R], tops_RK[own_R])
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
    handles: Mapping[int, Sequence[Taught]],
    fetch: Fetch,
    mixture: Mixture,
    projections: Mapping[int, VocabProjection],
) -> None:
    """Add the log-probs of a teacher, of a mixture of several, or of each of several (`handles` by group), to each row.
    `projections`: of the teachers with another tokenizer, by number."""
    if mixture.separate:
        _add_spans(shard, rows, handles, fetch, projections)
        return
    groups: dict[int, GroupLogprobs] = {}
    for position in shard.columns:
        teachers = [(taught.weight, _fetched(taught.handles, fetch)) for taught in handles[position]]
        groups[position] = {
            key: mixed([(weight, logprobs[key]) for weight, logprobs in teachers], mixture) for key in teachers[0][1]
        }
    for micro, row in _loaded(shard, rows):
        parts = [groups[rollout.position][rollout.key] for rollout in micro]
        row.columns_R["teacher_logprobs"] = _joined(row, [part.logprobs_R for part in parts])
        if parts[0].top_ids_RK.shape[1]:
            row.columns_R["teacher_top"] = _joined(row, [part.top_logprobs_RK for part in parts])
            row.further_RK = _joined(row, [part.top_ids_RK for part in parts]).long()


def _loaded(shard: BatchShard, rows: Sequence[Sequence[PackedRow]]) -> Iterator[tuple[MicroBatch, PackedRow]]:
    """Yield the micro-batches that are not empty, with their rows."""
    for micros, minibatch_rows in zip(shard.minibatches, rows, strict=True):
        for micro, row in zip(micros, minibatch_rows, strict=True):
            if micro:
                yield micro, row


@dataclass(frozen=True)
class _TaughtGroup:
    """What the teachers of a group say."""

    share: dict[int, float]
    """The weight of each, divided by their sum."""
    logprobs: dict[int, GroupLogprobs]


def _add_spans(
    shard: BatchShard,
    rows: Sequence[Sequence[PackedRow]],
    handles: Mapping[int, Sequence[Taught]],
    fetch: Fetch,
    projections: Mapping[int, VocabProjection],
) -> None:
    groups: dict[int, _TaughtGroup] = {}
    for position in shard.columns:
        total = sum(taught.weight for taught in handles[position])
        groups[position] = _TaughtGroup(
            {taught.teacher: taught.weight / total for taught in handles[position]},
            {taught.teacher: _fetched(taught.handles, fetch) for taught in handles[position]},
        )
    for micro, row in _loaded(shard, rows):
        of_rollouts = [groups[rollout.position] for rollout in micro]
        text_R, tops, ids, spans = row.columns_R["rollout"], [], [], []
        logprobs_R = torch.zeros_like(row.columns_R["rollout_logprobs"])
        for teacher in sorted({teacher for group in of_rollouts for teacher in group.share}):
            if (projection := projections.get(teacher)) is None:
                logprobs = [
                    _own(group, teacher, rollout.key) for group, rollout in zip(of_rollouts, micro, strict=True)
                ]
                top_RK, ids_RK, each_R = _in_tokens(row, logprobs)
                chunk_R = None
            else:
                each_R, logprobs = None, [_own(group, teacher, None) for group in of_rollouts]
                top_RK, ids_RK, chunk_R = _in_chunks(row, logprobs, row.extra_R[chunk_column(teacher)])
            shares = torch.tensor([group.share.get(teacher, 0.0) for group in of_rollouts])
            weight_R = shares.to(text_R.device)[text_R]
            logprobs_R += weight_R * (row.columns_R["rollout_logprobs"] if each_R is None else each_R)
            spans.append(TeacherSpan(top_RK.shape[1], weight_R, chunk_R, projection))
            tops.append(top_RK)
            ids.append(ids_RK)
        row.columns_R |= {"teacher_logprobs": logprobs_R, "teacher_top": torch.cat(tops, 1)}
        row.further_RK, row.spans = torch.cat(ids, 1).long(), tuple(spans)


def _own(group: _TaughtGroup, teacher: int, key: tuple[int, int] | None) -> RolloutLogprobs | None:
    """Return the teacher's log-probs of a rollout (`key` None: of the only text of its tokenization), or None where it
    does not teach the group."""
    if (logprobs := group.logprobs.get(teacher)) is None:
        return None
    return next(iter(logprobs.values())) if key is None else logprobs[key]


def _in_tokens(
    row: PackedRow, logprobs: Sequence[RolloutLogprobs | None]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probs [R, K] and ids [R, K] of likely tokens, and the log-probs [R] of the chosen ones; where the
    teacher does not teach the rollout, any tokens with equal probabilities."""
    counts = row.columns_R["rollout"].bincount(minlength=len(logprobs)).tolist()
    top = next(part.top_ids_RK.shape[1] for part in logprobs if part is not None)
    untaught = (
        RolloutLogprobs(
            np.zeros(count, np.float32), np.arange(top, dtype=np.int32)[None].repeat(count, 0),
            np.full((count, top), -np.log(top), np.float32),
        )
        for count in counts
    )  # fmt: skip
    parts = [part or other for part, other in zip(logprobs, untaught, strict=True)]
    columns = ("top_logprobs_RK", "top_ids_RK", "logprobs_R")
    top_RK, ids_RK, logprobs_R = (_joined(row, [getattr(part, name) for part in parts]) for name in columns)
    return top_RK, ids_RK, logprobs_R


def add_teacher_tokens(
    shard: BatchShard,
    rows: Sequence[Sequence[PackedRow]],
    handles: Mapping[int, Sequence[Sequence[object]]],
    fetch: Fetch,
) -> None:
    """Give each row the most likely tokens of all teachers (`handles` by group and teacher) as its further tokens."""
    groups = {at: [_fetched(parts, fetch) for parts in handles[at]] for at in shard.columns}
    for micro, row in _loaded(shard, rows):
        ids = [
            np.concatenate([logprobs[rollout.key].top_ids_RK for logprobs in groups[rollout.position]], 1)
            for rollout in micro
        ]
        row.further_RK = _joined(row, ids).long()


def _fetched(handles: Sequence[object], fetch: Fetch) -> GroupLogprobs:
    return {key: column for part in fetch(list(handles)) for key, column in part.items()}


def _in_chunks(
    row: PackedRow, logprobs: Sequence[RolloutLogprobs | None], chunk_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the log-probs [R, K] of a teacher with another tokenizer, the ids [R, K] of its tokens, and the chunks [R]
    of the row's tokens, -1 where the teacher has not read them or does not teach the text."""
    all_chunks_R, text_R = chunk_R.cpu().numpy(), row.columns_R["rollout"].cpu().numpy()
    top = next(part.top_ids_RK.shape[1] for part in logprobs if part is not None)
    chunks, tops, ids = [], [], []
    for text, rollout_logprobs in enumerate(logprobs):
        own_R = all_chunks_R[text_R == text]
        if rollout_logprobs is None:
            chunks.append(np.full(len(own_R), -1, np.float32))
            tops.append(np.full((len(own_R), top), -np.log(top), np.float32))
            ids.append(np.arange(top, dtype=np.int32)[None].repeat(len(own_R), 0))
            continue
        assert rollout_logprobs.chunks_C is not None  # the teacher's columns have them, too
        place_R = np.searchsorted(rollout_logprobs.chunks_C, own_R).clip(max=len(rollout_logprobs.chunks_C) - 1)
        chunks.append(np.where(rollout_logprobs.chunks_C[place_R] == own_R, own_R, -1))
        tops.append(rollout_logprobs.top_logprobs_RK[place_R])
        ids.append(rollout_logprobs.top_ids_RK.repeat(len(own_R), 0))
    return _joined(row, tops), _joined(row, ids), _joined(row, chunks).float()


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
