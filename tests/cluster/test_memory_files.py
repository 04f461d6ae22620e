"""Files in a host's memory: they outlive who wrote them, and not the process that owns their folder."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time

import pytest

from rlctl.cluster.memory_files import SHARED_MEMORY, MemoryFiles

OWNER = """
import sys, time
from rlctl.cluster.memory_files import MemoryFiles
MemoryFiles(sys.argv[1])
print("ready", flush=True)
time.sleep(600)
"""
pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="this machine has no /dev/shm")


def test_a_folder_goes_with_its_owner_also_where_that_is_killed() -> None:
    folder = SHARED_MEMORY / f"rlctl-{secrets.token_hex(8)}"
    with subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "step_1").mkdir()
        (folder / "step_1" / "part").write_bytes(bytes(1000))
        owner.kill()
    deadline = time.monotonic() + 20
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not folder.exists()


def test_files_are_listed_read_and_copied_out_by_step(tmp_path) -> None:
    owner = MemoryFiles(str(SHARED_MEMORY / f"rlctl-{secrets.token_hex(8)}"))
    try:
        content = os.urandom(5000)
        for step in (1, 2):
            owner.make(step)
            (owner.place(step) / "critic").mkdir()
            (owner.place(step) / "critic" / "__0_0.distcp").write_bytes(content)
            (owner.place(step) / ".metadata").write_bytes(b"12")
            (owner.place(step) / "half.part").write_bytes(b"1")  # of a copy that was cut off
        assert owner.files(2) == {"critic/__0_0.distcp": 5000, ".metadata": 2}
        assert owner.read(2, "critic/__0_0.distcp", 1000) == content[1000:]
        owner.write_out(2, ["critic/__0_0.distcp"], str(tmp_path))
        assert (tmp_path / "critic" / "__0_0.distcp").read_bytes() == content
        owner.keep([2])
        assert owner.files(1) == {}
        assert len(owner.files(2)) == 2
    finally:
        owner.close()
    assert not owner.folder.exists()
