"""Rows of folders with tasks for agents, in the forms of Harbor (task.toml) and terminal-bench (task.yaml). The
prompt is the instruction; the field `task` is the folder, which the environment `harbor` plays."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from rlctl.data.prompt_rows import PromptDataset, instructions
from rlctl.data.row_types import PROMPTS, RowType
from rlctl.errors import InputError
from rlctl.settings.data import DataConfig

HARBOR, TERMINAL_BENCH = "task.toml", "task.yaml"
CANARY = re.compile(r"\A(?:\s*(?:<!--.*canary.*-->|#.*canary.*)\n)*\s*", re.IGNORECASE)
"""Leading lines that mark an instruction as a benchmark's, which Harbor does not show to agents."""


def task_folders(name: str) -> list[Path]:
    """Return the tasks of a folder, or the folder itself if it is one; empty: it is no folder of tasks."""
    place = Path(name)
    folders = [place, *sorted(place.iterdir())] if place.is_dir() else []
    return [folder for folder in folders if any((folder / file).is_file() for file in (HARBOR, TERMINAL_BENCH))]


def open_tasks(name: str, folders: Sequence[Path], data: DataConfig, rows: RowType = PROMPTS) -> PromptDataset:
    """Return a row for each task (the first `data.size`). Raises InputError for a task without an instruction."""
    read = []
    for index, folder in enumerate(folders[: data.size]):
        record = {data.prompt_field: instruction_of(folder), "name": folder.name, "task": str(folder.resolve())}
        read.append(rows.read(record, index, f"task {folder}", data))
    identity = {"sha256": folder_digest(*folders[: data.size])}
    return PromptDataset(name, len(read), read.__getitem__, identity, instructions(data), checked=len(read))


def instruction_of(folder: Path) -> str:
    """Return what a task asks for. Raises InputError for an unreadable one, and for Harbor's tasks of several steps."""
    try:
        if not (folder / HARBOR).is_file():
            return str(yaml.safe_load((folder / TERMINAL_BENCH).read_text(encoding="utf-8"))["instruction"])
        if (folder / "steps").is_dir() and not (folder / "instruction.md").is_file():
            raise InputError(f"{folder} is a task of several steps, and rlctl plays tasks of one.", "Leave it out.")
        return CANARY.sub("", (folder / "instruction.md").read_text(encoding="utf-8"), count=1)
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise InputError(
            f"{folder} has no readable instruction: {error!r:.200}.", "Leave it out, or mend it."
        ) from error


def folder_digest(*folders: Path) -> str:
    """Return the SHA-256 of the names and contents of all files."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            digest.update(f"{folder.name}/{path.relative_to(folder)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
