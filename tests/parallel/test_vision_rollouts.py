"""Rollouts with images: what vLLM reports of its tokens is what transformers' models and the trainer compute of them,
in one turn and in several, whether groups are waited for together or by themselves, and after a refit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rlctl.backends.base import EngineSpec, EpisodeWorker
from rlctl.backends.messages import GroupRequest, SampledGroup, Sampling, attached
from rlctl.checkpoints.hf.model_facts import facts_in
from rlctl.config.parallel import ParallelSpec
from rlctl.data.chat import PromptEncoder, load_tokenizer
from rlctl.data.image_sources import IMAGES, MARK, image_source
from rlctl.data.images import ImageProcessor
from rlctl.data.prompt_rows import PromptRow
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.rollouts.environment_episodes import EnvironmentEpisodes, episode_request
from support import vision_cases
from support.engine_host import PublishedPolicy, SwappingEngine, hosted
from support.engines import START_TIMEOUT_S
from support.parallel_cases import Case
from support.pool import Pools
from support.vision_cases import rollout_difference, sampled_alone
from support.vision_models import WITH_ENGINES, square, write_vision_model

TOLERANCE = 1e-5
DRAWING = f"{Path(__file__).parents[1] / 'support' / 'toy_environments.py'}:Drawing"
OF_ENVIRONMENT = ((square("red"),), (square("blue", (112, 48)), square("green", (40, 100))), ())
"""Images of its messages, as `toy_environments.Drawing` shows them."""
GUARDS = ("qwen3_vl",)


@pytest.fixture(scope="module")
def host(placement: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with hosted(placement, tmp_path_factory.mktemp("vision-engines")) as group:
        yield group


class Hosted:
    """The engine of a host, as refits of tests call it."""

    def __init__(self, host: Any) -> None:
        self._host = host

    def call(self, method: Any, *args: Any) -> Any:
        return self._host.call(SwappingEngine.call, method, *args)[0]

    def submit(self, method: Any, *args: Any) -> Any:
        return self._host.submit(SwappingEngine.call, method, *args)


def spec(model: Path) -> EngineSpec:
    from rlctl.backends.vllm.args import engine_spec

    config = RlConfig.model_validate({"generation": {"max_concurrent": 16, "kv_cache_bytes": 32 << 20}})
    return engine_spec(config, facts_in(model), model, device="cpu", max_length=1024, threads=1)


def row_of(position: int) -> PromptRow:
    sources = [image_source(image, f"row {position}", Path()) for image in vision_cases.IMAGES[position]]
    message = {"role": "user", "content": MARK * len(sources) + f"what color is square {position}?"}
    prompt = [message | ({IMAGES: sources} if sources else {})]
    return PromptRow(position, f"row {position}", prompt, "red")


def sampled(host: Any, asked: list[GroupRequest], sampling: Sampling) -> list[SampledGroup]:
    """The groups as a call returns them and as they end by themselves, which are the same."""

    call = Hosted(host).call
    together = call(EpisodeWorker.generate, asked, sampling, 100.0)
    call(EpisodeWorker.submit, asked, sampling)
    for _ in asked:
        (one,) = attached(*call(EpisodeWorker.collect_by_handle, 100.0))
        (other,) = (result for result in together if result.group == one.group)
        assert (one.columns.tokens_T == other.columns.tokens_T).all()
        np.testing.assert_allclose(one.columns.logprobs_T, other.columns.logprobs_T, atol=TOLERANCE)
    return together


def expected_ids(directory: Path, turns: list[list[dict[str, Any]]], answers: list[list[int]], end: int) -> list[int]:
    """A conversation by transformers' processor, with sampled ids between what the template writes for `turns`."""
    processor: Any = ImageProcessor.open(directory).processor
    told: list[dict[str, Any]] = []
    for messages in turns:
        told += [*messages, {"role": "assistant", "content": "ANSWER"}]
    written = processor.apply_chat_template(told).split("ANSWER")
    found: list[int] = []
    for number, (text, messages) in enumerate(zip(written, turns, strict=False)):
        images = [part["image"] for one in messages for part in one["content"] if part["type"] == "image"]
        ids = processor(text=[text], images=[images] if images else None, add_special_tokens=False)["input_ids"][0]
        over = number > 0 and answers[number - 1][-1] == end  # then the answer has the token that the text begins with
        found += [*ids[over:], *answers[number]]
    return found


def require_agreed(directory: Path, results: list[SampledGroup], never: tuple[int, ...], images: Any) -> None:
    """`images`: of each group."""
    for result, shown in zip(results, images, strict=True):
        for row in range(result.columns.rollouts):
            own = result.columns.slice(row)
            media = result.columns.media(row)
            assert [part.data.shape[:2] for part in media] == [image.size[::-1] for image in shown]
            tokens, mask = result.columns.tokens_T[own], result.columns.loss_mask_T[own]
            theirs = sampled_alone(directory, tokens, [Image.fromarray(part.data) for part in media], never).numpy()
            assert np.abs(result.columns.logprobs_T[own][1:] - theirs)[mask[1:]].max() < TOLERANCE
            assert not np.isin(tokens[mask], never).any()


