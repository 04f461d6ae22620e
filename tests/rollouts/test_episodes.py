"""Episodes of several turns on a real engine: token in, token out, and every token knows who wrote it."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

from rlctl.backends.base import EngineSpec, EpisodeWorker
from rlctl.backends.batching.batch import WeightedSequence
from rlctl.backends.batching.packed_rows import build_row
from rlctl.backends.messages import GroupRequest, SampleRequest, SampleResult, Sampling, attached
from rlctl.cluster.ray_session import fetch, put
from rlctl.data.chat import PromptEncoder, load_tokenizer
from rlctl.data.prompt_records import row_from_record
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.rollouts import MediaPart, Turn, contexts_of
from rlctl.errors import InputError, WorkerError
from rlctl.methods.rl.grpo import Grpo
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.rollouts import episodes
from rlctl.rollouts.environment_episodes import EnvironmentEpisodes, episode_request, episode_seed
from rlctl.rollouts.episodes import Episode, result_of
from rlctl.rollouts.scored_groups import groups_with_scores, load_groups, save_groups
from rlctl.rollouts.source import sample_seed
from rlctl.rollouts.source_episodes import SourceEpisodes
from rlctl.settings.data import DataConfig, ModelConfig
from support.chat_formats import FORMATS, write_of_formats
from support.engine_host import SwappingEngine, hosted
from support.engine_policies import PROMPTS, WholeTensorPolicy, requests
from support.engines import START_TIMEOUT_S, tiny_facts
from support.multimodal_models import IMAGE, IMAGE_SIDE, IMAGE_TOKENS, write_with_images
from support.pool import slowly
from support.toy_episodes import REPLY, TOKENS_A_TURN, TURNS
from support.toy_gym import free_port, toy_gym
from support.vision_cases import sampled_alone
from support.vision_models import square, write_vision_model

TOLERANCE = 1e-4
TOYS = Path(__file__).parents[1] / "support" / "toy_environments.py"
PROGRAM = TOYS.with_name("toy_program.py")
ROW = PromptRow(0, "row 0", "2 + 3?", "5")
SAMPLING = Sampling(40)


@pytest.fixture(scope="module")
def host(placement: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with hosted(placement, tmp_path_factory.mktemp("episodes")) as group:
        yield group


def spec(model: Path) -> EngineSpec:
    from rlctl.backends.vllm.args import engine_spec
    from rlctl.methods.rl.rl_config import RlConfig

    generation = {"max_concurrent": 16, "kv_cache_bytes": 32 << 20}
    config = RlConfig.model_validate({"generation": generation})
    return engine_spec(config, tiny_facts(tied=False), model, device="cpu", max_length=512, threads=1)


def call(host: Any, method: Any, *args: Any) -> Any:
    return host.call(SwappingEngine.call, method, *args)[0]


def test_an_episode_is_put_together_from_answers_and_what_others_wrote(host: Any, tiny_llama: Path) -> None:
    policy = WholeTensorPolicy(tiny_llama)
    host.within(START_TIMEOUT_S).call(SwappingEngine.play, spec(tiny_llama), "support.toy_episodes:echo")
    results = call(host, EpisodeWorker.generate, requests(samples=2), SAMPLING, 60.0)
    assert [result.group for result in results] == [0, 1, 2, 3]
    for result, prompt in zip(results, PROMPTS, strict=True):
        columns = result.columns
        for row in range(2):
            part = columns.slice(row)
            tokens, mask = columns.tokens_T[part].tolist(), columns.loss_mask_T[part]
            others = [(at, token) for at, (token, chosen) in enumerate(zip(tokens, mask, strict=True)) if not chosen]
            assert tuple(token for _, token in others[: len(prompt)]) == prompt
            assert tuple(token for _, token in others[len(prompt) :]) == REPLY * (TURNS - 1)
            expected = policy.logprobs(tuple(tokens[:1]), tokens[1:], SAMPLING).numpy()
            got = columns.logprobs_T[part]
            assert np.abs(got[1:] - expected)[mask[1:]].max() < TOLERANCE
            assert set(columns.weight_version_T[part][mask]) == {0}
            assert result.response_tokens[row] == mask.sum() <= TURNS * TOKENS_A_TURN
            assert result.rewards[row] == (TURNS if mask.sum() == TURNS * TOKENS_A_TURN else result.rewards[row])
        assert result.finish_reasons == ("done",) * 2
    assert any(result.rewards == (float(TURNS),) * 2 for result in results)


def test_episodes_that_go_on_by_themselves_are_the_same(host: Any, tiny_llama: Path) -> None:
    host.within(START_TIMEOUT_S).call(SwappingEngine.play, spec(tiny_llama), "support.toy_episodes:echo")
    together = {one.group: one for one in call(host, EpisodeWorker.generate, requests(2), SAMPLING, 60.0)}
    call(host, EpisodeWorker.submit, requests(samples=2), SAMPLING)
    for _ in PROMPTS:
        (one,) = attached(*call(host, EpisodeWorker.collect_by_handle, 60.0))
        other = together.pop(one.group)
        assert (one.columns.tokens_T == other.columns.tokens_T).all()
        assert (one.rewards, one.texts) == (other.rewards, other.texts)
    assert not together


def test_an_environment_that_fails_ends_its_call_and_not_the_engine(host: Any, tiny_llama: Path) -> None:
    host.within(START_TIMEOUT_S).call(SwappingEngine.play, spec(tiny_llama), "support.toy_episodes:broken")
    for _ in range(2):
        with pytest.raises(WorkerError, match="the environment is broken"):
            call(host, EpisodeWorker.generate, requests(samples=2), SAMPLING, 60.0)


def test_each_turn_has_a_seed_of_its_own() -> None:
    assert len({sample_seed(seed, turn) for seed in range(10) for turn in range(1, 10)}) == 90


def test_an_engine_of_one_turn_is_the_default(host: Any, tiny_llama: Path) -> None:
    own = replace(spec(tiny_llama), in_flight="wait")
    host.within(START_TIMEOUT_S).call(SwappingEngine.swap, own)
    (result, *_) = call(host, EpisodeWorker.generate, requests(samples=2), Sampling(4), 60.0)
    mask = result.columns.loss_mask_T[result.columns.slice(0)]
    assert (np.diff(mask.astype(int)) >= 0).all()  # a prompt and one answer
    assert result.rewards == (None, None)


@pytest.mark.long
def test_a_prompt_s_image_is_with_each_turn_and_with_its_rollout(host: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = write_with_images(tmp_path)
    processor = AutoProcessor.from_pretrained(model)
    looked = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    engine = spec(model)
    engine = replace(
        engine, arguments=engine.arguments | {"skip_mm_profiling": True, "limit_mm_per_prompt": {"image": 1}}
    )
    host.within(START_TIMEOUT_S).call(SwappingEngine.swap, engine, "support.toy_episodes:echo")
    pixels = np.random.default_rng(0).integers(0, 255, (IMAGE_SIDE, IMAGE_SIDE, 3), dtype=np.uint8)
    text = f"What is {IMAGE}? The answer is"
    ids = processor(text=[text], images=[[pixels]], add_special_tokens=False).input_ids[0]
    written = processor.tokenizer(text, add_special_tokens=False).input_ids
    at = written.index(processor.image_token_id)
    part = MediaPart("image", pixels, at, len(ids) - len(written) + 1, (processor.image_token_id,))
    asked = GroupRequest(0, tuple(ids), (1, 2), media=(part,))
    (result,) = call(host, EpisodeWorker.generate, [asked], Sampling(40, temperature=0.0), 60.0)
    columns = result.columns
    shown = processor.image_processor([pixels], return_tensors="pt")
    for sample in range(2):
        own = columns.slice(sample)
        tokens, mask = torch.tensor(columns.tokens_T[own]).long(), columns.loss_mask_T[own]
        with torch.no_grad():
            logprobs = looked(input_ids=tokens[None], **shown).logits[0].log_softmax(-1)
        expected = logprobs[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
        assert np.abs(columns.logprobs_T[own][1:] - expected)[mask[1:]].max() < TOLERANCE
    held = replace(result, columns=put(columns), texts=put(result.texts))
    groups, _ = groups_with_scores([held], {0: ROW}, {0: asked.seeds}, [None], "stop")
    save_groups(tmp_path / "groups.npz", groups)
    (loaded,) = load_groups(tmp_path / "groups.npz", lambda position: ROW)
    micro = tuple(WeightedSequence(0, one.sample, one.prompt_tokens, one.tokens, 0.0, 1.0) for one in loaded.rollouts)
    row = build_row(micro, {0: fetch(loaded.columns)}, share=True, multiple=1, device=torch.device("cpu"))
    (found,) = row.media  # the prompt stands there once
    assert (found.start, found.tokens) == (at, IMAGE_TOKENS + 3)
    assert (found.data == pixels).all()
    assert row.media_T is not None
    assert row.media_T[at : at + found.tokens].tolist() == list(range(found.tokens))
    assert (row.media_T >= 0).sum() == found.tokens
    miscounted = replace(asked, media=(replace(part, tokens=part.tokens - 1),))
    with pytest.raises(WorkerError, match="vLLM reads a prompt with image as"):
        call(host, EpisodeWorker.generate, [miscounted], SAMPLING, 60.0)


@pytest.mark.parametrize("other", ["equal", "other pixels", "another size"])
def test_a_group_shares_the_images_that_are_the_same(other: str) -> None:
    """An environment may show each episode an image of its own, whose tokens look the same."""
    red, blue = (np.array(square(color, (8, 4))) for color in ("red", "blue"))
    second, tokens = {"equal": (red.copy(), 4), "other pixels": (blue, 4), "another size": (blue[:2], 2)}[other]
    request, episodes = GroupRequest(0, (), (1, 2)), []
    for pixels, count in ((red, 4), (second, tokens)):
        episode = Episode(cast(Any, None), "0.0.0", request, 1, SAMPLING)
        episode.read([7, *[5] * count, 8], [MediaPart("image", pixels, 1, count, (5,))])
        answer = SampleResult("", np.array([9], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "", "stop")
        episode.answers.append((len(episode.tokens), answer))
        episode.tokens.append(9)
        episode.transcript.append(Turn("assistant", "", 1, 0.0))
        episodes.append(episode)
    result = result_of(request, episodes, 0)
    assert result.prompt_tokens == (6 if other == "equal" else 1)
    micro = tuple(WeightedSequence(0, one, result.prompt_tokens, result.tokens[one], 0.0, 1.0) for one in range(2))
    row = build_row(micro, {0: result.columns}, share=True, multiple=1, device=torch.device("cpu"))
    assert [part.data.tolist() for part in row.media] == [red.tolist(), *([second.tolist()] * (other != "equal"))]
    assert [row.tokens_T[part.start : part.start + part.tokens].unique().tolist() for part in row.media] == [
        [5] for _ in row.media
    ]


# With an environment


def play(
    model: Path, name: str, limits: dict[str, Any] | None = None, *, template: str | None = None, **params: Any
) -> EnvironmentEpisodes:
    """The play of an environment of `toy_environments`, or of one with a small letter that comes with rlctl, as a run
    opens it."""
    named = f"{TOYS}:{name}" if name[0].isupper() else name
    environment = {"name": named, "params": params, **(limits or {})}
    config = RlConfig.model_validate({"environment": environment, "model": {"chat_template": template}})
    encoder = PromptEncoder.build(load_tokenizer(model, config.model), config.model, config.data, model)
    found = EnvironmentEpisodes.open(config, encoder, ROW)
    assert found is not None
    return replace(found, max_length=256)


def played(
    host: Any, model: Path, made: EnvironmentEpisodes, samples: int = 2, new: int = 6, ends: tuple[int, ...] = ()
) -> list[Any]:
    host.within(START_TIMEOUT_S).call(SwappingEngine.play, spec(model), made)
    seeds = [tuple(100 * group + sample for sample in range(samples)) for group in range(3)]
    asked = [episode_request(i, ROW, made.turns.encoder, one, episode_seed(0, i)) for i, one in enumerate(seeds)]
    return call(host, EpisodeWorker.generate, asked, Sampling(new, stop_token_ids=ends), 60.0)


def test_turns_and_an_environment_s_messages_are_told_apart(host: Any, tiny_llama: Path) -> None:
    made, policy = play(tiny_llama, "Counting"), WholeTensorPolicy(tiny_llama)
    results = played(host, tiny_llama, made)
    decode = made.turns.encoder.tokenizer.decode
    for result in results:
        columns = result.columns
        for sample in range(2):
            part = columns.slice(sample)
            tokens, mask, turn = columns.tokens_T[part], columns.loss_mask_T[part], columns.extra_T["turn"][part]
            assert (mask == (turn >= 0)).all()
            assert sorted(set(turn[mask].tolist())) == [0, 1, 2]
            assert set(columns.extra_T["turn_reward"][part][mask].tolist()) == {0.5}
            expected = policy.logprobs(tuple(tokens[:1].tolist()), tokens[1:].tolist(), Sampling(6)).numpy()
            assert np.abs(columns.logprobs_T[part][1:] - expected)[mask[1:]].max() < TOLERANCE
            said = [one for one in result.transcripts[sample] if one.role == "assistant"]
            for number, one in enumerate(said):
                ids = tokens[turn == number].tolist()
                assert len(ids) == one.tokens
                assert one.text.rstrip("\ufffd") == made.turns.text_of(ids).rstrip("\ufffd")
            assert "turn 1" in decode(tokens[~mask])
            assert "turn 3" not in decode(tokens[~mask])  # nobody answers what ended the episode
        assert (result.rewards, result.finish_reasons) == ((1.5, 1.5), ("length", "length"))  # no turn ended by itself
        assert {(one.turns, one.counts["said"], one.failure) for one in result.episodes} == {(3, 3.0, None)}
        first = columns.loss_mask_T[columns.slice(0)].argmax()
        assert result.prompt_tokens == first  # environments of a group begin alike


@pytest.mark.long
@pytest.mark.parametrize(
    ("limits", "reason", "turns"),
    [
        ({"turns": 2}, "turns", 2),
        pytest.param({"sampled_tokens": 8}, "sampled_tokens", 2, marks=pytest.mark.slow),
        ({}, "context", None),
    ],
)
def test_limits_end_an_episode_with_their_name(
    host: Any, tiny_llama: Path, limits: dict[str, int], reason: str, turns: int | None
) -> None:
    made = play(tiny_llama, "Counting", limits, turns=20, tail=" and more" * (reason == "context"))
    for result in played(host, tiny_llama, replace(made, max_length=64 + 192 * (reason != "context"))):
        assert set(result.finish_reasons) == {reason}
        for number, one in enumerate(result.episodes):
            assert turns is None or one.turns == turns
            assert result.tokens[number] <= made.max_length
            assert result.response_tokens[number] <= limits.get("sampled_tokens", 256)


@pytest.mark.long
@pytest.mark.parametrize("cut", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_episode_whose_last_turn_is_cut_off_is_one_that_was_cut_off(host: Any, tiny_llama: Path, cut: bool) -> None:
    """Turns that the limit of 6 tokens ends are as cut off as a single completion is, and cost as much by DAPO
    (2503.14476) equation 13, whatever their number: 1 at the limit. Turns of a token that ends them cost nothing."""
    made, every = play(tiny_llama, "Counting"), tuple(range(len(load_tokenizer(tiny_llama, ModelConfig()))))
    sections = {
        "generation": {"max_new_tokens": 6},
        "reward": {"overlong_buffer": 0.5},
        "filter": {"truncated": "mask"},
    }
    algorithm = Grpo(RlConfig.model_validate(sections))
    for result in played(host, tiny_llama, made, ends=() if cut else every):
        (group,), _ = groups_with_scores([result], {result.group: ROW}, {result.group: (1, 2)}, [None], "stop")
        for rollout in group.rollouts:
            assert (rollout.stop_reason, rollout.truncated) == (("length", True) if cut else ("done", False))
            assert rollout.response_tokens == (3 * 6 if cut else 3)
            assert algorithm.learned_tokens(rollout) == (0 if cut else 3)
        assert algorithm.length_penalties(group).tolist() == ([-1.0, -1.0] if cut else [0.0, 0.0])


@pytest.mark.long
@pytest.mark.parametrize("how", [pytest.param("raise", marks=pytest.mark.slow), "die", "hang"])
def test_a_failing_environment_costs_its_own_rollouts(host: Any, tiny_llama: Path, how: str) -> None:
    made = play(tiny_llama, "Failing", {"turn_timeout_s": 3.0}, how=how)
    results = played(host, tiny_llama, made)
    assert {one.failure is None for result in results for one in result.episodes} == {True, False}
    for result in results:
        groups, failures = groups_with_scores([result], {result.group: ROW}, {result.group: (1, 2)}, [None], "drop")
        failed = [one.failure for one in result.episodes if one.failure]
        assert groups[0].dropped == tuple(failed)
        assert failures == len(failed)
        assert [one.reward for one in groups[0].rollouts] == [3.0] * (2 - len(failed))
        groups, _ = groups_with_scores([result], {result.group: ROW}, {result.group: (1, 2)}, [None], "zero")
        assert [one.reward for one in groups[0].rollouts] == [0.0 if one.failure else 3.0 for one in result.episodes]


@pytest.mark.long
def test_an_engine_plays_each_group_in_the_environment_of_its_source(host: Any, tiny_llama: Path) -> None:
    """Two environments, of which one fails in some episodes, next to prompts of one turn."""
    counting, failing = play(tiny_llama, "Counting"), play(tiny_llama, "Failing", {"retries": 0}, how="raise")
    made = SourceEpisodes({"a": counting, "b": failing, "c": counting}).within(200)
    host.within(START_TIMEOUT_S).call(SwappingEngine.play, spec(tiny_llama), made)
    sources = ("b", "a", "", "c", "b", "b")
    asked = [
        episode_request(place, replace(ROW, source=source), counting.turns.encoder, (place,), episode_seed(0, place))
        if source
        else GroupRequest(place, PROMPTS[0], (place,))
        for place, source in enumerate(sources)
    ]
    results = call(host, EpisodeWorker.generate, asked, Sampling(6), 60.0)
    even = [random.Random(episode_seed(0, place)).randint(0, 9) % 2 == 0 for place in range(len(sources))]
    assert len({even[place] for place, source in enumerate(sources) if source == "b"}) == 2
    for place, (source, result) in enumerate(zip(sources, results, strict=True)):
        if not source:
            assert (result.episodes, result.rewards) == ((), (None,))
            continue
        (facts,) = result.episodes
        fails = source == "b" and even[place]
        assert (facts.reason, "step raised KeyError: 'nothing'" in facts.cause) == ("raised" * fails, fails)
        assert (facts.turns, result.rewards) == (2 if fails else 3, (1.0 if fails else 3.0 if source == "b" else 1.5,))


def test_raw_texts_stand_between_turns_as_they_are(host: Any, tiny_llama: Path) -> None:
    made = play(tiny_llama, "Counting", {"append": "raw"})
    for result in played(host, tiny_llama, made, samples=1):
        tokens, mask = result.columns.tokens_T, result.columns.loss_mask_T
        after = np.flatnonzero(np.diff(mask.astype(int)) == -1)[0] + 1
        before = np.flatnonzero(np.diff(mask.astype(int)) == 1)[1] + 1
        assert made.turns.encoder.tokenizer.decode(tokens[after:before]) == "turn 1"


def test_seconds_of_the_engine_are_those_with_a_continuation_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two continuations at once count once, and an attempt that failed counts for the environment."""
    clock = 100.0

    async def passing(seconds: float) -> None:
        nonlocal clock
        for _ in range(round(seconds)):
            await asyncio.sleep(0)
            clock = ends.pop(0) if ends else clock

    class Runner:
        async def sampled(self, request: SampleRequest) -> SampleResult:
            await passing(request.sampling.max_new_tokens)
            return SampleResult(request.key, np.array([1]), np.array([0.0]), np.array([0]), "x", "stop")

    ends: list[float] = []
    monkeypatch.setattr(episodes.time, "monotonic", lambda: clock)
    episode = Episode(cast("Any", Runner()), "key", GroupRequest(0, (1, 2), (3,)), 3, Sampling(1))

    async def play() -> None:
        nonlocal clock
        clock += 4  # an attempt that fails
        episode.begin()
        ends[:] = [107.0]
        await episode.answer()  # 3 s
        clock += 5
        ends[:] = [113.0, 114.0, 116.0]
        await asyncio.gather(episode.sample(1, (1,), ()), episode.sample(2, (1,), (), max_new_tokens=2))  # 4 s
        clock += 1
        episode.end()

    asyncio.run(play())
    facts = episodes._facts(episode)
    assert (facts.model_s, facts.environment_s) == (7.0, 10.0)


