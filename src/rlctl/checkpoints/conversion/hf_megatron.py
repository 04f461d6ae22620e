"""Conversions between Hugging Face directories and Megatron checkpoints, and of text parts: plan, stream, verify,
rename."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlctl.checkpoints.conversion import record
from rlctl.checkpoints.conversion.exported import Exported, exported_weights
from rlctl.checkpoints.conversion.run_tokenizer import take_tokenizer_of_run
from rlctl.checkpoints.conversion.stream import (
    Beside,
    ParamReader,
    Progress,
    Streamed,
    plan_between,
    stream,
    verify,
)
from rlctl.checkpoints.conversion.text_checkpoint import OTHER, RawTensors, whole_layouts
from rlctl.checkpoints.hf.hf_files import WEIGHTS, copy_companions, read_object
from rlctl.checkpoints.hf.hf_model import open_hf_model
from rlctl.checkpoints.hf.reward_models import require_loadable, with_score
from rlctl.checkpoints.hf.safetensors_files import SafetensorsDirectory, SafetensorsWriter
from rlctl.checkpoints.hf.text_part import TextPart
from rlctl.checkpoints.identity import damaged_files, source_identity
from rlctl.checkpoints.megatron.megatron_directory import HF_FOLDER, LATEST, RELEASE, MegatronDirectory, find
from rlctl.checkpoints.megatron.megatron_model import Blocks, common_values
from rlctl.checkpoints.megatron.torch_dist_files import TorchDistReader, TorchDistWriter
from rlctl.checkpoints.model_files import ModelFiles, Tell, as_files
from rlctl.checkpoints.staging import any_content, locked, require_replaceable, staged
from rlctl.checkpoints.tensor_fingerprints import fingerprint
from rlctl.errors import InputError, listed
from rlctl.models.families import weights_of
from rlctl.settings.training import Rounding
from rlctl.weights import hf
from rlctl.weights import torch_dist as keys
from rlctl.weights.layout import Layout, ParamSpec, Shape, whole_piece
from rlctl.weights.plan_execution import dtype_of
from rlctl.weights.transfer_plan import SingleWorld, World

BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class Options:
    """How to convert."""

    dtype: str | None = None
    verify: bool = True
    force: bool = False
    reuse: bool = False
    """Accept an existing destination made from the same source."""
    shard_bytes: int = 5_000_000_000
    whole: Path | None = None
    """A model with image or sound parts, which is written with these weights as its text part."""
    progress: Progress = lambda step, done, total: None
    tell: Tell = lambda line: None


@dataclass(frozen=True)
class Report:
    """A finished conversion."""

    tensors: int
    bytes: int
    seconds: float
    verified: bool
    destination: str
    dtype: str
    reused: bool = False
    nans: tuple[str, ...] = ()


def hf_to_megatron(source: Path, destination: Path, options: Options | None = None) -> Report:
    """Write the Megatron checkpoint of a Hugging Face directory. Raises InputError for a damaged or contradictory
    source or an existing destination, MachineError without enough space, and VerificationError if the result differs
    (nothing is left)."""
    options = options or Options()
    model = open_hf_model(source)
    if model.facts.listed:
        reason = f"{source}: {model.facts.family} cannot be converted, because its family has no file in rlctl."
        raise InputError(reason, "`train --backend dtensor` starts from the published files.")
    dtype = options.dtype or model.dtype

    def write(aside: Path) -> Streamed:
        style = keys.default_style(model.facts)
        whole = keys.layout(model.facts, dtype, style)
        blocks = {
            chunk.name: chunk
            for key, spec in whole.params.items()
            for chunk in keys.chunk_of(spec, key, keys.lead_axes(key, model.facts, style), BLOCK_BYTES)
        }
        plan = plan_between(model.world, SingleWorld(keys.chunked(whole, list(blocks.values()))))
        shards = aside / RELEASE
        shards.mkdir()
        writer = TorchDistWriter(shards, whole.params)
        first: dict[str, tuple[str, int, int]] = {}  # blocks lie where their first data do: sequential reading
        for copy in plan.copies:
            at = model.source.place(copy.source_param)
            first[copy.destination_param] = min(first.get(copy.destination_param, at), at)
        order = sorted(plan.layout.params, key=lambda name: first.get(name, ("", 0, 0)))
        shapes = weights_of(model.facts).tensors
        put = lambda n, v: writer.write(blocks[n], v)  # noqa: E731
        done = stream(plan, shapes, model.source, order, put, options.progress)
        for key in keys.extra_state_keys(model.facts, style):
            writer.write_object(key, [None])
        writer.finish(common_values(model.facts, dtype))
        copy_companions(source, aside / HF_FOLDER, ("quantization_config",), **_dtype_value(model.config, dtype))
        (aside / LATEST).write_text(RELEASE)
        if options.verify:
            reader = TorchDistReader.open(shards)
            verify(plan, done.digests, Blocks(reader, blocks), options.progress)
        writer.wait()
        return done

    conversion, published = record.wanted(source, dtype), model.published(dtype)
    specs = {name: ParamSpec(shape, dtype) for name, shape in weights_of(model.facts).tensors.items()}
    return _write_under_lock(destination, (source,), specs, options, conversion, write, published)


def megatron_to_hf(
    source: Path, destination: Path, config_from: Path | ModelFiles | None = None, options: Options | None = None
) -> Report:
    """Write the Hugging Face directory of a Megatron checkpoint (see `exported`). Raises like `hf_to_megatron`.
    `config_from`: a model with config.json and tokenizer, if the checkpoint has none, or the run's base."""
    options = options or Options()
    megatron = find(source)
    if megatron is None:
        problem = "is not a Megatron checkpoint" if source.exists() else "does not exist"
        hint = "Name a run, or a directory with latest_checkpointed_iteration.txt or .metadata."
        raise InputError(f"{source} {problem}.", hint)
    if options.verify:
        require_undamaged(megatron)
    model = exported_weights(megatron, as_files(config_from), options.tell)
    dtype = options.dtype or model.dtype
    conversion = {
        "source": [str(megatron.shards.resolve()), megatron.iteration],
        "dtype": dtype,
        "format": "safetensors",
    }
    published = record.published(megatron.shards, dtype)
    params = hf.layout(model.facts, dtype).params

    def check(aside: Path, read: dict[str, int]) -> None:
        part = options.whole
        written = TextPart.open(part).at(aside) if part else SafetensorsDirectory.open(aside)
        dtypes = {name: spec.dtype for name, spec in TextPart.open(part).specs.items()} if part else published
        _require_as_converted(megatron, dtype, read, written, {name: params[name] for name in params if name in dtypes})

    finish = partial(take_tokenizer_of_run, megatron, tell=options.tell)
    sources = (megatron.root, megatron.shards, model.companions)
    return write_exported(model, destination, options, conversion, sources, published, check, finish)


