"""The text part of a model that takes images or sound as well, written as a model of its own, and put back into it."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from rlctl.checkpoints.conversion import record
from rlctl.checkpoints.conversion.stream import Progress, Streamed
from rlctl.checkpoints.hf.hf_files import WEIGHTS
from rlctl.checkpoints.hf.hf_model import FLOATS
from rlctl.checkpoints.hf.safetensors_files import SafetensorsDirectory, SafetensorsWriter
from rlctl.checkpoints.hf.text_part import TextPart, text_config, write_companions
from rlctl.checkpoints.plan_execution import dtype_of
from rlctl.errors import InputError, VerificationError, listed
from rlctl.models.facts import ModelFacts
from rlctl.models.families import weights_of
from rlctl.models.matrices import Role
from rlctl.weights import hf
from rlctl.weights.layout import Layout, ParamSpec, Piece, whole

HEAD = "lm_head.weight"


def write_text_part(part: TextPart, aside: Path, shard_bytes: int, verify: bool, progress: Progress) -> Streamed:
    """Write the text part into an empty directory, one tensor after the other in the order of the files.

    Raises VerificationError where what was written is not what was read.
    """
    source = part.files.directory
    write_companions(source, aside, text_config(source))
    specs, done = part.specs, Streamed()
    writer, total = SafetensorsWriter(aside, specs, shard_bytes), sum(spec.bytes for spec in specs.values())
    for name, spec in specs.items():
        writer.write(name, part.read(name))
        part.drop(name)
        done.bytes += spec.bytes
        progress("take out", done.bytes, total)
    writer.finish()
    if verify:
        _require_same(part, SafetensorsDirectory.open(aside), list(specs))
    return done


def whole_layout(part: TextPart, facts: ModelFacts) -> Layout:
    """The text tensors of a model with these `facts`, in the dtypes that the whole model publishes them in.

    Raises InputError where the whole is quantised, or its text part another model.
    """
    directory, dtypes = part.files.directory, {name: tensor.stored.dtype for name, tensor in part.tensors.items()}
    if packed := [name for name, dtype in dtypes.items() if dtype not in FLOATS]:
        why = f"--into {directory}: its text part is quantised (tensor {packed[0]} is {dtypes[packed[0]]})."
        raise InputError(why, "Name the same model in plain weights, or export the text model alone.")
    target = hf.layout(facts, "bfloat16", copies=True, published=dtypes)
    params, pieces = dict(target.params), list(target.pieces)
    embedding = next(weight.tensor for weight in weights_of(facts).outer if weight.role is Role.EMBEDDING)
    if facts.tied_embeddings and HEAD in part.tensors:  # a second copy of the embedding
        params[HEAD] = replace(params[embedding], dtype=dtypes[HEAD])
        box = whole(params[HEAD].shape)
        pieces.append(Piece(embedding, box, HEAD, box, tuple(range(len(box))), primary=False))
    if {name: spec.shape for name, spec in params.items()} != {n: spec.shape for n, spec in part.specs.items()}:
        different = sorted(
            name for name in params.keys() | part.specs.keys()
            if name not in params or name not in part.specs or params[name].shape != part.specs[name].shape
        )  # fmt: skip
        why = f"--into {directory}: its text part is another model than this one, by {listed(different)}."
        raise InputError(why, "Name the model that the run began with.")
    return Layout(0, params, tuple(pieces), target.fills)


class WholeWriter:
    """Writes the files of a whole model again with other tensors in its text part, which come in the order of the
    part. All else is copied from the files that are there."""

    def __init__(self, directory: Path, part: TextPart) -> None:
        self._part = part
        held = sorted(part.files.tensors.values(), key=lambda tensor: (tensor.file.name, tensor.position))
        files: dict[str, list[str]] = {}
        for tensor in held:
            files.setdefault(tensor.file.name, []).append(tensor.name)
        specs = {tensor.name: ParamSpec(tensor.shape, tensor.dtype) for tensor in held}
        self._directory, self._left = directory, [tensor.name for tensor in reversed(held)]
        self._writer = SafetensorsWriter(directory, specs, 0, files)
        self._missing = Counter(tensor.stored.name for tensor in part.tensors.values())
        self._stack, self._rows = torch.empty(0), dict[str, int]()

    def write(self, name: str, values: torch.Tensor) -> None:
        """Write the next tensor of the text part, or the next rows of it."""
        tensor = self._part.tensors[name]
        self._copy_until(tensor.stored.name)
        done = self._rows.get(name, 0)
        self._rows[name] = done + (len(values) if values.dim() else 1)
        if tensor.expert is None:
            self._writer.write(tensor.stored.name, values)
        else:
            if not self._stack.numel():
                self._stack = torch.empty(tensor.stored.shape, dtype=dtype_of(tensor.stored.dtype))
            tensor.of(self._stack)[done : self._rows[name]].copy_(values)
        if self._rows[name] < next(iter(tensor.shape), 1):
            return
        self._missing[tensor.stored.name] -= 1
        if self._missing[tensor.stored.name] == 0:
            if tensor.expert is not None:
                self._writer.write(tensor.stored.name, self._stack)
                self._stack = torch.empty(0)
            self._left.pop()

    def finish(self) -> None:
        """Write what is left, and copy the other files. Copies of the weights in other formats are left out: they hold
        the values before training, and an engine may prefer them."""
        self._copy_until("")
        for path in self._part.files.directory.iterdir():
            if path.is_file() and not any(map(path.match, (*WEIGHTS, record.RECORD))):
                shutil.copyfile(path, self._directory / path.name)

    def verify(self) -> None:
        """Raise VerificationError where a tensor of another part is not what it was."""
        others = [name for name in self._part.files.tensors if name not in self._part.stored]
        _require_same(self._part.files, SafetensorsDirectory.open(self._directory), others)

    def _copy_until(self, stored: str) -> None:
        while self._left and self._left[-1] != stored and self._left[-1] not in self._part.stored:
            name = self._left.pop()
            self._writer.write(name, self._part.files.read(name))
            self._part.files.drop(name)


def _require_same(source: TextPart | SafetensorsDirectory, written: SafetensorsDirectory, names: list[str]) -> None:
    """Raise VerificationError, which names the tensors, where bytes that were written are not those of the source."""
    wrong: list[str] = []
    for name in names:
        ours, theirs = source.read(name), written.read(name)
        same = ours.dtype == theirs.dtype and ours.shape == theirs.shape
        if not same or not torch.equal(*(held.reshape(-1).view(torch.uint8) for held in (ours, theirs))):
            wrong.append(name)
        source.drop(name)
        written.drop(name)
    if wrong:
        raise VerificationError(
            f"{len(wrong)} of {len(names)} tensors are not what they were in the source: {listed(wrong, 8)}.",
            "The destination was removed. Check the disk, and run the command again.",
        )
