"""Episodes of several turns: the model and its environment answer each other, until one of them or a limit ends it.

    prompt, reset -> [ model's turn -> step -> what the environment says ] ... -> close

All of it is token in, token out (`data/turns.py`). A failure of an environment costs its own episode, which is
played again from its start, with the same seeds, before it is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlctl.backends.messages import GroupRequest
from rlctl.config.schema import EnvironmentConfig, RlctlConfig
from rlctl.data.chat import PromptEncoder
from rlctl.data.prompt_rows import PromptRow
from rlctl.data.rollouts import Turn
from rlctl.data.turns import TurnEncoder, with_tools
from rlctl.envs.environment import Message
from rlctl.envs.environment_process import EnvironmentHost, EpisodeFailedError, Session
from rlctl.envs.environments import EnvironmentPlan, Reply, plan_environment
from rlctl.envs.tools import INSTRUCTIONS, format_of, listed
from rlctl.errors import InputError, WaitTimeoutError
from rlctl.rollouts.episodes import Episode, one_turn
from rlctl.rollouts.source import sample_seed

CLOSE_S = 10.0
"""Longest time for an environment to end."""
ENDS_TURN = ("abort", "timeout")
"""Ends of the model's turn that end the episode."""


@dataclass(frozen=True)
class EnvironmentPlay:
    """How episodes with an environment go. It is plain data until an engine begins it."""

    plan: EnvironmentPlan
    turns: TurnEncoder
    limits: EnvironmentConfig
    opening: tuple[Message, ...]
    """The messages of the environment behind the first prompt, by which prompts are measured before a run."""
    notes: tuple[str, ...]
    """Notes for the user before the run."""
    max_length: int = 0
    """Most tokens of an episode."""

    @classmethod
    def open(cls, config: RlctlConfig, encoder: PromptEncoder, row: PromptRow) -> EnvironmentPlay | None:
        """Begin an episode on a row of the data, and end it; None: the run has no environment. Raises InputError for
        what is wrong with it."""
        if not config.environment.wanted:
            return None
        plan, limits = plan_environment(config.environment), config.environment
        host = EnvironmentHost(plan)
        host.start()
        try:
            return asyncio.run(cls._tried(host, limits, encoder, row, config.run.seed))
        except EpisodeFailedError as error:
            raise InputError(f"Environment {plan.label}: {error} ({row.where}).") from error
        finally:
            host.close()

    @classmethod
    async def _tried(
        cls, host: EnvironmentHost, limits: EnvironmentConfig, encoder: PromptEncoder, row: PromptRow, seed: int
    ) -> EnvironmentPlay:
        session = host.begin()
        described = await session.ask("schemas", timeout_s=limits.turn_timeout_s)
        schemas = described.schemas
        shown, knows = with_tools(encoder, list(schemas.values()), INSTRUCTIONS.format(schemas=listed(schemas)))
        turns = TurnEncoder.build(shown, raw=limits.append == "raw", tools=bool(schemas) and knows)
        form = limits.tool_format
        if form == "auto":
            form = form_of(shown) if schemas and knows else "hermes"
        plan = replace(host.plan, schemas=dict(schemas), form=form, tool_role=turns.tool_role)
        notes = list(filter(None, [described.note, turns.note if schemas else None]))
        if schemas:
            told = "" if knows else "; the chat template has no place for them: the system prompt says how to call them"
            notes.append(f"tools: {', '.join(schemas)}; calls are written as {form} writes them{told}")
        reply = await session.ask("reset", row, episode_seed(seed, 0), timeout_s=limits.turn_timeout_s)
        play = cls(plan, turns, limits, reply.messages, tuple(notes))
        play.prompt([*turns.encoder.messages(row), *reply.messages], row.where)
        return play

    def showing_tools(self, encoder: PromptEncoder) -> PromptEncoder:
        """Return the encoder of a source's prompts, with the tools of the run."""
        schemas = self.plan.schemas
        return with_tools(encoder, list(schemas.values()), INSTRUCTIONS.format(schemas=listed(schemas)))[0]

    def prompt(self, messages: Sequence[Message], where: str) -> list[int]:
        """Return the ids that an episode begins with. Raises InputError where there are none."""
        if not messages:
            raise InputError(
                f"Environment {self.plan.label}: {where} has no prompt, and `reset` returned no message.",
                "Return the first message from `reset`, or name prompts with --data.",
            )
        return list(self.turns.encoder.encode_messages(list(messages), where))

    def manifest(self) -> dict[str, Any]:
        """Return what tells this environment from another, for a run's manifest."""
        code = [one for one in (self.plan.code, *self.plan.tools) if one is not None]
        return {"name": self.plan.name, "params": self.plan.params, "code": [one.fingerprint for one in code]}

    def describe(self) -> list[str]:
        """Return what a run says of it before it begins."""
        limits, name = self.limits, self.plan.name or "tools alone"
        how = f"environment: {name}, at most {limits.turns} turn{'s' * (limits.turns > 1)}"
        return [how, *self.notes]

    # In the process of an engine

    def started(self) -> Player:
        """Return what plays episodes; starts the process of the environments."""
        host = EnvironmentHost(self.plan)
        host.start()
        return Player(self, host)


