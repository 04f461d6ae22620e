"""The order of bytes and counts on processors that reorder stores and loads, such as those of GB200."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlctl.errors import MachineError
from rlctl.transport import staging
from rlctl.transport.staging import DONE, Ring, Segment, ring_bytes


def test_a_count_is_written_after_its_bytes_and_bytes_are_read_after_their_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    segment = Segment.create(ring_bytes(2, 2, 4096))
    sender, receiver = (
        Ring(segment, ("sender",), ("receiver",), me, capacity=4096, buffers=2, timeout_s=10.0) for me in (0, 1)
    )
    barriers: list[int] = []
    keep_order = staging.keep_order

    def noted() -> None:
        barriers.append(int(sender._cells[0, DONE]))
        keep_order()

    monkeypatch.setattr(staging, "KEEPS_ORDER", False)
    monkeypatch.setattr(staging, "keep_order", noted)
    with sender.refit(1, 1), receiver.refit(1, 1):
        sender.wait_free(0).fill_(7)
        before = int(sender._cells[0, DONE])
        barriers.clear()
        sender.filled(0)
        assert barriers == [before] != [sender._cells[0, DONE]]
        barriers.clear()
        assert int(receiver.wait_filled(0).sum()) == 7 * 4096
        assert barriers == [sender._cells[0, DONE]]
    sender.close()
    receiver.close()


def test_a_system_without_the_barrier_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "KEEPS_ORDER", False)
    staging.keep_order()
    monkeypatch.setattr(staging, "_LIBC", SimpleNamespace(syscall=lambda *_: -1))
    with pytest.raises(MachineError, match=r"needs membarrier.*--mover disk"):
        staging.keep_order()
