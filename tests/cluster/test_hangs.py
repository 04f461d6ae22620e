"""Ranks that hang: whom they wait for, where each is, and how long they are waited for."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ray import cloudpickle
from torch.distributed import TCPStore

from rlctl.cluster import hangs, workers
from rlctl.cluster.hangs import Look, look_of
from rlctl.cluster.workers import WorkerGroup, WorkerSpec
from rlctl.errors import WaitTimeoutError
from rlctl.transport.process_group import ServedStore

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Rank:
    """A rank of a gloo group of three, with a group of ranks 0 and 2 in it."""

    def __init__(self, rank: int, port: int) -> None:
        self.rank = rank
        store = TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
        self.pair = dist.new_group([0, 2])

    def sum_up(self, sleeper: int | None = None) -> float:
        total = torch.ones(2)
        dist.all_reduce(total)
        if self.rank != 1:
            dist.all_reduce(total, group=self.pair)
        if self.rank == sleeper:
            sleep_long()
        dist.all_reduce(total)
        return float(total[0])


def sleep_long() -> None:
    time.sleep(600)


@pytest.fixture
def ranks(placement, tmp_path):
    store = ServedStore("127.0.0.1", 60)
    (bundle, *_), port = placement.bundles, store.port
    specs = [WorkerSpec({"rank": rank, "port": port}, (bundle,), hangs.RECORD) for rank in range(3)]
    limits = {"start_timeout_s": 120, "call_timeout_s": 60}
    group = WorkerGroup("policy", Rank, specs, placement, tmp_path / "logs", measured=True, **limits)
    yield group
    group.kill()


@pytest.mark.slow
@pytest.mark.guard
def test_the_rank_that_others_wait_for_is_named_and_all_stacks_are_kept(ranks, monkeypatch):
    assert ranks.call(Rank.sum_up) == [15.0, 15.0, 15.0]
    monkeypatch.setattr(workers, "LEAST_LIMIT_S", 3.0)
    monkeypatch.setattr(workers, "TIMES_SLOWEST", 0.0)
    with pytest.raises(WaitTimeoutError) as caught:
        ranks.call(Rank.sum_up, 1)
    said = caught.value.message
    assert "policy rank 0, 1, 2 did not finish `sum_up` in 3 s" in said
    assert "Rank 0, 2 wait for other ranks in all_reduce. Rank 1 does not wait, it is in `sleep_long` (" in said
    assert caught.value.node == ranks.specs[1].bundles[0].node
    logs = [ranks.log_path(rank).read_text() for rank in range(3)]
    assert ["in sleep_long" in text for text in logs] == [False, True, False]
    assert ["in all_reduce" in text for text in logs] == [True, False, True]
    # The numbers of the collectives, counted by hand: two of all three in the first call and one in the second.
    begun = {}
    for rank in range(3):
        entries = json.loads(hangs.record_path(ranks.log_path(rank)).read_text())["entries"]
        begun[rank] = max(one["collective_seq_id"] for one in entries if one["process_group"][1] == "default_pg")
    assert begun == {0: 4, 1: 3, 2: 4}


@pytest.mark.slow
@pytest.mark.guard
def test_limits_follow_the_slowest_call_of_a_method(ranks):
    assert ranks.limit_s("sum_up") == 60
    ranks.call(Rank.sum_up)
    assert ranks.limit_s("sum_up") == 300  # ten times less than this, and never below five minutes
    ranks.took("sum_up", 90.0)
    ranks.took("sum_up", 40.0)
    assert ranks.limit_s("sum_up") == ranks.part([0]).limit_s("sum_up") == 900
    assert ranks.limit_s("sum_alone") == 60
    assert ranks.within(7).limit_s("sum_up") == 7


def test_a_rank_that_waits_for_an_earlier_collective_is_behind():
    """Two ranks wait in different collectives of one group; a rank without a record is judged by its stack."""
    further = Look(open=(hangs.Collective("0:world", 9, "all_gather"),), last={"0:world": 9})
    early = Look("`load` (a.py:3)", (hangs.Collective("1:pair", 2, "send"),), {"0:world": 8, "1:pair": 2})
    said = hangs.diagnosis({0: further, 3: early})
    assert said == "Rank 0 waits for other ranks in all_gather. Rank 3 is behind, it is in `load` (a.py:3)."
    assert hangs.diagnosis({0: Look(in_torch=True), 1: Look()}) == "Rank 0 waits for other ranks. Rank 1 does not wait."
    assert hangs.diagnosis({}) == ""


def test_a_process_that_does_not_catch_the_signal_is_left_alone():
    with subprocess.Popen(["sleep", "60"]) as other:
        time.sleep(0.2)
        assert hangs.look_here([hangs.Process(other.pid, "/nowhere/log")]) == [look_of("", [])]
        assert other.poll() is None
        other.kill()


BUSY = """
import json, sys, threading, time
from pathlib import Path
from rlctl.cluster.hangs import answer_questions

def compute():
    while True:
        json.loads(text)

def wait():
    time.sleep(600)

text = json.dumps([{"a": [1, 2]}] * 20)
for _ in range(3):
    threading.Thread(target=compute, daemon=True).start()
answer_questions(Path(sys.argv[1]))
print("ready", flush=True)
wait()
"""
HOLDING = """
import ctypes, sys
from pathlib import Path
from rlctl.cluster.hangs import answer_questions

answer_questions(Path(sys.argv[1]))
print("ready", flush=True)
while True:  # the signal ends a sleep
    ctypes.PyDLL(None).sleep(600)
"""


@pytest.fixture
def looked_at(tmp_path):
    started = []

    def start(program: str) -> tuple[subprocess.Popen[str], hangs.Process]:
        log = tmp_path / "worker.log"
        with log.open("w") as out:
            command = [sys.executable, "-c", program, str(log)]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=out, text=True))
        assert started[-1].stdout.readline() == "ready\n"
        time.sleep(0.2)  # until it is in its last call
        return started[-1], hangs.Process(started[-1].pid, str(log))

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_process_whose_threads_compute_goes_on_after_many_looks(looked_at):
    """A rank that others are thought to wait for may be well."""
    process, there = looked_at(BUSY)
    for _ in range(50):
        hangs.look_here([there])
    assert process.poll() is None
    stacks = Path(there.log).read_text()
    assert stacks.count(" in wait\n") == 50
    assert stacks.count(" in compute\n") == 150


def test_a_process_whose_interpreter_is_held_shows_its_stacks(looked_at, monkeypatch):
    monkeypatch.setattr(hangs, "ANSWER_S", 0.5)
    process, there = looked_at(HOLDING)
    hangs.look_here([there])
    assert process.poll() is None
    assert '"<string>", line 9 in <module>' in Path(there.log).read_text()