# Contexts: the model goes on from a conversation that is not the one before


THOUGHTS_GO = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)


def require_exact(result: Any, policy: WholeTensorPolicy, sample: int) -> list[list[int]]:
    """Require the log-probs of a policy for each context of a rollout; return their tokens."""
    columns, found = result.columns, []
    for begin, tokens in contexts_of(result.tokens[sample], result.episodes[sample]):
        part = slice(columns.slice(sample).start + begin, columns.slice(sample).start + begin + tokens)
        ids, mask = columns.tokens_T[part].tolist(), columns.loss_mask_T[part]
        expected = policy.logprobs(tuple(ids[:1]), ids[1:], Sampling(6)).numpy()
        assert mask.any()
        assert np.abs(columns.logprobs_T[part][1:] - expected)[mask[1:]].max() < TOLERANCE
        found.append(ids)
    return found


def test_thoughts_go_where_the_template_takes_them_out(host: Any, tiny_llama: Path) -> None:
    made = play(tiny_llama, "Counting", {"thinking": "template"}, template=THOUGHTS_GO)
    assert made.turns.drops == ("user",)
    policy, encoder = WholeTensorPolicy(tiny_llama), made.turns.encoder
    for result in played(host, tiny_llama, made):
        for sample in range(2):
            contexts = require_exact(result, policy, sample)
            assert len(contexts) == 3
            said = [{"role": one.role, "content": one.text} for one in result.transcripts[sample]]
            for turn, ids in enumerate(contexts):
                written = encoder.encode_messages(said[: 2 * turn + 2], "the conversation")
                assert encoder.tokenizer.decode(ids).startswith(encoder.tokenizer.decode(written))
        assert result.prompt_tokens < min(one[1] for one in contexts_of(result.tokens[0], result.episodes[0]))


