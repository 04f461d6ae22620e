"""Episodes of several turns between model and environment.

prompt, reset -> [ model's turn -> step -> reply ] ... -> close. Everything is tokens (`data/turns.py`). An episode
whose environment fails is played again with the same seeds, and then counts as failed.
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
from rlctl.data.chat import CALLS, EncodedPrompt, PromptEncoder
from rlctl.data.image_sources import IMAGES
from rlctl.data.prompt_rows import TOOLS, PromptRow
from rlctl.data.rollouts import LENGTH, EpisodeFailure, MediaPart, Turn
from rlctl.data.turns import TurnEncoder, with_tools
from rlctl.data.written_messages import arguments_of
from rlctl.environments.environment_plan import EnvironmentPlan, plan_environment
from rlctl.environments.gateway.exchange import without_effect
from rlctl.environments.interface import Ask, Message, is_cut
from rlctl.environments.process import EnvironmentHost, EpisodeFailedError, Session
from rlctl.environments.running_episode import Reply, RunningEpisode, checked_ask, readable_calls
from rlctl.environments.tools import CALL, INSTRUCTIONS, format_of, listed, without_call
from rlctl.errors import InputError, WaitTimeoutError
from rlctl.rollouts.episodes import Episode, one_turn
from rlctl.rollouts.gateway_episodes import FirstQuestion, ModelTurns, turns_of
from rlctl.rollouts.source import sample_seed
from rlctl.rollouts.turn_faults import BITS, THINK, JudgedTurn, episode_faults, faults_of
from rlctl.settings.config import RolloutConfig
from rlctl.settings.rewards import EnvironmentConfig, host_and_port

OPENING_TOKENS = 8
"""Tokens at the end of a context that can spell `<think>`."""
PAUSE_S = 1.0
"""Before an episode is played again. The death of the environments' process shows within milliseconds."""
ENDS_TURN = ("abort", "timeout")
"""Stop reasons of a turn that end the episode."""


