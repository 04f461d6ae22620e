"""Bin packing of rollouts into rows (micro-batches), balanced over data-parallel ranks. Every rank gets the same number
of rows, because collectives pair up. Cost is linear in tokens plus quadratic attention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from rlctl.backends.batching.batch import BatchShard, MicroBatch, WeightedSequence
from rlctl.backends.batching.bin_packing import fewest_bins, least_bins, pack, spread
from rlctl.errors import ConfigError

ATTENTION_TOKENS = 4096
"""Sequence length where a layer's attention costs as much as its linear part (6-12 x hidden; used for balance only)."""
MORE_ROWS = 1.02
"""Share of additional rows allowed before groups are divided, which duplicates their prompt."""

KEY = attrgetter("sample", "begin")
"""`WeightedSequence.key`, read without a call into Python: a batch may have 160,000 rollouts."""


@dataclass(frozen=True)
class PackingStats:
    """The effect of packing on one step's batch, over all data-parallel ranks."""

    tokens: int
    """Tokens that go through the model."""
    padded_tokens: int
    """Tokens of padding: rounding of rows, and rows that exist only so that ranks have equally many."""
    unshared_tokens: int
    """Tokens if every rollout had a copy of the prompt."""
    micro_batches: int
    """Rows of each rank, over all mini-batches."""
    imbalance: float
    """Compute of the busiest rank over the mean, summed over mini-batches, minus 1."""

    @property
    def padding_fraction(self) -> float:
        return self.padded_tokens / max(1, self.tokens + self.padded_tokens)


@dataclass(frozen=True)
class BatchPlan:
    """A step's batch, divided."""

    shards: tuple[BatchShard, ...]
    """One for each data-parallel rank."""
    stats: PackingStats


@dataclass(frozen=True)
class PackingUnit:
    """Rollouts that share a row: one, or several with one prompt copy."""

    rollouts: tuple[WeightedSequence, ...]
    tokens: int
    cost: float


def plan_batch(
    minibatches: Sequence[Sequence[WeightedSequence]],
    columns: dict[int, object],
    *,
    dp: int,
    micro_batch_tokens: int,
    packing: bool = True,
    dynamic: bool = False,
    share_prompts: bool = True,
    whole_groups: bool = False,
    multiple: int = 1,
    micro_batch_multiple: int = 1,
) -> BatchPlan:
    """Divide each optimizer mini-batch into rows for `dp` ranks.

    Raises ConfigError for a rollout longer than a row. `columns`: handle of each group's columns. `micro_batch_tokens`:
    row limit. `packing` False: one rollout per row; with `dynamic`, rows of similar lengths, padded. `share_prompts`:
    rollouts of a group share one prompt copy (needs packing). `whole_groups`: a group stays in one row, whose loss
    compares it. `multiple`: rows are padded to it (tp x 2 cp). `micro_batch_multiple`: rows per rank are a multiple,
    with empty rows if needed.
    """
    share = share_prompts and packing
    if packing and dynamic:
        raise ConfigError(
            "training.dynamic_batching replaces training.packing, and both are on.", "Set training.packing=false."
        )
    bins_of = _packed if packing else _rectangles if dynamic else _single
    ranks = []
    for rollouts in minibatches:
        _require_fit(rollouts, micro_batch_tokens)
        step = dp * micro_batch_multiple
        units = _units(rollouts, micro_batch_tokens, step, share, whole_groups)
        units.sort(key=lambda u: (-u.cost, u.rollouts[0].position, u.rollouts[0].key))
        ranks.append(_spread(bins_of(units, step, micro_batch_tokens), dp))
    shards = []
    for rank in range(dp):
        minis = tuple(tuple(_micro_batch(units) for units in rows[rank]) for rows in ranks)
        groups = sorted({rollout.position for rows in minis for micro in rows for rollout in micro})
        shards.append(BatchShard({group: columns[group] for group in groups}, minis, share, dynamic))
    unshared = sum(rollout.tokens for rollouts in minibatches for rollout in rollouts)
    return BatchPlan(tuple(shards), _stats(ranks, unshared, multiple, share=share, rectangular=dynamic))


def row_tokens(micro_batch: Iterable[WeightedSequence], share_prompts: bool) -> int:
    rollouts = list(micro_batch)
    total = sum(rollout.tokens for rollout in rollouts)
    if not share_prompts:
        return total
    prompts = {rollout.position: rollout.prompt_tokens for rollout in rollouts}
    return total - sum(rollout.prompt_tokens for rollout in rollouts) + sum(prompts.values())


def _require_fit(rollouts: Sequence[WeightedSequence], limit: int) -> None:
    longest = max((rollout.tokens for rollout in rollouts), default=0)
    if longest > limit:
        raise ConfigError(
            f"A rollout of {longest} tokens does not fit training.micro_batch_tokens = {limit}.",
            "Set that to at least model.max_length.",
        )


