"""The store at which the members of a group meet: where it listens, and for how long."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from rlctl.errors import WorkerError
from rlctl.transport.process_group import Message, ServedStore, TransferGroup
from rlctl.transport.rounds import Rendezvous


def test_a_store_that_stopped_listening_serves_those_who_have_met() -> None:
    served = ServedStore("127.0.0.1", 30)
    stores = [served, TCPStore("127.0.0.1", served.port, is_master=False)]
    served.stop_listening()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", served.port), 5)
    stores[1].set("told", "late")
    assert served.get("told") == b"late"

    def sum_of_ranks(rank: int) -> float:
        """Meet in a group that is made after the store stopped listening."""
        store, limit = PrefixStore("later", stores[rank]), timedelta(seconds=30)
        value = torch.tensor([float(rank + 1)])
        dist.ProcessGroupGloo(store, rank, 2, limit).allreduce([value]).wait()
        return float(value)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(sum_of_ranks, range(2))) == [3.0, 3.0]


def test_the_end_of_a_store_closes_its_descriptor_alone() -> None:
    before = psutil.Process().num_fds()
    served = ServedStore("127.0.0.1", 30)
    served.stop_listening()
    with socket.socket() as other:  # with the number that has just become free
        del served
        assert other.getsockname()
        assert psutil.Process().num_fds() <= before + 1  # stores of other tests may close theirs meanwhile


def test_a_store_listens_at_the_given_address_alone() -> None:
    served = ServedStore("127.0.0.2", 30)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", served.port), 5)
    with pytest.raises(WorkerError, match=r"cannot listen at 192\.0\.2\.1"):
        ServedStore("192.0.2.1", 30)


class Nccl:
    """Keeps account of what a group asks of its backend."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def barrier(self, options: Any) -> Nccl:
        self.asked.append(("barrier", options.device))
        return self

    def wait(self, limit: timedelta) -> bool:
        return True

    def _start_coalescing(self) -> None:
        self.asked.append("(")

    def _end_coalescing(self) -> Nccl:
        self.asked.append(")")
        return self

    def send(self, memory: list[torch.Tensor], peer: int, tag: int) -> None:
        self.asked.append(("send", peer))

    def recv(self, memory: list[torch.Tensor], peer: int, tag: int) -> None:
        self.asked.append(("receive", peer))


def test_on_gpus_all_messages_of_a_group_go_through_its_one_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message outside a batch has NCCL make a communicator for the two members (torch's ProcessGroupNCCL.cpp)."""
    nccl, device, memory = Nccl(), torch.device("cuda", 0), torch.zeros(1)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Mock(return_value=nccl), raising=False)
    store = ServedStore("127.0.0.1", 30)
    group = TransferGroup.join(Rendezvous("127.0.0.1", store.port, "x", ("a", "b", "c")), 0, device, 30)
    assert nccl.asked == [("barrier", device)]  # all members make it together
    nccl.asked.clear()
    group.send(memory, 2).wait("it")
    group.together([], [Message(memory, 1, 0), Message(memory, 2, 0)])[0].wait("it")
    assert nccl.asked == ["(", ("send", 2), ")", "(", ("receive", 1), ("receive", 2), ")"]
    assert group.together([], []) == []
