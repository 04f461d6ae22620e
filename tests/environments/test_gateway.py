"""The gateway: the official clients against it, and which sampled answer a request continues."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest

from rlctl.environments.gateway import server
from rlctl.environments.gateway.chat import ChatCompletions
from rlctl.environments.gateway.exchange import Answer, Question, RefusedError, ToolCall, too_long
from rlctl.environments.gateway.matching import Answers, conversation_digests
from rlctl.environments.gateway.messages import AnthropicMessages
from rlctl.environments.gateway.responses import Responses
from rlctl.environments.gateway.server import Gateway
from rlctl.environments.interface import Ask
from rlctl.environments.running_episode import checked_ask
from rlctl.errors import MachineError
from rlctl.settings.rewards import EnvironmentConfig, host_and_port
from support.toy_gym import free_port

CALL = ToolCall("call00000", "look", '{"at": 2.0, "by": "eye"}')
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


class Scripted:
    """An episode that answers after a moment, and refuses questions of more than three messages."""

    def __init__(self) -> None:
        self.questions: list[Question] = []

    def asked(self, question: Question) -> asyncio.Future[Sequence[Answer]]:
        if len(question.messages) > 3:
            raise too_long(77, 64)
        self.questions.append(question)

        async def answered() -> Sequence[Answer]:
            await asyncio.sleep(0.01)
            calls = (CALL,) if question.tools else ()
            thought = "Hm." if question.messages and question.messages[-1]["content"] == "Think." else ""
            cut = question.max_tokens == 2
            return [Answer("I see.", calls, [1, 2, 3], [4, 5], [-0.5, -0.25], cut=cut, thought=thought)]

        return asyncio.ensure_future(answered())

    def tokens_of(self, question: Question) -> int:
        return 3


def test_clients_of_openai_and_anthropic_read_every_reply() -> None:
    """The packages' own models are the schema: what they parse has the fields and values that they declare."""
    import anthropic  # here: with openai it takes as long as all that the other test files import
    import openai

    async def asked() -> None:
        gateway, episode = Gateway(), Scripted()
        address = await gateway.open(episode)
        user: Any = [{"role": "user", "content": "Look."}]
        client = openai.AsyncOpenAI(base_url=f"{address.url}/v1", api_key="other", max_retries=0)
        claude = anthropic.AsyncAnthropic(base_url=address.url, api_key=address.key, max_retries=0)
        try:
            await _chats(client, user)
            await _responds(client)
            await _speaks_claude(claude, user)
            assert [model.id async for model in client.models.list()] == ["policy"]
            with pytest.raises(openai.BadRequestError, match="maximum context length is 64 tokens") as refused:
                await client.chat.completions.create(model="policy", messages=user * 4)
            assert refused.value.code == "context_length_exceeded"
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 77 tokens > 64 maximum"):
                await claude.messages.create(model="policy", max_tokens=9, messages=user * 4)
            file = [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]
            with pytest.raises(openai.BadRequestError, match="data URL"):
                await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": file}])  # type: ignore[list-item,typeddict-item]
            gateway.end(address)
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="policy", messages=user)
            with pytest.raises(anthropic.AuthenticationError):
                await claude.messages.create(model="policy", max_tokens=9, messages=user)
        finally:
            gateway.close()

    asyncio.run(asked())


@pytest.mark.parametrize(
    ("field", "without_effect", "calls"),
    [
        ({"tool_choice": "auto"}, (), True),
        ({"tool_choice": "none"}, (), False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ("tool_choice", "parallel_tool_calls"), True),
        ({"response_format": {"type": "json_object"}}, ("response_format",), True),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, "tool_choice has to be auto", True),
        ({"functions": [{"name": "look"}]}, "The field functions has no effect", True),
    ],
)
def test_what_a_client_asks_of_the_form_of_an_answer(
    field: dict[str, Any], without_effect: tuple[str, ...] | str, calls: bool
) -> None:
    """Forms are counted where agents can do without, and refused where they cannot."""
    import openai

    async def asked() -> None:
        gateway, episode = Gateway(), Scripted()
        address = await gateway.open(episode)
        client = openai.AsyncOpenAI(base_url=f"{address.url}/v1", api_key=address.key, max_retries=0)
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Look."}], "tools": [TOOL], **field}
        try:
            if isinstance(without_effect, str):
                with pytest.raises(openai.BadRequestError, match=without_effect):
                    await client.chat.completions.create(model="policy", **body)
                return
            await client.chat.completions.create(model="policy", **body)
            (question,) = episode.questions
            assert (question.unenforced, question.calls) == (without_effect, calls)
        finally:
            gateway.close()

    asyncio.run(asked())


