"""Episodes: rollouts in progress, next to their engine.

An episode is a coroutine that asks the engine to continue its tokens, appends others', and returns at its end;
`one_turn` samples one completion. `EpisodeRunner` is an `EpisodeWorker` that takes groups and returns columns. One
thread decodes, another runs episodes. A call's episodes ask for their first samples together, for reproducible batches.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np

from rlctl.backends.base import EngineWorker
from rlctl.backends.messages import (
    VALUES_A_GROUP,
    GroupRequest,
    SampledGroup,
    SampleRequest,
    SampleResult,
    Sampling,
    detached,
)
from rlctl.cluster.progress import report
from rlctl.cluster.worker_host import imported
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.rollouts import (
    FAULTS,
    ROUTED_EXPERTS,
    TURN,
    TURN_REWARD,
    EpisodeFacts,
    EpisodeFailure,
    MediaPart,
    RolloutColumns,
    Turn,
)
from rlctl.errors import WaitTimeoutError
from rlctl.rollouts.source import sample_seed

T = TypeVar("T")
ONE_TURN = "rlctl.rollouts.episodes:one_turn"
LOOK_S = 0.5
"""Seconds between two looks at the engine's state."""
DECODE_S = 0.1
"""Time limit of one decoding call. The end of a run waits for the decoding thread to notice it."""