@dataclass(frozen=True)
class EnvironmentEpisodes:
    """Settings of a run's episodes with an environment. In an engine's process, `started` returns their player."""

    plan: EnvironmentPlan
    turns: TurnEncoder
    limits: EnvironmentConfig
    opening: Reply
    """The environment's reply to the first row. It represents all replies when prompts are measured before a run."""
    notes: tuple[str, ...]
    """Notes for the user before the run."""
    max_length: int = 0
    """Maximum number of tokens of an episode."""
    example: str = ""
    """A tool call in the template's form; empty: no tools, or an unknown form."""

    @classmethod
    def open(
        cls, config: RolloutConfig, encoder: PromptEncoder, row: PromptRow, limits: EnvironmentConfig | None = None
    ) -> EnvironmentEpisodes | None:
        """Play a trial episode on a row; None without an environment. `limits`: the settings of the row's source.
        Raises InputError if it fails."""
        limits = limits or config.environment
        if not limits.wanted:
            return None
        plan = plan_environment(limits)
        host = EnvironmentHost(plan)
        host.start()
        try:
            return asyncio.run(cls._tried(host, limits, encoder, row, config.run.seed))
        except EpisodeFailedError as error:
            without_data = plan.name and not (config.data.name or config.data.sources)
            hint = "If the environment reads rows, name their file with --data." if without_data else None
            message = str(error).removesuffix(".")
            if message.startswith("Tool "):
                raise InputError(f"{message}.", "docs/environments.md#tools has the form of a tool.") from error
            raise InputError(f"Environment {plan.label}: {message} ({row.where}).", hint) from error
        finally:
            host.close()

    @classmethod
    async def _tried(
        cls, host: EnvironmentHost, limits: EnvironmentConfig, encoder: PromptEncoder, row: PromptRow, seed: int
    ) -> EnvironmentEpisodes:
        session = host.begin()
        schemas_of_tools, note = await session.ask(RunningEpisode.schemas, timeout_s=limits.turn_timeout_s)
        reply = await session.ask(RunningEpisode.reset, row, episode_seed(seed, 0), timeout_s=limits.turn_timeout_s)
        asked_for: tuple[str, ...] = ()
        if reply.runs:
            reply, asked_for = await _first_question(session, limits, encoder, row)
        schemas = dict(schemas_of_tools)
        if reply.ask is not None:
            schemas |= {tool["function"]["name"]: dict(tool) for tool in reply.ask.tools}
        first_messages, knows = showing(encoder, list(schemas.values()))
        turns = TurnEncoder.build(
            first_messages,
            raw=limits.append == "raw",
            tools=bool(schemas) and knows,
            drops_thoughts=limits.thinking == "template",
        )
        form = limits.tool_format
        if form == "auto":
            form = form_of(first_messages) if schemas and knows else "hermes"
        plan = replace(host.plan, schemas=schemas_of_tools, form=form, tool_role=turns.tool_role)
        notes = list(filter(None, [note, turns.note, without_effect(asked_for) if asked_for else ""]))
        example = ""
        if schemas:
            example = written_call(first_messages, next(iter(schemas.values())), knows=knows)
            place = "" if knows else "; the chat template has no place for tools, so the system prompt describes them"
            written = f": {example!r}" if example else ""
            notes.append(f"tools: {', '.join(schemas)}; calls are written as {form} writes them{written}{place}")
        if reply.ask is not None:  # each conversation shows its tools
            turns = replace(turns, encoder=encoder.with_ends(turns.encoder.stop_token_ids))
        episodes = cls(plan, turns, limits, reply, tuple(notes), example=example)
        opened = episodes.opened(row, turns.encoder)
        episodes.require_shown(schemas, opened, row)
        if opened.media and turns.drops:
            raise InputError(
                f"environment.thinking = template: {row.where} has images, and a context with images is not written "
                "without its thoughts.",
                "Leave it out: thoughts then stay in the context.",
            )
        return episodes

    def require_shown(self, names: Iterable[str], prompt: EncodedPrompt, row: PromptRow) -> None:
        """Raise InputError for a tool that a first prompt does not show."""
        text = str(self.turns.encoder.tokenizer.decode(list(prompt.tokens), skip_special_tokens=False))
        of_tokens = self.opening.ask is not None and self.opening.ask.tokens
        if hidden := [] if of_tokens else [name for name in names if name not in text]:
            raise InputError(
                f"{row.where}: the prompt does not show the tool {hidden[0]!r} to the model, because the chat template "
                "leaves it out.",
                "Give a template that shows tools with --chat-template, or describe them in the data's system message.",
            )

    def within(self, max_length: int) -> EnvironmentEpisodes:
        """Return the settings for episodes of at most `max_length` tokens."""
        return replace(self, max_length=max_length)

    def showing_tools(self, encoder: PromptEncoder) -> PromptEncoder:
        """Return an encoder of prompts that shows the tools of the run."""
        return showing(encoder, list(self.plan.schemas.values()))[0]

    def beginning(
        self, prompt: Sequence[Message], reply: Reply, row: PromptRow
    ) -> tuple[EncodedPrompt, Sequence[Message]]:
        """Return a context's first ids, images and messages: the row's and the reply's, or `Reply.ask`'s. Raises
        InputError if empty."""
        where = row.where
        if (ask := reply.ask) is not None and ask.tokens:
            self.turns.encoder.require_known(ask.tokens, where)
            text = self.turns.text_of(list(ask.tokens))
            return EncodedPrompt(tuple(ask.tokens)), [{"role": "user", "content": text}]
        messages = [*prompt, *reply.messages] if ask is None else self.in_known_roles(ask.messages)
        encoder = self._encoder_of(row) if ask is None else showing(self.turns.encoder, ask.tools)[0]
        messages = messages if ask is None else encoder.instructed(messages)
        self.turns.require_roles(reply.messages if ask is None else messages, ("system", "user", "assistant", "tool"))
        if not messages:
            raise InputError(
                f"Environment {self.plan.label}: {where} has no prompt, and `reset` returned no message.",
                "Return the first message from `reset`, or name prompts with --data.",
            )
        return encoder.prompt_of(list(messages), where), messages

    def _encoder_of(self, row: PromptRow) -> PromptEncoder:
        """Return the encoder of an episode's prompt with the row's tools. Raises InputError for a tool that the
        environment lacks."""
        encoder = self.turns.encoder
        names = [str(tool.get("function", tool).get("name")) for tool in row.tools]
        if lacking := [name for name in names if self.plan.schemas and name not in self.plan.schemas]:
            raise InputError(
                f"{row.where}: the field `{TOOLS}` names {lacking[0]!r}, and the environment's tools are "
                f"{', '.join(self.plan.schemas)}.",
                f"Give the tool with --tool, or leave the field `{TOOLS}` out.",
            )
        # If the template has no place for tools, the system prompt lists the environment's.
        return encoder if self.plan.schemas and TOOLS not in encoder.variables else encoder.telling(row)

    def opened(self, row: PromptRow, encoder: PromptEncoder) -> EncodedPrompt:
        """Return a first prompt before a run, with the environment's first messages. Raises InputError if empty."""
        return self.beginning(encoder.messages(row), self.opening, row)[0]

    def measured(self, row: PromptRow, encoder: PromptEncoder) -> list[int]:
        """Return the ids of `opened`."""
        return list(self.opened(row, encoder).tokens)

    def in_known_roles(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with calls and tool results as the template writes them: calls as text if it has no form."""
        result: list[Message] = []
        for message in messages:
            if message.get(CALLS) and not self.turns.encoder.call_form.written:
                message = with_calls_as_text(message)
            last = result[-1] if result else None
            if message["role"] != "tool" or self.turns.tool_role == "tool":
                result.append(message)
            elif last is not None and last["role"] == "user":  # some templates require alternating roles
                images = [*last.get(IMAGES, ()), *message.get(IMAGES, ())]
                result[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
                result[-1] |= {IMAGES: images} if images else {}
            else:
                result.append({**message, "role": "user"})
        return result

    def judged(self, text: str, read: Sequence[int], *, called: bool, broken: bool) -> JudgedTurn:
        """Judge a turn of the model, behind the tokens `read`."""
        opened = self.turns.text_of(read[-OPENING_TOKENS:]).rstrip().endswith(THINK)
        faults = faults_of(text, opened=opened, called=called, broken=broken)
        spoken = without_call(text, self.plan.form) if called else text
        return JudgedTurn(text, spoken, opened, called, faults)

    def manifest(self) -> dict[str, Any]:
        code = [part.fingerprint for part in (self.plan.code, *self.plan.tools) if part is not None]
        return {"name": self.plan.name, "params": self.plan.params, "code": code}

    def describe(self) -> list[str]:
        limits, name = self.limits, self.plan.name or "tools alone"
        turns = f"at most {limits.turns} turn{'s' * (limits.turns > 1)}"
        return [f"environment: {name}, {turns}", *self.notes]

    # In the process of an engine

    def started(self) -> EpisodePlayer:
        host = EnvironmentHost(self.plan)
        host.start()
        return EpisodePlayer(self, host)


class EpisodePlayer:
    """Plays the episodes of one engine."""

    def __init__(self, play: EnvironmentEpisodes, host: EnvironmentHost) -> None:
        from rlctl.environments.gateway.server import Gateway  # aiohttp is with the engines

        self._play, self._host, self._limits = play, host, play.limits
        self._gateway = Gateway(*host_and_port(play.limits.listen), play.limits.address)

    async def __call__(self, episode: Episode) -> None:
        """Play an episode to its end; record environment failures in it. Requests of refit checks have no row."""
        if episode.request.row is None:
            await one_turn(episode)
            return
        limits, failure, reason = self._play.limits, "it had no turn", "raised"
        for attempt in range(limits.retries + 1):
            if attempt:
                await asyncio.sleep(PAUSE_S)
            episode.begin()
            session = self._host.begin()
            try:
                await asyncio.wait_for(self._played(episode, session), limits.timeout_s)
                return
            except EpisodeFailedError as error:
                failure, reason = str(error), error.reason
            except InputError as error:  # the chat template cannot write the environment's messages
                failure, reason = error.message.removesuffix("."), "template"
            except WaitTimeoutError:  # of the engine, not of this episode
                raise
            except TimeoutError:
                if episode.answers:  # keep the finished turns
                    episode.stop_reason = "episode_timeout"
                    return
                failure, reason = (
                    f"the episode took longer than environment.timeout_s = {limits.timeout_s:g} s",
                    "timeout",
                )
            finally:
                session.close()
        episode.stop_reason = "environment"
        label = self._play.plan.label
        message = f"Environment {label}: {failure} ({episode.row.where})."
        episode.failure = EpisodeFailure(reason, f"Environment {label}: {failure}", message)

    async def _played(self, episode: Episode, session: Session) -> None:
        play, limits = self._play, self._limits
        reply = await session.ask(
            RunningEpisode.reset, episode.row, episode.request.seed, timeout_s=limits.turn_timeout_s
        )
        if reply.runs:
            await self._run(episode, session)
            return
        prompt, messages = play.beginning(episode.request.messages, reply, episode.row)
        ids = list(prompt.tokens)
        if reply.ask is not None and reply.ask.tokens:
            play.turns.encoder.require_no_image(ids, episode.row.where)
        if len(ids) >= play.max_length:
            raise EpisodeFailedError(f"the prompt has {len(ids)} tokens of at most {play.max_length}", "prompt")
        episode.read(ids, prompt.media)
        episode.transcript += turns_of(messages, len(ids))
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

    async def _run(self, episode: Episode, session: Session) -> None:
        """Have the episode's program ask the model until it ends."""
        limits, turns = self._limits, ModelTurns(self._play, episode)
        address = await self._gateway.open(turns)
        run = asyncio.ensure_future(session.ask(RunningEpisode.run, address, timeout_s=limits.timeout_s + PAUSE_S))
        try:
            while not (await asyncio.wait([run], timeout=min(PAUSE_S, limits.turn_timeout_s)))[0]:
                if turns.idle_s() > limits.turn_timeout_s:
                    raise EpisodeFailedError(f"run asked nothing for {limits.turn_timeout_s:g} s", "timeout")
            reply = run.result()
        except EpisodeFailedError:
            if turns.refusal is None:
                raise
            reply = Reply()  # the program failed because its request was refused
        finally:
            run.cancel()
            self._gateway.end(address)
            await turns.close()
        if not episode.answers:
            raise EpisodeFailedError("its program asked the model nothing", "program")
        reason = LENGTH if episode.answers[-1][1].stop_reason == LENGTH else "done"
        episode.stop_reason = episode.stop_reason or turns.refusal or reason
        episode.rewarded(reply.reward)
        episode.count(reply.metrics)
        if self._loses_its_reward(episode):
            episode.count({"no_reward": 1.0})
            episode.rewards = [0.0] * len(episode.rewards)

    def _loses_its_reward(self, episode: Episode) -> bool:
        limits = self._limits
        if any(token in limits.unwanted_tokens for _, answer in episode.answers for token in answer.tokens_R.tolist()):
            return True
        return bool(episode.said) and not episode_faults(episode.said).isdisjoint(limits.no_reward)

    def _reads(self, episode: Episode, story: _Story, reply: Reply) -> bool:
        """Append a reply to the context; return whether there was room for it."""
        ask, turns, context = reply.ask, self._play.turns, episode.context
        anew, media = False, tuple[MediaPart, ...]()
        if ask is None or (ask.known and not ask.tokens):
            messages = self._play.in_known_roles(reply.messages if ask is None else ask.messages[ask.known :])
            expanded = turns.encoder.with_images(turns.between(context[-1], messages), messages, episode.row.where)
            tokens, media = list(expanded.tokens), expanded.media
            story.turns.append((episode.answers[-1][1].tokens_R.tolist(), tokens))
            if any(message["role"] in turns.drops for message in messages):
                without = turns.without_thoughts(story.prompt, story.turns)
                anew = without != [*context, *tokens]
                if anew and (episode.media or media):
                    raise EpisodeFailedError("environment.thinking=template does not go with images", "template")
                tokens = without if anew else tokens
        else:
            prompt, messages = self._play.beginning((), reply, episode.row)
            if ask.tokens:  # the request needs the images of its placeholder tokens
                prompt = replace(prompt, media=episode.images_in(prompt.tokens))
                turns.encoder.require_no_image(prompt.text_tokens, episode.row.where)
            tokens, media = list(prompt.tokens), prompt.media
            anew = tokens[: len(context)] != context
            if not anew:
                tokens = tokens[len(context) :]
                media = tuple(replace(p, start=p.start - len(context)) for p in media if p.start >= len(context))
            story.prompt, story.turns = [*([] if anew else context), *tokens], []
        episode.transcript += turns_of(messages, len(tokens))
        if (0 if anew else len(context)) + len(tokens) >= self._play.max_length:
            return False
        episode.read(tokens, media, anew=anew)
        return True

    async def _turn(self, episode: Episode, session: Session, before: Reply) -> Reply:
        read, usual = episode.context, episode.sampling
        request = before.ask or Ask()
        limits = [usual.max_new_tokens, self._play.max_length - len(read), request.max_tokens]
        if (most := self._limits.sampled_tokens) is not None:
            limits.append(most - episode.sampled_tokens)
        ends = self._play.turns.encoder.stop_token_ids
        answer = await episode.answer(
            stop=tuple(dict.fromkeys((*usual.stop, *before.stop, *request.stop))),
            stop_token_ids=tuple(dict.fromkeys((*usual.stop_token_ids, *ends, *request.stop_token_ids))),
            turn_ends=(*usual.turn_ends, *ends),
            max_new_tokens=min(limit for limit in limits if limit is not None),
        )
        tokens = answer.tokens_R.tolist()
        text = answer.text
        episode.transcript.append(Turn("assistant", text, len(tokens), 0.0))
        if answer.stop_reason in ENDS_TURN:
            episode.stop_reason = answer.stop_reason
            return Reply()
        message = {
            "role": "assistant", "content": text, "tokens": tokens, "logprobs": answer.logprobs_R.tolist(),
            "prompt_tokens": read, "stop_reason": answer.stop_reason,
        }  # fmt: skip
        reply = await session.ask(RunningEpisode.step, message, timeout_s=self._limits.turn_timeout_s)
        episode.rewarded(reply.reward)
        form, cut = self._play.plan.form, is_cut(message)
        called = reply.calls > 0 or bool(request.tools and readable_calls(text, form, request.tools, cut=cut))
        judged = self._play.judged(text, read, called=called, broken=reply.broken > 0)
        episode.said.append(judged)
        if judged.faults:
            episode.faults[len(episode.answers) - 1] = sum(BITS[name] for name in judged.faults)
            episode.count(dict.fromkeys(judged.faults, 1.0))
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
        return next((reason for reason, reached in over.items() if reached), None)

    def close(self) -> None:
        self._gateway.close()
        self._host.close()


@dataclass
class _Story:
    """An episode's context in parts: a prompt, and each answer with the reply after it."""

    prompt: list[int]
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)