def test_a_template_that_keeps_thoughts_is_said_to(tiny_llama: Path) -> None:
    made = play(tiny_llama, "Counting", {"thinking": "template"})
    assert any("keeps thoughts" in note for note in made.notes)
    with pytest.raises(ValueError, match=r"environment\.thinking=template needs a template"):
        RlConfig.model_validate({"environment": {"thinking": "template", "append": "raw"}})


@pytest.mark.long
@pytest.mark.parametrize(("how", "begins"), [
    pytest.param("chat", 1, marks=pytest.mark.slow), pytest.param("stream", 1, marks=pytest.mark.slow),
    ("tools", 1), pytest.param("ids", 1, marks=pytest.mark.slow), pytest.param("several", 1, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_program_asks_the_model(host: Any, tiny_llama: Path, how: str, begins: int) -> None:
    policy = WholeTensorPolicy(tiny_llama)
    made = play(tiny_llama, "program", command=[sys.executable, str(PROGRAM), how])
    made = replace(made, max_length=512)  # the system prompt describes the tools
    for result in played(host, tiny_llama, made):
        for sample in range(2):
            assert len(require_exact(result, policy, sample)) == begins + 1
            assert result.episodes[sample].turns == 3
            assert result.episodes[sample].counts["asked"] == 3.0
        assert result.rewards == ((0.25,) * 2 if how == "ids" else (1.0,) * 2)
        assert result.finish_reasons == ("length", "length")


@pytest.mark.long
def test_agents_of_a_program_share_a_beginning_and_each_sampled_token_is_trained_once(host, tiny_llama) -> None:
    """The program asks once more for the same, has two agents continue one answer at once, edits that answer, and asks
    for two titles and a probe: three branches of four turns."""
    policy = WholeTensorPolicy(tiny_llama)
    made = play(tiny_llama, "program", {"turns": 4}, command=[sys.executable, str(PROGRAM), "harness"])
    for result in played(host, tiny_llama, replace(made, max_length=512)):
        for sample in range(2):
            assert len(require_exact(result, policy, sample)) == 3
            episode, columns = result.episodes[sample], result.columns
            assert (episode.failure, episode.turns) == (None, 4)
            counts = {name.removeprefix("gateway/"): number for name, number in episode.counts.items()}
            assert (counts["requests"], counts["retries"], counts["auxiliary"]) == (7, 1, 3)
            assert (counts["unenforced_tool_choice"], counts["unenforced_response_format"]) == (1, 1)
            assert (counts["branches"], counts["rewritten_answers"]) == (2, 1)
            mask = columns.loss_mask_T[columns.slice(sample)]
            answers = [turn for turn in result.transcripts[sample] if turn.request]
            assert mask.sum() == sum(turn.tokens for turn in answers if not turn.auxiliary)
            assert [turn.auxiliary for turn in answers] == ["", "", "", "", "title", "model small", "probe"]
            assert counts["dropped_tokens"] == sum(turn.tokens for turn in answers[4:])
            asked = sorted((turn.request for turn in answers[:4]), key=lambda request: request.number)
            assert [request.parent for request in asked] == [None, 1, 1, None]
            assert all(0 <= request.began_s <= request.ended_s for request in asked)
            assert asked[0].ended_s <= min(request.began_s for request in asked[1:])
            assert asked[1].prompt_tokens > asked[0].prompt_tokens


@pytest.mark.long
def test_calls_of_a_conversation_are_texts_for_a_template_that_writes_none(host: Any, tiny_llama: Path) -> None:
    """In the form in which the system prompt asks for them."""
    made = play(tiny_llama, "program", command=[sys.executable, str(PROGRAM), "recalls"])
    (result, *_) = played(host, tiny_llama, replace(made, max_length=512), samples=1)
    assert len(require_exact(result, WholeTensorPolicy(tiny_llama), 0)) == 1
    text = made.turns.encoder.tokenizer.decode(result.columns.tokens_T[: result.prompt_tokens])
    call = '<tool_call>\n{"name": "look_up", "arguments": {"place": "here"}}\n</tool_call>'
    said = ["What is here?", call, "a cup", "A cup.", "Answer"]
    places = [text.index(words) for words in said]
    assert places == sorted(places)
    assert result.episodes[0].counts["gateway/rewritten_answers"] == 0  # the first request's answer is an example
    assert [one.role for one in result.transcripts[0]][1:6] == ["user", "assistant", "user", "assistant", "user"]


@pytest.mark.slow
def test_a_program_shows_the_model_the_images_of_its_row(host: Any, tmp_path: Path) -> None:
    """Also where it goes on from tokens that stand for images already, which nothing expands again."""
    model = write_vision_model(tmp_path / "model", "qwen3_vl")
    shown = [square("red"), square("blue", (112, 48))]
    record = {"prompt": "What is it?", "images": shown, "answer": "x"}
    row = row_from_record(record, 0, "row 0", DataConfig())
    config = RlConfig.model_validate(
        {"environment": {"name": "program", "params": {"command": [sys.executable, str(PROGRAM), "look"]}}}
    )
    encoder = PromptEncoder.build(load_tokenizer(model, config.model), config.model, config.data, model)
    made = EnvironmentEpisodes.open(config, encoder, row)
    assert made is not None
    made = replace(made, max_length=512)
    engine = replace(spec(model), arguments=spec(model).arguments | {"skip_mm_profiling": True})
    host.within(START_TIMEOUT_S).call(SwappingEngine.play, engine, made)
    asked = episode_request(0, row, encoder, (1, 2), 0)
    never = encoder.never_sampled
    (result,) = call(host, EpisodeWorker.generate, [asked], Sampling(6, never=never), 60.0)
    for sample in range(2):
        columns, episode = result.columns, result.episodes[sample]
        assert (episode.failure, episode.turns) == (None, 4)
        contexts = contexts_of(result.tokens[sample], episode)
        sizes = []
        for begin, tokens in contexts:
            part = slice(columns.slice(sample).start + begin, columns.slice(sample).start + begin + tokens)
            media = [one for one in columns.media(sample) if begin <= one.start < begin + tokens]
            sizes.append([one.data.shape[1::-1] for one in media])
            mask = columns.loss_mask_T[part]
            images = [Image.fromarray(one.data) for one in media]
            expected = sampled_alone(model, columns.tokens_T[part], images, never).numpy()
            assert np.abs(columns.logprobs_T[part][1:] - expected)[mask[1:]].max() < TOLERANCE
        both = [image.size for image in shown]
        assert sizes == [both, [*both, both[0]], both]  # the conversation continues in the second answer's context


@pytest.mark.slow
def test_an_agent_of_nemo_gym_asks_the_model_of_its_episode(host: Any, tiny_llama: Path) -> None:
    policy, listen = WholeTensorPolicy(tiny_llama), f"127.0.0.1:{free_port()}"
    with toy_gym(f"http://{listen}/v1") as head:
        with pytest.raises(InputError, match=r"The row names the agent None, and NeMo Gym at .* has guesser"):
            play(tiny_llama, "nemo-gym", head=head, listen=listen)
        made = play(tiny_llama, "nemo-gym", head=head, listen=listen, agent="guesser")
        for result in played(host, tiny_llama, made):
            for sample in range(2):
                assert len(require_exact(result, policy, sample)) == 1
                assert (result.episodes[sample].turns, result.episodes[sample].counts["turns"]) == (2, 5.0)
            assert (result.rewards, result.finish_reasons) == ((0.5, 0.5), ("length", "length"))
            groups, _ = groups_with_scores([result], {result.group: ROW}, {result.group: (1, 2)}, [None], "stop")
            assert [one.terms for one in groups[0].rollouts] == [{"form": 0.3, "right": 0.2}] * 2
    with pytest.raises(InputError, match="There is no head server of NeMo Gym"):
        play(tiny_llama, "nemo-gym", head=head, listen=listen, agent="guesser")


def test_a_program_is_told_that_its_episode_is_over(host: Any, tiny_llama: Path) -> None:
    made = play(tiny_llama, "program", {"turns": 4}, command=f"{sys.executable} {PROGRAM} endless")
    for result in played(host, tiny_llama, made):
        assert set(result.finish_reasons) == {"turns"}
        assert [one.turns for one in result.episodes] == [4, 4]
        assert result.rewards == (0.25 * 9,) * 2


def test_a_program_that_fails_says_its_last_line(tiny_llama: Path) -> None:
    with pytest.raises(InputError, match=r"the program ended with code 1: nothing works \(row 0\)"):
        play(tiny_llama, "program", command=[sys.executable, str(PROGRAM), "fail"])


@pytest.fixture(scope="module")
def of_formats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_of_formats(tmp_path_factory.mktemp("formats"))


@pytest.mark.parametrize("family", slowly(FORMATS.keys(), *sorted(FORMATS)[::3], "gemma3"))
def test_what_the_engine_says_is_what_the_policy_computes_in_every_form(
    host: Any, of_formats: Path, family: str
) -> None:
    made = replace(play(of_formats, "Calling", template=FORMATS[family]), max_length=512)
    assert (made.turns.tool_role == "user") == (family in ("gemma3", "smollm2"))
    policy = WholeTensorPolicy(of_formats)
    for result in played(host, of_formats, made, new=3):
        for sample in range(2):
            (whole,) = require_exact(result, policy, sample)
            assert result.episodes[sample].turns == 4
            written = made.turns.encoder.tokenizer.decode(whole)
            assert written.count("is 12") == 2
            assert written.count("Next?") == 1
