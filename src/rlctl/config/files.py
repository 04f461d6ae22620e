"""Files that users name: told from pipes, devices and directories before they are opened, and read up to a bound."""

from __future__ import annotations

import stat
from pathlib import Path

from rlctl.errors import ConfigError

TEXT_LIMIT_BYTES = 16 << 20
"""Size of a template, a source or a list of prompts beyond which the wrong file was named."""

KINDS = {
    stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}  # fmt: skip


def problem_with(path: Path) -> str | None:
    """Return why `path` is no file that can be read to its end, or None. Opening a pipe or a device may never return."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:  # a zero byte in the name
        return str(error)
    return None if stat.S_ISREG(mode) else f"it is {KINDS.get(stat.S_IFMT(mode), 'of another kind')}, not a file"


def read_text(path: Path, what: str, most_bytes: int = TEXT_LIMIT_BYTES) -> str:
    """Return the text of a file; `what` names it in errors. Raises ConfigError where it cannot be read, is no regular
    file, holds more than `most_bytes`, or is not UTF-8."""
    problem, data = problem_with(path), b""
    if problem is None:
        try:
            with path.open("rb") as file:
                data = file.read(most_bytes + 1)
        except OSError as error:
            problem = error.strerror or str(error)
    if len(data) > most_bytes:
        problem = f"it is larger than {most_bytes:,} bytes"
    if problem is None:
        try:
            return data.decode("utf-8-sig").replace("\r\n", "\n")
        except UnicodeDecodeError:
            problem = "it is not a UTF-8 text"
    raise ConfigError(f"{what} {path} cannot be read: {problem}.")
