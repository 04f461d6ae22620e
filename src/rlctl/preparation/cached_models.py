"""Cache of the models that rlctl makes: each is complete or absent, and verified with checksums."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from rlctl.checkpoints.model_files import Tell
from rlctl.checkpoints.staging import locked
from rlctl.config.files import cache_directory
from rlctl.errors import MachineError, WaitTimeoutError

CHECKSUMS = "checksums.json"
TIMEOUT_S = 900.0


def kept(label: str, make: Callable[[Path, Path], None], record: Mapping[str, str], tell: Tell) -> Path:
    """Return the directory of a model, made on first use under a lock.

    `make(work, destination)` writes the model to `destination` and its temporary files to `work`. `record`: the model's
    origin, stored beside the checksums.
    """
    models = cache_directory() / "models"
    models.mkdir(parents=True, exist_ok=True)
    target = models / label
    with locked(target, tell):
        if target.exists() and not is_intact(target):
            tell(f"{target} does not match its checksums; making it again")
            shutil.rmtree(target)
        for left in models.glob(f".{label}-*"):  # left by a killed process, since this process holds the lock
            shutil.rmtree(left, ignore_errors=True)
        if not target.exists():
            with tempfile.TemporaryDirectory(prefix=f".{label}-", dir=models) as work:
                built = Path(work) / label
                make(Path(work), built)
                seal(built, {"label": label, **record})
                built.rename(target)
    return target


def run(command: list[str], doing: str, instead: str = "Give --model a local Hugging Face directory instead.") -> None:
    """Run a helper process and hide its output. Raises MachineError with the last lines of output and the hint
    `instead` if it fails."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False)
    except subprocess.TimeoutExpired as error:
        raise WaitTimeoutError(f"{doing} took longer than {TIMEOUT_S:.0f} s.") from error
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        reason = "\n".join(lines[-3:]) or f"exit code {done.returncode}"
        raise MachineError(f"{doing} failed: {reason}", instead)


def seal(directory: Path, record: Mapping[str, str]) -> None:
    """Write checksums, make every file readable for all users, and flush the files to disk before the rename."""
    files = sorted(path for path in directory.iterdir() if path.is_file())
    sealed = {**record, "sha256": {path.name: sha256(path) for path in files}}
    (directory / CHECKSUMS).write_text(json.dumps(sealed, indent=2) + "\n")
    for path in directory.iterdir():
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    directory.chmod(0o755)


def is_intact(directory: Path) -> bool:
    """Return whether every file with a checksum exists and is unchanged."""
    try:
        record = json.loads((directory / CHECKSUMS).read_text())
        return all(sha256(directory / name) == digest for name, digest in record["sha256"].items())
    except (OSError, ValueError, KeyError):
        return False


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file; cached in this process until the file changes."""
    status = path.stat()
    return _sha256(path, status.st_size, status.st_mtime_ns, status.st_ino)


@functools.cache
def _sha256(path: Path, *state: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
