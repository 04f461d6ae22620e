"""The text part of a multimodal model, as a separate model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rlctl.checkpoints.conversion import record
from rlctl.checkpoints.conversion.exported import PREDICTING
from rlctl.checkpoints.conversion.hf_megatron import Options, Report, _write_safetensors, _write_under_lock
from rlctl.checkpoints.conversion.stream import (
    Streamed,
)
from rlctl.checkpoints.conversion.text_checkpoint import RawTensors, text_layouts
from rlctl.checkpoints.hf.safetensors_files import SafetensorsWriter
from rlctl.checkpoints.hf.text_config import text_config, write_companions
from rlctl.checkpoints.hf.text_part import TextPart
from rlctl.weights.transfer_plan import SingleWorld


def take_text_part(source: Path, destination: Path, options: Options | None = None) -> Report:
    """Write a multimodal model's text part as a separate model in its dtypes. Raises like `hf_to_megatron`, and
    InputError for an untrainable text part."""
    options, part = options or Options(), TextPart.open(source)
    stored, text_layout = text_layouts(part)
    config = text_config(source)
    called_for = {key: 0 for key in PREDICTING if config.get(key) and not part.facts.mtp_layers}

    def write(aside: Path) -> Streamed:
        if called_for:
            options.tell("without the multi-token-prediction layers, which transformers' text model does not have")
        write_companions(source, aside, config | called_for)
        writer = SafetensorsWriter(aside, part.specs, options.shard_bytes)
        done = _write_safetensors(aside, SingleWorld(stored), RawTensors(part.files), text_layout, writer, options)
        return replace(done, fingerprints={})  # in the dtypes of the files; nothing else is created

    return _write_under_lock(destination, (source,), part.specs, options, record.text_wanted(source), write)
