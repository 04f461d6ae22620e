"""Episodes of several turns between model and environment, until one of them or a limit ends it.

prompt, reset -> [ model's turn -> step -> reply ] ... -> close. Everything is tokens (`data/turns.py`). An
environment's failure costs its episode, which is first played again with the same seeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from typing import Any

from rlctl.backends.messages import GroupRequest
from rlctl.data.chat import EncodedPrompt, PromptEncoder
from rlctl.data.image_rows import IN_TEXT
from rlctl.data.image_sources import IMAGES, MARK
from rlctl.data.prompt_rows import TOOLS, PromptRow
from rlctl.data.rollouts import LENGTH, MediaPart, Turn
from rlctl.data.turns import TurnEncoder, with_tools
from rlctl.environments.environment_plan import EnvironmentPlan, plan_environment
from rlctl.environments.interface import Ask, Message, is_cut
from rlctl.environments.process import EnvironmentHost, EpisodeFailedError, Session
from rlctl.environments.running_episode import Reply, RunningEpisode, readable_calls
from rlctl.environments.tools import INSTRUCTIONS, format_of, listed, without_call
from rlctl.errors import InputError, WaitTimeoutError
from rlctl.rollouts.episodes import Episode, one_turn
from rlctl.rollouts.source import sample_seed
from rlctl.rollouts.turn_faults import BITS, THINK, JudgedTurn, episode_faults, faults_of
from rlctl.settings.config import RolloutConfig
from rlctl.settings.rewards import EnvironmentConfig

OPENING_TOKENS = 8
"""Tokens at the end of a context that can spell `<think>`."""
PAUSE_S = 1.0
"""Before an episode is played again: where the process of all environments has died, that shows in milliseconds."""
ENDS_TURN = ("abort", "timeout")
"""Ends of the model's turn that end the episode."""


