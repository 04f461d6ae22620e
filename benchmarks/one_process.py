"""Parts that the training benchmarks share: a policy of one process, a loss, and the memory of a step."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.backends.base import PolicySpec
from rlctl.backends.batching.batch import LossOutput, TokenBatch
from rlctl.backends.lookup import policy_backend
from rlctl.cluster.worker_host import imported
from rlctl.models.facts import ModelFacts
from rlctl.models.families import facts_from_hf_config
from rlctl.settings.training import OptimizerConfig

if TYPE_CHECKING:
    from rlctl.backends.policy_rank import PolicyRank


class PolicyGradient:
    """The plain policy gradient loss."""

    def __call__(self, batch: TokenBatch) -> LossOutput:
        return LossOutput(-(batch.logprobs_R * batch.advantages_R * batch.token_weights_R).sum())


def facts_of(model: Path) -> ModelFacts:
    """Read the facts of a model from its Hugging Face directory."""
    return facts_from_hf_config(json.loads((model / "config.json").read_text()))


@contextlib.contextmanager
def policy(
    model: Path, threads: int, backend: str = "megatron", optimizer: OptimizerConfig | None = None
) -> Iterator[PolicyRank]:
    """Make this process a policy in float32 with the model's weights."""
    spec = PolicySpec(facts_of(model), threads=threads, model_dir=model)
    spec = spec if optimizer is None else replace(spec, optimizer=optimizer)
    worker = imported(policy_backend(backend).worker)(0, 1, "127.0.0.1", spec)
    worker.setup(worker.open_store())
    try:
        worker.load_model(model)
        yield worker
    finally:
        worker.close()


def peak_bytes(step: Callable[[], object]) -> int:
    """Return by how much the memory of this process grows at most during `step` (Linux)."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _status("VmRSS")
    return highest_bytes(step) - before


def highest_bytes(step: Callable[[], object]) -> int:
    """Return the highest resident memory of this process during `step` (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # the highest counts from here on (proc(5))
    step()
    return _status("VmHWM")


def _status(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])