async def _first_question(
    session: Session, limits: EnvironmentConfig, encoder: PromptEncoder, row: PromptRow
) -> tuple[Reply, tuple[str, ...]]:
    """Run a program until its first request; return the request, and its fields without effect."""
    from rlctl.environments.gateway.server import Gateway  # aiohttp is with the engines

    gateway, first = Gateway(*host_and_port(limits.listen), limits.address), FirstQuestion()
    address = await gateway.open(first)
    run = asyncio.ensure_future(session.ask(RunningEpisode.run, address, timeout_s=limits.turn_timeout_s))
    try:
        await asyncio.wait([run, first.question], return_when=asyncio.FIRST_COMPLETED)
        if not first.question.done():
            run.result()
            raise EpisodeFailedError("its program asked the model nothing")
        question = first.question.result()
    finally:
        run.cancel()
        gateway.close()
    tokens = question.tokens if question.text is None else encoder.encode_text(question.text, row.where)
    return Reply(ask=checked_ask(Ask(question.messages, tokens=tokens, tools=question.tools))), question.unenforced


def showing(encoder: PromptEncoder, schemas: Sequence[Mapping[str, Any]]) -> tuple[PromptEncoder, bool]:
    """Return the encoder of prompts that show tools, and whether the template has a place for them."""
    by_name = {schema["function"]["name"]: dict(schema) for schema in schemas}
    return with_tools(encoder, list(by_name.values()), INSTRUCTIONS.format(schemas=listed(by_name)))