@dataclass(frozen=True)
class EnvironmentEpisodes:
    """How episodes with an environment go. It is plain data until an engine begins it."""

    plan: EnvironmentPlan
    turns: TurnEncoder
    limits: EnvironmentConfig
    opening: Reply
    """The environment's reply to the first row, by which prompts are measured before a run."""
    notes: tuple[str, ...]
    """Notes for the user before the run."""
    max_length: int = 0
    """Most tokens of an episode."""
    example: str = ""
    """A call as the model is to write it; empty: without tools, or unknown."""

    @classmethod
    def open(cls, config: RolloutConfig, encoder: PromptEncoder, row: PromptRow) -> EnvironmentEpisodes | None:
        """Play a trial episode on a row; None without an environment. Raises InputError for its faults."""
        if not config.environment.wanted:
            return None
        plan, limits = plan_environment(config.environment), config.environment
        host = EnvironmentHost(plan)
        host.start()
        try:
            return asyncio.run(cls._tried(host, limits, encoder, row, config.run.seed))
        except EpisodeFailedError as error:
            without_data = plan.name and not (config.data.name or config.data.sources)
            hint = "If the environment reads rows, name their file with --data." if without_data else None
            said = str(error).removesuffix(".")
            if said.startswith("Tool "):
                raise InputError(f"{said}.", "docs/environments.md#tools has the form of a tool.") from error
            raise InputError(f"Environment {plan.label}: {said} ({row.where}).", hint) from error
        finally:
            host.close()

    @classmethod
    async def _tried(
        cls, host: EnvironmentHost, limits: EnvironmentConfig, encoder: PromptEncoder, row: PromptRow, seed: int
    ) -> EnvironmentEpisodes:
        session = host.begin()
        schemas_of_tools, note = await session.ask(RunningEpisode.schemas, timeout_s=limits.turn_timeout_s)
        reply = await session.ask(RunningEpisode.reset, row, episode_seed(seed, 0), timeout_s=limits.turn_timeout_s)
        schemas = dict(schemas_of_tools)
        if reply.ask is not None:
            schemas |= {one["function"]["name"]: dict(one) for one in reply.ask.tools}
        shown, knows = showing(encoder, list(schemas.values()))
        turns = TurnEncoder.build(
            shown,
            raw=limits.append == "raw",
            tools=bool(schemas) and knows,
            drops_thoughts=limits.thinking == "template",
        )
        form = limits.tool_format
        if form == "auto":
            form = form_of(shown) if schemas and knows else "hermes"
        plan = replace(host.plan, schemas=schemas_of_tools, form=form, tool_role=turns.tool_role)
        notes = list(filter(None, [note, turns.note]))
        example = ""
        if schemas:
            example = written_call(shown, next(iter(schemas.values())), knows=knows)
            told = "" if knows else "; the chat template has no place for tools, so the system prompt describes them"
            written = f": {example!r}" if example else ""
            notes.append(f"tools: {', '.join(schemas)}; calls are written as {form} writes them{written}{told}")
        if reply.ask is not None:  # each conversation shows its own tools
            turns = replace(turns, encoder=encoder.with_ends(turns.encoder.stop_token_ids))
        play = cls(plan, turns, limits, reply, tuple(notes), example=example)
        opened = play.opened(row, turns.encoder)
        play.require_shown(schemas, opened, row)
        if opened.media and turns.drops:
            raise InputError(
                f"environment.thinking = template: {row.where} has images, and a context with images is not written "
                "without its thoughts.",
                "Leave it out: thoughts then stay in the context.",
            )
        return play

    def require_shown(self, names: Iterable[str], prompt: EncodedPrompt, row: PromptRow) -> None:
        """Raise InputError for a tool that the model does not read of in a first prompt."""
        text = str(self.turns.encoder.tokenizer.decode(list(prompt.tokens), skip_special_tokens=False))
        of_tokens = self.opening.ask is not None and self.opening.ask.tokens
        if hidden := [] if of_tokens else [name for name in names if name not in text]:
            raise InputError(
                f"{row.where}: the prompt does not show the tool {hidden[0]!r} to the model, because the chat template "
                "leaves it out.",
                "Give a template that shows tools with --chat-template, or describe them in the data's system message.",
            )

    def showing_tools(self, encoder: PromptEncoder) -> PromptEncoder:
        """Return the encoder of a source's prompts, with the tools of the run."""
        return showing(encoder, list(self.plan.schemas.values()))[0]

    def beginning(
        self, prompt: Sequence[Message], reply: Reply, row: PromptRow
    ) -> tuple[EncodedPrompt, Sequence[Message]]:
        """Return a context's first ids, images and messages: the row's and the reply's, or `Reply.ask`'s. Raises
        InputError if empty."""
        where = row.where
        if (ask := reply.ask) is not None and ask.tokens:
            self.turns.encoder.require_known(ask.tokens, where)
            told = [{"role": "user", "content": self.turns.text_of(list(ask.tokens))}]
            return EncodedPrompt(tuple(ask.tokens)), told
        messages = [*prompt, *reply.messages] if ask is None else self.told(ask.messages)
        encoder = self._telling(row) if ask is None else showing(self.turns.encoder, ask.tools)[0]
        messages = messages if ask is None else encoder.instructed(messages)
        self.turns.require_roles(reply.messages if ask is None else messages, ("system", "user", "assistant", "tool"))
        if not messages:
            raise InputError(
                f"Environment {self.plan.label}: {where} has no prompt, and `reset` returned no message.",
                "Return the first message from `reset`, or name prompts with --data.",
            )
        return encoder.prompt_of(list(messages), where), messages

    def _telling(self, row: PromptRow) -> PromptEncoder:
        """Return the encoder of an episode's prompt with the row's tools. Raises InputError for a tool that the
        environment lacks."""
        encoder = self.turns.encoder
        names = [str(one.get("function", one).get("name")) for one in row.tools]
        if lacking := [name for name in names if self.plan.schemas and name not in self.plan.schemas]:
            raise InputError(
                f"{row.where}: the field `{TOOLS}` names {lacking[0]!r}, and the environment's tools are "
                f"{', '.join(self.plan.schemas)}.",
                f"Give the tool with --tool, or leave the field `{TOOLS}` out.",
            )
        # Where the template has no place for tools, the system prompt lists those of the environment.
        return encoder if self.plan.schemas and TOOLS not in encoder.variables else encoder.telling(row)

    def opened(self, row: PromptRow, encoder: PromptEncoder) -> EncodedPrompt:
        """Return a first prompt before a run, with the environment's first messages. Raises InputError if empty."""
        return self.beginning(encoder.messages(row), self.opening, row)[0]

    def measured(self, row: PromptRow, encoder: PromptEncoder) -> list[int]:
        """Return the ids of `opened`."""
        return list(self.opened(row, encoder).tokens)

    def told(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with results of tools in the role in which the template takes them."""
        told: list[Message] = []
        for one in messages:
            if one["role"] != "tool" or self.turns.tool_role == "tool":
                told.append(one)
            elif told and told[-1]["role"] == "user":  # templates may want questions and answers to alternate
                images = [*told[-1].get(IMAGES, ()), *one.get(IMAGES, ())]
                told[-1] = {**told[-1], "content": f"{told[-1]['content']}\n\n{one['content']}"}
                told[-1] |= {IMAGES: images} if images else {}
            else:
                told.append({**one, "role": "user"})
        return told

    def manifest(self) -> dict[str, Any]:
        code = [one for one in (self.plan.code, *self.plan.tools) if one is not None]
        return {"name": self.plan.name, "params": self.plan.params, "code": [one.fingerprint for one in code]}

    def describe(self) -> list[str]:
        limits, name = self.limits, self.plan.name or "tools alone"
        how = f"environment: {name}, at most {limits.turns} turn{'s' * (limits.turns > 1)}"
        return [how, *self.notes]

    # In the process of an engine

    def started(self) -> EpisodePlayer:
        host = EnvironmentHost(self.plan)
        host.start()
        return EpisodePlayer(self, host)


class EpisodePlayer:
    """Plays the episodes of one engine."""

    def __init__(self, play: EnvironmentEpisodes, host: EnvironmentHost) -> None:
        self._play, self._host, self._limits = play, host, play.limits

    async def __call__(self, episode: Episode) -> None:
        """Play an episode to its end; report environment failures without raising. Prompts of refit checks have no
        environment."""
        if episode.request.row is None:
            await one_turn(episode)
            return
        limits, failure = self._play.limits, "it had no turn"
        for attempt in range(limits.retries + 1):
            if attempt:
                await asyncio.sleep(PAUSE_S)
            episode.begin()
            session = self._host.begin()
            try:
                await asyncio.wait_for(self._played(episode, session), limits.timeout_s)
                return
            except EpisodeFailedError as error:
                failure = str(error)
            except InputError as error:  # what the environment said cannot be written
                failure = error.message.removesuffix(".")
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
        reply = await session.ask(
            RunningEpisode.reset, episode.row, episode.request.seed, timeout_s=limits.turn_timeout_s
        )
        prompt, said = play.beginning(episode.request.messages, reply, episode.row)
        ids = list(prompt.tokens)
        if reply.ask is not None and reply.ask.tokens:
            play.turns.encoder.require_no_image(ids, episode.row.where)
        if len(ids) >= play.max_length:
            raise EpisodeFailedError(f"the prompt has {len(ids)} tokens of at most {play.max_length}")
        episode.read(ids, prompt.media)
        episode.transcript += _spoken(said, len(ids))
        story = _Story(ids)
        reason, calls, broken = None, 0, 0
        while reason is None:
            reply = await self._turn(episode, session, reply)
            calls, broken = calls + reply.calls, broken + reply.broken
            if play.plan.schemas:
                episode.count({"tool_calls": reply.calls, "broken_calls": reply.broken})
            episode.count(reply.metrics)
            reason = episode.stop_reason or self._reason(episode, reply, calls, broken)
            if reason is None and not self._reads(episode, story, reply):
                reason = "context"
        episode.stop_reason = reason
        last = await session.ask(RunningEpisode.close, timeout_s=limits.turn_timeout_s)
        episode.rewarded(last.reward)
        episode.count(last.metrics)
        if self._loses_its_reward(episode):
            episode.count({"no_reward": 1.0})
            episode.rewards = [0.0] * len(episode.rewards)

    def _loses_its_reward(self, episode: Episode) -> bool:
        limits = self._limits
        if any(token in limits.unwanted_tokens for _, answer in episode.answers for token in answer.tokens_R.tolist()):
            return True
        return bool(episode.said) and not episode_faults(episode.said).isdisjoint(limits.no_reward)

    def _reads(self, episode: Episode, story: _Story, reply: Reply) -> bool:
        """Let the model read a reply, and return whether there was room for it."""
        ask, turns, context = reply.ask, self._play.turns, episode.context
        anew, media = False, tuple[MediaPart, ...]()
        if ask is None or (ask.known and not ask.tokens):
            messages = self._play.told(reply.messages if ask is None else ask.messages[ask.known :])
            shown = turns.encoder.with_images(turns.between(context[-1], messages), messages, episode.row.where)
            given, media = list(shown.tokens), shown.media
            story.turns.append((episode.answers[-1][1].tokens_R.tolist(), given))
            if any(one["role"] in turns.drops for one in messages):
                without = turns.without_thoughts(story.prompt, story.turns)
                anew = without != [*context, *given]
                if anew and (episode.media or media):
                    raise EpisodeFailedError("environment.thinking=template does not go with images")
                given = without if anew else given
        else:
            prompt, messages = self._play.beginning((), reply, episode.row)
            if ask.tokens:  # an engine is asked with the images of its tokens that stand for some
                prompt = replace(prompt, media=episode.images_in(prompt.tokens))
                turns.encoder.require_no_image(prompt.text_tokens, episode.row.where)
            given, media = list(prompt.tokens), prompt.media
            anew = given[: len(context)] != context
            if not anew:
                given = given[len(context) :]
                media = tuple(replace(p, start=p.start - len(context)) for p in media if p.start >= len(context))
            story.prompt, story.turns = [*([] if anew else context), *given], []
        episode.transcript += _spoken(messages, len(given))
        if (0 if anew else len(context)) + len(given) >= self._play.max_length:
            return False
        episode.read(given, media, anew=anew)
        return True

    async def _turn(self, episode: Episode, session: Session, before: Reply) -> Reply:
        read, usual = episode.context, episode.sampling
        asked = before.ask or Ask()
        left = [usual.max_new_tokens, self._play.max_length - len(read), asked.max_tokens]
        if (most := self._limits.sampled_tokens) is not None:
            left.append(most - episode.sampled_tokens)
        ends = self._play.turns.encoder.stop_token_ids
        found = await episode.answer(
            stop=tuple(dict.fromkeys((*usual.stop, *before.stop, *asked.stop))),
            stop_token_ids=tuple(dict.fromkeys((*usual.stop_token_ids, *ends, *asked.stop_token_ids))),
            turn_ends=(*usual.turn_ends, *ends),
            max_new_tokens=min(limit for limit in left if limit is not None),
        )
        tokens = found.tokens_R.tolist()
        text = found.text
        episode.transcript.append(Turn("assistant", text, len(tokens), 0.0))
        if found.stop_reason in ENDS_TURN:
            episode.stop_reason = found.stop_reason
            return Reply()
        message = {
            "role": "assistant", "content": text, "tokens": tokens, "logprobs": found.logprobs_R.tolist(),
            "prompt_tokens": read, "stop_reason": found.stop_reason,
        }  # fmt: skip
        reply = await session.ask(RunningEpisode.step, message, timeout_s=self._limits.turn_timeout_s)
        episode.rewarded(reply.reward)
        opened = self._play.turns.text_of(read[-OPENING_TOKENS:]).rstrip().endswith(THINK)
        form, cut = self._play.plan.form, is_cut(message)
        called = reply.calls > 0 or bool(asked.tools and readable_calls(text, form, asked.tools, cut=cut))
        found_faults = faults_of(text, opened=opened, called=called, broken=reply.broken > 0)
        spoken = without_call(text, form) if called else text
        episode.said.append(JudgedTurn(text, spoken, opened, called, found_faults))
        if found_faults:
            episode.faults[len(episode.answers) - 1] = sum(BITS[name] for name in found_faults)
            episode.count(dict.fromkeys(found_faults, 1.0))
        return reply

    def _reason(self, episode: Episode, reply: Reply, calls: int, broken: int) -> str | None:
        """Return why an episode ends after a turn; None: it continues. A last turn cut off by the token limit is not a
        natural end."""
        limits = self._limits
        if reply.done:
            return LENGTH if episode.answers[-1][1].stop_reason == LENGTH else "done"
        over = {
            "turns": len(episode.answers) >= limits.turns,
            "sampled_tokens": limits.sampled_tokens is not None and episode.sampled_tokens >= limits.sampled_tokens,
            "tool_calls": limits.tool_calls is not None and calls >= limits.tool_calls and reply.calls > 0,
            "broken_calls": limits.broken_calls is not None and broken >= limits.broken_calls,
            "context": len(episode.context) >= self._play.max_length,
        }
        return next((reason for reason, so in over.items() if so), None)

    def close(self) -> None:
        self._host.close()


@dataclass
class _Story:
    """An episode's context in parts: a prompt, and each answer with the reply after it."""

    prompt: list[int]
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)


