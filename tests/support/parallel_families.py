"""What runs in the pool's processes: logits and gradients of a plain `GPTModel` filled from a converted checkpoint by
Megatron's own loader."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlctl.backends.base import PolicySpec
from rlctl.backends.batching.batch import WeightedSequence
from rlctl.backends.megatron.worker import MegatronWorker
from rlctl.config.parallel import ParallelSpec
from rlctl.data.rollouts import RolloutColumns
from rlctl.models.facts import ModelFacts
from rlctl.settings.training import OptimizerConfig
from support.family_models import VOCAB
from support.parallel_cases import Case as PolicyCase
from support.parallel_cases import pieces, plan_of


@dataclass(frozen=True)
class Cell:
    """A family under one set of parallel sizes."""

    family: str
    parallel: ParallelSpec
    share_prompts: bool = False


@dataclass
class Outcome:
    """One rank's part."""

    logits: list[tuple[tuple[int, int], int, int, Tensor]]
    """(group, row), position in the rollout, first vocabulary entry, logits of the rank's part of the vocabulary"""
    grads: list[tuple[str, Tensor, int, int, int | None]]


def make_batch() -> dict[int, RolloutColumns]:
    """Three groups of two rollouts; prompts longer than the window."""
    rng = np.random.default_rng(11)
    batch = {}
    for group in range(3):
        prompt = rng.integers(0, VOCAB, 6 + 2 * group)
        completions = [rng.integers(0, VOCAB, int(rng.integers(3, 9))) for _ in range(2)]
        tokens = np.concatenate([np.concatenate([prompt, c]) for c in completions]).astype(np.int32)
        mask = np.concatenate([np.arange(len(prompt) + len(c)) >= len(prompt) for c in completions])
        offsets = np.cumsum([0, *(len(prompt) + len(c) for c in completions)]).astype(np.int32)
        zeros = np.zeros(len(tokens), np.float32)
        batch[group] = RolloutColumns(tokens, offsets, mask, zeros, np.where(mask, 0, -1).astype(np.int32))
    return batch


def cotangent(group: int, row: int, length: int) -> Tensor:
    """[length, V]: what the rollout's logits are multiplied by in the loss; the largest gradients are about 0.5."""
    generator = torch.Generator().manual_seed(100 * group + row)
    return torch.randn(length, VOCAB, generator=generator) / 512


def run_cell(rank: int, cell: Cell, facts: ModelFacts, shards: Path, batch: dict[int, RolloutColumns]) -> Outcome:
    """Logits of every chosen position, and the gradients of their product with `cotangent`."""
    from megatron.core import dist_checkpointing

    spec = PolicySpec(facts, cell.parallel, optimizer=OptimizerConfig(), temperature=1.0, threads=1)
    worker = MegatronWorker(rank, cell.parallel.world_size, "127.0.0.1", spec)
    worker.build()
    for chunk in worker.chunks:
        loaded = dist_checkpointing.load({"model": chunk.module.sharded_state_dict()}, str(shards))
        chunk.module.load_state_dict(loaded["model"], strict=False)
        _plain(chunk)
    case = PolicyCase(parallel=cell.parallel, share_prompts=cell.share_prompts, micro_batch_tokens=48)
    shard = plan_of(case, batch).shards[cell.parallel.data_rank(rank)]
    worker.load_batch(shard, list)
    places = iter(
        [_places(micro, row, cell.parallel) for micro, row in zip(shard.minibatches[0], worker._rows[0], strict=True)]
    )
    found = worker.run_rows(worker._rows[0], lambda row, out: _product(out, next(places), batch), forward_only=False)
    logits = [entry for part in found for entry in part["logits"]]
    return Outcome(logits, list(pieces(worker, "grad")))


def _plain(chunk: Any) -> None:
    """Megatron's own GPTModel instead of the policy's output; gradients whole on every rank."""
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt.gpt_model import GPTModel

    chunk.module.__class__ = GPTModel
    chunk.zero_grad_buffer()

    def sum_gradients(self: Any, *args: Any, **kwargs: Any) -> None:
        for param in self.module.parameters():
            dense = getattr(param, "allreduce", True)
            group = (
                ps.get_data_parallel_group(with_context_parallel=True) if dense else ps.get_expert_data_parallel_group()
            )
            torch.distributed.all_reduce(param.main_grad, group=group)

    chunk.finish_grad_sync = MethodType(sum_gradients, chunk)


def _places(micro: list[WeightedSequence], row: Any, parallel: ParallelSpec) -> list[tuple[int, tuple[int, int], int]]:
    """(index among this rank's tokens, (group, row), position) of every token of a completion."""
    from megatron.core import parallel_state as ps

    from rlctl.backends.batching.context_parallel import zigzag

    rollouts = iter(micro)
    found = []
    for unit in row.units:
        parts = unit.completions or ((unit.tokens,) if unit.start < row.tokens else ())
        start = unit.start + (unit.prompt if unit.completions else 0)
        for length in parts:
            rollout = next(rollouts)
            first = rollout.prompt_tokens
            skipped = 0 if unit.completions else first
            for i in range(length - skipped):
                found.append((start + skipped + i, (rollout.position, rollout.sample), first + i))
            start += length
    if parallel.cp == 1:
        return found
    mine = zigzag(row.tokens_T.shape[0], parallel.cp, ps.get_context_parallel_rank())
    local = {int(token): index for index, token in enumerate(mine)}
    return [(local[token], key, position) for token, key, position in found if token in local]


def _product(out: Tensor, places: list, batch: dict[int, RolloutColumns]) -> tuple[Tensor, dict[str, Any]]:
    from megatron.core import parallel_state as ps

    logits_TV = out[0]
    first = logits_TV.shape[1] * ps.get_tensor_model_parallel_rank()
    loss, entries = logits_TV.sum() * 0, []
    for index, (group, row), position in places:
        span = batch[group].slice(row)
        length = span.stop - span.start
        weights = cotangent(group, row, length)[position, first : first + logits_TV.shape[1]]
        loss = loss + (logits_TV[index, : len(weights)] * weights).sum()
        entries.append(((group, row), position, first, logits_TV[index, : len(weights)].detach().clone()))
    return loss, {"logits": entries}
