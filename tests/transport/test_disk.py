"""Files of the disk mover where the disk does not take them."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from rlctl.errors import WorkerError
from rlctl.transport.disk import DiskSender
from rlctl.transport.round_buffers import Packer
from rlctl.transport.rounds import Channel, Connection, chunk_layout, cut_rounds, whole_tensors
from rlctl.weights.transfer_plan import SingleWorld, receive_plan


def sender(directory: Path) -> DiskSender:
    """One that sends 4,000 bytes."""
    layout = whole_tensors([("weight", "float32", (1000,))])
    rounds = cut_rounds(layout, 1 << 12)
    plan = receive_plan(SingleWorld(layout), chunk_layout(layout, rounds))
    packer = Packer(rounds, plan.copies, message=True)
    link = Connection("disk", 1 << 12, ("policy rank 0",), ("engine 0",), 1.0, directory=str(directory))
    return DiskSender(Channel(0, layout, "node", "cpu", (0,), link), 0, packer)


def test_a_place_that_is_none_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(WorkerError, match=r"refit\.directory: .*Not a directory"),
        sender(tmp_path / "file").begin(1, 1),
    ):
        pass


def test_want_of_space_names_the_key(tmp_path: Path) -> None:
    own = sender(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(WorkerError, match=r"refit\.directory: .*too large"), own.begin(1, 1):
            own.done(0, 4000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
