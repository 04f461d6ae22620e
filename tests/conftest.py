"""Fixtures and environment that all tests share."""

from __future__ import annotations

import os
import random
import shutil
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import setuptools  # noqa: F401  # before anything imports distutils: torch's cpp_extension fails on the other order

# Set before any engine is imported: no network, one thread a process (tests run several), no telemetry, no compiling.
os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "WANDB_MODE": "disabled",
    }
)

from rlctl.data.gym_questions import GymProcess, gym_process
from rlctl.tiny_models.text import write_tiny_family
from rlctl.vector_math import warm_up
from support.durations import DurationsPlugin, make_scheduler
from support.forked_workers import started_anew

pytest_plugins = ["support.commands", "support.crew", "support.engines", "support.scoring"]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(DurationsPlugin(config), "durations")
    # Rewriting the assertions takes half of a collection, and compiling rlctl most of a command's start: both are kept
    # beside the files, also where PYTHONDONTWRITEBYTECODE is set.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests for GPUs if there is no driver, and only then: they fail if an engine does not find the GPU."""
    if shutil.which("nvidia-smi") is None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="there is no NVIDIA driver here"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return make_scheduler(config, log)


def pytest_collection_finish() -> None:
    """Tests compute in this process too; one that imports torch later than this has a single thread."""
    if "torch" in sys.modules:
        warm_up()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give each test random numbers of its own, and end the ranks of policies before a test that does not use them."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
    if "support.pool" in sys.modules and "pools" not in getattr(item, "fixturenames", ()):
        sys.modules["support.pool"].close_pools()


@pytest.fixture(autouse=True)
def workers_that_can_use_cuda(request: pytest.FixtureRequest) -> Iterator[None]:
    with started_anew(request.node):
        yield


@pytest.fixture(scope="session", autouse=True)
def converted_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs of tests convert their models: one place, so that each model is converted once in a session."""
    directory = tmp_path_factory.mktemp("converted")
    os.environ["RLCTL_MEGATRON_CHECKPOINT_DIR"] = str(directory)
    return directory


@pytest.fixture(scope="session", autouse=True)
def questions_process() -> GymProcess:
    """Kept, so that tests do not each start one."""
    return gym_process()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with its own output embedding."""
    return write_tiny_family(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_llama_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose output embedding is its input embedding."""
    return write_tiny_family(tmp_path_factory.mktemp("models") / "tiny-llama-tied", "llama-tied")


@pytest.fixture(scope="session")
def tiny_qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE."""
    return write_tiny_family(tmp_path_factory.mktemp("models") / "tiny-qwen3-moe", "qwen3_moe", num_experts=4)
