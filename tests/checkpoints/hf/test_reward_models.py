"""Reward models as they are published."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.checkpoints.hf.reward_models import SCORE, require_loadable
from rlctl.checkpoints.hf.safetensors_files import SafetensorsDirectory
from rlctl.errors import InputError
from rlctl.tiny_models.text import FAMILIES, llama_config, write_tiny_model
from rlctl.weights.layout import ParamSpec


@pytest.mark.parametrize("family", ["llama-tied", "qwen3_moe"])
def test_what_transformers_would_save_is_what_was_written(tmp_path: Path, family: str) -> None:
    write_tiny_model(tmp_path, llama_config(tied=False) | FAMILIES[family], scores=True)
    specs = {one.name: ParamSpec(one.shape, one.dtype) for one in SafetensorsDirectory.open(tmp_path).in_order()}
    require_loadable(tmp_path, specs)
    del specs[SCORE]
    with pytest.raises(InputError, match=f"other tensors than this reward model: {SCORE}."):
        require_loadable(tmp_path, specs)
