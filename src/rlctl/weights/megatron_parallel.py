"""Megatron's parallel sizes, the coordinates of a rank, and which layers a pipeline stage has.

Sources: megatron/core/parallel_state.py (rank order tp-cp-ep-dp-pp), transformer_block.py and transformer_layer.py
(layers of a stage); the same in versions 0.16 to 0.19.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from rlctl.errors import ConfigError
from rlctl.models.facts import ModelFacts

Spec = Literal["local", "te"]
Experts = Literal["sequential", "grouped", "legacy_grouped"]


@dataclass(frozen=True)
class MegatronParallel:
    """Parallel sizes as Megatron names them. World size is tp x cp x dp x pp."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    """Tensor parallel size of the experts; None is tp, Megatron's own default."""
    vpp: int | None = None
    """Model chunks a pipeline stage."""
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    vocab_multiple: int = 1
    """The vocabulary is padded to a multiple of this times tp (`make_vocab_size_divisible_by`)."""

    def __post_init__(self) -> None:
        if self.stage_size % (self.expert_tp * self.ep):
            parts = f"etp x ep = {self.expert_tp} x {self.ep}"
            what = f"A pipeline stage of {self.stage_size} ranks"
            raise ConfigError(f"{what} does not divide by {parts}.", "Change ep or etp.")
        if self.chunks > 1 and self.pp == 1:
            raise ConfigError("vpp needs pp of at least 2.", "Leave vpp out, or set pp.")

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def chunks(self) -> int:
        return self.vpp or 1

    def padded_vocab(self, vocab: int) -> int:
        """Rows of the embedding."""
        multiple = self.vocab_multiple * self.tp
        return -(-vocab // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where a rank stands as far as weights are concerned."""

    pp: int
    tp: int
    ep: int
    etp: int


@dataclass(frozen=True)
class MegatronSetting:
    """What fixes the params of every rank of a policy."""

    facts: ModelFacts
    parallel: MegatronParallel
    spec: Spec = "local"
    """The layer spec: its own modules, or TransformerEngine's, which fuse norms into linear layers."""
    dtype: str = "float32"
    experts: Experts = "sequential"
    """SequentialMLP, TEGroupedMLP (one weight an expert), or the GroupedMLP with all experts in one weight."""
    zero_centered_norms: bool = False
    """The engine adds one to norm gains (`layernorm_zero_centered_gamma`)."""
    mla_down: Literal["replicated", "column"] = "replicated"
    """How the down-projections of MLA are held."""


def coordinates(parallel: MegatronParallel, rank: int) -> Coordinates:
    """Coordinates of `rank`: tp is fastest, then cp, dp, pp; for experts etp, ep, expert dp, pp."""
    stage, inside = divmod(rank, parallel.stage_size)
    return Coordinates(
        stage, inside % parallel.tp, inside // parallel.expert_tp % parallel.ep, inside % parallel.expert_tp
    )


def stage_counts(layers: int, parallel: MegatronParallel) -> list[int]:
    """Layers of each pipeline stage."""
    if parallel.pp == 1:
        return [layers]
    ends = {0: parallel.first_stage_layers, parallel.pp - 1: parallel.last_stage_layers}
    given = {stage: count for stage, count in ends.items() if count is not None}
    left, stages = layers - sum(given.values()), parallel.pp - len(given)
    if left < 0 or (left if stages == 0 else left % stages):
        raise ConfigError(f"{layers} layers do not divide over pp = {parallel.pp} stages.", "Set first_stage_layers.")
    return [given.get(stage, left // stages if stages else 0) for stage in range(parallel.pp)]


def chunk_layers(layers: int, parallel: MegatronParallel, stage: int, chunk: int) -> range:
    """Layers (from 0) of one model chunk of a stage, uneven first and last stages included."""
    counts = stage_counts(layers, parallel)
    for count in counts:
        if count % parallel.chunks:
            raise ConfigError(f"A stage of {count} layers does not divide by vpp = {parallel.chunks}.", "Change vpp.")
    per_chunk = [count // parallel.chunks for count in counts]
    start = chunk * sum(per_chunk) + sum(per_chunk[:stage])
    return range(start, start + per_chunk[stage])


@lru_cache(maxsize=64)
def stage_of_layer(layers: int, mtp_layers: int, parallel: MegatronParallel) -> dict[int, int]:
    """Layer -> its stage; multi-token-prediction layers are on the last."""
    stages = {
        layer: stage
        for stage in range(parallel.pp)
        for chunk in range(parallel.chunks)
        for layer in chunk_layers(layers, parallel, stage, chunk)
    }
    return stages | dict.fromkeys(range(layers, layers + mtp_layers), parallel.pp - 1)


@lru_cache(maxsize=64)
def first_layers(layers: int, parallel: MegatronParallel) -> list[int]:
    """First layer of each stage's first chunk."""
    return [chunk_layers(layers, parallel, stage, 0).start for stage in range(parallel.pp)]
