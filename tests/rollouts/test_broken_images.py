"""Rows whose images cannot be read, before a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlctl.errors import InputError
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.rollouts.prompt_order import PromptStream
from support.vision_models import square, write_vision_model


def test_rows_with_broken_images_are_refused_or_left_out(tmp_path: Path) -> None:
    model = write_vision_model(tmp_path / "model")
    square("red").save(tmp_path / "red.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "red.png").read_bytes()[:-60])
    rows = [{"prompt": "what?", "image": name} for name in ("red.png", "cut.png", "gone.png", "red.png")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def opened(how: str) -> PromptStream:
        data = {"name": str(path), "broken_images": how}
        return PromptStream.open_rollouts(RlConfig.model_validate({"data": data}), model)

    with pytest.raises(InputError, match=r"rows.jsonl, line 2, cut.png: the image is damaged"):
        opened("stop")
    stream = opened("drop")
    assert [row.where.rpartition(" ")[2] for row in (stream.sources[0].prompts[place] for place in range(2))] == [
        "1",
        "4",
    ]
    assert len(stream.sources[0].prompts) == 2
    assert any("2 of 4 rows are left out (data.broken_images=drop)" in note for note in stream.notes())