def require_trained(directory: Path, results: list[SampledGroup], never: tuple[int, ...], pools: Pools) -> None:
    for parallel in (ParallelSpec(), ParallelSpec(dp=2)):
        case = Case(backend="dtensor", parallel=parallel)
        of_ranks = pools(parallel.world_size).run(rollout_difference, case, directory, never, results)
        assert max(of_ranks) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=pytest.mark.guard if one in GUARDS else ()) for one in WITH_ENGINES]
)
def test_engines_report_what_transformers_and_the_trainer_compute(
    family: str, host: Any, pools: Pools, tmp_path: Path
) -> None:
    directory = write_vision_model(tmp_path / family, family)
    environment = {"name": DRAWING, "turns": 3}
    config = RlConfig.model_validate({"environment": environment})
    encoder = PromptEncoder.build(load_tokenizer(directory, config.model), config.model, config.data, directory)
    never, end = (*encoder.never_sampled, *range(64, 250)), encoder.stop_token_ids[0]  # more, so that some are missed
    rows = [row_of(position) for position in range(len(vision_cases.IMAGES))]
    sampling = Sampling(8, never=never)

    host.within(START_TIMEOUT_S).call(SwappingEngine.swap, spec(directory))
    prompts = [encoder.prompt(row) for row in rows]
    alone = [
        GroupRequest(row.index, one.tokens, (1, 2), media=one.media) for row, one in zip(rows, prompts, strict=True)
    ]
    alone.append(_with_lines(alone[1], encoder))
    results = sampled(host, alone, sampling)
    for position, result in enumerate(results[:-1]):
        theirs = vision_cases.written(directory, position).inputs["input_ids"][0].tolist()
        assert result.columns.tokens_T[: result.prompt_tokens].tolist() == theirs
    of_alone = [*vision_cases.IMAGES, vision_cases.IMAGES[1]]
    require_agreed(directory, results, never, of_alone)
    require_trained(directory, results, never, pools)

    made = EnvironmentEpisodes.open(config, encoder, rows[0])
    assert made is not None
    host.within(START_TIMEOUT_S).call(SwappingEngine.play, spec(directory), replace(made, max_length=1024))
    asked = [episode_request(row.index, row, encoder, (1, 2), 0) for row in rows]
    results = sampled(host, asked, sampling)
    for position, result in enumerate(results):
        assert {(one.turns, one.failure) for one in result.episodes} == {(3, None)}
        for sample in range(2):
            own = result.columns.slice(sample)
            tokens, turn_T = result.columns.tokens_T[own], result.columns.extra_T["turn"][own]
            answers = [tokens[turn_T == turn].tolist() for turn in range(3)]
            assert tokens.tolist() == expected_ids(directory, _told(position), answers, end)
    of_rows = [[*own, *(image for shown in OF_ENVIRONMENT for image in shown)] for own in vision_cases.IMAGES]
    require_agreed(directory, results, never, of_rows)
    require_trained(directory, results, never, pools)

    # All weights change, those of the tower too, and the same images come again.
    policy = PublishedPolicy(directory)
    policy.perturb(1)
    policy.refit(Hosted(host), 1, receive="auto")
    changed = policy.save(tmp_path / "changed")
    results = sampled(host, alone, sampling)
    require_agreed(changed, results, never, of_alone)
    require_trained(changed, results, never, pools)


def _with_lines(asked: GroupRequest, encoder: PromptEncoder) -> GroupRequest:
    """A later turn: the model has sampled newlines one by one, which no processor is to join (Gemma 3 has tokens for
    several)."""
    known: list[Any] = [encoder.tokenizer.convert_tokens_to_ids("\n" * count) for count in (1, 2, 2, 1, 1)]
    return replace(
        asked, group=len(vision_cases.IMAGES), prompt_tokens=(*asked.prompt_tokens, *filter(None, known), 40)
    )


def _told(position: int) -> list[list[dict[str, Any]]]:
    """The messages in front of each answer, as transformers' processors take them."""

    def user(*parts: Any) -> dict[str, Any]:
        texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
        return {"role": "user", "content": texts}

    red, wide, tall = ({"type": "image", "image": image} for shown in OF_ENVIRONMENT for image in shown)
    own = [{"type": "image", "image": image} for image in vision_cases.IMAGES[position]]
    first = [user(*own, f"what color is square {position}?"), user("Begin:", red)]
    return [first, [user(wide, "or", tall, "?")], [user("And without one?")]]