def test_clients_read_thoughts_in_the_words_of_each_protocol() -> None:
    import anthropic
    import openai

    async def asked() -> None:
        gateway, episode = Gateway(), Scripted()
        address = await gateway.open(episode)
        client = openai.AsyncOpenAI(base_url=f"{address.url}/v1", api_key=address.key, max_retries=0)
        claude = anthropic.AsyncAnthropic(base_url=address.url, api_key=address.key, max_retries=0)
        user: Any = [{"role": "user", "content": "Think."}]
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        try:
            chat = (await client.chat.completions.create(model="policy", messages=user)).choices[0].message
            assert (chat.content, chat.to_dict()["reasoning_content"]) == ("I see.", "Hm.")
            response = await client.responses.create(model="policy", input=user)
            assert [item.type for item in response.output] == ["reasoning", "message"]
            assert (response.output[0].content[0].text, response.output_text) == ("Hm.", "I see.")
            async with client.responses.stream(model="policy", input=user) as stream:
                streamed = await stream.get_final_response()
            assert streamed.output[0].to_dict()["content"] == response.output[0].to_dict()["content"]
            again = [*user, *(item.to_dict() for item in response.output), *user]
            await client.responses.create(model="policy", input=again)
            assert [m["content"] for m in episode.questions[-1].messages] == ["Think.", "I see.", "Think."]
            message = await claude.messages.create(model="policy", max_tokens=2000, messages=user, thinking=thinking)
            assert [block.type for block in message.content] == ["thinking", "text"]
            async with claude.messages.stream(
                model="policy", max_tokens=2000, messages=user, thinking=thinking
            ) as stream:
                last = await stream.get_final_message()
            assert last.content[0].thinking == message.content[0].thinking == "Hm."
            assert last.content[0].signature
            back = [*user, {"role": "assistant", "content": [block.to_dict() for block in message.content]}, *user]
            await claude.messages.create(model="policy", max_tokens=2000, messages=back, thinking=thinking)
            assert [m["content"] for m in episode.questions[-1].messages] == ["Think.", "I see.", "Think."]
            plain = await claude.messages.create(model="policy", max_tokens=2000, messages=user)
            assert [block.type for block in plain.content] == ["text"]
        finally:
            gateway.close()

    asyncio.run(asked())


def test_usage_of_a_stream_is_told_once_and_where_it_is_asked_for() -> None:
    """Clients such as LangChain's add up the usage of all chunks."""
    import openai

    async def asked() -> None:
        gateway = Gateway()
        address = await gateway.open(Scripted())
        client = openai.AsyncOpenAI(base_url=f"{address.url}/v1", api_key=address.key, max_retries=0)
        user: Any = [{"role": "user", "content": "Look."}]
        try:
            for options, used in (({"include_usage": True}, [2]), (openai.omit, [])):
                stream = await client.chat.completions.create(
                    model="policy", messages=user, stream=True, stream_options=options
                )
                assert [chunk.usage.completion_tokens async for chunk in stream if chunk.usage] == used
        finally:
            gateway.close()

    asyncio.run(asked())


