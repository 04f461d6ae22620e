"""Weights for a Hugging Face directory: a Megatron checkpoint's, and the base model's for adapters and left-out
layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.checkpoints.conversion.stream import Beside, ParamReader
from rlctl.checkpoints.hf.hf_files import read_config
from rlctl.checkpoints.hf.hf_model import open_hf_model
from rlctl.checkpoints.hf.model_facts import facts_in
from rlctl.checkpoints.hf.reward_models import SCORE, scorer_config, with_score
from rlctl.checkpoints.megatron.lora_weights import adapter_keys, read_adapters, scale_of
from rlctl.checkpoints.megatron.megatron_directory import Base, MegatronDirectory, base_of, computed_in, is_of_run
from rlctl.checkpoints.megatron.megatron_model import Blocks, open_megatron_model, value_head
from rlctl.checkpoints.megatron.torch_dist_files import TorchDistReader
from rlctl.errors import InputError
from rlctl.models.facts import ModelFacts
from rlctl.models.families import weights_of
from rlctl.settings.training import Rounding
from rlctl.weights.layout import Layout, ParamSpec, Piece
from rlctl.weights.transfer_plan import SingleWorld, World

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Exported:
    """Weights as a source, and the configuration and tokenizer that go with them."""

    companions: Path
    config: dict[str, Any]
    facts: ModelFacts
    world: World
    source: ParamReader
    dtype: str
    """The run's compute dtype, else the checkpoint's."""
    rounding: Rounding = "unbiased"
    score: ParamSpec | None = None
    """The head of a reward model."""


def exported_weights(found: MegatronDirectory, config_from: Path | None, tell: Callable[[str], None]) -> Exported:
    """Return a checkpoint's weights with merged adapters and the base model's multi-token-prediction layers. `tell`
    reports missing parts. Raises InputError for a damaged checkpoint or a missing base model."""
    reader = TorchDistReader.open(found.shards)
    if adapter_keys(reader.shapes):
        return _merged(found, reader, config_from)
    companions = config_from or found.huggingface()
    if companions is None:
        hint = "Name the Hugging Face model it was made from with --config-from."
        raise InputError(f"{found.shards} has no config.json next to it.", hint)
    own_weights = _of_checkpoint(found, companions)
    untrained = facts_in(own_weights.companions)
    if own_weights.facts.mtp_layers == untrained.mtp_layers:
        return own_weights
    why = f"{found.shards} holds none of them."
    try:
        base = _of_base(base_of(found, config_from), own_weights.dtype) if is_of_run(found) else own_weights
        why = f"{base.companions} has none of them either." if is_of_run(found) else why
    except InputError as error:
        base, why = own_weights, error.message
    if base.facts.mtp_layers != untrained.mtp_layers:
        tell(f"without the multi-token-prediction layers that config.json calls for: {why}")
        return own_weights
    # What the run does not train is as it was in the model that it began with.
    lacking = weights_of(untrained).tensors.keys() - weights_of(own_weights.facts).tensors.keys()
    ours, theirs = own_weights.world.layout(0), base.world.layout(0)
    pieces = tuple(piece for piece in theirs.pieces if piece.tensor in lacking)
    read = _read_for(pieces)
    layout = Layout(0, ours.params | {name: theirs.params[name] for name in read}, ours.pieces + pieces, ours.fills)
    source = Beside(own_weights.source, base.source, read)
    return replace(own_weights, facts=untrained, world=SingleWorld(layout), source=source)


def _of_checkpoint(found: MegatronDirectory, companions: Path) -> Exported:
    config, head = read_config(companions), value_head(TorchDistReader.open(found.shards))
    model = open_megatron_model(found, facts_in(companions), valued=head is not None)
    blocks, (dtype, rounding) = Blocks(model.reader, model.blocks), computed_in(found)
    made = Exported(companions, config, model.facts, model.world, blocks, dtype or model.dtype, rounding)
    return _scoring(made, model.reader)


def _scoring(made: Exported, reader: TorchDistReader) -> Exported:
    head = value_head(reader)
    if head is None:
        return made
    score = ParamSpec(reader.shapes[head].shape, made.dtype)
    held = replace(score, dtype=reader.shapes[head].dtype)
    return replace(
        made,
        config=scorer_config(made.companions, made.config),
        world=SingleWorld(with_score(made.world.layout(0), held)),
        source=Beside(made.source, _Whole(reader, head), (SCORE,)),
        score=score,
    )


def _of_base(base: Base, dtype: str) -> Exported:
    if base.megatron is not None:
        return _of_checkpoint(base.megatron, base.directory)
    model = open_hf_model(base.directory)
    return Exported(base.directory, model.config, model.facts, model.world, model.source, dtype)


def _merged(found: MegatronDirectory, reader: TorchDistReader, config_from: Path | None) -> Exported:
    base, (computed, rounding) = base_of(found, config_from), computed_in(found)
    dtype = computed or reader.shapes[adapter_keys(reader.shapes)[0]].dtype
    under = _of_base(base, dtype)
    adapters = read_adapters(reader, under.facts, scale_of(base)).computed_in(dtype, rounding)
    world = SingleWorld(adapters.onto(under.world.layout(0)))
    source = Beside(under.source, adapters, adapters.params)
    made = replace(under, world=world, source=source, dtype=dtype, rounding=rounding)
    return _scoring(made if value_head(reader) is None else _headless(made), reader)


def _headless(made: Exported) -> Exported:
    facts, layout = replace(made.facts, tied_embeddings=True), made.world.layout(0)
    kept = weights_of(facts).tensors.keys()
    pieces = tuple(piece for piece in layout.pieces if piece.tensor in kept)
    read = _read_for(pieces)
    params = {name: spec for name, spec in layout.params.items() if name in read}
    return replace(made, facts=facts, world=SingleWorld(replace(layout, params=params, pieces=pieces)))


def _read_for(pieces: Iterable[Piece]) -> set[str]:
    return {name for one in pieces for name in (one.param, *(n for t in one.transforms for n in t.reads))}


@dataclass(frozen=True)
class _Whole:
    """A source of one whole tensor."""

    reader: TorchDistReader
    key: str

    def read(self, param: str) -> torch.Tensor:
        return self.reader.whole(self.key)

    def drop(self, param: str) -> None: ...
