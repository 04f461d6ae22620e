"""Filling the live weights of one rank from a model directory, Hugging Face's or Megatron's, without the other form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rlctl.checkpoints.megatron.megatron_directory import computed_in, find, is_of_run
from rlctl.errors import InputError
from rlctl.models.facts import ModelFacts
from rlctl.weights.transfer_plan import SingleWorld, World, receive_plan

if TYPE_CHECKING:
    import torch

    from rlctl.checkpoints.conversion.stream import ParamReader
    from rlctl.settings.training import LoraConfig


Pairs = dict[str, "tuple[torch.Tensor, torch.Tensor]"]
"""A [rank, inputs] and B [outputs, rank] by published tensor."""


def load_rank(
    directory: Path,
    world: World,
    rank: int,
    params: dict[str, torch.Tensor],
    facts: ModelFacts | None = None,
    *,
    valued: bool = False,
    masters: bool = False,
) -> int:
    """Stream a model directory into a rank's live params and return the bytes read.

    `params` are contiguous tensors named by `world.layout(rank)`; each element is written exactly once (proven first).
    Trained weights are rounded as in the run. `facts`: the policy's, checked against Megatron checkpoints. `valued`:
    all but the head of a value model. `masters`: read float32 weights if stored apart. Raises InputError for damaged or
    different models and mismatched params.
    """
    from rlctl.weights.plan_execution import execute, fill

    stored, opened, order = _open(directory, facts, valued, masters)
    megatron = find(directory)
    rounding = computed_in(megatron)[1] if megatron is not None and is_of_run(megatron) else "nearest"
    plan = receive_plan(stored, world.layout(rank)).prove()
    for name, spec in plan.layout.params.items():
        if name not in params:
            raise InputError(f"The policy has no parameter {name}, which the layout expects.")
        if tuple(params[name].shape) != spec.shape:
            shapes = f"shape {list(params[name].shape)} in the policy, but {list(spec.shape)} in the layout"
            raise InputError(f"{name} has {shapes}.")
    if extra := sorted(params.keys() - plan.layout.params.keys()):
        raise InputError(f"The policy's parameter {extra[0]} is in no layout and would keep its random values.")
    fill(plan.fills, params, plan.layout.params)
    read = 0
    for copy in sorted(plan.copies, key=lambda c: order[c.source_param]):
        execute(copy, opened.read(copy.source_param), params[copy.destination_param], opened.read, rounding)
        opened.drop(copy.source_param)
        read += copy.elements * params[copy.destination_param].element_size()
    return read


def require_policy(directory: Path) -> Path:
    """Return a directory that holds a policy checkpoint; raise InputError where it holds none."""
    if not (directory / ".metadata").is_file():
        raise InputError(
            f"{directory} holds no policy checkpoint.", "Name a directory checkpoints/step_N/policy of a run."
        )
    return directory


def load_adapters(directory: Path, facts: ModelFacts, lora: LoraConfig) -> Pairs:
    """Return a policy checkpoint's float32 adapters by published tensor: A [rank, inputs], B [outputs, rank]. Raises
    InputError for none, or another model's."""
    from rlctl.checkpoints.megatron.lora_weights import adapter_keys, read_adapters
    from rlctl.checkpoints.megatron.megatron_model import MASTERS
    from rlctl.checkpoints.megatron.torch_dist_files import TorchDistReader

    reader = TorchDistReader.open(require_policy(directory))
    if not adapter_keys(reader.shapes):
        raise InputError(f"{directory} holds no adapters; its run trained all weights.", "Set training.lora.rank to 0.")
    has_masters = any(key.startswith(MASTERS) for key in reader.shapes)
    return read_adapters(reader, facts, lora, prefix=MASTERS if has_masters else "").pairs


class PeftAdapter(NamedTuple):
    """What a PEFT directory holds."""

    pairs: Pairs
    whole: dict[str, torch.Tensor]
    """Modules that were trained whole, by their parameter in transformers' modules."""


def peft_adapters(directory: Path, facts: ModelFacts, lora: LoraConfig) -> PeftAdapter:
    """Return the adapters of a PEFT directory by published tensor. Raises InputError for another model's, or for other
    layers than `lora` names."""
    from rlctl.checkpoints.conversion.peft_tensors import adapters_of_tensors
    from rlctl.checkpoints.hf.peft_files import read_peft_config, read_whole
    from rlctl.weights.adapter_sites import saved_whole, sites
    from rlctl.weights.dtensor import module_layout

    config = read_peft_config(directory)
    stored = adapters_of_tensors(config, facts, directory, whole_modules=True)
    run_sites = sites(facts, lora).by_tensor
    if odd := next(
        (name for name in stored.keys() | run_sites.keys() if (name in stored) != (name in run_sites)), None
    ):
        raise InputError(
            f"training.lora.adapter: {directory} and the run do not both have an adapter of {odd}.",
            "Leave the other keys of training.lora out: the adapter sets them.",
        )
    modules = read_whole(config)
    whole = {param: modules[param.removesuffix(".weight")] for param in saved_whole(facts, lora)}
    shapes = module_layout(facts, "float32").params
    if other := next((param for param, value in whole.items() if tuple(value.shape) != shapes[param].shape), None):
        raise InputError(
            f"training.lora.adapter: {other} of {directory} has shape {list(whole[other].shape)}, and the model's has "
            f"{list(shapes[other].shape)}.",
            "Name the model that it was trained on.",
        )
    return PeftAdapter({name: (pair.a, pair.b) for name, pair in stored.items()}, whole)


def load_value_head(directory: Path) -> torch.Tensor:
    """Read the head of values of a checkpoint, [1, H], whoever saved it. Raises InputError without one."""
    from rlctl.checkpoints.megatron.megatron_model import MASTERS, value_head
    from rlctl.checkpoints.megatron.torch_dist_files import TorchDistReader

    reader = TorchDistReader.open(require_policy(directory))
    key = value_head(reader)
    if key is None:
        raise InputError(f"{directory} holds no head of values.", "Copy the checkpoint again.")
    return reader.whole(MASTERS + key if MASTERS + key in reader.shapes else key)


def published_value_head(directory: Path) -> torch.Tensor | None:
    """Read the head of a published reward model, [1, H]; None: the directory is no such model."""
    from rlctl.checkpoints.hf.reward_models import SCORE
    from rlctl.checkpoints.hf.safetensors_files import SafetensorsDirectory

    files = SafetensorsDirectory.open(directory) if find(directory) is None else None
    return files.read(SCORE) if files is not None and SCORE in files.tensors else None


def _open(
    directory: Path, facts: ModelFacts | None, valued: bool, masters: bool
) -> tuple[World, ParamReader, dict[str, int]]:
    """A directory's world and params, and where each param lies: files are read front to back."""
    from rlctl.checkpoints.hf.hf_model import open_hf_model

    megatron = find(directory)
    if megatron is None or facts is None:
        model = open_hf_model(directory, facts if facts and facts.listed else None)
        names = sorted(model.layout.params, key=model.source.place)
        return model.world, model.source, {name: i for i, name in enumerate(names)}
    from rlctl.checkpoints.megatron.megatron_model import Blocks, open_megatron_model

    checkpoint = open_megatron_model(megatron, facts, without_mtp=not facts.mtp_layers, valued=valued)
    world, blocks = checkpoint.world, checkpoint.blocks
    if masters:
        layout, blocks = checkpoint.masters()
        world = SingleWorld(layout)
    return world, Blocks(checkpoint.reader, blocks), {name: i for i, name in enumerate(blocks)}