@pytest.mark.parametrize("arguments", ['{"at": 2', "[1]", '"x"'])
def test_calls_without_an_object_as_arguments_are_written_for_the_model(arguments: str) -> None:
    """Clients send them back to have the model mend them; templates write objects."""
    user = {"role": "user", "content": "Look."}
    asked = {"messages": [user, _called(arguments), {"role": "tool", "tool_call_id": "call00000", "content": "Error"}]}
    item = {"type": "function_call", "call_id": "call00000", "name": "look", "arguments": arguments}
    output = {"type": "function_call_output", "call_id": "call00000", "output": "Error"}
    for question in (ChatCompletions().question(asked), Responses().question({"input": [user, item, output]})):
        (_, answer, _) = checked_ask(Ask(question.messages)).messages
        (call,) = answer["tool_calls"]
        assert (call["function"]["name"], call["id"]) == ("look", "call00000")
        assert json.loads(call["function"]["arguments"]) == {"unparsed": arguments}


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"stop": ["a", ""]}, "A stop text is empty"),
        ({"max_tokens": 0}, "The maximum number of tokens is 0"),
        ({"max_completion_tokens": 0, "max_tokens": 5}, "The maximum number of tokens is 0"),
        ({"n": 0}, "n is 0"),
    ],
)
def test_values_that_no_engine_takes_are_refused(field: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        ChatCompletions().question({"messages": [{"role": "user", "content": "Look."}], **field})


def test_forms_are_read_in_the_words_of_each_protocol() -> None:
    """Fields as codex, Claude Code and inspect-ai send them, for turns and for titles."""
    user, schema = [{"role": "user", "content": "Look."}], {"type": "json_schema", "schema": {"type": "object"}}
    tool = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
    responses, messages = Responses(), AnthropicMessages()
    turn = responses.question({"input": "Look.", "tools": [tool], "tool_choice": "required"})
    assert (turn.unenforced, turn.is_title) == (("tool_choice",), False)
    assert responses.question({"input": "Hello.", "reasoning": {"effort": "low"}}).is_title
    assert not responses.question({"input": "Hello.", "reasoning": {"effort": "high"}}).is_title
    compaction = [*user, {"role": "assistant", "content": "I see."}, {"role": "user", "content": "Sum up."}]
    assert not responses.question({"input": compaction, "reasoning": {"effort": "low"}, "tools": []}).is_title
    assert responses.question({"input": "Look.", "text": {"format": schema}}).unenforced == ("response_format",)
    assert messages.question({"messages": user, "output_config": {"format": schema}}).is_title
    looking = {"messages": user, "tools": [{"name": "look", "input_schema": {"type": "object"}}]}
    assert messages.question(looking | {"tool_choice": {"type": "any"}}).unenforced == ("tool_choice",)
    assert not messages.question(looking | {"tool_choice": {"type": "none"}}).calls
    with pytest.raises(RefusedError, match="no call of one certain tool"):
        messages.question(looking | {"tool_choice": {"type": "tool", "name": "look"}})


@pytest.mark.parametrize("wire", [AnthropicMessages(), ChatCompletions(), Responses()], ids=lambda wire: wire.path)
def test_claude_codes_line_for_anthropics_servers_is_no_part_of_a_prompt(wire: Any) -> None:
    """Recorded from Claude Code 2.1.114: `cch` differs between requests of one conversation. Routers send the line on,
    as a part or in one text. A user's message keeps it."""
    line, prompt = (
        "x-anthropic-billing-header: cc_version=2.1.114.df9; cc_entrypoint=sdk-cli; cch={};",
        "You are an agent.",
    )
    blocks = [{"type": "text", "text": text} for text in (line.format("b1ca6"), prompt)]
    for system in (blocks, f"{line.format('66142')}\n{prompt}", [blocks[1]]):
        later = {"role": "system", "content": system}
        asked = {"role": "user", "content": line}
        body = {
            "/v1/messages": {"system": system, "messages": [asked, later]},
            "/v1/chat/completions": {"messages": [later, asked, later]},
            "/v1/responses": {
                "instructions": system if isinstance(system, str) else prompt,
                "input": [asked, later],
            },
        }[wire.path]
        said = wire.question(body).messages
        assert [message["content"] for message in said] == [prompt, line, prompt]
    alone = wire.question({"messages": [asked], "system": blocks[:1], "input": [asked], "instructions": line})
    assert [message["content"] for message in alone.messages] == [line]


def test_clients_ask_again_for_what_is_refused_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    import openai

    async def asked() -> None:
        gateway, episode = Gateway(), Scripted()
        address = await gateway.open(episode)
        user: Any = [{"role": "user", "content": "Look."}]
        client = openai.AsyncOpenAI(base_url=f"{address.url}/v1", api_key=address.key, max_retries=0)
        try:
            one, other = await asyncio.gather(
                *(client.chat.completions.create(model="policy", messages=user) for _ in range(2)),
                return_exceptions=True,
            )
            refused = one if isinstance(one, openai.RateLimitError) else other
            assert isinstance(refused, openai.RateLimitError)
            assert refused.response.headers["retry-after"] == "1"
            patient = client.with_options(max_retries=5)
            both = (patient.chat.completions.create(model="policy", messages=user) for _ in range(2))
            assert [reply.choices[0].message.content for reply in await asyncio.gather(*both)] == ["I see."] * 2
        finally:
            gateway.close()

    monkeypatch.setattr(server, "IN_FLIGHT", 1)
    asyncio.run(asked())


def test_a_key_is_a_bearer_token_a_header_or_part_of_the_address() -> None:
    import openai

    async def asked() -> None:
        gateway = Gateway()
        address = await gateway.open(Scripted())
        base = address.url.removesuffix(f"/{address.key}")
        body = {"model": "policy", "prompt": "I", "stream": True}
        given = (
            (address.url, {}),
            (base, {"x-api-key": address.key}),
            (base, {"Authorization": f"Bearer {address.key}"}),
        )
        try:
            async with aiohttp.ClientSession() as session:
                for url, headers in given:
                    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as reply:
                        text = await reply.text()
                        assert (reply.status, text.endswith("data: [DONE]\n\n")) == (200, True)
                        chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]
                    for chunk in chunks:
                        openai.types.Completion.model_validate(chunk)
                    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "I see."
                async with session.post(f"{base}/v1/completions", json=body) as reply:
                    assert reply.status == 401
        finally:
            gateway.close()

    asyncio.run(asked())


