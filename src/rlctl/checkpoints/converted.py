"""Models that a run converts once, keeps in the checkpoint directory, and starts from ever after.

Every rank then reads its part of plain, verified weights that all nodes see, whatever the published files are: float8,
four-bit experts, on the disk of one node, or gone from the hub's cache.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from math import prod
from pathlib import Path

from rlctl.checkpoints import record
from rlctl.checkpoints.identity import source_identity
from rlctl.checkpoints.megatron_directory import RELEASE, MegatronDirectory
from rlctl.checkpoints.places import (
    NAMED,
    converted_directory,
    hub_directory,
    named_directory,
    nearest_existing,
    write_problem,
)  # fmt: skip
from rlctl.checkpoints.safetensors import SafetensorsDirectory
from rlctl.checkpoints.source import ModelSource, of_megatron
from rlctl.checkpoints.staging import FREE_SPACE_MARGIN, any_content
from rlctl.errors import InputError, MachineError, RlctlError, VerificationError

CLEARING_S = 30.0
"""That an interrupted conversion may take to remove what it wrote."""
DIGITS = 12
"""Of the model's identity, in the name of its conversion."""


def place_of(directory: Path, dtype: str) -> Path:
    """Where the conversion of a model directory is kept: one for each content and precision."""
    cached = directory.parent.name == "snapshots"  # a hub model: models--owner--name/snapshots/revision
    name = directory.parents[1].name.removeprefix("models--") if cached else directory.name
    return converted_directory() / f"{name}-{source_identity(directory)[:DIGITS]}-{dtype}"


def prepared(source: ModelSource, dtype: str, nodes: int, tell: Callable[[str], None]) -> ModelSource:
    """What a run on `nodes` starts from: the conversion of `source`, which is made now unless it is there already.

    A Megatron checkpoint is what it is. Where the user has not said where conversions belong and the place for them
    will not do, the published files are, and `tell` hears why.

    Raises the error of a conversion that fails, and InputError where something else or a damaged one is in its place.
    """
    if source.megatron is not None:
        return source
    place, named = place_of(source.directory, dtype), named_directory() is not None
    why = None if named else _unseen(place, source.directory, nodes)
    if why is None and _is_there(place, source, dtype):
        tell(f"starting from {place}, converted by an earlier run")
    elif not named and (why := why or _unsuitable(place, source.directory, dtype)):
        tell(f"starting from the published files, which are not converted: {why} ({NAMED[0]} names another place)")
        return source
    else:
        tell(f"converting the model once, for every run to start from: {place} (model.convert=false does without)")
        try:
            _convert(source, place, dtype)
        except MachineError:  # what was free when it began is no more
            if named:
                raise
            tell(f"starting from the published files ({NAMED[0]} names another place for conversions)")
            return source
    # Not the iteration that somebody trained from it with other tools and saved beside it.
    converted = of_megatron(source.label, MegatronDirectory(place, place / RELEASE, None))
    return ModelSource(converted.directory, source.label, source.note, converted.megatron)


def _is_there(place: Path, source: ModelSource, dtype: str) -> bool:
    """Whether the conversion of `source` lies at `place`: its record does not before all else does.

    Raises InputError for one that is damaged (by the sizes of its files), and for anything else at `place`.
    """
    made = record.read(place)
    if made is None or made.get("wanted") != record.wanted(source.directory, dtype):
        if not os.path.exists(place) or not any_content(place):
            return False
        raise _to_be_removed(place, "is not a complete conversion")
    if problem := record.damage(place, made):
        raise _to_be_removed(place, f"was converted by an earlier run and has been damaged since: {problem}")
    return True


def _to_be_removed(place: Path, what: str) -> InputError:
    return InputError(
        f"{place} {what}.",
        f"Remove it, and the next run converts the model again: rm -r {shlex.quote(str(place))}. "
        "--set model.convert=false starts from the published files.",
    )


def _unseen(place: Path, source: Path, nodes: int) -> str | None:
    """Why processes on other nodes may not find what is at `place`, though they find `source`; None: they do."""
    beside = source.resolve().is_relative_to(hub_directory().resolve())
    return None if nodes == 1 or beside else f"other nodes may not see {place.parent}"


def _unsuitable(place: Path, source: Path, dtype: str) -> str | None:
    """Why no conversion of `source` can be written at `place`; None: one can."""
    there = nearest_existing(place.parent)
    if problem := write_problem(there):
        return problem
    needed, free = converted_bytes(source, dtype), shutil.disk_usage(there).free
    if free < needed * FREE_SPACE_MARGIN:
        return f"{there} has {free / 1e9:.3g} GB free of {needed / 1e9:.3g} GB needed"
    return None


def converted_bytes(directory: Path, dtype: str) -> int:
    """Bytes of a published model's weights in `dtype`, read from the headers of its files."""
    size = 4 if dtype == "float32" else 2
    tensors = SafetensorsDirectory.open(directory).tensors.items()
    packed = 2  # values in one byte of the four-bit experts
    return sum(prod(t.shape) * size * (packed if name.endswith("_blocks") else 1) for name, t in tensors)


def _convert(source: ModelSource, place: Path, dtype: str) -> None:
    """In a process of its own, under the lock of the place: of several runs one converts, the others wait and reuse."""
    command = ["convert", "hf-to-megatron", str(source.directory), str(place), "--dtype", dtype, "--reuse"]
    # -P: no module of the directory that the user works in stands for one of Python's.
    code = _run([sys.executable, "-P", "-m", "rlctl", *command])
    if code < 0:
        raise RlctlError(
            f"The conversion of {source.label} was killed by signal {-code}.",
            "Was memory short? Run again; what it left is cleared then.",
        )
    if code:  # it has said on stderr what was wrong
        kind = next((k for k in (InputError, MachineError, VerificationError) if k.exit_code == code), None)
        raise (kind or RlctlError)(
            f"{source.label} could not be converted into {place.parent}.",
            "Why is said above. Where it is the place: set RLCTL_MEGATRON_CHECKPOINT_DIR to a directory with room that "
            "every node sees, or start from the published files with --set model.convert=false.",
        )


def _run(command: list[str]) -> int:
    """Exit code of a command whose results nobody wants. An interruption reaches it, too: it clears what it wrote."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(CLEARING_S)
        raise
    finally:
        process.kill()  # nothing, where it has ended
        process.wait()


def fingerprints_of(source: ModelSource, dtype: str) -> dict[str, int]:
    """Of the tensors of a model that rlctl has converted to `dtype`; empty for any other."""
    return {} if source.megatron is None else record.fingerprints(source.megatron, dtype)
