"""Run directories whose checkpoint holds parameters, or adapters, by the names of transformers' modules, as the backend
dtensor saves them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlctl.checkpoints.megatron.torch_dist_files import TorchDistWriter
from rlctl.checkpoints.model_files import ModelFiles
from rlctl.weights.layout import ParamSpec, Span
from rlctl.weights.torch_dist import StoredBlock


def write_module_run(run: Path, base: ModelFiles, held: Mapping[str, torch.Tensor], **config: Any) -> Path:
    """Write a run with the checkpoint of step 1 in float32; `config` has keys with `__` for dots."""
    shards = run / "checkpoints" / "step_1" / "policy"
    shards.mkdir(parents=True)
    writer = TorchDistWriter(shards, {key: ParamSpec(tuple(value.shape), "float32") for key, value in held.items()})
    for key, value in held.items():
        writer.write(StoredBlock(key, tuple(Span(0, size) for size in value.shape)), value.contiguous())
    writer.finish({"iteration": 1})
    writer.wait()
    model = {
        "fingerprint": base.fingerprint(), "own_fingerprint": base.own_fingerprint(), "directory": str(base.directory),
        "weights": str(base.weights), "origin": str(base.origin) if base.origin else None,
    }  # fmt: skip
    values = {key.replace("__", "."): {"value": value} for key, value in (config | {"model__dtype": "float32"}).items()}
    manifest = {"model": model, "config": values, "plan": {"training": {"precision": "float32"}}}
    (run / "manifest.json").write_text(json.dumps(manifest))
    return run
