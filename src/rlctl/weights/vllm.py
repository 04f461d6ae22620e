"""The layout of vLLM's ranks: fused qkv and gate_up, repeated KV heads, experts stacked as w13 and w2.

These functions describe each kind of layer. `backends/vllm/weights/locate.py` applies them to running modules,
`VllmWorld` to a model's sizes (tests, benchmarks). Copies of weights (tied outputs, halves of kv_b) exist only in
running models. Sources (vLLM 0.32): model_executor/layers/linear.py, vocab_parallel_embedding.py (padding to 64),
attention/mla_attention.py, fused_moe/routed_experts.py, fused_moe/expert_map_manager.py, fused_moe/config.py and
models/gpt_oss.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rlctl.models.facts import ModelFacts
from rlctl.models.families import weights_of
from rlctl.models.matrices import FLOAT32_ROLES, Matrix, ModelWeights, Role
from rlctl.weights.layout import Layout, ParamSpec, Piece, Span, share

VOCAB_PADDING = 64
# The published modules that each fused module consists of, in the order of its rows.
FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
}


@dataclass(frozen=True)
class MatrixPart:
    """A box of one published tensor inside a matrix or vector."""

    tensor: str
    shape: tuple[int, ...]
    """Shape of the whole published tensor."""
    start: tuple[int, ...]
    """Where the box begins in it."""
    row: int
    """First row of the matrix (or element of the vector) that holds the box."""
    rows: int


@dataclass(frozen=True)
class LocalMatrix:
    """One matrix or vector that a rank holds, and the parts of published tensors in it."""

    path: str
    """The module's name in vLLM's model."""
    parameter: str
    parts: tuple[MatrixPart, ...]
    columns: int = 0
    """Width of the matrix; 0 for a vector."""
    index: int | None = None
    """Number of the matrix in a stack of experts or heads."""
    transposed: bool = False
    """The parameter has rows and columns exchanged against the published tensor."""
    further: tuple[int, ...] = ()
    """Trailing axis sizes of non-matrices such as convolutions; `columns` is then 0."""
    elsewhere: tuple[str, ...] = ()
    """Published tensors that another rank holds for this one, which has zeros to add."""

    @property
    def full_name(self) -> str:
        """The parameter's name in vLLM's model."""
        return f"{self.path}.{self.parameter}"

    @property
    def param(self) -> str:
        """Name in the layout that a worker asks for."""
        return self.full_name + ("" if self.index is None else f"[{self.index}]")

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, self.columns) if self.columns else (self.rows, *self.further)

    def pieces(self) -> Iterator[Piece]:
        """The parts one below the other. A published tensor of all experts has one axis more in front."""
        row, width = 0, self.shape[1:]
        for part in self.parts:
            inner = (part.rows, *width)
            lead = len(part.shape) - len(inner)
            box = tuple(Span(start, count) for start, count in zip(part.start, (*(1,) * lead, *inner), strict=True))
            at = (Span(row, part.rows), *(Span(0, columns) for columns in width))
            yield Piece(part.tensor, box, self.param, at, tuple(range(lead, len(box))))
            row += part.rows


def layout_of(rank: int, matrices: Iterable[tuple[LocalMatrix, str]]) -> Layout:
    """Return the layout of matrices as separate params."""
    params: dict[str, ParamSpec] = {}
    pieces: list[Piece] = []
    for matrix, dtype in matrices:
        params[matrix.param] = ParamSpec(matrix.shape, dtype)
        pieces += matrix.pieces()
    return Layout(rank, params, tuple(pieces))


# The matrices of each kind of layer


@dataclass(frozen=True)
class Rows:
    """The rows of a published matrix that one rank holds."""

    total: int
    first: int
    count: int


def all_rows(total: int) -> Rows:
    """A replicated matrix."""
    return Rows(total, 0, total)


def equal_rows(total: int, tp: int, rank: int, quantity: str = "Output size") -> Rows:
    """The share of a column-parallel matrix. Raises ConfigError if `tp` does not divide it."""
    span = share(total, tp, rank, quantity, "generation tp")
    return Rows(total, span.start, span.count)


def below_one_another(parts: Sequence[Rows]) -> list[Rows]:
    """The same rows of one published matrix that consists of all the parts."""
    total, tensor_rows, start = sum(part.total for part in parts), [], 0
    for part in parts:
        tensor_rows.append(Rows(total, start + part.first, part.count))
        start += part.total
    return tensor_rows


def vocab_rows(vocab: int, tp: int, rank: int) -> Rows:
    """The share of an embedding: of the padded vocabulary, without its padding."""
    padded = -(-vocab // VOCAB_PADDING) * VOCAB_PADDING
    span = share(padded, tp, rank, "Padded vocabulary", "generation tp")
    first = min(span.start, vocab)
    return Rows(vocab, first, min(span.count, vocab - first))


def qkv_rows(heads: int, kv_heads: int, head_dim: int, v_head_dim: int, tp: int, rank: int) -> list[Rows]:
    """Return a rank's queries, keys and values; with more ranks than KV heads, ranks share them."""
    query_heads = share(heads, tp, rank, "Number of attention heads", "generation tp")
    if tp >= kv_heads:
        share(tp, kv_heads, 0, "generation tp", "number of KV heads")
        kv = Span(rank // (tp // kv_heads), 1)
    else:
        kv = share(kv_heads, tp, rank, "Number of KV heads", "generation tp")
    parts = ((heads, query_heads, head_dim), (kv_heads, kv, head_dim), (kv_heads, kv, v_head_dim))
    return [Rows(total * dim, span.start * dim, span.count * dim) for total, span, dim in parts]


def stacked_rows(
    path: str, parameter: str, tensors: Sequence[str], rows: Sequence[Rows], columns: int = 0, index: int | None = None
) -> LocalMatrix:
    """Rows of one or more published tensors, one below the other: all layers without a function below."""
    parts, row = [], 0
    for tensor, tensor_rows in zip(tensors, rows, strict=True):
        shape, start = (
            ((tensor_rows.total, columns), (tensor_rows.first, 0))
            if columns
            else ((tensor_rows.total,), (tensor_rows.first,))
        )
        parts.append(MatrixPart(tensor, shape, start, row, tensor_rows.count))
        row += tensor_rows.count
    return LocalMatrix(path, parameter, tuple(parts), columns, index)


def replicated(path: str, parameter: str, shape: tuple[int, ...]) -> LocalMatrix:
    """What every rank holds as it is published, under the name that it has in the model."""
    rows, *others = shape
    part = MatrixPart(f"{path}.{parameter}", shape, (0,) * len(shape), 0, rows)
    if len(others) == 1:
        return LocalMatrix(path, parameter, (part,), others[0])
    return LocalMatrix(path, parameter, (part,), further=tuple(others))


def row_parallel(path: str, tensor: str, outputs: int, inputs: int, tp: int, rank: int) -> LocalMatrix:
    """All outputs of an equal share of the inputs."""
    span = share(inputs, tp, rank, f"Axis 1 of {tensor}", "generation tp")
    part = MatrixPart(tensor, (outputs, inputs), (0, span.start), 0, outputs)
    return LocalMatrix(path, "weight", (part,), span.count)


class ExpertSizes(NamedTuple):
    """Sizes of each expert on one rank, without what kernels pad."""

    hidden: int
    width: int
    """Rows of the gate on this rank."""
    ranks: int
    """Ranks that share an expert."""
    rank: int


def expert(
    path: str,
    prefix: str,
    number: int,
    index: int,
    names: tuple[str, str, str],
    sizes: ExpertSizes,
    half: int,
    swapped: bool = False,
) -> Iterator[LocalMatrix]:
    """Expert `number` at `index` of a stack, from separate matrices named `names` (gate, up, down). `half`: first row
    of the second of gate and up; `swapped`: up first."""
    hidden, width, ranks, rank = sizes
    ffn = width * ranks
    gate, up, down = (f"{prefix}.{number}.{name}.weight" for name in names)
    halves = (up, gate) if swapped else (gate, up)
    rows = zip(halves, (0, half), strict=True)
    parts = tuple(MatrixPart(name, (ffn, hidden), (rank * width, 0), row, width) for name, row in rows)
    yield LocalMatrix(path, "w13_weight", parts, hidden, index)
    yield LocalMatrix(path, "w2_weight", (MatrixPart(down, (hidden, ffn), (0, rank * width), 0, hidden),), width, index)


def gpt_oss_expert(
    path: str, prefix: str, number: int, index: int, experts: int, sizes: ExpertSizes
) -> Iterator[LocalMatrix]:
    """One expert of gpt-oss, whose tensors [E, in, out] hold all experts, gate and up columns taking turns."""
    hidden, width, ranks, rank = sizes
    ffn, first = width * ranks, 2 * rank * width
    up = MatrixPart(f"{prefix}.gate_up_proj", (experts, hidden, 2 * ffn), (number, 0, first), 0, hidden)
    up_bias = MatrixPart(f"{prefix}.gate_up_proj_bias", (experts, 2 * ffn), (number, first), 0, 2 * width)
    down = MatrixPart(f"{prefix}.down_proj", (experts, ffn, hidden), (number, rank * width, 0), 0, width)
    down_bias = MatrixPart(f"{prefix}.down_proj_bias", (experts, hidden), (number, 0), 0, hidden)
    yield LocalMatrix(path, "w13_weight", (up,), 2 * width, index, transposed=True)
    yield LocalMatrix(path, "w2_weight", (down,), hidden, index, transposed=True)
    yield LocalMatrix(path, "w13_bias", (up_bias,), 0, index)
    # The ranks' products are added up, so the first rank alone holds the bias and the others hold zeros.
    elsewhere = (down_bias.tensor,) if rank else ()
    yield LocalMatrix(path, "w2_bias", () if rank else (down_bias,), 0, index, elsewhere=elsewhere)


def latent_halves(
    path: str, tensor: str, heads: int, keys: int, values: int, columns: int, tp: int, rank: int
) -> Iterator[LocalMatrix]:
    """The copies of kv_b for decoding with latent attention: each head's keys, and its transposed values."""
    total = tp * heads * (keys + values)
    for head in range(heads):
        first = (rank * heads + head) * (keys + values)
        yield stacked_rows(path, "W_UK_T", [tensor], [Rows(total, first, keys)], columns, head)
        part = MatrixPart(tensor, (total, columns), (first + keys, 0), 0, values)
        yield LocalMatrix(path, "W_UV", (part,), columns, head, transposed=True)


# The ranks of a model that does not run


@dataclass(frozen=True)
class VllmParallel:
    """Sizes of an engine: `dp` replicas with shared experts, `pp` stages, `tp` ranks; `ep`: whole experts over a
    stage's ranks of all replicas."""

    tp: int = 1
    dp: int = 1
    ep: bool = False
    pp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def expert_ranks(self) -> int:
        return self.tp * self.dp

    def place(self, rank: int) -> tuple[int, int, int]:
        replica, index = divmod(rank, self.tp * self.pp)
        return replica, *divmod(index, self.tp)

    def expert_rank(self, rank: int) -> int:
        """The place of `rank` among the ranks that hold the experts of its layers."""
        replica, _, index = self.place(rank)
        return replica * self.tp + index

    def stage_layers(self, layers: int, stage: int) -> range:
        """The layers of a stage; remaining layers go to the stages before the last, the later stages first."""
        base, more = divmod(layers, self.pp)
        counts = [base + (self.pp - 1 - more <= at < self.pp - 1) for at in range(self.pp)]
        first = sum(counts[:stage])
        return range(first, first + counts[stage])


VOCAB = frozenset({Role.EMBEDDING, Role.HEAD})
QKV = frozenset({Role.Q, Role.Q_BIAS})
ROW_PARALLEL = frozenset({Role.O, Role.DOWN, Role.SHARED_DOWN})
COLUMN_PARALLEL = frozenset({Role.GATE, Role.SHARED_GATE, Role.MLA_Q, Role.MLA_Q_UP, Role.MLA_KV_UP, Role.SINKS})
ENDS_EVERYWHERE = frozenset({"qwen3_moe", "mixtral", "gemma3", "gpt_oss"})
"""Families whose vLLM model file puts both embeddings and the last norm on every pipeline stage."""
NORMS_OF_HEADS = (Role.Q_NORM, Role.K_NORM)
DIVIDED_NORMS = frozenset({"minimax_m2"})
"""Families in whose norms over all heads vLLM's ranks have the gains of their heads."""
_FUSED_INTO = {name: fused for fused, names in FUSED.items() for name in names}


@dataclass(frozen=True)
class VllmWorld:
    """All ranks of an engine, by replica, then by stage."""

    facts: ModelFacts
    parallel: VllmParallel
    dtype: str = "bfloat16"

    @property
    def size(self) -> int:
        return self.parallel.world_size

    @cached_property
    def weights(self) -> ModelWeights:
        return weights_of(self.facts)

    def layout(self, rank: int) -> Layout:
        """Everything that `rank` holds, without the padding of vocabularies."""
        return layout_of(rank, ((m, dtype) for m, dtype in self._held(rank) if m.rows))

    def local_experts(self, rank: int) -> range:
        """Experts (global numbers) of a rank: as even as possible, the first ranks one more."""
        if self.facts.moe is None:
            return range(0)
        if not self.parallel.ep:
            return range(self.facts.moe.experts)
        base, more = divmod(self.facts.moe.experts, self.parallel.expert_ranks)
        expert_rank = self.parallel.expert_rank(rank)
        start = expert_rank * base + min(expert_rank, more)
        return range(start, start + base + (expert_rank < more))

    def _held(self, rank: int) -> Iterator[tuple[LocalMatrix, str]]:
        _, stage, at = self.parallel.place(rank)
        yield from self._dense((matrix for matrix in self.weights.outer if stage in self._stages(matrix.role)), at)
        layers = self.parallel.stage_layers(self.facts.layers, stage)
        for layer in layers:  # multi-token-prediction layers belong to a drafting model
            matrices = list(self.weights.layer(layer, self.local_experts(rank)))
            yield from self._dense((matrix for matrix in matrices if matrix.expert is None), at)
            yield from self._experts((matrix for matrix in matrices if matrix.expert is not None), rank)

    def _stages(self, role: Role) -> set[int]:
        if self.facts.family in ENDS_EVERYWHERE:
            return set(range(self.parallel.pp))
        last = self.parallel.pp - 1
        if role is not Role.EMBEDDING:
            return {last}
        return {0, last} if self.facts.tied_embeddings else {0}

    def _dense(self, matrices: Iterable[Matrix], rank: int) -> Iterator[tuple[LocalMatrix, str]]:
        by_tensor: dict[str, list[Matrix]] = {}
        for matrix in matrices:
            by_tensor.setdefault(matrix.tensor, []).append(matrix)
        done: set[str] = set()
        for tensor, (matrix, *_) in by_tensor.items():
            module, _, parameter = tensor.rpartition(".")
            parent, _, leaf = module.rpartition(".")
            fused = _FUSED_INTO.get(leaf, "")
            members = [f"{parent}.{name}.{parameter}" for name in FUSED.get(fused, ())]
            path = f"{parent}.{fused}"
            if not members or not all(name in by_tensor for name in members):
                path, members = module, [tensor]
            if members[0] not in done:
                done.update(members)
                dtype = "float32" if matrix.role in FLOAT32_ROLES else self.dtype
                yield self._module(path, parameter, [part for name in members for part in by_tensor[name]], rank), dtype

    def _module(self, path: str, parameter: str, matrices: Sequence[Matrix], rank: int) -> LocalMatrix:
        first, tp, facts = matrices[0], self.parallel.tp, self.facts
        tensors = [matrix.tensor for matrix in matrices]
        if first.role in ROW_PARALLEL:
            return row_parallel(path, first.tensor, first.shape[0], first.shape[1], tp, rank)
        if first.role in VOCAB:
            rows = [vocab_rows(facts.vocab, tp, rank)]
        elif first.role in QKV:
            rows = qkv_rows(facts.heads, facts.kv_heads, facts.head_dim, facts.head_dim, tp, rank)
        elif first.role in NORMS_OF_HEADS and facts.family in DIVIDED_NORMS:
            queries, keys, _ = qkv_rows(facts.heads, facts.kv_heads, facts.head_dim, facts.head_dim, tp, rank)
            rows = [queries if first.role is Role.Q_NORM else keys]
        elif first.role in COLUMN_PARALLEL:
            rows = [equal_rows(matrix.shape[0], tp, rank, f"Axis 0 of {matrix.tensor}") for matrix in matrices]
        else:
            rows = [all_rows(matrix.shape[0]) for matrix in matrices]
        if len(set(tensors)) == 1:
            rows = below_one_another(rows)
        return stacked_rows(path, parameter, tensors, rows, first.shape[1] if len(first.shape) > 1 else 0)

    def _experts(self, matrices: Iterable[Matrix], rank: int) -> Iterator[tuple[LocalMatrix, str]]:
        by_expert: dict[int, dict[Role, Matrix]] = {}
        for matrix in matrices:
            assert matrix.expert is not None
            by_expert.setdefault(matrix.expert, {})[matrix.role] = matrix
        # Without expert parallelism the ranks of every replica share each expert.
        ranks, place = (1, 0) if self.parallel.ep else (self.parallel.expert_ranks, self.parallel.expert_rank(rank))
        for index, (number, matrices_of) in enumerate(by_expert.items()):
            gate, up, down = (matrices_of[role] for role in (Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN))
            ffn, hidden = gate.shape
            sizes = ExpertSizes(
                hidden, share(ffn, ranks, 0, "Width of experts", "generation tp x dp").count, ranks, place
            )
            if gate.tensor == up.tensor:
                prefix = gate.tensor.rpartition(".")[0]
                path = f"{prefix}.routed_experts"
                unpacked = gpt_oss_expert(path, prefix, number, index, gate.tensor_shape[0], sizes)
            else:
                prefix = gate.tensor.rsplit(".", 3)[0]
                leaf = {matrix.role: matrix.tensor.split(".")[-2] for matrix in (gate, up, down)}
                names = leaf[Role.EXPERT_GATE], leaf[Role.EXPERT_UP], leaf[Role.EXPERT_DOWN]
                unpacked = expert(f"{prefix}.routed_experts", prefix, number, index, names, sizes, sizes.width)
            yield from ((matrix, self.dtype) for matrix in unpacked)
