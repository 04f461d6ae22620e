"""The number format of `auto` on a processor: its instructions, and a probe of its products."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlctl.config.load import Resolved
from rlctl.methods.configuration import resolve
from rlctl.models.facts import ModelFacts
from rlctl.preparation import cpu_format
from rlctl.preparation.cpu_format import format_notes, has_instructions, measured_rates, with_cpu_format

LLAMA_8B = ModelFacts("llama", 32, 4096, 32, 8, 128, 14336, 128256, 131072)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 amx_tile\n", True),
        ("flags\t\t: fpu avx512f amx_bf16\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("flags\t\t: fpu avx2 avx512f avx512_vnni\n", False),
        ("model name\t: bf16\n", False),
    ],
)
def test_the_processor_says_whether_it_multiplies_bfloat16(tmp_path: Path, lines: str, expected: bool) -> None:
    (tmp_path / "cpuinfo").write_text(lines)
    assert has_instructions(tmp_path / "cpuinfo") is expected
    assert not has_instructions(tmp_path / "absent")


def on_a_cpu(*sets: str) -> Resolved:
    return resolve(flags={"run.algorithm": "grpo"}, sets=("cluster.gpu=cpu", *sets), environment={})


@pytest.mark.parametrize(("narrow", "chosen"), [(630e9, "bfloat16"), (239e9, "auto"), (30e9, "auto")])
def test_bfloat16_is_chosen_where_its_products_are_one_and_a_half_times_as_fast(
    narrow: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_format, "has_instructions", lambda: True)
    monkeypatch.setattr(cpu_format, "measured_rates", lambda *_: {"float32": 160e9, "bfloat16": narrow})
    found = with_cpu_format(on_a_cpu(), LLAMA_8B, None)
    assert found.config.model.dtype == chosen
    notes = ["model.dtype = bfloat16: this processor reaches 630 GFLOP/s in bfloat16, 160 in float32"]
    assert format_notes(found) == (notes if chosen == "bfloat16" else [])
    for named in ("float32", "bfloat16"):
        assert with_cpu_format(on_a_cpu(f"model.dtype={named}"), LLAMA_8B, None).config.model.dtype == named
    on_gpus = resolve(flags={"run.algorithm": "grpo"}, sets=("cluster.gpu=h100",), environment={})
    assert with_cpu_format(on_gpus, LLAMA_8B, "h100").config.model.dtype == "auto"


@pytest.mark.long
def test_the_probe_runs_once_for_each_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_format, "cache_directory", lambda: tmp_path)
    first = measured_rates(64, 128)
    assert first is not None
    assert all(rate > 1e6 for rate in first.values())
    assert measured_rates(64, 128) == first
    assert list(json.loads((tmp_path / "cpu-formats.json").read_text()).values()) == [first]
