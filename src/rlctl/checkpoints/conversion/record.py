"""The record next to the result of a conversion: its source, its report and the tensors' fingerprints. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlctl.checkpoints.identity import source_identity
from rlctl.checkpoints.megatron.megatron_directory import LATEST, RELEASE

RECORD = "rlctl_conversion.json"


def wanted(source: Path, dtype: str) -> dict[str, str]:
    """The values that identify a conversion of a Hugging Face directory to Megatron."""
    return {"source": source_identity(source), "dtype": dtype, "format": "torch_dist"}


def text_wanted(source: Path) -> dict[str, str]:
    """Return the values that identify a directory's text part."""
    return {"source": source_identity(source), "format": "text part"}


def write(
    directory: Path,
    conversion: dict[str, Any],
    report: dict[str, Any],
    fingerprints: Mapping[str, int],
    published: Mapping[str, str],
) -> None:
    """Record a finished `directory`. `wanted` identifies the conversion; `fingerprints` are per tensor; `published` has
    dtypes that differ in the source."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    files = {str(path.relative_to(directory)): path.stat().st_size for path in paths}
    files.pop(LATEST, None)  # names another iteration once one is saved next to it
    values = {"wanted": conversion, "report": report, "files": files, "published": dict(published)}
    values["fingerprints"] = {name: f"{value:016x}" for name, value in fingerprints.items()}
    (directory / RECORD).write_text(json.dumps(values, indent=2) + "\n")


def read(directory: Path) -> dict[str, Any] | None:
    """Return the record, or None if missing or incomplete."""
    try:
        entry = json.loads((directory / RECORD).read_text())
    except (OSError, ValueError):
        return None
    return entry if isinstance(entry, dict) and "report" in entry else None


def complete(directory: Path, conversion: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the record of a complete conversion with these values; None: missing, incomplete, or trained since."""
    made, latest = read(directory), directory / LATEST
    if made is None or made.get("wanted") != json.loads(json.dumps(conversion)) or damage(directory, made):
        return None
    return made if not latest.is_file() or latest.read_text(errors="replace").strip() == RELEASE else None


def damage(directory: Path, made: Mapping[str, Any], below: str = "") -> str | None:
    """Compare the sizes of the files (or of files `below` a folder) with the record `made`; None: they agree."""
    for name, size in made["files"].items():
        if not name.startswith(below):
            continue
        try:
            present = (directory / name).stat().st_size
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if present != size:
            return f"{name} has {present} bytes instead of {size}"
    return None


def fingerprints(shards: Path, dtype: str) -> dict[str, int]:
    """Return the fingerprints of a Megatron checkpoint's tensors at its conversion to `dtype`; empty if unknown, as for
    trained iterations."""
    return {name: int(value, 16) for name, value in _part(shards, dtype, "fingerprints").items()}


def published(shards: Path, dtype: str) -> dict[str, str]:
    """Return source dtypes that differ from a Megatron checkpoint's `dtype`; empty if unknown."""
    return _part(shards, dtype, "published")


def _part(shards: Path, dtype: str, key: str) -> dict[str, str]:
    entry = read(shards.parent) if shards.name == RELEASE else None
    return entry[key] if entry is not None and entry["report"].get("dtype") == dtype else {}
