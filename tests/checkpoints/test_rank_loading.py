"""Ranks read their own parts of a model directory, whatever form it has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlctl.checkpoints.conversion.hf_megatron import hf_to_megatron
from rlctl.checkpoints.hf.hf_model import read_config
from rlctl.checkpoints.rank_loading import load_rank
from rlctl.config.parallel import ParallelSpec
from rlctl.errors import InputError
from rlctl.models.facts import ModelFacts
from rlctl.models.families import facts_from_hf_config
from rlctl.tiny_models.text import write_tiny_family
from rlctl.weights.megatron import MegatronWorld
from rlctl.weights.plan_execution import dtype_of

BLOCK = (48, 80)  # divides neither the matrices nor a rank's part of them


def facts_of(directory: Path) -> ModelFacts:
    return facts_from_hf_config(read_config(directory))


def loaded(directory: Path, facts: ModelFacts, parallel: ParallelSpec, rank: int) -> dict[str, torch.Tensor]:
    world = MegatronWorld(facts, parallel)
    params = {
        name: torch.full(spec.shape, torch.nan, dtype=dtype_of(spec.dtype))
        for name, spec in world.layout(rank).params.items()
    }
    load_rank(directory, world, rank, params, facts)
    return params


def quantized(directory: Path, plain: Path) -> None:
    """Projections of `directory` in float8 with a scale a block; `plain` gets the values they stand for."""
    held = load_file(directory / "model.safetensors")
    values = dict(held)
    for name in [n for n in held if n.endswith("_proj.weight")]:
        rows, columns = held[name].shape
        scale = torch.rand(-(-rows // BLOCK[0]), -(-columns // BLOCK[1])) + 0.5
        small = held[name].to(torch.float8_e4m3fn)
        held |= {name: small, f"{name}_scale_inv": scale}
        spread = scale.repeat_interleave(BLOCK[0], 0)[:rows].repeat_interleave(BLOCK[1], 1)[:, :columns]
        values[name] = small.float() * spread
    save_file(values, plain / "model.safetensors")
    save_file(held, directory / "model.safetensors")
    path = directory / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"weight_block_size": list(BLOCK)}}
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("parallel", [ParallelSpec(), ParallelSpec(tp=2), ParallelSpec(pp=2)], ids=str)
def test_odd_float8_blocks_are_the_same_on_every_rank(parallel: ParallelSpec, tmp_path: Path) -> None:
    scaled, plain = (write_tiny_family(tmp_path / name, intermediate_size=200) for name in ("scaled", "plain"))
    quantized(scaled, plain)
    facts = facts_of(plain)
    for rank in range(parallel.world_size):
        ours, theirs = loaded(scaled, facts, parallel, rank), loaded(plain, facts, parallel, rank)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), name


def test_a_megatron_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    model = write_tiny_family(tmp_path / "model")
    hf_to_megatron(model, tmp_path / "ckpt")
    other = facts_of(write_tiny_family(tmp_path / "other", intermediate_size=200))
    with pytest.raises(InputError, match=r"linear_fc\d\.weight has shape"):
        loaded(tmp_path / "ckpt", other, ParallelSpec(), 0)