def _spoken(messages: Sequence[Message], tokens: int) -> list[Turn]:
    return [
        Turn(one["role"], one["content"].replace(MARK, IN_TEXT), 0 if i else tokens, None)
        for i, one in enumerate(messages)
    ]


def showing(encoder: PromptEncoder, schemas: Sequence[Mapping[str, Any]]) -> tuple[PromptEncoder, bool]:
    """Return the encoder of prompts that show tools, and whether the template has a place for them."""
    named = {one["function"]["name"]: dict(one) for one in schemas}
    return with_tools(encoder, list(named.values()), INSTRUCTIONS.format(schemas=listed(named)))


def form_of(encoder: PromptEncoder) -> str:
    """Return the format in which the chat template writes calls. Raises InputError where none is known."""
    found, why = None, ""
    try:
        found = format_of(lambda messages: encoder.render(list(messages), answered=True), encoder.special_texts)
    except InputError as error:
        why = f" {error.message}"
    if found is None:
        raise InputError(
            f"It is unknown how the model of this chat template writes calls of tools.{why}",
            "Name the format: --set environment.tool_format=hermes; `rlctl config schema` lists them.",
        )
    return found


def written_call(encoder: PromptEncoder, schema: Mapping[str, Any], *, knows: bool) -> str:
    """Return a call of a tool as the template writes it, or as the system prompt says; empty if it writes none."""
    function = schema["function"]
    parameters = function.get("parameters", {})
    names = parameters.get("required") or parameters.get("properties", {})
    called = {"name": function["name"], "arguments": dict.fromkeys(names, "...")}
    if not knows:
        return f"<tool_call>\n{json.dumps(called)}\n</tool_call>"
    user = {"role": "user", "content": "?"}
    call = {"id": "call00000", "type": "function", "function": called}
    with contextlib.suppress(InputError):
        written = encoder.render([user, {"role": "assistant", "content": "", "tool_calls": [call]}], answered=True)
        text = written[len(commonprefix([written, encoder.render([user])])) :].strip()  # noqa: RUF071 - of texts
        for end in encoder.tokenizer.convert_ids_to_tokens(list(encoder.stop_token_ids)):
            text = text.removesuffix(str(end)).rstrip()
        return text if function["name"] in text else ""
    return ""


def episode_seed(run_seed: int, position: int) -> int:
    return sample_seed(run_seed, position, 2**32 - 1)


def episode_request(
    group: int, row: PromptRow, encoder: PromptEncoder, seeds: Sequence[int], seed: int
) -> GroupRequest:
    return GroupRequest(group, (), tuple(seeds), row, tuple(encoder.messages(row)), seed)
