"""Models that read images: packed rows, shared prompts and several ranks have the log-probs, the loss and the gradient
of transformers' models of one text at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlctl.backends.clients import only_result
from rlctl.checkpoints.conversion.hf_megatron import megatron_to_hf
from rlctl.config.parallel import ParallelSpec
from rlctl.models.vision import VISION_FAMILIES
from rlctl.settings.training import LoraConfig
from support import vision_cases
from support.parallel_cases import Case
from support.pool import Pools, slowly
from support.vision_cases import VisionCase, run_vision
from support.vision_models import FAMILIES, write_vision_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family -> a directory with a tiny model."""

    @cache
    def directory(family: str) -> Path:
        return write_vision_model(tmp_path_factory.mktemp(family), family)

    return directory


def require_same(given: VisionCase, directory: Path, pools: Pools) -> None:
    found = pools(given.case.parallel.world_size).run(run_vision, given, directory)
    loss, gradient, logprobs = vision_cases.reference(directory, given.never, mutual=given.mutual)
    result = only_result([results[0] for results, *_ in found])
    assert result.loss == pytest.approx(loss, rel=1e-5)
    ours = torch.cat([values for _, _, rows, _ in found[:: given.case.parallel.tp] for _, values, _ in rows])
    torch.testing.assert_close(ours.sort().values, logprobs.sort().values, rtol=0, atol=1e-5)
    for name, value in found[0][1].items():
        own = value.reshape(gradient[name].shape)
        near = max(2e-6, 1e-5 * float(gradient[name].abs().max()))
        torch.testing.assert_close(own, gradient[name], rtol=1e-3, atol=near, msg=lambda why, n=name: f"{n}: {why}")
    assert found[0][1].keys() == gradient.keys()


@pytest.mark.parametrize("family", slowly(FAMILIES.keys(), "gemma3", "qwen2_5_vl", "idefics3", "qwen3_5_moe"))
def test_packed_rows_are_single_texts(family: str, models: Callable[[str], Path], pools: Pools) -> None:
    require_same(VisionCase(Case(backend="dtensor")), models(family), pools)


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_images_of_gemma_attend_in_both_directions_on_gpus(
    tp: int, models: Callable[[str], Path], pools: Pools
) -> None:
    parallel = ParallelSpec(tp=tp, sequence_parallel=tp > 1)
    require_same(VisionCase(Case(backend="dtensor", parallel=parallel), mutual=True), models("gemma3"), pools)
    causal, both = (vision_cases.reference(models("gemma3"), mutual=mutual)[2] for mutual in (False, True))
    assert (causal - both).abs().max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=pytest.mark.guard if one in ("idefics3", "qwen3_vl") else ()) for one in FAMILIES],
)
def test_ranks_without_images_take_part(family: str, models: Callable[[str], Path], pools: Pools) -> None:
    case = Case(backend="dtensor", parallel=ParallelSpec(dp=2), recompute="full")
    require_same(VisionCase(case), models(family), pools)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["gemma3", *(pytest.param(one, marks=pytest.mark.guard) for one in ("qwen2_5_vl", "qwen3_vl"))]
)
def test_the_language_part_is_divided(family: str, models: Callable[[str], Path], pools: Pools) -> None:
    parallel = ParallelSpec(tp=2, sequence_parallel=True)
    require_same(VisionCase(Case(backend="dtensor", parallel=parallel)), models(family), pools)


def test_experts_are_spread(models: Callable[[str], Path], pools: Pools) -> None:
    parallel = ParallelSpec(dp=2, ep=2)
    require_same(VisionCase(Case(backend="dtensor", parallel=parallel)), models("qwen3_5_moe"), pools)


def test_tokens_that_are_never_drawn_have_no_share(models: Callable[[str], Path], pools: Pools) -> None:
    """As in engines, to whose logits the same is added."""
    parallel = ParallelSpec(tp=2, sequence_parallel=True)
    require_same(VisionCase(Case(backend="dtensor", parallel=parallel), never=(2, 251, 325)), models("idefics3"), pools)


@pytest.mark.parametrize(
    "freeze",
    [pytest.param(("vision",), marks=pytest.mark.slow), ("vision", "projector"), ("language",)],
    ids="+".join,
)
def test_frozen_parts_have_no_gradient(freeze: tuple[str, ...], models: Callable[[str], Path], pools: Pools) -> None:
    directory, case = models("idefics3"), Case(backend="dtensor", parallel=ParallelSpec(dp=2))
    found = pools(2).run(run_vision, VisionCase(case, freeze), directory)
    loss, gradient, _ = vision_cases.reference(directory)
    family = VISION_FAMILIES["idefics3"]
    trained = {name for name in gradient if family.part_of(name) not in freeze}
    assert only_result([results[0] for results, *_ in found]).loss == pytest.approx(loss, rel=1e-5)
    assert found[0][1].keys() == trained
    for name in trained:
        torch.testing.assert_close(
            found[0][1][name].reshape(gradient[name].shape), gradient[name], rtol=1e-3, atol=2e-6
        )


@pytest.mark.parametrize("family", ["idefics3", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
def test_adapters_are_on_the_language_part(family: str, models: Callable[[str], Path], pools: Pools) -> None:
    lora = LoraConfig(rank=4, alpha=8)
    given = VisionCase(Case(backend="dtensor", parallel=ParallelSpec(dp=2)), lora=lora, steps=2, lr=1e-2)
    found = pools(2).run(run_vision, given, models(family))
    results = [only_result([results[step] for results, *_ in found]) for step in range(2)]
    assert results[0].loss == pytest.approx(vision_cases.reference(models(family))[0], rel=1e-5)
    assert results[1].loss < results[0].loss
    adapted = {name.rpartition(".")[0] for name in found[0][1]}
    language = VISION_FAMILIES[family].language
    assert {name.rpartition(".")[2] for name in adapted} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    assert all(name.startswith(f"{language}.layers.") for name in adapted)


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one == "gemma3" else pytest.mark.slow) for one in FAMILIES]
)
def test_exports_have_published_names_and_the_run_s_log_probs(
    family: str, models: Callable[[str], Path], pools: Pools, tmp_path: Path
) -> None:
    case = Case(backend="dtensor", parallel=ParallelSpec(dp=2))
    given = VisionCase(case, lr=1e-3, save=tmp_path / "saved")
    found = pools(2).run(run_vision, given, models(family))
    megatron_to_hf(tmp_path / "saved", tmp_path / "exported", config_from=models(family))
    begun, exported = (load_file(place / "model.safetensors") for place in (models(family), tmp_path / "exported"))
    assert {name: value.shape for name, value in exported.items()} == {n: v.shape for n, v in begun.items()}
    ours = torch.cat([values for _, _, rows, _ in found for _, values, _ in rows])
    _, _, theirs = vision_cases.reference(tmp_path / "exported")
    torch.testing.assert_close(ours.sort().values, theirs.sort().values, rtol=0, atol=1e-5)
    assert (theirs - vision_cases.reference(models(family))[2]).abs().max() > 1e-2