async def _chats(client: Any, user: Any) -> None:
    whole = await client.chat.completions.create(model="policy", messages=user, tools=[TOOL])
    type(whole).model_validate(whole.model_dump(), strict=False)
    assert (whole.choices[0].finish_reason, whole.choices[0].message.tool_calls[0].id) == ("tool_calls", CALL.id)
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            model="policy", messages=user, tools=[TOOL], stream=True, stream_options={"include_usage": True}
        )
    ]
    for chunk in chunks:
        type(chunk).model_validate(chunk.model_dump())
    called = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    assert [json.loads(call.function.arguments) for call in called] == [{"at": 2.0, "by": "eye"}]
    assert chunks[-1].usage.total_tokens == 5
    text = await client.completions.create(model="policy", prompt="I")
    type(text).model_validate(text.model_dump())
    assert text.choices[0].text == "I see."


async def _responds(client: Any) -> None:
    tool = {"type": "function", **TOOL["function"], "strict": None}  # type: ignore[dict-item]
    whole = await client.responses.create(model="policy", input="Look.", tools=[tool])
    type(whole).model_validate(whole.model_dump())
    assert [item.type for item in whole.output] == ["message", "function_call"]
    async with client.responses.stream(model="policy", input="Look.", tools=[tool]) as stream:
        events = [event.type async for event in stream]
        last = await stream.get_final_response()
    assert events[0] == "response.created"
    assert events[-1] == "response.completed"
    assert (last.output_text, last.usage.output_tokens) == ("I see.", 2)
    cut = await client.responses.create(model="policy", input="Look.", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def _speaks_claude(claude: Any, user: Any) -> None:
    tool = {"name": "look", "input_schema": {"type": "object"}}
    whole = await claude.messages.create(model="policy", max_tokens=9, messages=user, tools=[tool])
    type(whole).model_validate(whole.model_dump())
    assert (whole.stop_reason, whole.content[1].input) == ("tool_use", {"at": 2.0, "by": "eye"})
    async with claude.messages.stream(model="policy", max_tokens=9, messages=user, tools=[tool]) as stream:
        last = await stream.get_final_message()
    assert (last.stop_reason, last.content[1].input) == ("tool_use", {"at": 2.0, "by": "eye"})
    assert (await claude.messages.count_tokens(model="policy", messages=user)).input_tokens == 3
    cut = await claude.messages.create(model="policy", max_tokens=2, messages=user)
    assert cut.stop_reason == "max_tokens"


def _called(arguments: str, **message: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
    } | message


@pytest.mark.parametrize(
    ("returned", "same"),
    [
        (_called('{ "by": "eye", "at": 2 }', content=None), True),
        (_called('{"at": 2e0, "by": "\\u0065ye"}'), True),
        (_called('{"at": 2.0, "by": "eye"}', content=[{"type": "text", "text": "\n"}]), True),
        (_called('{"at": 2.5, "by": "eye"}'), False),
        (_called('{"at": true, "by": "eye"}'), False),
        (_called("{}"), False),
        (_called('{"at": 2.0, "by": "eye"}', content="So."), False),
    ],
)
def test_an_answer_is_found_again_as_clients_send_it_back(returned: dict[str, Any], same: bool) -> None:
    """The changes that ten clients were seen to make."""
    user = [{"role": "user", "content": "Look.\r\nThere. "}]
    known = Answers[str]()
    known.add(conversation_digests(user, [TOOL])[-1], _called('{"at": 2.0, "by": "eye"}', content=""), "turn")
    parts = [{"type": "text", "text": "Look.\nThere.", "cache_control": {"type": "ephemeral"}}]
    later = [{"role": "user", "content": parts}, returned, {"role": "tool", "content": "A cat."}]
    found = known.continued(later, conversation_digests(later, [TOOL]))
    assert found == ((2, "turn") if same else (0, None))
    assert known.continued(later, conversation_digests(later, [])) == (0, None)


def test_engines_share_out_the_ports_from_a_chosen_one_on_and_name_them_in_a_given_address() -> None:
    async def opened() -> list[str]:
        first = free_port()
        gateways = [Gateway("127.0.0.1", first, address) for address in (None, "https://agents.example/{port}/", None)]
        try:
            urls = [(await gateway.open(Scripted())).url.rpartition("/")[0] for gateway in gateways]
        finally:
            for gateway in gateways:
                gateway.close()
        ports = [int(url.rpartition("/" if "example" in url else ":")[2]) for url in urls]
        assert first <= ports[0] < ports[1] < ports[2] < first + 256
        return [url.replace(str(port), "PORT") for url, port in zip(urls, ports, strict=True)]

    assert asyncio.run(opened()) == ["http://127.0.0.1:PORT", "https://agents.example/PORT", "http://127.0.0.1:PORT"]


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(MachineError, match=r"environment.listen: this machine cannot listen at 198.51.100.7, port any"):
        asyncio.run(Gateway("198.51.100.7").open(Scripted()))


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        ("127.0.0.1", ("127.0.0.1", 0)), ("0.0.0.0:8700", ("0.0.0.0", 8700)), ("::1", ("::1", 0)),
        ("[::1]", ("::1", 0)), ("[fd00::7]:8700", ("fd00::7", 8700)), ("worker", ("worker", 0)),
    ],
)  # fmt: skip
def test_listen_is_a_host_with_or_without_a_port(listen: str, expected: tuple[str, int]) -> None:
    """URLs (RFC 3986) write addresses of IPv6 in brackets before a port."""
    assert host_and_port(EnvironmentConfig(listen=listen).listen) == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"listen": "0.0.0.0:http"}, "environment.listen = '0.0.0.0:http': 'http' is no port"),
        ({"listen": "0.0.0.0:70000"}, "'70000' is no port"),
        ({"listen": ":8700"}, "environment.listen = ':8700' has no host: 0.0.0.0 is all addresses"),
        ({"listen": ""}, "environment.listen = '' has no host"),
        ({"address": "agents.example"}, "environment.address = 'agents.example' is no http:// or https:// address"),
        ({"address": "https://{host}"}, "environment.address = 'https://{host}'"),
    ],
)
def test_listen_and_address_are_checked_before_a_run(keys: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        EnvironmentConfig.model_validate(keys)
