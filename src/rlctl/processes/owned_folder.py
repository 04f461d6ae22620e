"""A folder that is removed when the process that owns it ends, even if that is killed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

REMOVE = 'chmod -R u+rwX "$0" 2> /dev/null; rm -rf "$0" 2> /dev/null || { sleep 1; rm -rf "$0"; }'
"""Shell script that removes a folder, also with folders that forbid it and while a dying process writes."""
SWEEP = f"exec 3<&0; (cat <&3 > /dev/null; {REMOVE}) &"
"""Shell script that leaves a process which waits for the end of its input, then removes the folder. The input is a pipe
from the owner. The process must not be a child of the owner, because Ray ends a worker's children with it."""


class OwnedFolder:
    """A new folder of this process. Other processes use it like any other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700)
        read, self._life = os.pipe()
        subprocess.run(
            ["sh", "-c", SWEEP, str(folder)], stdin=read, env={"PATH": os.defpath}, start_new_session=True, check=True
        )
        os.close(read)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._life)
