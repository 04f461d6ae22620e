"""Every process that computes with torch on a CPU first lets the vector functions set themselves up on one thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

from rlctl.backends.base import PolicySpec
from rlctl.backends.dtensor.worker import DTensorWorker
from rlctl.backends.megatron import cpu
from rlctl.backends.vllm.engine import VllmEngine
from rlctl.checkpoints.conversion.hf_megatron import hf_to_megatron
from rlctl.models.families import facts_from_hf_config
from rlctl.vector_math import warm_up
from support.engines import HostedEngine

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests' modules

FRESH = """
from rlctl.vector_math import warm_up
warm_up()
import torch
f = torch.outer(torch.arange(512.), 1 / 10000 ** (torch.arange(0, 32, 2) / 32))
print(float((f.cos().double() - f.double().cos()).abs().max()))
"""


def warmed_up(worker: Any) -> bool:
    """Whether the process of a vLLM worker has done it."""
    from rlctl.vector_math import warm_up

    return warm_up.cache_info().currsize == 1


def test_a_policy_and_a_conversion_warm_up_before_they_compute(tiny_llama: Path, tmp_path: Path) -> None:
    spec = PolicySpec(facts_from_hf_config(json.loads((tiny_llama / "config.json").read_text())))
    sharded = DTensorWorker(0, 1, "127.0.0.1", spec)
    for begin in (cpu.install, sharded.prepare, lambda: hf_to_megatron(tiny_llama, tmp_path / "converted")):
        warm_up.cache_clear()
        begin()
        assert warm_up.cache_info().currsize == 1


def test_the_worker_of_an_engine_warms_up(engine: HostedEngine) -> None:
    assert engine.call(VllmEngine._rpc, warmed_up) == [True]


@pytest.mark.slow
def test_the_first_parallel_cosine_of_a_fresh_process_is_right() -> None:
    """Without the warm-up up to a quarter of the processes fail, on processors that have the fault."""
    environment = {key: value for key, value in os.environ.items() if key != "MKL_NUM_THREADS"}
    for _ in range(20):
        done = subprocess.run(
            [sys.executable, "-c", FRESH], env=environment | {"OMP_NUM_THREADS": "2"}, capture_output=True, text=True,
            timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert float(done.stdout) < 1e-6
