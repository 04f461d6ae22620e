"""Environments in processes of their own: each accepted form, tools, and failures that cost one episode."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlctl.data.image_sources import IMAGES, MARK
from rlctl.data.prompt_rows import PromptRow
from rlctl.environments.environment_plan import plan_environment
from rlctl.environments.process import EnvironmentHost, EpisodeFailedError
from rlctl.environments.running_episode import RunningEpisode
from rlctl.errors import InputError
from rlctl.settings.rewards import EnvironmentConfig
from support.processes import is_alive
from support.vision_models import square

TOYS = Path(__file__).parents[1] / "support" / "toy_environments.py"
ROW = PromptRow(4, "row 4", "What?", "7", {"level": 2})
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'


@contextmanager
def hosting(name: str | None, **settings: Any) -> Iterator[EnvironmentHost]:
    plan = plan_environment(EnvironmentConfig(name=name and f"{TOYS}:{name}", **settings))
    with closing(EnvironmentHost(plan)) as host:
        host.start()
        schemas, _ = asyncio.run(asked(host, ("schemas",)))[0]
        host.plan = replace(plan, schemas=schemas)
        if schemas:  # the process is told of them with its plan
            host.close()
            host.start()
        yield host


async def asked(host: EnvironmentHost, *requests: tuple[Any, ...], timeout_s: float = 20.0) -> list[Any]:
    session = host.begin()
    try:
        return [
            await session.ask(getattr(RunningEpisode, method), *arguments, timeout_s=timeout_s)
            for method, *arguments in requests
        ]
    finally:
        session.close()


def episode(*texts: str, seed: int = 1) -> list[tuple[Any, ...]]:
    return [("reset", ROW, seed), *(("step", {"role": "assistant", "content": text}) for text in texts), ("close",)]


def test_an_episode_goes_from_reset_to_close() -> None:
    with hosting("Counting", params={"turns": 2}) as host:
        opening, first, last, closed = asyncio.run(asked(host, *episode("a", "b")))
        again = asyncio.run(asked(host, *episode(seed=1)))[0]
    assert opening.messages[0]["content"].startswith("Begin with ")
    assert again.messages == opening.messages  # the seed says how it begins
    assert (first.messages, first.reward, first.done) == (({"role": "user", "content": "turn 1"},), 0.5, False)
    assert (last.done, last.metrics, closed.reward) == (True, {"said": 1.0}, 0.0)


def test_text_in_and_a_mapping_out_are_accepted() -> None:
    with hosting("Failing", params={"how": "raise"}) as host:
        _, first, *_ = asyncio.run(asked(host, *episode("a")))
    assert (first.messages, first.reward) == (({"role": "user", "content": "turn 1"},), 1.0)


@pytest.mark.parametrize("form", ["text", "message", "messages"])
def test_a_class_of_gymnasium_is_an_environment(form: str) -> None:
    """reset(seed, options) -> (observation, info); step -> (observation, reward, terminated, truncated, info)."""
    with hosting("Gymnasium", params={"form": form}) as host:
        opening, first, last, _ = asyncio.run(asked(host, *episode("a", "b", seed=7)))
    assert opening.messages == ({"role": "user", "content": "What? 7"},)
    assert (first.messages, first.reward, first.done) == (({"role": "user", "content": "a again"},), 0.5, False)
    assert (last.reward, last.done) == (0.5, True)  # truncated


@pytest.mark.parametrize(
    ("what", "reward", "done"),
    [
        ("observation", 1.0, True), ("obs", 1.0, True), ("older tuple", 1.0, True),
        ("text", 0.0, False), ("message", 0.0, False), ("messages", 0.0, False),
    ],
)  # fmt: skip
def test_a_step_may_be_returned_in_several_forms(what: str, reward: float, done: bool) -> None:
    with hosting("Returning", params={"what": what}) as host:
        _, found, _ = asyncio.run(asked(host, *episode("a")))
    assert (found.messages, found.reward, found.done) == (({"role": "user", "content": "more"},), reward, done)
    if what != "older tuple":
        with hosting("Returning", params={"what": what, "method": "reset"}) as host:
            opening, *_ = asyncio.run(asked(host, ("reset", ROW, 1)))
        assert opening.messages == ({"role": "user", "content": "more"},)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (
            "nothing",
            r"step returned None, and has to return a Step, .*messages, reward, done, stop, metrics, ask.*Gymnasium",
        ),
        (
            "unknown",
            r"with the field 'rewards'. Its fields are messages, reward, done, .*observation, obs, .*terminated",
        ),
        ("both", "with both 'messages' and 'observation', which are the same field"),
        ("number", "3 is neither a text nor messages"),
        ("pair", r"step returned \('more', 1.0\), and has to return"),
    ],
)
def test_what_no_step_is_names_the_forms_that_are(what: str, why: str) -> None:
    with hosting("Returning", params={"what": what}) as host, pytest.raises(EpisodeFailedError, match=why):
        asyncio.run(asked(host, *episode("a")))


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("raise", "step raised KeyError: 'nothing'; toy_environments.py, line"),
        ("die", "its process died in step"),
        ("hang", "step took longer than 5 s"),
        ("eat", "step raised MemoryError"),
    ],
)
def test_a_failure_costs_its_own_episode(how: str, why: str) -> None:
    async def both(host: EnvironmentHost) -> list[Any]:
        ends = (asked(host, *episode("a", "b", "c", seed=seed), timeout_s=5.0) for seed in (1, 5))
        return await asyncio.gather(*ends, return_exceptions=True)

    with hosting("Failing", params={"how": how}) as host:
        numbers = [asyncio.run(asked(host, *episode(seed=seed)))[0].messages[0]["content"] for seed in (1, 5)]
        found = asyncio.run(both(host))
        asyncio.run(asked(host, *episode(seed=1)))  # the next one begins as ever
    failed = [number[-2] in "02468" for number in numbers]
    assert sorted(failed) == [False, True]
    for outcome, fails in zip(found, failed, strict=True):
        assert isinstance(outcome, EpisodeFailedError) == fails
        assert not fails or why in str(outcome)


def test_what_an_episode_starts_ends_with_it() -> None:
    others = psutil.Process().children(recursive=True)  # of other tests

    def started() -> list[psutil.Process]:
        found = [one for one in psutil.Process().children(recursive=True) if one not in others]
        return [one for one in found if is_alive(one)]

    with hosting("Failing", params={"how": "fork"}) as host:
        before = len(started())
        for seed in range(6):
            assert asyncio.run(asked(host, *episode("a", "b", "c", seed=seed)))[-2].done
        asyncio.run(asyncio.sleep(1.5))
        asyncio.run(asked(host, *episode()))  # it clears up when it is asked for something
        assert len(started()) <= before + 1
    assert not started()


def test_methods_are_tools_and_a_broken_call_is_told_to_the_model() -> None:
    texts = (
        "I add. " + CALL.format("add", '{"a": 2, "b": 3}'),
        CALL.format("add", '{"a": "two"}') + CALL.format("divide", '{"a": 1, "b": 2}'),
        CALL.format("divide", '{"a": 1, "b": 0}'),
        CALL.format("multiply", "{}"),
        '<tool_call>\n{"name": "add", ',
        CALL.format("add", '{"a": 2, "b": 3}') + CALL.format("add", '{"a": 1'),
        "Done.",
    )
    with hosting("Sums") as host:
        assert list(host.plan.schemas) == ["add", "divide"]
        opening, *replies, closed = asyncio.run(asked(host, *episode(*texts)))
    assert opening.messages == ({"role": "user", "content": "Add."},)
    said = [[one["content"] for one in reply.messages] for reply in replies]
    assert said[0] == ["5"]
    both = "Error: the arguments of add are wrong: 'two' is not of type 'integer'.\n\n{\"result\": 0.5}"
    assert said[1] == [both]  # as the user's, in one message
    assert said[2] == ["Error: ZeroDivisionError: division by zero"]
    assert said[3] == ["Error: there is no function 'multiply'; the functions are add, divide."]
    assert said[4][0].startswith("Error: the call cannot be read:")
    assert said[5][0].startswith("5\n\nError: the call cannot be read:")
    assert [(one.calls, one.broken) for one in replies] == [(1, 0), (1, 1), (1, 0), (0, 1), (0, 1), (1, 1), (0, 0)]
    assert replies[-1].done
    assert closed.reward == 5.0


def test_tools_return_images() -> None:
    one, other = CALL.format("show", '{"color": "red"}'), CALL.format("compare", "{}")
    found = CALL.format("find", "{}")
    with hosting("Album") as host:
        texts = (one, f"{other}{one}{CALL.format('hide', '{}')}", found)
        _, shown, both, told, *_ = asyncio.run(asked(host, *episode(*texts)))
    [message] = shown.messages
    assert (message["role"], message["content"]) == ("user", MARK)
    assert [image.rgb().tobytes() for image in message[IMAGES]] == [square("red").tobytes()]
    [message] = both.messages
    said = f"as wide as{MARK}\n\n{MARK}\n\nError: there is no function 'hide'; the functions are compare, find, show."
    assert message["content"] == said
    sizes = [image.rgb().size for image in message[IMAGES]]
    assert sizes == [(112, 48), (64, 64)]
    assert [one["content"] for one in told.messages] == ['[{"type": "image", "image": "a.png", "title": "A"}]']


def test_what_an_environment_says_is_plain_data() -> None:
    with hosting("Odd", params={"how": "half"}) as host:
        opening, first, *_ = asyncio.run(asked(host, *episode("a")))
    assert (opening.stop, first.stop) == (("</a>",), ("end",))  # one text is not its letters
    assert first.messages == ({"role": "user", "content": "a ?"},)
    assert type(first.messages[0]["role"]) is str
    with hosting("Odd", params={"how": "nan"}) as host, pytest.raises(EpisodeFailedError, match="the reward is nan"):
        asyncio.run(asked(host, *episode("a")))


def test_a_function_is_a_tool_without_an_environment() -> None:
    with hosting(None, tools=(f"{TOYS}:double",)) as host:
        found = asyncio.run(asked(host, *episode(CALL.format("double", '{"number": 21}'), "42")))
    assert found[1].messages == ({"role": "user", "content": "42"},)
    assert found[2].done


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "guess-nummer"}, "Unknown environment 'guess-nummer' \\(--env\\)"),
        ({"name": f"{TOYS}:Nobody"}, "the file has no class 'Nobody'"),
        ({"name": f"{TOYS}:double"}, "is not a class with a method `reset`"),
        ({"name": f"{TOYS}:Counting", "params": {"rounds": 3}}, "does not take these parameters .*'rounds'"),
        ({"tools": (f"{TOYS}:undescribed",)}, "Tool 'undescribed' has no schema: .*description"),
    ],
)
def test_what_is_wrong_with_an_environment_is_said_before_a_run(settings: dict[str, Any], message: str) -> None:
    def begin() -> None:
        with closing(EnvironmentHost(plan_environment(EnvironmentConfig(**settings)))) as host:
            host.start()
            asyncio.run(asked(host, ("schemas",)))

    with pytest.raises((InputError, EpisodeFailedError), match=message):
        begin()


def test_an_environment_s_own_words_describe_its_parameters() -> None:
    with pytest.raises(InputError, match="missing a required argument: 'head'") as caught:
        plan_environment(EnvironmentConfig(name="nemo-gym")).load()
    assert "`head` is the address of Gym's head server, and `listen` the HOST:PORT" in str(caught.value.hint)


def test_a_tool_has_the_variables_of_the_shell_where_the_cluster_lacks_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tools.py").write_text(
        'import os\ndef key() -> str:\n    """Return the key."""\n    return os.environ.get("JUDGE_KEY", "none")\n'
    )
    monkeypatch.setenv("JUDGE_KEY", "abc")
    plan = plan_environment(EnvironmentConfig(tools=(f"{tmp_path / 'tools.py'}:key",)))
    monkeypatch.delenv("JUDGE_KEY")
    with closing(EnvironmentHost(replace(plan, schemas=plan.load().schemas()))) as host:
        host.start()
        _, reply, _ = asyncio.run(asked(host, *episode(CALL.format("key", "{}"))))
    assert [one["content"] for one in reply.messages] == ["abc"]


@pytest.mark.parametrize("first", ["('more', None, False, False, {})", "{'observation': 'more', 'reward': None}"])
def test_a_step_may_have_no_reward(first: str, tmp_path: Path) -> None:
    """As SkyRL-gym's environments with one reward for the trajectory."""
    (tmp_path / "game.py").write_text(
        "class Game:\n    said = False\n    def reset(self, row): return 'Go.'\n    def step(self, text):\n"
        "        self.said, before = True, self.said\n"
        f"        return ('', 1.0, True, False, {{}}) if before else {first}\n"
    )
    plan = plan_environment(EnvironmentConfig(name=f"{tmp_path / 'game.py'}:Game"))
    with closing(EnvironmentHost(plan)) as host:
        host.start()
        _, middle, last, _ = asyncio.run(asked(host, *episode("a", "b")))
    assert [(one.reward, one.done) for one in (middle, last)] == [(0.0, False), (1.0, True)]
