"""Questions of reasoning-gym tasks are the same in every process."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from unittest import mock

import pytest

from rlctl.data import gym_questions
from rlctl.data.gym_questions import GymQuestions, gym_process
from rlctl.data.gym_tasks import build_task
from rlctl.data.prompt_rows import GymTask
from rlctl.data.prompts import open_prompts
from rlctl.settings.data import DataConfig

SHOWN = """
import json, sys
from rlctl.data.prompts import open_prompts
from rlctl.settings.data import DataConfig
source = open_prompts(DataConfig(name=f"reasoning-gym:{sys.argv[1]}", size=4), seed=3)
print(json.dumps([[source[i].prompt for i in range(4)], source.fingerprint()["contents"]]))
"""
LIBRARY = """
import json, sys, reasoning_gym
dataset = reasoning_gym.create_dataset(sys.argv[1], size=4, seed=3)
print(json.dumps([dataset[i]["question"] for i in range(4)]))
"""


def shown(program: str, task: str, hash_seed: str) -> list:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-W", "ignore", "-c", program, task]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, check=True, timeout=100).stdout)


@pytest.mark.guard
@pytest.mark.slow
def test_questions_do_not_depend_on_the_hash_seed_of_a_process() -> None:
    expected = shown(LIBRARY, "ransom_note", "0")
    assert expected != shown(LIBRARY, "ransom_note", "7")  # else this test shows nothing
    first, second = shown(SHOWN, "ransom_note", "7"), shown(SHOWN, "ransom_note", "random")
    assert first == second
    assert first[0] == expected


def test_the_identity_of_a_task_covers_its_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataConfig(name="reasoning-gym:chain_sum", size=4)
    then = open_prompts(data, seed=3).fingerprint()
    assert open_prompts(data, seed=3).fingerprint() == then
    changed = "rlctl.data.prompts.questions_of"  # as another version of a generator would
    monkeypatch.setattr(changed, lambda task, dataset: [{**dataset[i], "answer": "?"} for i in range(4)])
    now = open_prompts(data, seed=3).fingerprint()
    assert {key for key in now if now[key] != then[key]} == {"contents"}


def test_questions_go_on_after_the_end_of_their_process() -> None:
    task = GymTask("chain_sum", {"seed": 3, "size": 4})
    questions, dataset = GymQuestions(task, 4), build_task(task)
    assert [questions[i] for i in (2, 0, 2)] == [dataset[i] for i in (2, 0, 2)]
    process = gym_process().server.process
    assert process is not None
    process.kill()
    process.wait()  # as at the end of a Ray session, which ends the processes of the driver
    assert questions[3] == dataset[3]


def test_tasks_share_a_process_that_ends_with_the_last_of_them() -> None:
    tasks = [GymTask(name, {"seed": 3, "size": 4}) for name in ("chain_sum", "spell_backward")]
    with mock.patch.object(gym_questions, "_processes", weakref.WeakValueDictionary()):  # the tests keep another
        sources = [GymQuestions(task, 4) for task in tasks]
        assert [source[1] for source in sources] == [build_task(task)[1] for task in tasks]
        process = gym_process().server.process
    assert process is not None
    del sources[0]
    assert process.poll() is None
    sources.clear()
    gc.collect()
    assert process.poll() is not None
