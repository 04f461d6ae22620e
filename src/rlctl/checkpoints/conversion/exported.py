"""Weights for a Hugging Face directory: a Megatron checkpoint's, and the base model's for adapters and left-out
layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.checkpoints.conversion.stream import Beside, ParamReader
from rlctl.checkpoints.hf.hf_files import read_config
from rlctl.checkpoints.hf.hf_model import FLOATS, open_hf_model
from rlctl.checkpoints.hf.model_facts import facts_in
from rlctl.checkpoints.hf.reward_models import SCORE, scorer_config, with_score
from rlctl.checkpoints.megatron.lora_weights import adapter_keys, read_adapters, settings_of
from rlctl.checkpoints.megatron.megatron_directory import Base, MegatronDirectory, base_of, computed_in, is_of_run
from rlctl.checkpoints.megatron.megatron_model import Blocks, open_megatron_model, value_head
from rlctl.checkpoints.megatron.torch_dist_files import TorchDistReader
from rlctl.checkpoints.model_files import ModelFiles
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
    predicting: dict[str, ParamSpec] = field(default_factory=dict)
    """Multi-token-prediction tensors of the base model without modules in transformers; dtype empty: the model's."""

    @property
    def changed(self) -> dict[str, Any]:
        """The values of config.json that are others than the companions'."""
        before = read_config(self.companions)
        return {key: value for key, value in self.config.items() if key not in before or before[key] != value}


PREDICTING = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Keys of config.json with the number of multi-token-prediction layers."""


def exported_weights(
    megatron: MegatronDirectory, config_from: ModelFiles | None, tell: Callable[[str], None]
) -> Exported:
    """Return a checkpoint's weights with merged adapters and the base model's multi-token-prediction layers. `tell`
    receives missing parts. Raises InputError for a damaged checkpoint or a missing base model."""
    reader = TorchDistReader.open(megatron.shards)
    if adapter_keys(reader.shapes):
        return _merged(megatron, reader, config_from)
    companions = config_from.directory if config_from else megatron.huggingface()
    if companions is None:
        hint = "Name the Hugging Face model it was made from with --config-from."
        raise InputError(f"{megatron.shards} has no config.json next to it.", hint)
    own_weights = _of_checkpoint(megatron, companions)
    untrained = facts_in(own_weights.companions)
    if own_weights.score is not None:
        return _undeclared(own_weights, "a reward model predicts no tokens.", tell)
    if own_weights.facts.mtp_layers == untrained.mtp_layers and not untrained.left_out:
        return own_weights
    reason = f"{megatron.shards} holds none of them."
    try:
        base = exported_base(base_of(megatron, config_from), own_weights.dtype) if is_of_run(megatron) else own_weights
        reason = f"{base.companions} has none of them either." if is_of_run(megatron) else reason
    except InputError as error:
        base, reason = own_weights, error.message
    if base.facts.mtp_layers != untrained.mtp_layers or not (untrained.mtp_layers or base.predicting):
        return _undeclared(own_weights, reason, tell)
    # What the run does not train is as it was in the model that it began with.
    there = weights_of(untrained).tensors.keys() | base.predicting.keys()
    lacking = there - weights_of(own_weights.facts).tensors.keys()
    ours, theirs = own_weights.world.layout(0), base.world.layout(0)
    pieces = tuple(piece for piece in theirs.pieces if piece.tensor in lacking)
    read = _read_for(pieces)
    layout = Layout(0, ours.params | {name: theirs.params[name] for name in read}, ours.pieces + pieces, ours.fills)
    source = Beside(own_weights.source, base.source, read)
    world, further = SingleWorld(layout), base.predicting
    return replace(own_weights, facts=untrained, world=world, source=source, predicting=further)


def _undeclared(made: Exported, reason: str, tell: Callable[[str], None]) -> Exported:
    """Return a model without multi-token-prediction layers, which its config.json then does not call for either."""
    if called_for := {key: 0 for key in PREDICTING if made.config.get(key)}:
        tell(f"without the multi-token-prediction layers that config.json called for, which is changed: {reason}")
    return replace(made, config=made.config | called_for)


def _of_checkpoint(megatron: MegatronDirectory, companions: Path) -> Exported:
    config, head = read_config(companions), value_head(TorchDistReader.open(megatron.shards))
    model = open_megatron_model(megatron, facts_in(companions), valued=head is not None)
    blocks, (dtype, rounding) = Blocks(model.reader, model.blocks), computed_in(megatron)
    made = Exported(companions, config, model.facts, model.world, blocks, dtype or model.dtype, rounding)
    return _scoring(made, model.reader)


def _scoring(made: Exported, reader: TorchDistReader) -> Exported:
    head = value_head(reader)
    if head is None:
        return made
    score = ParamSpec(reader.shapes[head].shape, made.dtype)
    head_spec = replace(score, dtype=reader.shapes[head].dtype)
    return replace(
        made,
        config=scorer_config(made.companions, made.config),
        world=SingleWorld(with_score(made.world.layout(0), head_spec)),
        source=Beside(made.source, _Whole(reader, head), (SCORE,)),
        score=score,
        predicting={},
    )


def exported_base(base: Base, dtype: str) -> Exported:
    if base.megatron is not None:
        return _of_checkpoint(base.megatron, base.directory)
    model = open_hf_model(base.directory)
    base_layout, further = model.layout, model.predicting
    layout = replace(
        base_layout, params=base_layout.params | further.params, pieces=(*base_layout.pieces, *further.pieces)
    )
    kept = {
        piece.tensor: spec if spec.dtype in FLOATS - {model.dtype} else replace(spec, dtype="")
        for piece in further.pieces
        for spec in [further.params[piece.param]]
    }
    world = SingleWorld(layout)
    return Exported(base.directory, model.config, model.facts, world, model.source, dtype, predicting=kept)


def _merged(megatron: MegatronDirectory, reader: TorchDistReader, config_from: ModelFiles | None) -> Exported:
    base, (computed, rounding) = base_of(megatron, config_from), computed_in(megatron)
    dtype = computed or reader.shapes[adapter_keys(reader.shapes)[0]].dtype
    under = exported_base(base, dtype)
    adapters = read_adapters(reader, under.facts, settings_of(base)).computed_in(dtype, rounding)
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
    return {name for piece in pieces for name in (piece.param, *(n for t in piece.transforms for n in t.reads))}


@dataclass(frozen=True)
class _Whole:
    """A source of one whole tensor."""

    reader: TorchDistReader
    key: str

    def read(self, param: str) -> torch.Tensor:
        return self.reader.whole(self.key)

    def drop(self, param: str) -> None: ...
