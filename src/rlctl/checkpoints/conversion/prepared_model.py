"""Converted models, cached in the checkpoint directory. Every rank reads its part of plain, verified weights that all
nodes see, even if published files are quantized, local, or gone."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlctl.checkpoints import locations
from rlctl.checkpoints.conversion import record
from rlctl.checkpoints.hf.hf_files import read_config
from rlctl.checkpoints.hf.model_facts import facts_in
from rlctl.checkpoints.hf.reward_models import SCORE
from rlctl.checkpoints.hf.safetensors_files import SafetensorsDirectory
from rlctl.checkpoints.hf.text_config import NEXT, has_text_part, text_directory
from rlctl.checkpoints.identity import source_identity
from rlctl.checkpoints.locations import NAMED
from rlctl.checkpoints.megatron.megatron_directory import RELEASE, MegatronDirectory
from rlctl.checkpoints.model_files import ModelFiles, of_megatron
from rlctl.checkpoints.staging import any_content
from rlctl.config.files import user_path
from rlctl.errors import InputError, MachineError, RlctlError
from rlctl.models.facts import ModelFacts
from rlctl.models.families import weights_of
from rlctl.models.hf_config import replaced_positions
from rlctl.models.transformers_classes import built_as
from rlctl.processes.child import call_in_child
from rlctl.weights.layout import ITEM_BYTES

log = logging.getLogger(__name__)
DIGITS = 12
"""Digits of the model's identity in the name of its conversion."""
TEXT, MERGED = "text", "merged"
"""Stand for the precision of a conversion in the name of a text part or of merged adapters, which keep their own."""
WITHOUT = "--set model.convert=false starts from the published files."
ELSEWHERE = f"set {NAMED[0]} to a directory with room that every node sees"


def conversion_directory(directory: Path, dtype: str) -> Path:
    """Where the conversion of a model directory is kept: one for each content and precision."""
    cached = directory.parent.name == "snapshots"  # a hub model: models--owner--name/snapshots/revision
    name = directory.parents[1].name.removeprefix("models--") if cached else directory.name
    return locations.converted_directory() / f"{name}-{source_identity(directory)[:DIGITS]}-{dtype}"


def prepared(source: ModelFiles, dtype: str, nodes: int, tell: Callable[[str], None]) -> ModelFiles:
    """Return the model that a run on `nodes` starts from: the conversion of `source`, created if missing, or a Megatron
    checkpoint unchanged. If the default place is unusable, return the published files and pass the reason to `tell`.
    Raises conversion errors, and InputError for damaged or foreign files at the place."""
    if source.megatron is not None:
        return source
    place, has_directory = conversion_directory(source.directory, dtype), locations.named_directory() is not None
    reason = None if has_directory else _unseen(place, source.directory, nodes)
    if reason is None and _is_there(place, record.wanted(source.directory, dtype), WITHOUT):
        log.info("starting from %s, converted by an earlier run", place)
    elif not has_directory and (reason := reason or locations.write_problem(locations.nearest_existing(place.parent))):
        tell(f"starting from the published files, which are not converted: {reason} ({NAMED[0]} names another place)")
        return source
    else:
        if (other := locations.foreign_conversion(source.label)) is not None:
            tell(
                f"{other} has another trainer's conversion of this model. rlctl does not use it, because "
                f"it has no record of its source weights (--model {shlex.quote(str(other))} starts from "
                "it, with config.json and "
                "tokenizer in its folder huggingface/)"
            )
        tell(f"converting the model once, for every run to start from: {place} (model.convert=false does without)")
        try:
            otherwise = ", or start from the published files with --set model.convert=false"
            _convert(source.directory, place, dtype, f"{source.label} could not be converted", otherwise)
        except MachineError as error:  # there is no room
            if has_directory:
                raise
            tell(f"starting from the published files: {error.message} ({NAMED[0]} names another place)")
            return source
    # Not the iteration that somebody trained from it with other tools and saved next to it.
    converted = of_megatron(source.label, MegatronDirectory(place, place / RELEASE, None))
    return ModelFiles(converted.directory, source.label, source.note, converted.megatron)