def form_of(encoder: PromptEncoder) -> str:
    """Return the format of tool calls in the chat template. Raises InputError for an unknown format."""
    form, reason = None, ""
    try:
        form = format_of(lambda messages: encoder.render(list(messages), answered=True), encoder.special_texts)
    except InputError as error:
        reason = f" {error.message}"
    if form is None:
        raise InputError(
            f"The format of tool calls in this chat template is unknown.{reason}",
            "Name the format: --set environment.tool_format=hermes; `rlctl config schema` lists them.",
        )
    return form


def written_call(encoder: PromptEncoder, schema: Mapping[str, Any], *, knows: bool) -> str:
    """Return a tool call in the form of the template, or of the system prompt; empty if the template has no form."""
    function = schema["function"]
    parameters = function.get("parameters", {})
    names = parameters.get("required") or parameters.get("properties", {})
    called = {"name": function["name"], "arguments": dict.fromkeys(names, "...")}
    if not knows:
        return CALL.format(json.dumps(called))
    user = {"role": "user", "content": "?"}
    call = {"id": "call00000", "type": "function", "function": called}
    with contextlib.suppress(InputError):
        written = encoder.render([user, {"role": "assistant", "content": "", "tool_calls": [call]}], answered=True)
        text = written[len(commonprefix([written, encoder.render([user])])) :].strip()  # noqa: RUF071 - of texts
        for end in encoder.tokenizer.convert_ids_to_tokens(list(encoder.stop_token_ids)):
            text = text.removesuffix(str(end)).rstrip()
        return text if function["name"] in text else ""
    return ""


def with_calls_as_text(message: Message) -> Message:
    """Return a message with its calls in the form of the system prompt, for a template that writes none."""
    calls = [{"name": call["function"]["name"], "arguments": arguments_of(call["function"])} for call in message[CALLS]]
    texts = [message["content"], *(CALL.format(json.dumps(call)) for call in calls)]
    rest = {name: value for name, value in message.items() if name != CALLS}
    return {**rest, "content": "\n".join(filter(None, texts))}


def episode_seed(run_seed: int, position: int) -> int:
    return sample_seed(run_seed, position, 2**32 - 1)


def episode_request(
    group: int, row: PromptRow, encoder: PromptEncoder, seeds: Sequence[int], seed: int
) -> GroupRequest:
    return GroupRequest(group, (), tuple(seeds), row, tuple(encoder.messages(row)), seed)