def write_exported(
    model: Exported,
    destination: Path,
    options: Options,
    conversion: dict[str, Any],
    sources: tuple[Path, ...],
    published: Mapping[str, str],
    check: Callable[[Path, dict[str, int]], None] = lambda aside, read: None,
    finish: Callable[[Path], None] = lambda aside: None,
) -> Report:
    """Write weights as a Hugging Face directory, or as the text part of `options.whole`. `published`: tensors with a
    dtype that is not the model's. `check` receives fingerprints of tensors, and `finish` the written directory."""
    dtype = options.dtype or model.dtype
    part = TextPart.open(options.whole) if options.whole else None
    if part is not None and model.score is not None:
        raise InputError("--into: a reward model ends in a score and is not part of the model.", "Leave --into out.")
    world, reader, files = model.world, model.source, None
    if part is None:
        target = _published_layout(model, dtype, published)
        specs = target.params
    else:
        source_layout, target = whole_layouts(part, model.facts, world.layout(0))
        of_whole = [name for name in source_layout.params if name.startswith(OTHER)]
        world, reader = SingleWorld(source_layout), Beside(model.source, RawTensors(part.files), of_whole)
        specs = {t.name: ParamSpec(t.shape, t.dtype) for t in part.files.in_order()}
        files = {
            t.file.name: [o.name for o in part.files.in_order() if o.file == t.file] for t in part.files.in_order()
        }
        conversion |= {"whole": source_identity(part.files.directory)}

    def write(aside: Path) -> Streamed:
        writer = SafetensorsWriter(aside, specs, options.shard_bytes, files)
        done = _write_safetensors(aside, world, reader, target, writer, options, model.rounding, check)
        if part is None:
            values = model.changed | _dtype_value(model.config, dtype)
            copy_companions(model.companions, aside, ("quantization_config",), **values)
            if model.score is not None:
                require_loadable(aside, specs)
        else:
            _copy_other_files(part.files.directory, aside)
        finish(aside)
        return done

    all_sources = (*sources, *([options.whole] if options.whole else []))
    return _write_under_lock(destination, all_sources, specs, options, conversion, write)


def _published_layout(model: Exported, dtype: str, published: Mapping[str, str]) -> Layout:
    """Return the layout of the published tensors, with the score of a reward model and the weights of heads that
    predict further tokens."""
    layout = hf.layout(model.facts, dtype, copies=True, published=published)
    if model.score is not None:
        layout = with_score(layout, replace(model.score, dtype=dtype))
    further = {name: replace(spec, dtype=spec.dtype or dtype) for name, spec in model.predicting.items()}
    heads = tuple(whole_piece(name, name, spec.shape) for name, spec in further.items())
    return replace(layout, params=layout.params | further, pieces=(*layout.pieces, *heads))


def _copy_other_files(directory: Path, aside: Path) -> None:
    """Copy all files but weights: weights in other formats hold the old values."""
    for path in directory.iterdir():
        if path.is_file() and not any(map(path.match, (*WEIGHTS, record.RECORD))):
            shutil.copyfile(path, aside / path.name)


