"""What `rlctl convert` writes, plain `megatron.core.dist_checkpointing` loads at any parallelism, and back again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlctl.checkpoints.conversion.hf_megatron import hf_to_megatron, megatron_to_hf
from rlctl.checkpoints.hf.safetensors_files import SafetensorsDirectory
from rlctl.config.parallel import ParallelSpec
from support.parallel_cases import Case, assemble, make_worker, pieces, write_without_forks
from support.pool import SLOW, Pools, covering, slowly
from support.reference_policy import hf_model, megatron_weights

CASES = {
    "alone": Case(),
    "tied-tp2": Case("llama-tied", ParallelSpec(tp=2)),
    "tied-pp2": Case("llama-tied", ParallelSpec(pp=2)),
    "qwen2-pp2": Case("qwen2", ParallelSpec(pp=2)),
    "qwen3-tp2": Case("qwen3", ParallelSpec(tp=2)),
    "deepseek-tp2": Case("deepseek", ParallelSpec(tp=2)),
    "deepseek-ep2": Case("deepseek", ParallelSpec(dp=2, ep=2)),
    "deepseek-pp2": Case("deepseek", ParallelSpec(pp=2)),
}
Held = list[tuple[str, Tensor, int, int, int | None]]


def load_plainly(rank: int, case: Case, shards: Path) -> Held:
    """A worker's model filled by Megatron's own loader, as Megatron-LM does it."""
    from megatron.core import dist_checkpointing

    worker = make_worker(rank, case, None)
    for chunk in worker.chunks:
        model = chunk.module
        loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(shards))
        model.load_state_dict(loaded["model"], strict=False)
    return list(pieces(worker, "data"))


def save_plainly(rank: int, case: Case, weights: dict[str, Tensor], shards: Path, metadata: dict[str, bool]) -> None:
    """A worker's model saved by Megatron's own writer."""
    from megatron.core import dist_checkpointing

    write_without_forks()
    worker = make_worker(rank, case, weights)
    state = worker.chunks[0].module.sharded_state_dict(metadata=metadata)
    dist_checkpointing.save({"model": state, "checkpoint_version": 3.0}, str(shards))
    torch.distributed.barrier()


@pytest.mark.parametrize("case", slowly(CASES, *covering(CASES)))
def test_megatron_loads_what_convert_writes(pools: Pools, case: Case, tmp_path: Path) -> None:
    model = hf_model(case.kind)
    model.save_pretrained(tmp_path / "hf")
    hf_to_megatron(tmp_path / "hf", tmp_path / "ckpt")
    ranks = pools(case.parallel.world_size).run(load_plainly, case, tmp_path / "ckpt" / "release")
    params, spread = assemble(ranks)
    expected = megatron_weights(case.kind, model.state_dict())
    assert spread == 0
    for name, value in expected.items():
        assert torch.equal(params[name], value), name


@pytest.mark.parametrize(
    ("name", "singleton"),
    [
        ("tied-tp2", False),
        ("qwen2-pp2", True),
        ("deepseek-ep2", False),
        ("deepseek-tp2", True),
        *(pytest.param(name, True, marks=SLOW) for name in ("tied-tp2", "deepseek-ep2")),
        *(pytest.param(name, False, marks=SLOW) for name in ("qwen2-pp2", "deepseek-tp2")),
    ],
)
def test_convert_reads_what_megatron_writes(pools: Pools, name: str, singleton: bool, tmp_path: Path) -> None:
    case = CASES[name]
    model = hf_model(case.kind)
    model.save_pretrained(tmp_path / "hf")
    shards = tmp_path / "ckpt" / "iter_0000007"
    shards.mkdir(parents=True)
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("7")
    weights = megatron_weights(case.kind, model.state_dict())
    metadata = {"singleton_local_shards": singleton}
    pools(case.parallel.world_size).run(save_plainly, case, weights, shards, metadata)
    report = megatron_to_hf(tmp_path / "ckpt", tmp_path / "back", config_from=tmp_path / "hf")
    assert report.verified
    before, after = SafetensorsDirectory.open(tmp_path / "hf"), SafetensorsDirectory.open(tmp_path / "back")
    assert before.tensors.keys() == after.tensors.keys()
    for tensor in before.tensors:
        assert torch.equal(before.read(tensor), after.read(tensor)), tensor
