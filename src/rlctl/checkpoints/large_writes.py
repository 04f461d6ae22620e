"""Files that take large tensors: what is written in one call reaches the kernel in pieces.

One write(2) of 64 MiB took up to ten times as long as 64 of 1 MiB (into the page cache of ext4, Linux 6.18), and
torch.save hands a whole tensor over in one.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import BinaryIO, cast

PIECE = 1 << 20


class _Pieces(io.FileIO):
    def write(self, data: object) -> int:
        """Writes all of `data` (anything with a buffer), however little the kernel takes at once; returns its bytes."""
        left = memoryview(data).cast("B")  # type: ignore[arg-type]
        total = len(left)
        while left:
            left = left[super().write(left[:PIECE]) or 0 :]
        return total


def open_to_write(path: Path) -> BinaryIO:
    """A new file, replacing one that is there."""
    return cast(BinaryIO, io.BufferedWriter(_Pieces(str(path), "wb")))
