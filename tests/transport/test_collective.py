"""The store at which the members of a group meet: where it listens, and for how long."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from rlctl.errors import WorkerError
from rlctl.transport.collective import ServedStore


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
    del served
    assert psutil.Process().num_fds() == before


def test_a_store_listens_at_the_given_address_alone() -> None:
    served = ServedStore("127.0.0.2", 30)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", served.port), 5)
    with pytest.raises(WorkerError, match=r"cannot listen at 192\.0\.2\.1"):
        ServedStore("192.0.2.1", 30)