def _is_there(place: Path, conversion: Mapping[str, str], otherwise: str = "") -> bool:
    """Whether `wanted` is at `place`, by its record. Raises InputError for damaged (by file sizes) or foreign files,
    with the advice `otherwise`."""
    made = record.read(place)
    if made is None or made.get("wanted") != conversion:
        if not os.path.exists(place) or not any_content(place):
            return False
        description = "is not a complete conversion"
    elif problem := record.damage(place, made):
        description = f"was converted by an earlier run and has been damaged since: {problem}"
    else:
        return True
    hint = f"Remove it, and the next run converts the model again: rm -r {shlex.quote(str(place))}. {otherwise}"
    raise InputError(f"{place} {description}.", hint.strip())


TAKES_MORE = "takes images or sound as well as text"


def planned_text_part(label: str, facts: ModelFacts, dtype: str) -> str:
    """Return the sentence on a model with these `facts` of its text part, which no run has taken out yet."""
    size = ITEM_BYTES[dtype] * weights_of(facts).parameters / 1e9
    where = f"which a run takes out once into {locations.converted_directory()} ({size:.3g} GB)"
    return f"{label} {TAKES_MORE}: its text part is trained, {where}"


def text_part_of(source: ModelFiles, tell: Callable[[str], None], *, copies: bool) -> ModelFiles:
    """Return the text part of a multimodal model, stored with conversions, or any other model as is. A missing one is
    made with `copies`, or without weights otherwise. The note names it. Raises InputError for an untrainable text part,
    and copy errors."""
    if source.megatron is not None or not has_text_part(source.directory):
        return source
    description = f"{source.label} {TAKES_MORE}"
    place = conversion_directory(source.directory, TEXT)
    if not _is_there(place, record.text_wanted(source.directory)):
        directory = text_directory(source.directory)
        try:
            facts = facts_in(directory)
        except InputError as error:
            raise InputError(f"{description}, and its text part cannot be trained: {error.message}", NEXT) from error
        if not copies:
            note = planned_text_part(source.label, facts, read_config(directory)["dtype"] or "bfloat16")
            return ModelFiles(directory, source.label, note, origin=source.directory)
        tell(f"taking the text part out of {source.label} once, for every run to start from: {place}")
        _convert(source.directory, place, TEXT, f"The text part of {source.label} could not be taken out")
    where = f"which lies in {place} ({SafetensorsDirectory.open(place).bytes / 1e9:.3g} GB)"
    return ModelFiles(place, source.label, f"{description}: its text part is trained, {where}", origin=source.directory)


def merged(source: ModelFiles, tell: Callable[[str], None], *, copies: bool) -> ModelFiles:
    """Return a run's merged adapters and base weights, stored like a text part, or any other model as is."""
    if source.megatron is None:
        return source
    from rlctl.checkpoints.megatron.lora_weights import adapter_keys
    from rlctl.checkpoints.megatron.torch_dist_files import TorchDistReader

    if not adapter_keys(TorchDistReader.open(source.megatron).shapes):
        return source
    run = user_path(source.label).resolve()
    place = locations.converted_directory() / f"{run.name}-{source.fingerprint()[:DIGITS]}-{MERGED}"
    description = f"{source.label} trained adapters, which are merged into the weights that it began with"
    made = record.read(place)
    if made is None or record.damage(place, made):
        if not copies:
            return ModelFiles(
                source.directory, source.label, f"{description} once, into {place}", origin=source.megatron
            )
        tell(f"merging the adapters of {source.label} once, for every run to start from: {place}")
        _convert(run, place, MERGED, f"The adapters of {source.label} could not be merged")
    return ModelFiles(place, source.label, f"{description}, in {place}", origin=source.megatron)


def repositioned(source: ModelFiles, most: int | None, scaling: dict[str, Any]) -> ModelFiles:
    """Return a model whose config.json has other positions than it was published with, and every other as it is."""
    if most is None and not scaling:
        return source
    if source.megatron is not None:
        reason = f"{source.label} is a Megatron checkpoint, which keeps the positions that it was made with"
        raise InputError(f"model.rope_scaling and model.max_position_embeddings: {reason}.", "Leave both out.")
    return _with_config(source, "positions", replaced_positions(read_config(source.directory), most, scaling))