class Player:
    """Plays the episodes of one engine."""

    def __init__(self, play: EnvironmentPlay, host: EnvironmentHost) -> None:
        self._play, self._host, self._limits = play, host, play.limits

    async def __call__(self, episode: Episode) -> None:
        """Play an episode to its end. Its environment's failure is told, and never raised. A prompt that is
        not of the data, as those by which a refit is checked, has no environment."""
        if episode.request.row is None:
            await one_turn(episode)
            return
        limits, failure = self._play.limits, "it had no turn"
        for _ in range(limits.retries + 1):
            episode.begin()
            session = self._host.begin()
            try:
                await asyncio.wait_for(self._played(episode, session), limits.timeout_s)
                return
            except EpisodeFailedError as error:
                failure = str(error)
            except WaitTimeoutError:  # the engine's own, and not of this episode
                raise
            except TimeoutError:
                if episode.answers:  # what there is stays
                    episode.stop_reason = "episode_timeout"
                    return
                failure = f"the episode took longer than environment.timeout_s = {limits.timeout_s:g} s"
            finally:
                session.close()
        episode.stop_reason = "environment"
        episode.failure = f"Environment {self._play.plan.label}: {failure} ({episode.row.where})."

    async def _played(self, episode: Episode, session: Session) -> None:
        play, limits = self._play, self._limits
        reply = await session.ask("reset", episode.row, episode.request.seed, timeout_s=limits.turn_timeout_s)
        said = [*episode.request.messages, *reply.messages]
        try:
            prompt = play.prompt(said, episode.row.where)
        except InputError as error:
            raise EpisodeFailedError(error.message) from error
        if len(prompt) >= play.max_length:
            raise EpisodeFailedError(f"the prompt has {len(prompt)} tokens of at most {play.max_length}")
        episode.read(prompt)
        episode.transcript += _spoken(said, len(prompt))
        reason, calls, broken = None, 0, 0
        while reason is None:
            reply = await self._turn(episode, session, reply)
            calls, broken = calls + reply.calls, broken + reply.broken
            if play.plan.schemas:
                episode.count({"tool_calls": reply.calls, "broken_calls": reply.broken})
            episode.count(reply.metrics)
            reason = episode.stop_reason or self._reason(episode, reply, calls, broken)
            if reason is None:
                given = play.turns.between(episode.tokens[-1], reply.messages)
                episode.transcript += _spoken(reply.messages, len(given))
                if len(episode.tokens) + len(given) >= play.max_length:
                    reason = "context"
                else:
                    episode.read(given)
        episode.stop_reason = reason
        last = await session.ask("close", timeout_s=CLOSE_S)
        episode.rewarded(last.reward)

    async def _turn(self, episode: Episode, session: Session, before: Reply) -> Reply:
        """Let the model write a turn, and return the environment's reply."""
        left = self._play.max_length - len(episode.tokens)
        if (most := self._limits.sampled_tokens) is not None:
            left = min(left, most - episode.sampled_tokens)
        usual = episode.sampling
        stops = tuple(dict.fromkeys((*usual.stop, *before.stop)))
        found = await episode.answer(stop=stops, max_new_tokens=min(usual.max_new_tokens, left))
        text = self._play.turns.text_of(found.tokens_R.tolist())
        episode.transcript.append(Turn("assistant", text, len(found.tokens_R), 0.0))
        if found.stop_reason in ENDS_TURN:
            episode.stop_reason = found.stop_reason
            return Reply(())
        reply = await session.ask("step", text, timeout_s=self._limits.turn_timeout_s)
        episode.rewarded(reply.reward)
        return reply

    def _reason(self, episode: Episode, reply: Reply, calls: int, broken: int) -> str | None:
        """Return what ends an episode after a turn; None: it goes on."""
        limits = self._limits
        over = {
            "done": reply.done,
            "turns": len(episode.answers) >= limits.turns,
            "sampled_tokens": limits.sampled_tokens is not None and episode.sampled_tokens >= limits.sampled_tokens,
            "tool_calls": limits.tool_calls is not None and calls >= limits.tool_calls and reply.calls > 0,
            "broken_calls": limits.broken_calls is not None and broken >= limits.broken_calls,
            "context": len(episode.tokens) >= self._play.max_length,
        }
        return next((reason for reason, so in over.items() if so), None)

    def close(self) -> None:
        """End the processes of the environments."""
        self._host.close()


def _spoken(messages: Sequence[Message], tokens: int) -> list[Turn]:
    """Return the turns of messages that were written together as `tokens` ids, which the first of them has."""
    return [Turn(one["role"], one["content"], 0 if i else tokens, None) for i, one in enumerate(messages)]


def form_of(encoder: PromptEncoder) -> str:
    """Return the format in which the chat template writes calls. Raises InputError where none is known."""
    found = format_of(lambda messages: encoder.render(list(messages), answered=True), encoder.special_texts)
    if found is None:
        raise InputError(
            "It is unknown how the model of this chat template writes calls of tools.",
            "Name the format: --set environment.tool_format=hermes; `rlctl config schema` lists them.",
        )
    return found


def episode_seed(run_seed: int, position: int) -> int:
    """Return the seed of the environments at a position: that of the whole group, which no sample has."""
    return sample_seed(run_seed, position, 2**32 - 1)


def episode_request(
    group: int, row: PromptRow, encoder: PromptEncoder, seeds: Sequence[int], seed: int
) -> GroupRequest:
    """Return the request for the episodes of a row, one for each of `seeds`; `seed` is that of their environments."""
    return GroupRequest(group, (), tuple(seeds), row, tuple(encoder.messages(row)), seed)
