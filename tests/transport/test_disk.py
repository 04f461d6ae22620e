"""Files of the disk mover where the disk does not take them."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from rlctl.errors import WorkerError
from rlctl.transport.disk import WriteFile


def test_a_place_that_is_none_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkerError, match=r"refit\.directory: .*Not a directory"):
        WriteFile(str(tmp_path / "file"), 1, 0, "policy rank 0", b"")


def test_want_of_space_names_the_key(tmp_path: Path) -> None:
    writer = WriteFile(str(tmp_path), 1, 0, "policy rank 0", b"header")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(WorkerError, match=r"refit\.directory: .*too large.*room for two versions"):
            writer.write(torch.zeros(4000, dtype=torch.uint8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
