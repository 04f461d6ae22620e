"""Parallel sizes of a policy, and values that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

SIZES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
"""The fields of `ParallelSpec` that are group sizes, in display order."""


@dataclass(frozen=True)
class ParallelSpec:
    """Sizes of a policy's parallel groups in Megatron's order: tp fastest, then cp, dp, pp; for experts etp, then
    ep."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Virtual pipeline stages (model chunks) of each pipeline rank."""
    cp: int = 1
    ep: int = 1
    etp: int = 0
    """Tensor parallel size of the experts; 0 or unset means `tp`, and reads as `tp`."""
    dp: int = 1
    replicate: int = 1
    """Copies of FSDP2's shards: each is sharded over dp / replicate ranks (times cp)."""
    sequence_parallel: bool | None = None
    """None or unset means `tp > 1`, and reads as that value."""
    first_stage_layers: int | None = None
    """Layers of the first pipeline stage; None: like unnamed stages."""
    last_stage_layers: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "etp", self.etp or self.tp)
        if self.sequence_parallel is None:
            object.__setattr__(self, "sequence_parallel", self.tp > 1)

    @property
    def model_size(self) -> int:
        """Ranks that hold the dense weights once, and work on one sample together."""
        return self.tp * self.cp * self.pp

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def world_size(self) -> int:
        return self.stage_size * self.pp

    @property
    def expert_size(self) -> int:
        """Ranks of one pipeline stage that hold its experts once."""
        return self.ep * self.etp

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts."""
        return max(1, self.stage_size // self.expert_size)

    @property
    def fsdp_shards(self) -> int:
        """Ranks over which FSDP2 shards each copy of the weights."""
        return self.dp // self.replicate * self.cp

    @property
    def row_multiple(self) -> int:
        """Divisor of a row's tokens: sequence-parallel parts, 2 chunks per context-parallel rank."""
        return (self.tp if self.sequence_parallel else 1) * (2 * self.cp if self.cp > 1 else 1)

    @property
    def micro_batch_multiple(self) -> int:
        """Divisor of micro-batches per step: the interleaved schedule needs groups of one micro-batch per stage."""
        return self.pp if self.vpp > 1 else 1

    def data_rank(self, rank: int) -> int:
        """Return the data-parallel rank of world rank `rank`: the index of the `BatchShard` it trains on."""
        return rank // (self.tp * self.cp) % self.dp

    @property
    def result_rank(self) -> int:
        """The world rank whose results are returned: the first of the last pipeline stage."""
        return self.stage_size * (self.pp - 1)

    def reports(self, rank: int) -> bool:
        """Return whether a rank returns its data-parallel rank's columns: the first on the last pipeline stage."""
        return rank >= self.result_rank and rank % (self.tp * self.cp) == 0

    def stage_layers(self, layers: int) -> list[int] | None:
        """Return the layers of each stage; None: `layers` do not divide, or a stage is empty. Named stages keep theirs;
        otherwise first and last are shorter."""
        ends = {0: self.first_stage_layers, self.pp - 1: self.last_stage_layers}
        custom = {stage: count for stage, count in ends.items() if count is not None}
        if not custom and layers % self.pp:
            left = layers - (self.pp - 2) * -(-layers // self.pp)
            custom = {0: -(-left // 2), self.pp - 1: left // 2}
        left, others = layers - sum(custom.values()), self.pp - len(custom)
        if left < others or min(custom.values(), default=1) < 1 or (left % others if others else left):
            return None
        return [custom.get(stage, left // max(1, others)) for stage in range(self.pp)]

    def name(self) -> str:
        """Return a short name that leaves out sizes of 1: `TP4 PP2 DP8`."""
        sizes = [(size, getattr(self, size)) for size in SIZES]
        listing = [(size, value) for size, value in sizes if size == "dp" or value > 1]
        return " ".join(f"{size.upper()}{value}" for size, value in listing)
