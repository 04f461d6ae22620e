"""Processes that become ranks of a policy or of engines without an engine, as tests need them; started once."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from rlctl.config.parallel import ParallelSpec
from rlctl.models.facts import ModelFacts
from rlctl.refit.records import Sent
from rlctl.refit.synthetic import SyntheticEngine, SyntheticSender
from rlctl.weights.dtensor import DTensorWorld
from rlctl.weights.megatron import MegatronWorld
from rlctl.weights.vllm import VllmParallel


class FaultySource(SyntheticSender):
    """A source that breaks on purpose in its second round."""

    fault = ""

    def refit_send(self, version: int, attempt: int) -> Sent:
        self.sent = super().refit_send(version, attempt)
        return self.sent

    def last_sent(self) -> tuple[Sent, int]:
        """What the last refit sent, and the bytes of it that went to other policy ranks."""
        exchange = self._state().exchange
        return self.sent, exchange.bytes if exchange else 0

    def be_impatient(self, seconds: float) -> None:
        for end in self._state().ends.values():
            be_impatient(end.sender, seconds)

    def _send_round(self, end: Any, index: int) -> float:
        if index == 1:
            break_down(self.fault)
        return super()._send_round(end, index)


class FaultyEngine(SyntheticEngine):
    """An engine that breaks on purpose once it has begun to receive."""

    fault = ""

    def be_impatient(self, seconds: float) -> None:
        be_impatient(self.receiver, seconds)

    def targets(self) -> Any:
        break_down(self.fault)
        return super().targets()


def be_impatient(end: Any, seconds: float) -> None:
    """From now on an end of a channel waits so long for the other: opening it may have taken a busy machine longer."""
    (getattr(end, "ring", None) or end.group).timeout_s = seconds


def break_down(fault: str) -> None:
    if fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(600)
    if fault == "raise":
        raise ValueError("asked for")


class Slot:
    """A process that is one thing after another."""

    def __init__(self) -> None:
        self.inner: Any = None

    def become_source(
        self,
        rank: int,
        facts: ModelFacts,
        parallel: ParallelSpec,
        dtype: str,
        node: str | None,
        device: str = "cpu",
        fsdp: bool = False,
    ) -> None:
        self._leave(node)
        world = DTensorWorld(facts, parallel, dtype) if fsdp else MegatronWorld(facts, parallel, "local", dtype)
        self.inner = FaultySource(rank, world, 1, device)
        self.inner.setup()

    def become_engine(
        self, index: int, facts: ModelFacts, parallel: VllmParallel, dtype: str, node: str | None, device: str = "cpu"
    ) -> None:
        self._leave(node)
        self.inner = FaultyEngine(index, facts, parallel, dtype, 1, device)

    def _leave(self, node: str | None) -> None:
        if self.inner is not None:
            self.inner.close()
        os.environ.pop("RLCTL_NODE", None)
        if node is not None:
            os.environ["RLCTL_NODE"] = node

    def meet(self, rank: int, size: int, port: int) -> None:
        """Join a process group, as trainers have one."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    def set_fault(self, fault: str) -> None:
        self.inner.fault = fault

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)
