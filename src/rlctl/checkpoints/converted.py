"""Models that a run converts once, keeps in the checkpoint directory, and starts from ever after.

Block-scaled weights (float8, four-bit experts), which every rank would unpack anew at every start, always are. Plain
ones are read as fast from the published files; they are converted where a user has named a checkpoint directory, which
other nodes may see while they do not see the model. `docs/convert.md` has the figures.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rlctl.checkpoints import record
from rlctl.checkpoints.identity import source_identity
from rlctl.checkpoints.places import converted_directory, named_directory
from rlctl.checkpoints.safetensors import SafetensorsDirectory
from rlctl.checkpoints.source import ModelSource, resolve_model
from rlctl.errors import InputError, MachineError, RlctlError, VerificationError

DIGITS = 12
"""Of the model's identity, in the name of its conversion."""


def is_block_scaled(directory: Path) -> bool:
    """Whether weights are stored in fewer bits, beside scales."""
    tensors = SafetensorsDirectory.open(directory).tensors
    return any(t.dtype.startswith("float8") or name.endswith("_blocks") for name, t in tensors.items())


def place_of(directory: Path, dtype: str) -> Path:
    """Where the conversion of a model directory is kept: one for each content and precision."""
    cached = directory.parent.name == "snapshots"  # a hub model: models--owner--name/snapshots/revision
    name = directory.parents[1].name.removeprefix("models--") if cached else directory.name
    return converted_directory() / f"{name}-{source_identity(directory)[:DIGITS]}-{dtype}"


def prepared(source: ModelSource, dtype: str, tell: Callable[[str], None]) -> ModelSource:
    """What a run starts from: `source` itself, or its conversion, which is made now unless it is there already.

    The conversion runs in a process of its own, under the lock of its place: of several runs one converts, and the
    others wait and reuse.

    Raises the error of a conversion that fails.
    """
    if source.megatron is not None or not (is_block_scaled(source.directory) or named_directory() is not None):
        return source
    place = place_of(source.directory, dtype)
    tell(f"starting from the {dtype} checkpoint in {place}, converted at the first run")
    command = ["convert", "hf-to-megatron", str(source.directory), str(place), "--dtype", dtype, "--reuse"]
    done = subprocess.run([sys.executable, "-m", "rlctl", *command], stdout=subprocess.DEVNULL)
    if done.returncode:  # it has said on stderr what was wrong
        kind = next((k for k in (InputError, MachineError, VerificationError) if k.exit_code == done.returncode), None)
        raise (kind or RlctlError)(
            f"{source.label} could not be converted into {place.parent}.",
            "Why is said above. Where it is the place: set RLCTL_MEGATRON_CHECKPOINT_DIR to a directory with room that "
            "every node sees.",
        )
    converted = resolve_model(str(place))
    return ModelSource(converted.directory, source.label, source.note, converted.megatron)


def fingerprints_of(source: ModelSource, dtype: str) -> dict[str, int]:
    """Of the tensors of a model that rlctl has converted to `dtype`; empty for any other."""
    return {} if source.megatron is None else record.fingerprints(source.megatron, dtype)
