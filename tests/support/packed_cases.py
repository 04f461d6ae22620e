"""Functions for the pool's processes that train adapters over packed layers."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rlctl.backends.dtensor.packed_linear import packed_layers
from rlctl.models.facts import ModelFacts
from support.lora_cases import LORA
from support.parallel_cases import Batch, Case, Loss, column_by_rollout, load_batch, make_worker
from support.reference_policy import Optim

PLAIN = (Tensor, nn.Parameter)
"""Classes of tensors with memory; DTensors hold some of them."""


def tensor_bytes() -> int:
    """Bytes of all tensors of this process, each memory once."""
    gc.collect()
    tensors = [value for value in gc.get_objects() if type(value) in PLAIN and value.device.type == "cpu"]
    memories = {storage.data_ptr(): storage.nbytes() for storage in (value.untyped_storage() for value in tensors)}
    return sum(memories.values())


def run_packed(
    rank: int, case: Case, model: Path, facts: ModelFacts, batch: Batch, saved: Path | None
) -> dict[str, Any]:
    """Log-probs of policy and reference before and after two steps, and what holding a reference adds in memory.
    `saved` None: the log-probs and memory of a policy without adapters."""
    lora = replace(case, lora=LORA) if saved is not None else case
    worker = make_worker(rank, lora, model, own_facts=facts)
    out: dict[str, Any] = {"results": []}

    def logprobs(worker: Any, column: str) -> dict[tuple[int, int], Tensor]:
        shard = load_batch(worker, rank, case, batch)
        worker.add_logprobs(column)
        return column_by_rollout(worker, shard, column)  # type: ignore[arg-type]

    out["before"] = logprobs(worker, "old_logprobs")
    layers = packed_layers(worker.model)
    out["packed"] = {name: sum(part.nbytes for part in layer.buffers()) for name, layer in layers.items()}
    worker.parameters()  # frees what FSDP2 has gathered
    before = tensor_bytes()
    worker.hold_reference()
    out["added"] = tensor_bytes() - before
    if saved is None:
        return out
    for _ in range(2):
        load_batch(worker, rank, case, batch)
        out["results"].append(worker.train_minibatch(0, Loss(), Optim().lr))
    out["reference"] = logprobs(worker, "reference_logprobs")
    out["after"] = logprobs(worker, "old_logprobs")
    worker.save_begin(saved)
    worker.save_finish()
    again = make_worker(rank, lora, model, own_facts=facts)
    again.load_saved(saved)
    out["loaded"] = logprobs(again, "old_logprobs")
    return out
