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
    MediaPart,
    RolloutColumns,
    Turn,
)
from rlctl.errors import WaitTimeoutError
from rlctl.rollouts.source import sample_seed

T = TypeVar("T")
ONE_TURN = "rlctl.rollouts.episodes:one_turn"
LOOK_S = 0.5
"""Longest time between two looks at what has changed."""
DECODE_S = 0.1
"""As much again until the decoding thread sees that it is to end, for which the end of a run waits."""


class Episode:
    """One rollout in the making: token ids that are only ever appended to, and who wrote them."""

    def __init__(self, runner: EpisodeRunner, key: str, request: GroupRequest, seed: int, sampling: Sampling) -> None:
        self._runner, self._key, self._seed = runner, key, seed
        self.request, self.sampling = request, sampling
        self.ended = False
        """Whether it is over, well or not."""
        self.begin()

    def begin(self) -> None:
        """Begin at the prompt, also again."""
        self.tokens = list(self.request.prompt_tokens)
        self.starts = [0]
        """Where each of its contexts begins among the tokens."""
        self.media = list(self.request.media)
        """The parts of them that are not text, in order."""
        self.answers: list[tuple[int, SampleResult]] = []
        """The model's answers with their token positions."""
        self.rewards: list[float] = []
        """Reward of each answer from the environment; else the completion is scored."""
        self.faults: dict[int, int] = {}
        """The bits of the faults of those answers that have any."""
        self.said: list[Any] = []
        """Its turns, as the player of its environment judges them."""
        self.counts: dict[str, float] = {}
        """Sums over the turns of what there is to count."""
        self.transcript: list[Turn] = []
        self.stop_reason: str | None = None
        """None: the last answer's."""
        self.failure: str | None = None
        """Why its environment failed; None: it did not."""

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
            if self.transcript[place].role == "assistant":
                self.transcript[place] = replace(self.transcript[place], reward=self.rewards[-1])
                break

    def count(self, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self.counts[name] = self.counts.get(name, 0.0) + number

    @property
    def context(self) -> list[int]:
        return self.tokens[self.starts[-1] :]

    def images_in(self, tokens: Sequence[int]) -> tuple[MediaPart, ...]:
        """Return the media of the context in the tokens that `tokens` begin with as well."""
        begin, context = self.starts[-1], self.context
        alike = next(
            (at for at, pair in enumerate(zip(context, tokens, strict=False)) if len({*pair}) > 1), len(context)
        )
        parts = (replace(part, start=part.start - begin) for part in self.media if part.start >= begin)
        return tuple(part for part in parts if part.start + part.tokens <= min(alike, len(tokens)))

    def read(self, tokens: Sequence[int], media: Sequence[MediaPart] = (), *, anew: bool = False) -> None:
        """Append tokens that the model did not choose, with `media` among them. `anew`: start a new context."""
        if anew:
            self.starts.append(len(self.tokens))
        self.media += [replace(part, start=len(self.tokens) + part.start) for part in media]
        self.tokens += tokens

    async def answer(self, **changes: Any) -> SampleResult:
        """Let the model go on from the tokens so far, with some fields of the sampling changed."""
        turn = len(self.answers)
        seed = self._seed if turn == 0 else sample_seed(self._seed, turn)
        sampling = replace(self.sampling, **changes)
        begin = self.starts[-1]
        media = tuple(replace(part, start=part.start - begin) for part in self.media if part.start >= begin)
        request = SampleRequest(self._key, tuple(self.context), seed, sampling, media)
        found = await self._runner.sampled(request)
        self.answers.append((len(self.tokens), found))
        self.tokens += found.tokens_R.tolist()
        return found


Play = Callable[[Episode], Awaitable[None]]
"""The course of an episode, from its prompt to its end."""


@runtime_checkable
class PlaySpec(Protocol):
    """A course of episodes that has to be started in the process of each engine."""

    def started(self) -> Play: ...


async def one_turn(episode: Episode) -> None:
    await episode.answer()


class EpisodeRunner:
    """Plays episodes against the engine that it holds; methods as in `EpisodeWorker`."""

    def __init__(self, engine: EngineWorker, play: Play | PlaySpec) -> None:
        self._engine, self._made, self._loop = engine, play, asyncio.new_event_loop()
        self._calls = count(1)
        self._begun = self._over = 0
        """Begun and ended episodes since the last idle moment."""
        self._asked: list[SampleRequest] = []
        """Samples to ask the engine for in this turn of the event loop."""
        self._awaited: dict[str, asyncio.Future[SampleResult]] = {}
        self._changed = threading.Condition()
        self._submitted = 0
        """Groups that were submitted and not collected."""
        self._finished: list[SampledGroup | BaseException] = []
        """Ended groups, in order."""
        self._threads: list[threading.Thread] = []

    def engine(self) -> EngineWorker:
        return self._engine

    def start(self) -> None:
        # Before the cores of this process are the engine's: what it starts has all of them.
        self._play: Play = self._made.started() if isinstance(self._made, PlaySpec) else self._made
        loaded = Future[None]()

        def load_and_decode() -> None:  # on a CPU the engine's cores are those of the thread that loads it
            try:
                self._engine.start()
            except BaseException as error:  # noqa: BLE001 - it is raised where the engine is started
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
        if threads and isinstance(self._made, PlaySpec):
            cast(Any, self._play).close()
        self._engine.close()

    # Calls of the driver

    def generate(self, requests: Sequence[GroupRequest], sampling: Sampling, timeout_s: float) -> list[SampledGroup]:
        deadline = time.monotonic() + timeout_s
        self._engine.require_ready(timeout_s)
        groups = self._episodes(requests, sampling)
        call = self._run(together(self._group(*one) for one in zip(requests, groups, strict=True)))
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
                found: SampledGroup | BaseException = await self._group(request, episodes)
            except Exception as error:  # noqa: BLE001 - it is raised where the group is collected
                found = error
            with self._changed:
                self._finished.append(found)
                self._changed.notify_all()

        groups = self._episodes(requests, sampling)
        with self._changed:
            self._submitted += len(requests)
            self._changed.notify_all()
        self._run(together(finish(*one) for one in zip(requests, groups, strict=True)))

    def collect_by_handle(self, timeout_s: float) -> tuple[list[SampledGroup], list[Any]]:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            if self._engine.asleep:  # whoever asks again is not to ask without a pause
                self._changed.wait(LOOK_S)
            while not self._finished:
                if self._engine.asleep:
                    return [], [None] * VALUES_A_GROUP
                if time.monotonic() > deadline:
                    self._engine.require_ready(0.0)
                    what = "finished none of its groups" if self._submitted else "was given nothing to sample"
                    raise WaitTimeoutError(f"{self._engine.label} {what} in {timeout_s:.0f} s.")
                self._changed.wait(min(LOOK_S, max(0.0, deadline - time.monotonic())))
            found = self._finished.pop(0)
            self._submitted -= 1
        if isinstance(found, BaseException):
            raise found
        return detached([found])

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

    def _run(self, play: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(play, self._loop)

    async def _group(self, request: GroupRequest, episodes: list[Episode]) -> SampledGroup:
        async def played(episode: Episode) -> None:
            try:
                await self._play(episode)
            finally:
                episode.ended = True
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
        asked, self._asked = [one for one in self._asked if one.key in self._awaited], []
        try:
            self._engine.add_samples(asked)
        except Exception as error:  # noqa: BLE001 - it is raised where the samples are awaited
            self._fail(error, [one.key for one in asked])

    def _decode(self) -> None:
        while self._threads:
            try:
                found = self._engine.finished_samples(DECODE_S)
            except Exception as error:  # noqa: BLE001 - it is raised where samples are awaited
                self._loop.call_soon_threadsafe(self._fail, error)
            else:
                self._loop.call_soon_threadsafe(self._answer, found)

    def _answer(self, results: Sequence[SampleResult]) -> None:
        for result in results:
            if (awaiting := self._awaited.get(result.key)) and not awaiting.done():
                awaiting.set_result(result)
        if self._begun:
            report(self._over, self._begun)

    def _fail(self, error: Exception, keys: Sequence[str] | None = None) -> None:
        """Raise an error where the samples called `keys` are awaited; None: where any is."""
        failed = [key for key in (self._awaited if keys is None else keys) if not self._awaited[key].done()]
        self._engine.drop_samples(failed)
        for key in failed:
            self._awaited[key].set_exception(error)


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return what all of `work` returns; where one part fails, end the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
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
        tuple(tuple(one.media) for one in episodes) if any(one.media for one in episodes) else (),
    )
    for begin, episode in zip(offsets, episodes, strict=False):
        for first, answer in episode.answers:
            chosen = slice(begin + first, begin + first + len(answer.tokens_R))
            columns.loss_mask_T[chosen] = True
            columns.logprobs_T[chosen] = answer.logprobs_R
            columns.weight_version_T[chosen] = answer.versions_R
    sampled = [[one for _, answer in episode.answers for one in answer.versions_R.tolist()] for episode in episodes]
    last = [episode.answers[-1][1] if episode.answers else None for episode in episodes]
    return SampledGroup(
        group=request.group,
        columns=columns,
        texts=[answer.text if answer else "" for answer in last],
        transcripts=[episode.transcript for episode in episodes] if plays else None,
        prompt_tokens=_shared_prompt(episodes) if plays else len(request.prompt_tokens),
        tokens=tuple(lengths),
        response_tokens=tuple(map(len, sampled)),
        finish_reasons=tuple(
            episode.stop_reason or (answer.stop_reason if answer else "abort")
            for episode, answer in zip(episodes, last, strict=True)
        ),
        versions=tuple(tuple(sorted(Counter(of).items())) or ((version, 0),) for of in sampled),
        rewards=tuple(sum(episode.rewards) if episode.rewards else None for episode in episodes),
        episodes=tuple(map(_facts, episodes)) if plays else (),
        images=tuple(len(one.media) for one in episodes) if columns.media_G else (),
        image_tokens=tuple(sum(p.tokens for p in one.media) for one in episodes) if columns.media_G else (),
    )


def _facts(episode: Episode) -> EpisodeFacts:
    longest = max((len(answer.tokens_R) for _, answer in episode.answers), default=0)
    return EpisodeFacts(len(episode.answers), episode.counts, episode.failure, tuple(episode.starts[1:]), longest)


def _shared_prompt(episodes: Sequence[Episode]) -> int:
    """Return the number of tokens before the first answers common to all contexts, with their media: usually the
    prompt."""
    begun, shown = [], []
    for episode in (one for one in episodes if one.answers):
        ends = (*episode.starts[1:], len(episode.tokens))
        for start, end in zip(episode.starts, ends, strict=True):
            first = next((at for at, _ in episode.answers if start <= at < end), end)
            begun.append(episode.tokens[start:first])
            shown.append(
                [replace(part, start=part.start - start) for part in episode.media if start <= part.start < first]
            )
    same = 0
    for column in zip(*begun, strict=False):
        if len(set(column)) > 1:
            break
        same += 1
    return min([same, *_places_of_other_media(shown)])


def _places_of_other_media(shown: Sequence[Sequence[MediaPart]]) -> Iterator[int]:
    """Yield where contexts, each of which has media of its own, have different ones: their tokens may be the same."""
    for parts in zip(*shown, strict=False):
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
            last = next((answer for at, answer in reversed(episode.answers) if start <= at < end), None)
            of_contexts.append((end - start, last and last.routed_T))
    known = next((routed for _, routed in of_contexts if routed is not None), None)
    if known is None:
        return {}
    column = [np.full((tokens, *known.shape[1:]), -1, known.dtype) for tokens, _ in of_contexts]
    for part, (_, routed) in zip(column, of_contexts, strict=True):
        if routed is not None:
            part[: len(routed)] = routed
    return {ROUTED_EXPERTS: np.concatenate(column)}


def engine_process(worker: str, episode: str | PlaySpec = ONE_TURN, **kwargs: Any) -> EpisodeRunner:
    """Return a worker that plays episodes with the function `episode` (or `module:function`) against an engine of a
    backend (`EngineBackend.worker`)."""
    return EpisodeRunner(imported(worker)(**kwargs), imported(episode) if isinstance(episode, str) else episode)
