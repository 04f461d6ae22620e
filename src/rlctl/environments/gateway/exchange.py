"""Questions of clients and answers of the model, without the form of a protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rlctl.environments.interface import MODEL, Message
from rlctl.errors import listed

Event = tuple[str, Mapping[str, Any]]
"""Name and data of an event of a stream."""
RESPONSE_FORMAT = "response_format"
UNENFORCED = "gateway/unenforced_"
"""Begin of the counts of requests with a field that has no effect, such as `gateway/unenforced_tool_choice`."""
LOW_EFFORT = ("none", "minimal", "low")
TOO_LONG = "context_length_exceeded"
"""Error code of a context that is too long, and of questions after the end of the episode. No client retries on it."""


@dataclass(frozen=True)
class Question:
    """A request to the model."""

    messages: Sequence[Message] = ()
    """The conversation in OpenAI's form."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools in OpenAI's form."""
    tokens: Sequence[int] | None = None
    """The prompt as token ids, in place of messages."""
    text: str | None = None
    """The prompt as text, in place of messages."""
    model: str = MODEL
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    samples: int = 1
    """Answers to the same prompt."""
    seed: int | None = None
    """Tells apart requests that are otherwise equal. Equal requests are retries."""
    calls: bool = True
    """Whether the answer may call tools (`tool_choice`)."""
    unenforced: tuple[str, ...] = ()
    """Fields of the request that ask for a form of the answer, which the model is free not to take."""
    low_effort: bool = False
    """Whether the client asks for little thought."""

    @property
    def probes(self) -> bool:
        """Whether a client only tests the connection."""
        return self.max_tokens == 1

    @property
    def is_title(self) -> bool:
        """Whether it has the form in which agents ask for titles and other work aside from their task: a first request
        without tools, and with low effort or a schema."""
        asks_little = self.low_effort or RESPONSE_FORMAT in self.unenforced
        return asks_little and not self.tools and not any(said["role"] == "assistant" for said in self.messages)


@dataclass(frozen=True)
class ToolCall:
    """A tool call as it is sent to the client."""

    id: str
    name: str
    arguments: str
    """JSON text."""


@dataclass(frozen=True)
class Answer:
    """One answer of the model."""

    text: str
    """The text without its thought and its calls, before a stop text."""
    calls: tuple[ToolCall, ...]
    prompt_tokens: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    cut: bool
    """Whether a limit ended it."""
    stop_text: str | None = None
    """The client's stop text that ended it."""
    thought: str = ""

    def message(self) -> Message:
        """Return the answer as a message of a conversation."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
        ]
        content = None if calls and not self.text else self.text
        thought = {"reasoning_content": self.thought} if self.thought else {}
        return {"role": "assistant", "content": content} | thought | ({"tool_calls": calls} if calls else {})


class RefusedError(Exception):
    """The reason that a request gets no answer, for the client."""

    def __init__(self, message: str, code: str = "invalid_value", status: int = 400, retry_s: int | None = None):
        super().__init__(message)
        self.message, self.code, self.status, self.retry_s = message, code, status, retry_s


def too_long(tokens: int, most: int) -> RefusedError:
    """Return the refusal of a prompt, in the words that OpenAI's and Anthropic's clients look for."""
    return RefusedError(
        f"prompt is too long: {tokens} tokens > {most} maximum. This model's maximum context length is {most} tokens. "
        f"However, your messages resulted in {tokens} tokens. Please reduce the length of the messages.",
        TOO_LONG,
    )


def episode_over() -> RefusedError:
    return RefusedError(
        "The episode is over: a limit of the run ended it. prompt is too long: This model's maximum context length is "
        "reached.",
        TOO_LONG,
    )


def without_effect(fields: Sequence[str]) -> str:
    """Return the sentence for users on fields of `Question.unenforced`."""
    return (
        f"programs ask for {listed(fields)} without effect: answers are samples of the policy, so that the loss "
        "matches their distribution, and the model has to learn their form"
    )


class ModelEpisode(Protocol):
    """An episode that answers requests."""

    def asked(self, question: Question) -> asyncio.Future[Sequence[Answer]]:
        """Start answering; the same question again gets the same future. Raises RefusedError."""
        ...

    def tokens_of(self, question: Question) -> int:
        """Return the length of the prompt in tokens. Raises RefusedError."""
        ...


@dataclass(frozen=True)
class Exchange:
    """What a reply is made of."""

    number: int
    """Number of the request, unique in the episode."""
    body: Mapping[str, Any]
    answers: Sequence[Answer]
    created: int
    """Unix time in seconds."""


class WireFormat(Protocol):
    """One request form of a protocol; registered in `gateway/server.py`."""

    path: str

    def question(self, body: Mapping[str, Any]) -> Question:
        """Read a request. Raises RefusedError, or KeyError, TypeError, ValueError and AttributeError for a form that is
        not the protocol's."""
        ...

    def whole(self, exchange: Exchange) -> dict[str, Any]:
        """Return the reply without streaming."""
        ...

    def events(self, exchange: Exchange) -> Iterable[Event]:
        """Yield the events of the reply. An event without name is data alone."""
        ...

    def error(self, refusal: RefusedError) -> dict[str, Any]: ...


Finish = Literal["stop", "length", "tool_calls"]


def finish_of(answer: Answer) -> Finish:
    """Return why an answer ended, in OpenAI's words."""
    return "length" if answer.cut else "tool_calls" if answer.calls else "stop"


def texts(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return stop texts. Raises RefusedError for an empty one."""
    stops = (stop,) if isinstance(stop, str) else tuple(map(str, stop or ()))
    if "" in stops:
        raise RefusedError("A stop text is empty.")
    return stops


def limit(value: Any) -> int | None:
    """Return a limit of tokens. Raises RefusedError for anything but a positive number."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise RefusedError(f"The maximum number of tokens is {value!r:.40}, and has to be a positive number.")
    return value


def wishes(choice: Any, form: Any, effort: Any, *, parallel: Any = None) -> dict[str, Any]:
    """Return the fields of a Question from OpenAI's `tool_choice`, response format, effort and `parallel_tool_calls`.
    Answers are samples of the policy, so that the loss matches their distribution: no form can be forced. Raises
    RefusedError for one certain tool, on which a program relies more than on a call of any."""
    choice = "auto" if choice is None else choice
    if choice not in ("auto", "none", "required"):
        raise RefusedError(
            "tool_choice has to be auto, required (any) or none: answers are samples of the policy, so that no call of "
            "one certain tool can be forced. Offer that tool alone in `tools`."
        )
    kind = form.get("type") if isinstance(form, Mapping) else None
    unenforced = {
        "tool_choice": choice == "required",
        RESPONSE_FORMAT: kind in ("json_schema", "json_object"),
        "parallel_tool_calls": parallel is False,
    }
    return {
        "calls": choice != "none",
        "unenforced": tuple(name for name, asked in unenforced.items() if asked),
        "low_effort": effort in LOW_EFFORT,
    }


def refuse_unread(body: Mapping[str, Any], *names: str) -> None:
    """Raise RefusedError for a field that has a value and would be without effect."""
    if given := [name for name in names if body.get(name)]:
        raise RefusedError(f"The field {given[0]} has no effect here. Leave it out.", "unsupported_parameter")


def openai_error(refusal: RefusedError) -> dict[str, Any]:
    kind = {429: "rate_limit_error", 500: "server_error"}.get(refusal.status, "invalid_request_error")
    return {"error": {"message": refusal.message, "type": kind, "param": None, "code": refusal.code}}