def body_of(directory: Path, *, weights: bool = True) -> ModelFiles:
    """Return a reward model for policy backends: config.json with the generating class and no output layer. Raises
    InputError without such a class or, with `weights`, a score."""
    config = read_config(directory)
    model_type = str(config.get("model_type"))
    if not (written := built_as(model_type)):
        raise InputError(f"{directory}: transformers has no model of type {model_type} that writes, which is loaded.")
    tensors = SafetensorsDirectory.open(directory).tensors if weights else {SCORE}
    if SCORE not in tensors:
        raise InputError(f"{directory}: the head of the model is not {SCORE}, which a backend could load.")
    tied = "lm_head.weight" not in tensors or config.get("tie_word_embeddings", False)
    changed = {**config, "architectures": [written], "tie_word_embeddings": tied}
    return _with_config(ModelFiles(directory, str(directory)), "scores", changed)


def _with_config(source: ModelFiles, description: str, changed: Mapping[str, Any]) -> ModelFiles:
    """Return a model with another config.json, stored with conversions as `what`, with links to other files."""
    config = json.dumps(changed, indent=2, sort_keys=True)
    digest = hashlib.sha256(config.encode()).hexdigest()[:DIGITS]
    place = conversion_directory(source.directory, f"{description}-{digest}")
    place.mkdir(parents=True, exist_ok=True)
    for path in source.directory.iterdir():
        if path.name != "config.json" and not (place / path.name).is_symlink():
            with suppress(FileExistsError):  # another run makes the same one
                (place / path.name).symlink_to(path.resolve())
    aside = place / f".config-{os.getpid()}.json"
    aside.write_text(config, encoding="utf-8")
    aside.replace(place / "config.json")
    return replace(source, directory=place)


def require_seen(source: ModelFiles, nodes: int) -> None:
    """Raise MachineError for a text part or merged adapters where other nodes may not see what this one has made."""
    if source.origin is None or locations.named_directory() is not None:
        return
    if unseen := _unseen(source.directory, source.origin, nodes):
        raise MachineError(
            f"{source.label}: {unseen}, where the model that is trained lies.", f"To be sure, {ELSEWHERE}."
        )


def _unseen(place: Path, source: Path, nodes: int) -> str | None:
    """Return why other nodes may not see `place` although they see `source`; None: they do."""
    beside = source.resolve().is_relative_to(locations.hub_directory().resolve())
    return None if nodes == 1 or beside else f"other nodes may not see {place.parent}"


def _convert(source: Path, place: Path, dtype: str, failed: str, otherwise: str = "") -> None:
    """Run a conversion in a child under the place's lock; other runs wait and reuse it. A signal stops both processes,
    and the child removes its files."""
    try:
        call_in_child(f"the conversion of {source}", partial(_convert_here, source, place, dtype))
    except RlctlError as error:
        hint = f"{error.hint or ''} Where it is the place: {ELSEWHERE}{otherwise}."
        raise type(error)(f"{failed} into {place.parent}: {error.message}", hint.strip()) from error


def fingerprints_of(source: ModelFiles, dtype: str) -> dict[str, int]:
    """Fingerprints of the tensors of a model that rlctl has converted to `dtype`; empty for any other."""
    return {} if source.megatron is None else record.fingerprints(source.megatron, dtype)


def _convert_here(source: Path, destination: Path, dtype: str) -> None:
    from rlctl.checkpoints.conversion.hf_megatron import Options, hf_to_megatron, megatron_to_hf
    from rlctl.checkpoints.conversion.stream import progress_bar
    from rlctl.checkpoints.conversion.text_model import take_text_part

    with progress_bar() as show:
        tell = partial(print, flush=True)
        if dtype == TEXT:
            take_text_part(source, destination, Options(reuse=True, progress=show, tell=tell))
        elif dtype == MERGED:
            megatron_to_hf(source, destination, options=Options(reuse=True, progress=show, tell=tell))
        else:
            hf_to_megatron(source, destination, Options(dtype, reuse=True, progress=show, tell=tell))