def _units(
    rollouts: Sequence[WeightedSequence], limit: int, step: int, share: bool, whole_groups: bool
) -> list[PackingUnit]:
    """Whole groups, or parts of groups if whole ones need over 2 % more rows than single rollouts."""
    if not share and not whole_groups:
        return [_unit((rollout,)) for rollout in rollouts]
    groups: dict[int, list[WeightedSequence]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.position].append(rollout)
    if whole_groups:
        return [_whole_group(group, limit, share) for group in groups.values()]
    ordered = [sorted(group, key=KEY) for group in groups.values()]
    lengths = [rollout.tokens for rollout in rollouts]
    most = MORE_ROWS * fewest_bins(lengths, limit, step)  # no packing has fewer rows, and counting them is quick
    exact = False
    units = [_unit(part) for group in ordered for part in _split_group(group, limit)]
    for halvings in range(1, limit.bit_length()):
        rows = least_bins([unit.tokens for unit in units], limit, step)
        if rows > most and not exact:
            most, exact = MORE_ROWS * least_bins(lengths, limit, step), True
        if rows <= most:
            break
        units = [_unit(part) for group in ordered for part in _split_group(group, limit >> halvings)]
    return units


def _whole_group(group: list[WeightedSequence], limit: int, share: bool) -> PackingUnit:
    unit = _unit(tuple(sorted(group, key=KEY)), share)
    if unit.tokens > limit:
        raise ConfigError(
            f"The {len(group)} texts of a group, {unit.tokens} tokens together, do not fit "
            f"training.micro_batch_tokens = {limit}.",
            f"Set that to at least {len(group)} x model.max_length.",
        )
    return unit


def _split_group(group: Sequence[WeightedSequence], limit: int) -> list[tuple[WeightedSequence, ...]]:
    """Parts of a group of at most `limit` tokens, as few as first-fit-decreasing finds; longer rollouts are parts."""
    prompt = group[0].prompt_tokens
    if sum([rollout.tokens for rollout in group]) - prompt * (len(group) - 1) <= limit:
        return [tuple(group)]
    parts: list[list[WeightedSequence]] = []
    rooms: list[int] = []
    for rollout in sorted(group, key=attrgetter("tokens"), reverse=True):
        completion = rollout.tokens - prompt
        for index, room in enumerate(rooms):
            if completion <= room:
                parts[index].append(rollout)
                rooms[index] -= completion
                break
        else:
            parts.append([rollout])
            rooms.append(limit - rollout.tokens)
    return [tuple(sorted(part, key=KEY)) for part in parts]


def _unit(rollouts: tuple[WeightedSequence, ...], share: bool = True) -> PackingUnit:
    prompt = rollouts[0].prompt_tokens if share else 0
    lengths = [rollout.tokens for rollout in rollouts]
    tokens = sum(lengths) - prompt * (len(lengths) - 1)
    attention = (sum([length * length for length in lengths]) - prompt * prompt * (len(lengths) - 1)) / 2
    return PackingUnit(rollouts, tokens, tokens + attention / ATTENTION_TOKENS * 2)


def _packed(units: list[PackingUnit], step: int, limit: int) -> list[list[PackingUnit]]:
    bins = pack([unit.tokens for unit in units], [unit.cost for unit in units], limit, step)
    return [[units[index] for index in bin_] for bin_ in bins]


def _single(units: list[PackingUnit], step: int, limit: int) -> list[list[PackingUnit]]:
    return _filled_up([[unit] for unit in units], step)


def _rectangles(units: list[PackingUnit], step: int, limit: int) -> list[list[PackingUnit]]:
    """Bins of neighbors in length whose padded rectangle fits; the costliest are halved until `step` divides them."""
    bins: list[list[PackingUnit]] = []
    for unit in sorted(units, key=lambda unit: -unit.tokens):
        if bins and bins[-1][0].tokens * (len(bins[-1]) + 1) <= limit:
            bins[-1].append(unit)
        else:
            bins.append([unit])
    while len(bins) % step and len(largest := max(bins, key=len)) > 1:
        half = len(largest) // 2
        bins += [largest[:half], largest[half:]]
        bins.remove(largest)
    return _filled_up(bins, step)


def _filled_up(bins: list[list[PackingUnit]], step: int) -> list[list[PackingUnit]]:
    """Bins and empty ones to a multiple of `step`, at least one: ranks take a step without rollouts together."""
    missing = -len(bins) % step if bins else step
    return [*bins, *([] for _ in range(missing))]


def _spread(bins: list[list[PackingUnit]], dp: int) -> list[list[list[PackingUnit]]]:
    ranks = spread([sum(unit.cost for unit in units) for units in bins], dp)
    return [[bins[index] for index in rank_bins] for rank_bins in ranks]


def _micro_batch(units: list[PackingUnit]) -> MicroBatch:
    ordered = sorted(units, key=lambda unit: (unit.rollouts[0].position, unit.rollouts[0].key))
    return tuple(rollout for unit in ordered for rollout in unit.rollouts)


def _stats(
    ranks: list[list[list[list[PackingUnit]]]], unshared: int, multiple: int, *, share: bool, rectangular: bool
) -> PackingStats:
    tokens = padded = 0
    for units in (units for rows in ranks for row_units in rows for units in row_units):
        # Parts of a group that meet in a row share the prompt again.
        used = length = row_tokens(_micro_batch(units), share)
        if rectangular and units:
            length = len(units) * max(unit.tokens for unit in units)
        tokens += used
        padded += max(multiple, -(-length // multiple) * multiple) - used
    costs = [[sum(unit.cost for units in row_units for unit in units) for row_units in rows] for rows in ranks]
    busiest, mean = sum(map(max, costs)), sum(sum(row_costs) / len(row_costs) for row_costs in costs)
    return PackingStats(
        tokens=tokens,
        padded_tokens=padded,
        unshared_tokens=unshared,
        micro_batches=sum(len(rows[0]) for rows in ranks),
        imbalance=busiest / mean - 1 if mean else 0.0,
    )