class Episode:
    """A rollout in progress: append-only token ids, and who wrote them."""

    def __init__(self, runner: EpisodeRunner, key: str, request: GroupRequest, seed: int, sampling: Sampling) -> None:
        self._runner, self._key, self._seed = runner, key, seed
        self.request, self.sampling = request, sampling
        self.ended = False
        """Whether it has ended, with or without a failure."""
        self.seconds = 0.0
        """Time from its first beginning to its end."""
        self.model_s = 0.0
        """Part of it in which the engine continued the tokens."""
        self._continues, self._since = 0, time.monotonic()
        """Continuations in progress, and the time of the last look."""
        self.begin()

    def begin(self) -> None:
        """Begin, or begin again, at the prompt."""
        self.tokens = list(self.request.prompt_tokens)
        self.starts = [0]
        """Token position at which each context begins."""
        self.media = list(self.request.media)
        """Images and other media among the tokens, in order."""
        self.answers: list[tuple[int, SampleResult]] = []
        """The model's answers with their token positions."""
        self.rewards: list[float] = []
        """The environment's reward of each answer; without any, the completion is scored."""
        self.faults: dict[int, int] = {}
        """Bits of the faults, by answers with faults."""
        self.said: list[Any] = []
        """Its turns with the environment player's judgment."""
        self.counts: dict[str, float] = {}
        """Metrics, summed over the turns."""
        self.transcript: list[Turn] = []
        self.stop_reason: str | None = None
        """None: the last answer's stop reason."""
        self.failure: EpisodeFailure | None = None
        """The environment's error, if it failed."""

    @property
    def row(self) -> PromptRow:
        assert self.request.row is not None
        return self.request.row

    @property
    def sampled_tokens(self) -> int:
        return sum(len(answer.tokens_R) for _, answer in self.answers)

    def rewarded(self, reward: float) -> None:
        self.rewards += [0.0] * (len(self.answers) - len(self.rewards))
        self.rewards[-1] += reward
        for place in reversed(range(len(self.transcript))):
            if self.transcript[place].role == "assistant" and not self.transcript[place].auxiliary:
                self.transcript[place] = replace(self.transcript[place], reward=self.rewards[-1])
                break

    def count(self, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self.counts[name] = self.counts.get(name, 0.0) + number

    @property
    def context(self) -> list[int]:
        return self.tokens[self.starts[-1] :]

    def images_in(self, tokens: Sequence[int]) -> tuple[MediaPart, ...]:
        """Return the context's media within the prefix that the context shares with `tokens`."""
        begin, context = self.starts[-1], self.context
        pairs = enumerate(zip(context, tokens, strict=False))
        alike = next((position for position, pair in pairs if len({*pair}) > 1), len(context))
        parts = (replace(part, start=part.start - begin) for part in self.media if part.start >= begin)
        return tuple(part for part in parts if part.start + part.tokens <= min(alike, len(tokens)))

    def read(self, tokens: Sequence[int], media: Sequence[MediaPart] = (), *, anew: bool = False) -> None:
        """Append tokens of the environment, with `media` among them. `anew`: start a new context."""
        if anew:
            self.starts.append(len(self.tokens))
        self.media += [replace(part, start=len(self.tokens) + part.start) for part in media]
        self.tokens += tokens

    async def answer(self, **changes: Any) -> SampleResult:
        """Have the model continue the context, with changed fields of the sampling."""
        begin = self.starts[-1]
        media = tuple(replace(part, start=part.start - begin) for part in self.media if part.start >= begin)
        answer = await self._sample(self._key, len(self.answers), self.context, media, **changes)
        self.answers.append((len(self.tokens), answer))
        self.tokens += answer.tokens_R.tolist()
        return answer

    async def sample(
        self, turn: int, tokens: Sequence[int], media: Sequence[MediaPart], **changes: Any
    ) -> SampleResult:
        """Have the model continue `tokens`, next to other turns, without a change of the episode."""
        return await self._sample(f"{self._key}.{turn}", turn, tokens, media, **changes)

    async def _sample(
        self, key: str, turn: int, tokens: Sequence[int], media: Sequence[MediaPart], **changes: Any
    ) -> SampleResult:
        seed = self._seed if turn == 0 else sample_seed(self._seed, turn)
        sampling = replace(self.sampling, **changes)
        self._look()
        self._continues += 1
        try:
            return await self._runner.sampled(SampleRequest(key, tuple(tokens), seed, sampling, tuple(media)))
        finally:
            self._look()
            self._continues -= 1

    def end(self) -> None:
        self._look()
        self.ended = True

    def _look(self) -> None:
        """Count the time since the last look."""
        passed, self._since = time.monotonic() - self._since, time.monotonic()
        self.seconds += passed
        self.model_s += passed * (self._continues > 0)


Play = Callable[[Episode], Awaitable[None]]
"""Plays an episode from its prompt to its end."""


@runtime_checkable
class PlaySpec(Protocol):
    """Settings of a Play, which starts in the process of each engine."""

    def started(self) -> Play: ...


async def one_turn(episode: Episode) -> None:
    await episode.answer()


class EpisodeRunner:
    """Plays episodes against its engine; methods as in `EpisodeWorker`."""

    def __init__(self, engine: EngineWorker, play: Play | PlaySpec) -> None:
        self._engine, self._spec, self._loop = engine, play, asyncio.new_event_loop()
        self._calls = count(1)
        self._begun = self._over = 0
        """Begun and ended episodes since the last idle moment."""
        self._asked: list[SampleRequest] = []
        """Sample requests of this turn of the event loop."""
        self._awaited: dict[str, asyncio.Future[SampleResult]] = {}
        self._changed = threading.Condition()
        self._submitted = 0
        """Number of groups that were submitted and not collected."""
        self._finished: list[SampledGroup | BaseException] = []
        """Ended groups, in order."""
        self._threads: list[threading.Thread] = []

    def engine(self) -> EngineWorker:
        return self._engine

    def start(self) -> None:
        # Before the engine pins this process to its cores: the environment's processes may use all cores.
        self._play: Play = self._spec.started() if isinstance(self._spec, PlaySpec) else self._spec
        loaded = Future[None]()

        def load_and_decode() -> None:  # on a CPU the loading thread sets the engine's cores
            try:
                self._engine.start()
            except BaseException as error:  # noqa: BLE001 - `start` raises it
                loaded.set_exception(error)
                return
            loaded.set_result(None)
            self._decode()

        work = {"episodes": self._loop.run_forever, "decoding": load_and_decode}
        self._threads = [threading.Thread(target=do, name=name, daemon=True) for name, do in work.items()]
        for thread in self._threads:
            thread.start()
        loaded.result()

    def close(self) -> None:
        threads, self._threads = self._threads, []
        if threads:
            self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in threads:
            thread.join()
        if threads and isinstance(self._spec, PlaySpec):
            cast(Any, self._play).close()
        self._engine.close()

    # Calls of the driver

    def generate(self, requests: Sequence[GroupRequest], sampling: Sampling, timeout_s: float) -> list[SampledGroup]:
        deadline = time.monotonic() + timeout_s
        self._engine.require_ready(timeout_s)
        groups = self._episodes(requests, sampling)
        work = together(self._group(*pair) for pair in zip(requests, groups, strict=True))
        call = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return call.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            if call.done():  # an episode raised it
                raise
            self._engine.require_ready(0.0)
            ended = [episode.ended for episodes in groups for episode in episodes]
            raise WaitTimeoutError(
                f"{self._engine.label} completed {sum(ended)} of {len(ended)} samples in {timeout_s:.0f} s.",
                "Raise cluster.step_timeout_s, or ask for fewer or shorter completions.",
            ) from error
        finally:
            call.cancel()

    def generate_by_handle(
        self, requests: Sequence[GroupRequest], sampling: Sampling, timeout_s: float
    ) -> tuple[list[SampledGroup], list[Any]]:
        return detached(self.generate(requests, sampling, timeout_s))

    def submit(self, requests: Sequence[GroupRequest], sampling: Sampling) -> None:
        self._engine.require_ready(0.0)

        async def finish(request: GroupRequest, episodes: list[Episode]) -> None:
            try:
                outcome: SampledGroup | BaseException = await self._group(request, episodes)
            except Exception as error:  # noqa: BLE001 - collecting the group raises it
                outcome = error
            with self._changed:
                self._finished.append(outcome)
                self._changed.notify_all()

        groups = self._episodes(requests, sampling)
        with self._changed:
            self._submitted += len(requests)
            self._changed.notify_all()
        work = together(finish(*pair) for pair in zip(requests, groups, strict=True))
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def collect_by_handle(self, timeout_s: float) -> tuple[list[SampledGroup], list[Any]]:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            if self._engine.asleep:  # the pause keeps the caller from asking in a busy loop
                self._changed.wait(LOOK_S)
            while not self._finished:
                if self._engine.asleep:
                    return [], [None] * VALUES_A_GROUP
                if time.monotonic() > deadline:
                    self._engine.require_ready(0.0)
                    problem = "finished none of its groups" if self._submitted else "was given nothing to sample"
                    raise WaitTimeoutError(f"{self._engine.label} {problem} in {timeout_s:.0f} s.")
                self._changed.wait(min(LOOK_S, max(0.0, deadline - time.monotonic())))
            outcome = self._finished.pop(0)
            self._submitted -= 1
        if isinstance(outcome, BaseException):
            raise outcome
        return detached([outcome])

    # Episodes

    def _episodes(self, requests: Sequence[GroupRequest], sampling: Sampling) -> list[list[Episode]]:
        call = next(self._calls)
        groups = [
            [
                Episode(self, f"{call}.{row}.{index}", request, seed, sampling)
                for index, seed in enumerate(request.seeds)
            ]
            for row, request in enumerate(requests)
        ]
        self._begun += sum(map(len, groups))
        return groups

    async def _group(self, request: GroupRequest, episodes: list[Episode]) -> SampledGroup:
        async def played(episode: Episode) -> None:
            try:
                await self._play(episode)
            finally:
                episode.end()
                self._over += 1
                report(self._over, self._begun)
                if self._over == self._begun:
                    self._over = self._begun = 0

        await together(map(played, episodes))
        return result_of(request, episodes, self._engine.version)

    # Samples

    async def sampled(self, request: SampleRequest) -> SampleResult:
        if not self._asked:
            self._loop.call_soon(self._ask)
        self._asked.append(request)
        self._awaited[request.key] = answer = self._loop.create_future()
        try:
            return await answer
        except asyncio.CancelledError:
            self._engine.drop_samples([request.key])
            raise
        finally:
            self._awaited.pop(request.key, None)

    def _ask(self) -> None:
        requests, self._asked = [request for request in self._asked if request.key in self._awaited], []
        try:
            self._engine.add_samples(requests)
        except Exception as error:  # noqa: BLE001 - awaiting the samples raises it
            self._fail(error, [request.key for request in requests])

    def _decode(self) -> None:
        while self._threads:
            try:
                samples = self._engine.finished_samples(DECODE_S)
            except Exception as error:  # noqa: BLE001 - awaiting the samples raises it
                self._loop.call_soon_threadsafe(self._fail, error)
            else:
                self._loop.call_soon_threadsafe(self._answer, samples)

    def _answer(self, results: Sequence[SampleResult]) -> None:
        for result in results:
            if (awaiting := self._awaited.get(result.key)) and not awaiting.done():
                awaiting.set_result(result)
        if self._begun:
            report(self._over, self._begun)

    def _fail(self, error: Exception, keys: Sequence[str] | None = None) -> None:
        """Fail the awaited samples `keys` with an error; None: all awaited samples."""
        failed = [key for key in (self._awaited if keys is None else keys) if not self._awaited[key].done()]
        self._engine.drop_samples(failed)
        for key in failed:
            self._awaited[key].set_exception(error)


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all `work`; if a part fails, cancel the others."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def result_of(request: GroupRequest, episodes: Sequence[Episode], version: int) -> SampledGroup:
    """Return the columns and scalars of a group. An episode without sampled tokens has `version`."""
    plays = any(episode.transcript or episode.failure for episode in episodes)
    lengths = [len(episode.tokens) for episode in episodes]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    total = int(offsets[-1])
    columns = RolloutColumns(
        np.concatenate([np.asarray(episode.tokens, np.int32) for episode in episodes]),
        offsets,
        np.zeros(total, bool),
        np.zeros(total, np.float32),
        np.full(total, -1, np.int32),
        _routed(episodes) | (_of_turns(episodes, offsets) if plays else {}),
        tuple(tuple(episode.media) for episode in episodes) if any(episode.media for episode in episodes) else (),
    )
    for begin, episode in zip(offsets, episodes, strict=False):
        for first, answer in episode.answers:
            chosen = slice(begin + first, begin + first + len(answer.tokens_R))
            columns.loss_mask_T[chosen] = True
            columns.logprobs_T[chosen] = answer.logprobs_R
            columns.weight_version_T[chosen] = answer.versions_R
    versions = [[v for _, answer in episode.answers for v in answer.versions_R.tolist()] for episode in episodes]
    last = [episode.answers[-1][1] if episode.answers else None for episode in episodes]
    return SampledGroup(
        group=request.group,
        columns=columns,
        texts=[answer.text if answer else "" for answer in last],
        transcripts=[episode.transcript for episode in episodes] if plays else None,
        prompt_tokens=_shared_prompt(episodes) if plays else len(request.prompt_tokens),
        tokens=tuple(lengths),
        response_tokens=tuple(map(len, versions)),
        finish_reasons=tuple(
            episode.stop_reason or (answer.stop_reason if answer else "abort")
            for episode, answer in zip(episodes, last, strict=True)
        ),
        versions=tuple(tuple(sorted(Counter(of_episode).items())) or ((version, 0),) for of_episode in versions),
        rewards=tuple(sum(episode.rewards) if episode.rewards else None for episode in episodes),
        episodes=tuple(map(_facts, episodes)) if plays else (),
        images=tuple(len(episode.media) for episode in episodes) if columns.media_G else (),
        image_tokens=tuple(sum(part.tokens for part in media) for media in columns.media_G),
    )


def _facts(episode: Episode) -> EpisodeFacts:
    longest = max((len(answer.tokens_R) for _, answer in episode.answers), default=0)
    failure = episode.failure
    return EpisodeFacts(
        turns=len(episode.answers),
        counts=episode.counts,
        failure=failure and failure.message,
        contexts=tuple(episode.starts[1:]),
        longest_turn=longest,
        reason=failure.reason if failure else "",
        cause=failure.cause if failure else "",
        model_s=episode.model_s,
        environment_s=episode.seconds - episode.model_s,
    )


def _shared_prompt(episodes: Sequence[Episode]) -> int:
    """Return the length of the prefix, media included, that all contexts share before their first answers: usually the
    prompt."""
    prompts, media = [], []
    for episode in (episode for episode in episodes if episode.answers):
        ends = (*episode.starts[1:], len(episode.tokens))
        for start, end in zip(episode.starts, ends, strict=True):
            first = next((position for position, _ in episode.answers if start <= position < end), end)
            prompts.append(episode.tokens[start:first])
            media.append(
                [replace(part, start=part.start - start) for part in episode.media if start <= part.start < first]
            )
    same = 0
    for column in zip(*prompts, strict=False):
        if len(set(column)) > 1:
            break
        same += 1
    return min([same, *_places_of_other_media(media)])


def _places_of_other_media(media: Sequence[Sequence[MediaPart]]) -> Iterator[int]:
    """Yield the positions where contexts differ in media, whose tokens may be equal."""
    for parts in zip(*media, strict=False):
        if not all(np.array_equal(part.data, parts[0].data) for part in parts[1:]):
            yield min(part.start for part in parts)


def _of_turns(episodes: Sequence[Episode], offsets: np.ndarray) -> dict[str, np.ndarray]:
    turn_T = np.full(int(offsets[-1]), -1, np.int32)
    reward_T, faults_T = (np.zeros(int(offsets[-1]), np.float32) for _ in range(2))
    for begin, episode in zip(offsets, episodes, strict=False):
        for turn, (first, answer) in enumerate(episode.answers):
            chosen = slice(begin + first, begin + first + len(answer.tokens_R))
            turn_T[chosen] = turn
            reward_T[chosen] = episode.rewards[turn] if turn < len(episode.rewards) else 0.0
            faults_T[chosen] = episode.faults.get(turn, 0)
    return {TURN: turn_T, TURN_REWARD: reward_T} | ({FAULTS: faults_T} if faults_T.any() else {})


def _routed(episodes: Sequence[Episode]) -> dict[str, np.ndarray]:
    """Return the column of recorded experts; -1 after a context's last answer."""
    of_contexts: list[tuple[int, np.ndarray | None]] = []
    for episode in episodes:
        for start, end in zip(episode.starts, (*episode.starts[1:], len(episode.tokens)), strict=True):
            of_context = (answer for position, answer in reversed(episode.answers) if start <= position < end)
            last = next(of_context, None)
            of_contexts.append((end - start, last and last.routed_T))
    example = next((routed for _, routed in of_contexts if routed is not None), None)
    if example is None:
        return {}
    column = [np.full((tokens, *example.shape[1:]), -1, example.dtype) for tokens, _ in of_contexts]
    for part, (_, routed) in zip(column, of_contexts, strict=True):
        if routed is not None:
            part[: len(routed)] = routed
    return {ROUTED_EXPERTS: np.concatenate(column)}


def engine_process(worker: str, episode: str | PlaySpec = ONE_TURN, **kwargs: Any) -> EpisodeRunner:
    """Return a worker that plays episodes with the function `episode` (or `module:function`) against an engine of a
    backend (`EngineBackend.worker`)."""
    return EpisodeRunner(imported(worker)(**kwargs), imported(episode) if isinstance(episode, str) else episode)
