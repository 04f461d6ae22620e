"""The layout of a Megatron-Core policy, as plain data. Sources (0.16 to 0.19): megatron/core/parallel_state.py (rank
order tp-cp-ep-dp-pp), transformer_block.py and transformer_layer.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from rlctl.config.parallel import ParallelSpec
from rlctl.models.constraints import require_policy_sizes
from rlctl.models.facts import ModelFacts
from rlctl.models.families import weights_of
from rlctl.models.matrices import FLOAT32_ROLES, Matrix, ModelWeights, Role
from rlctl.weights.layout import Box, Fill, Layout, ParamSpec, Piece, Shape, Span, meet, share, whole
from rlctl.weights.megatron_names import MTP_OUTER, Experts, Kind, Slot, Spec, slot
from rlctl.weights.transfer_plan import Shard
from rlctl.weights.transforms import Add, Transform


@dataclass(frozen=True, slots=True)
class Coordinates:
    """The coordinates of a rank that decide which weights it holds."""

    pp: int
    tp: int
    ep: int
    etp: int


@dataclass(frozen=True)
class MegatronWorld:
    """All ranks of a Megatron policy. Names are `GPTModel.named_parameters()` and persistent buffers, with layers
    counted in the stage, or globally with vpp > 1."""

    facts: ModelFacts
    parallel: ParallelSpec
    spec: Spec = "local"
    """The layer spec: Megatron's modules, or TransformerEngine's, which fuse norms into linear layers."""
    dtype: str = "float32"
    experts: Experts = "sequential"
    """Megatron's SequentialMLP or TEGroupedMLP; both have one weight an expert."""
    zero_centered_norms: bool = False
    """The engine adds one to norm gains (`layernorm_zero_centered_gamma`)."""
    head: bool = True
    """Off for a critic, whose output layer is not a published tensor."""

    @property
    def size(self) -> int:
        return self.parallel.world_size

    @cached_property
    def weights(self) -> ModelWeights:
        return weights_of(self.facts)

    @cached_property
    def _alike(self) -> dict[tuple, LocalParam]:
        """One place of each kind: layers and experts repeat it under other names."""
        return {}

    def __post_init__(self) -> None:
        require_policy_sizes(self.facts, self.parallel)

    def layout(self, rank: int) -> Layout:
        # tp is fastest, then cp, dp, pp; for experts etp, ep, expert dp, pp
        stage, inside = divmod(rank, self.parallel.stage_size)
        at = Coordinates(
            stage, inside % self.parallel.tp, inside // self.parallel.etp % self.parallel.ep, inside % self.parallel.etp
        )
        params: dict[str, ParamSpec] = {}
        pieces: list[Piece] = []
        fills: dict[str, tuple[Fill, ...]] = {}
        for matrix in self._held(at):
            for local in self._params_of(matrix, at):
                params[local.param] = local.spec
                pieces.extend(local.pieces)
                if local.fills:
                    fills[local.param] = local.fills
        return Layout(rank, params, tuple(pieces), tuple(fill for filled in fills.values() for fill in filled))

    def shards(self, tensor: str) -> Sequence[Shard]:
        """The ranks of a shard differ in dp and cp (and tp where replicated)."""
        shards: list[Shard] = []
        for matrix in self.weights.by_tensor.get(tensor, ()):
            last = 0 if matrix.role is Role.EMBEDDING else self.parallel.pp - 1
            stage = last if matrix.layer is None else self._stage_of[matrix.layer]
            for ranks, at in self._groups(matrix, stage):
                params = tuple(
                    (p, param.spec) for param in self._params_of(matrix, at) for p in param.pieces if p.primary
                )
                if params:
                    shards.append(Shard(ranks, params))
        return shards

    def layers_of(self, stage: int) -> list[int]:
        """Layers (from 0) of all chunks of a stage; multi-token-prediction layers are on the last."""
        return _layers_of_stages(self.facts.layers, self.facts.mtp_layers, self.parallel)[stage]

    @cached_property
    def _stage_of(self) -> dict[int, int]:
        return {layer: stage for stage in range(self.parallel.pp) for layer in self.layers_of(stage)}

    def local_experts(self, ep_rank: int) -> range:
        if self.facts.moe is None:
            return range(0)
        local = share(self.facts.moe.experts, self.parallel.ep, ep_rank, "Number of experts", "ep")
        return range(local.start, local.start + local.count)

    def param_name(self, matrix: Matrix, target: Slot) -> str:
        name = target.name
        if matrix.expert is not None:
            name = name.format(expert=matrix.expert % len(self.local_experts(0)))
        if matrix.layer is None:
            return name
        layers = self.facts.layers
        if matrix.layer >= layers:
            inside = "" if matrix.role in MTP_OUTER else "transformer_layer."
            return f"mtp.layers.{matrix.layer - layers}.{inside}{name}"
        if self.parallel.vpp > 1:
            return f"decoder.layers.{matrix.layer}.{name}"
        first = self.layers_of(self._stage_of[matrix.layer])[0]
        return f"decoder.layers.{matrix.layer - first}.{name}"

    def _held(self, at: Coordinates) -> Iterator[Matrix]:
        yield from self.weights.outer
        for layer in self.layers_of(at.pp):
            yield from self.weights.layer(layer, self.local_experts(at.ep))

    def _params_of(self, matrix: Matrix, at: Coordinates) -> Iterator[LocalParam]:
        last, first = at.pp == self.parallel.pp - 1, at.pp == 0
        if matrix.role is Role.EMBEDDING:
            if first or (self.facts.mtp_layers and last):
                yield self._param_of(matrix, Role.EMBEDDING, at, primary=first)
            if self.facts.tied_embeddings and self.head and last and not first:
                yield self._param_of(matrix, Role.HEAD, at, primary=False)
        elif matrix.role in (Role.HEAD, Role.FINAL_NORM):
            if last and (self.head or matrix.role is Role.FINAL_NORM):
                yield self._param_of(matrix, matrix.role, at)
        else:
            yield self._param_of(matrix, matrix.role, at)

    def _param_of(self, matrix: Matrix, role: Role, at: Coordinates, primary: bool = True) -> LocalParam:
        target = self._slot(matrix, role)
        name = self.param_name(matrix, target)
        expert = matrix.expert is not None
        kind = (target, matrix.role, matrix.shape, matrix.tensor_starts, matrix.tensor_steps, matrix.axes)
        key = (*kind, matrix.offset, expert, at, primary)
        if key not in self._alike:
            self._alike[key] = _local_param(self, matrix, target, name, at, primary)
        return self._alike[key].renamed(matrix.tensor, name)

    def _slot(self, matrix: Matrix, role: Role) -> Slot:
        moe_layer = matrix.layer is not None and self.facts.is_moe_layer(matrix.layer)
        place = slot(role, self.spec, self.experts, mla=self.facts.mla is not None, moe_layer=moe_layer)
        divided = self.facts.wide_qk_norm and role in (Role.Q_NORM, Role.K_NORM)
        return replace(place, kind=Kind.COLUMN) if divided else place

    def _groups(self, matrix: Matrix, stage: int) -> Iterator[tuple[Sequence[int], Coordinates]]:
        """(ranks, coordinates) of each distinct part of a matrix within a stage."""
        parallel, base = self.parallel, stage * self.parallel.stage_size
        end = base + parallel.stage_size
        replicated = self._slot(matrix, matrix.role).kind is Kind.REPLICATED
        if matrix.expert is not None:
            etp, block = parallel.etp, parallel.expert_size
            ep = matrix.expert // len(self.local_experts(0))
            if replicated:
                ranks = [r for r in range(base, end) if (r - base) // etp % parallel.ep == ep]
                yield ranks, Coordinates(stage, 0, ep, 0)
                return
            for t in range(etp):
                yield range(base + ep * etp + t, end, block), Coordinates(stage, t, ep, t)
        elif replicated:
            yield range(base, end), Coordinates(stage, 0, 0, 0)
        else:
            for t in range(parallel.tp):
                yield range(base + t, end, parallel.tp), Coordinates(stage, t, 0, 0)


@lru_cache(maxsize=64)
def _layers_of_stages(layers: int, mtp_layers: int, parallel: ParallelSpec) -> list[list[int]]:
    counts = parallel.stage_layers(layers)
    assert counts is not None, "MegatronWorld checks its sizes"
    stage_layers: list[list[int]] = [[] for _ in counts]
    first = 0
    for _ in range(parallel.vpp):
        for stage, count in enumerate(counts):
            stage_layers[stage] += range(first, first + count // parallel.vpp)
            first += count // parallel.vpp
    stage_layers[-1] += range(layers, layers + mtp_layers)
    return stage_layers


@dataclass(frozen=True, slots=True)
class LocalParam:
    """One param of a rank and the parts of one matrix in it."""

    param: str
    spec: ParamSpec
    pieces: tuple[Piece, ...]
    fills: tuple[Fill, ...] = ()

    def renamed(self, tensor: str, param: str) -> LocalParam:
        """The same part of a matrix of the same kind: its boxes are shared, not made again."""
        if param == self.param and all(p.tensor == tensor for p in self.pieces):
            return self
        return LocalParam(
            param,
            self.spec,
            tuple(p.renamed(tensor, param) for p in self.pieces),
            tuple(Fill(param, fill.box, fill.value) for fill in self.fills),
        )


def _local_param(
    world: MegatronWorld, matrix: Matrix, target: Slot, name: str, at: Coordinates, primary: bool
) -> LocalParam:
    """Return where the rank at `at` holds its part of `matrix` in the param `name`."""
    parallel = world.parallel
    parts, index = (parallel.etp, at.etp) if matrix.expert is not None else (parallel.tp, at.tp)
    dtype = "float32" if matrix.role in FLOAT32_ROLES else world.dtype
    gain = float(world.zero_centered_norms) if target.norm else 0.0
    if target.kind is Kind.VOCAB:
        return _vocab(world, matrix, name, dtype, index, primary)
    if target.kind is Kind.QKV:
        return _qkv(world, matrix, target.part, name, dtype, index)
    if target.kind is Kind.REPLICATED:
        local = piece(matrix, whole(matrix.shape), name, (0,) * len(matrix.shape), primary, gain)
        return LocalParam(name, ParamSpec(matrix.shape, dtype), (local,))
    axis, flag = int(target.kind is Kind.ROW), "etp" if matrix.expert is not None else "tp"
    span = share(matrix.shape[axis], parts, index, f"Axis {axis} of {matrix.tensor}", flag)
    shape, starts = list(matrix.shape), [0] * len(matrix.shape)
    shape[axis] = span.count * (2 if target.kind is Kind.GATED else 1)
    starts[axis] = span.count * target.part if target.kind is Kind.GATED else 0
    local = piece(matrix, on_axis(matrix, axis, span), name, tuple(starts), primary, gain)
    return LocalParam(name, ParamSpec(tuple(shape), dtype), (local,))


def _vocab(world: MegatronWorld, matrix: Matrix, name: str, dtype: str, index: int, primary: bool) -> LocalParam:
    vocab, hidden = matrix.shape
    rows = -(-vocab // world.parallel.tp)  # the last ranks' are padded
    start = index * rows
    rows_held = max(0, min(rows, vocab - start))
    spec = ParamSpec((rows, hidden), dtype)
    pieces = (piece(matrix, (Span(start, rows_held), Span(0, hidden)), name, (0, 0), primary),) if rows_held else ()
    fills = (Fill(name, (Span(rows_held, rows - rows_held), Span(0, hidden))),) if rows_held < rows else ()
    return LocalParam(name, spec, pieces, fills)


def _qkv(world: MegatronWorld, matrix: Matrix, part: int, name: str, dtype: str, index: int) -> LocalParam:
    """Rows of a group: its queries, its key, its value; groups follow one another, ranks take equal shares of rows."""
    facts = world.facts
    own_rows = facts.heads // facts.kv_heads * facts.head_dim
    group_rows = own_rows + 2 * facts.head_dim
    size, lead = ((own_rows, 0), (facts.head_dim, own_rows), (facts.head_dim, own_rows + facts.head_dim))[part]
    mine = share(facts.kv_heads * group_rows, world.parallel.tp, index, "Rows of the fused QKV matrix", "tp")
    pieces = []
    for group in range(mine.start // group_rows, -(-(mine.start + mine.count) // group_rows)):
        hit = meet(Span(group * group_rows + lead, size), mine)
        if hit:
            first, _, to, _, count = hit
            box = on_axis(matrix, 0, Span(group * size + first, count))
            pieces.append(piece(matrix, box, name, (to,) + (0,) * (len(matrix.shape) - 1)))
    shape: Shape = (mine.count, *matrix.shape[1:])
    return LocalParam(name, ParamSpec(shape, dtype), tuple(pieces))


def piece(
    matrix: Matrix, box: Box, param: str, starts: tuple[int, ...], primary: bool = True, gain: float = 0.0
) -> Piece:
    """Return `box` of the matrix at `starts` of the param; extra leading axes have length one. `gain`: added by the
    engine (zero-centered norms: 1)."""
    lead = len(starts) - len(box)
    shift = matrix.offset - gain
    transforms: tuple[Transform, ...] = (Add(shift),) if shift else ()
    counts = (1,) * lead + tuple(span.count for span in box)
    param_box = tuple(Span(start, count) for start, count in zip(starts, counts, strict=True))
    tensor_box = [Span(start, 1) for start in matrix.tensor_starts]
    for span, axis in zip(box, matrix.axes, strict=True):
        step = matrix.tensor_steps[axis]
        tensor_box[axis] = Span(matrix.tensor_starts[axis] + span.start * step, span.count, span.step * step)
    axes = (*(None,) * lead, *matrix.axes)
    return Piece(matrix.tensor, tuple(tensor_box), param, param_box, axes, transforms, primary)


def on_axis(matrix: Matrix, axis: int, span: Span) -> Box:
    """The whole matrix but for `axis`, where it is `span`."""
    return tuple(span if i == axis else Span(0, n) for i, n in enumerate(matrix.shape))
