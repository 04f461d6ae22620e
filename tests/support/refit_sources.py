"""A policy of several processes without a training engine: shards of published tensors, moved by transfer plans."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rlctl.backends.base import WeightSource
from rlctl.backends.batching.batch import BatchShard, Fetch, LogprobStats
from rlctl.backends.messages import Sampling
from rlctl.refit.policy_side import RefitSender
from rlctl.refit.records import SenderSetup, Sent
from rlctl.weights.layout import Layout, ParamSpec, Piece, Span, whole
from rlctl.weights.transfer_plan import Copy, Shard, World
from support.engine_policies import WholeTensorPolicy

COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
ROW_PARALLEL = ("o_proj", "down_proj")


@dataclass(frozen=True)
class ShardedWorld:
    """tp x dp ranks (tp fastest). Output features are dealt in turns (row i on rank i % tp): boxes have steps."""

    shapes: dict[str, tuple[int, ...]]
    tp: int
    dp: int
    _layouts: dict[int, Layout] = field(default_factory=dict, compare=False)

    @property
    def size(self) -> int:
        return self.tp * self.dp

    def layout(self, rank: int) -> Layout:
        if rank not in self._layouts:
            pieces = tuple(self.piece(name, rank % self.tp) for name in self.shapes)
            params = {p.param: ParamSpec(tuple(s.count for s in p.param_box), "float32") for p in pieces}
            self._layouts[rank] = Layout(rank, params, pieces)
        return self._layouts[rank]

    def piece(self, name: str, tp_rank: int) -> Piece:
        shape, box = self.shapes[name], list(whole(self.shapes[name]))
        module = name.split(".")[-2]
        if module in COLUMN_PARALLEL:
            box[0] = Span(tp_rank, shape[0] // self.tp, self.tp)
        elif module in ROW_PARALLEL:
            box[1] = Span(tp_rank * (shape[1] // self.tp), shape[1] // self.tp)
        local = tuple(Span(0, span.count) for span in box)
        return Piece(name, tuple(box), f"local.{name}", local, tuple(range(len(shape))))

    def shards(self, tensor: str) -> Sequence[Shard]:
        if tensor not in self.shapes:
            return ()
        groups: dict[tuple, list[int]] = {}
        for rank in range(self.size):
            groups.setdefault(self.layout(rank).by_tensor[tensor][0].tensor_box, []).append(rank)
        return [
            Shard(ranks, ((p := self.layout(ranks[0]).by_tensor[tensor][0], self.layout(ranks[0]).params[p.param]),))
            for ranks in groups.values()
        ]


class ShardedSource(RefitSender, WeightSource):
    """One rank of such a policy. `fault` breaks it on purpose."""

    def __init__(self, rank: int, tp: int, dp: int, directory: Path, fault: str = "", transpose: str = "") -> None:
        from safetensors.torch import load_file

        self.rank, self.fault, self.transpose, self.directory = rank, fault, transpose, directory
        super().__init__(self)
        whole_tensors = load_file(directory / "model.safetensors")
        self.world = ShardedWorld({name: tuple(t.shape) for name, t in sorted(whole_tensors.items())}, tp, dp)
        self.held = {
            p.param: whole_tensors[p.tensor][
                tuple(slice(s.start, s.last + 1, s.step) for s in p.tensor_box)
            ].contiguous()
            for p in self.world.layout(rank).pieces
        }

    def parameters(self) -> dict[str, torch.Tensor]:
        return self.held

    def layouts(self) -> World:
        return self.world

    def shard(self, name: str) -> tuple[Any, torch.Tensor]:
        """This rank's box of a published tensor, and its values."""
        piece = self.world.layout(self.rank).by_tensor[name][0]
        return piece.tensor_box, self.held[piece.param]

    def refit_connect(self, setup: SenderSetup) -> Any:
        opened = super().refit_connect(setup)
        for end in self._state().ends.values():
            end.packer.copies = [[self._transposed(copy) for copy in own] for own in end.packer.copies]
        return opened

    def _transposed(self, copy: Copy) -> Copy:
        """A layout that writes one tensor with its axes exchanged."""
        view = copy.destination_view
        if copy.tensor != self.transpose:
            return copy
        return replace(copy, destination_view=view._replace(strides=view.strides[::-1]))

    def _send_round(self, end: Any, index: int) -> float:
        if self.fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._send_round(end, index)

    def refit_send(self, version: int, attempt: int) -> Sent:
        self.sent = super().refit_send(version, attempt)
        return self.sent

    # What a `PolicyClient` asks for log-probs; transformers computes them from the tensors of a single rank.

    def load_batch(self, shard: BatchShard, fetch: Fetch) -> None:
        handles = list(shard.columns)
        self.batch = list(zip(handles, fetch([shard.columns[group] for group in handles]), strict=True))

    def add_logprobs(self, column: str) -> None:
        policy = WholeTensorPolicy(self.directory)
        with torch.no_grad():
            for name, tensor in policy.tensors().items():
                tensor.copy_(self.held[f"local.{name}"])
        self.differences: list[torch.Tensor] = []
        for _, columns in self.batch:
            for row in range(columns.rollouts):
                span = columns.slice(row)
                tokens, chosen = columns.tokens_T[span].tolist(), int(columns.loss_mask_T[span].sum())
                own = policy.logprobs(tuple(tokens[:-chosen]), tokens[-chosen:], Sampling(chosen))
                self.differences.append(own - torch.tensor(columns.logprobs_T[span][-chosen:]))

    def logprob_difference(self, column: str) -> LogprobStats:
        d = torch.cat(self.differences).double()
        return LogprobStats(len(d), float(d.abs().sum()), float(d.abs().max()), float((d.exp() - 1 - d).sum()))

    def last_sent(self) -> Sent:
        """What the last refit sent."""
        return self.sent

    def break_from_now_on(self, fault: str) -> None:
        self.fault = fault


class SourceSlot:
    """A process that is one `ShardedSource` after another: its imports are paid for once."""

    inner: Any = None

    def become(self, arguments: dict[str, Any]) -> None:
        if self.inner is not None:
            self.inner.refit_close()
        self.inner = ShardedSource(**arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