def _write_safetensors(
    aside: Path,
    source: World,
    reader: ParamReader,
    target: Layout,
    writer: SafetensorsWriter,
    options: Options,
    rounding: Rounding = "nearest",
    check: Callable[[Path, dict[str, int]], None] = lambda aside, digests: None,
) -> Streamed:
    """Stream a plan into safetensors files by blocks of rows. `options.verify` reads the result back and passes
    fingerprints to `check`."""
    rows = {
        chunk.name: chunk
        for key in writer.order
        for chunk in keys.chunk_of(target.params[key], key, 0, BLOCK_BYTES)
    }  # fmt: skip
    plan = plan_between(source, SingleWorld(keys.chunked(target, list(rows.values()))))
    shapes: dict[str, Shape] = {}
    for piece in source.layout(0).pieces:
        ends = tuple(span.last + 1 for span in piece.tensor_box)
        shapes[piece.tensor] = tuple(map(max, ends, shapes.get(piece.tensor, ends)))
    put = lambda n, v: writer.write(rows[n].key, v)  # noqa: E731
    done = stream(plan, shapes, reader, rows, put, options.progress, rounding)
    writer.finish()
    if options.verify:
        check(aside, done.fingerprints)
        written = _Rows(RawTensors(SafetensorsDirectory.open(aside)), target.params, rows)
        verify(plan, done.digests, written, options.progress)
    writer.wait()
    return done


def require_undamaged(megatron: MegatronDirectory) -> None:
    """Raise InputError where files of a run's checkpoint have other digests than its `state.json` says."""
    if megatron.shards.name == "policy" and (megatron.shards.parent / "state.json").is_file():
        digests = read_object(megatron.shards.parent, "state.json").get("files", {})
        if damaged := damaged_files(megatron.shards, digests):
            hint = "Convert another: name RUN/checkpoints/step_N."
            raise InputError(f"{megatron.shards.parent} is damaged: {damaged[0]}.", hint)


def _require_as_converted(
    megatron: MegatronDirectory,
    dtype: str,
    read: dict[str, int],
    written: SafetensorsDirectory | TextPart,
    published: Mapping[str, ParamSpec],
) -> None:
    """Raise InputError for tensors that differ from the conversion that wrote the checkpoint. `published` tensors have
    other dtypes and are read from the `written` files."""
    stored = record.fingerprints(megatron.shards, dtype)
    layouts = {
        name: fingerprint(written.read(name).to(dtype_of(spec.dtype)), spec.shape)
        for name, spec in (published if stored else {}).items()
    }
    if changed := sorted(name for name, value in stored.items() if (read | layouts).get(name, value) != value):
        reason = f"{len(changed)} tensors are not those that were converted ({listed(changed)})."
        raise InputError(f"{megatron.root} is damaged: {reason}", "Remove it, and convert the model again.")


class _Rows:
    """Blocks of rows of the tensors of safetensors files."""

    def __init__(self, files: RawTensors, specs: Mapping[str, ParamSpec], rows: dict[str, keys.StoredBlock]) -> None:
        self._files, self._specs, self._rows = files, specs, rows

    def read(self, param: str) -> torch.Tensor:
        chunk = self._rows[param]
        whole = self._files.read(chunk.key).reshape(self._specs[chunk.key].shape)
        return whole[chunk.box[0].start : chunk.box[0].start + chunk.box[0].count] if chunk.box else whole

    def drop(self, param: str) -> None:
        self._files.drop(self._rows[param].key)


def _write_under_lock(
    destination: Path,
    sources: tuple[Path, ...],
    specs: Mapping[str, ParamSpec],
    options: Options,
    conversion: dict[str, Any],
    write: Callable[[Path], Streamed],
    published: Mapping[str, str] | None = None,
) -> Report:
    """Run `write` under the destination's lock and record it, with dtypes of `published` tensors. Reuse a result of the
    same source from another process."""
    require_replaceable(destination, sources)
    destination = destination.resolve()
    dtype = Counter(spec.dtype for spec in specs.values()).most_common(1)[0][0]
    with locked(destination, options.tell) as waited:
        begun = time.perf_counter()
        if (waited or options.reuse) and (made := record.complete(destination, conversion)):
            options.tell(f"reusing {destination}" + (", which another process has just finished" if waited else ""))
            return Report(**{**made["report"], "nans": tuple(made["report"]["nans"]), "reused": True})
        if options.reuse and not options.force and destination.exists() and any_content(destination):
            reason = f"{destination} exists, but is not the complete conversion of {sources[0]} to {dtype}."
            raise InputError(reason, "Give --force to replace it, or another destination.")
        with staged(destination, sum(spec.bytes for spec in specs.values()), options.force) as aside:
            done = write(aside)
            seconds, nans = time.perf_counter() - begun, tuple(done.nans)
            report = Report(len(specs), done.bytes, seconds, options.verify, str(destination), dtype, nans=nans)
            record.write(aside, conversion, report.__dict__, done.fingerprints, published or {})
            return report


def _dtype_value(config: dict[str, Any], dtype: str) -> dict[str, str]:
    """The keys of the dtype that config.json has (`torch_dtype` before transformers 5)."""
    return dict.fromkeys([key for key in ("torch_dtype", "dtype") if key in config] or ["dtype"], dtype)
