"""Programs that models write: each layer stops what it is for, and an honest program works behind all."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlctl.doctor.host import check_sandbox
from rlctl.environments.builtin.python import Python, alike
from rlctl.environments.environment_plan import plan_environment
from rlctl.environments.interface import Step
from rlctl.errors import InputError
from rlctl.processes.sandbox import LAYERS, Limits, layers, run
from rlctl.settings.rewards import EnvironmentConfig

LIMITS = Limits(seconds=20.0, memory_mib=256)
ATTACKS = [
    ("limits", "x = bytearray(1 << 30)"),
    ("limits", "for _ in range(4): print('x' * (1 << 20), flush=True)"),
    ("limits", "import os; os.environ['SECRET_OF_RLCTL']"),
    ("limits", "[open('/dev/null') for _ in range(100)]"),
    ("user", "open({of_root!r}, 'w')"),
    ("namespaces", "import socket; socket.create_connection(('127.0.0.1', {port}), 5)"),
    ("namespaces", "import os; os.kill({pid}, 0)"),
    ("namespaces", "open('/proc/{pid}/status').read()"),
    ("landlock", "open({outside!r}, 'w')"),
    ("landlock", "open({secret!r}).read()"),
    ("landlock", "import os; os.truncate({secret!r}, 0)"),
    ("seccomp", "import socket; socket.socket(socket.AF_UNIX)"),
]
FORKS = """
import os, time
n = 0
for _ in range(400):
    try:
        process = os.fork()
    except OSError:
        break
    if not process:
        time.sleep(30)
    n += 1
print(n)
"""


def group_of(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid) if process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, ProcessLookupError):
        return None


@pytest.mark.parametrize(("layer", "attack"), ATTACKS)
def test_each_layer_stops_what_it_is_for(
    layer: str, attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if layer not in layers():
        pytest.skip(f"the machine lacks {layer}")
    monkeypatch.setenv("SECRET_OF_RLCTL", "hidden")
    (secret := tmp_path / "secret").write_text("hidden")
    for place in (tmp_path, *tmp_path.parents[:2]):
        place.chmod(0o777)  # so that it is not the user alone that is refused
    secret.chmod(0o666)
    with socket.create_server(("127.0.0.1", 0)) as server:
        values = {"port": server.getsockname()[1], "pid": os.getpid(), "outside": str(tmp_path / "outside")}
        of_root = f"{Path(__file__).with_suffix('.none')}"
        program = attack.format(**values, secret=str(secret), of_root=of_root) + "\nprint('BROKE')"
        if layer != "limits":
            assert "BROKE" in run(program, limits=LIMITS, behind=("limits",)).output
        outcome = run(program, limits=LIMITS, behind=tuple(dict.fromkeys(("limits", layer))))
    assert outcome.code
    assert "BROKE" not in outcome.output
    assert len(outcome.output) <= 1 << 20


def test_processes_are_limited() -> None:
    if os.geteuid() == 0 and not {"user", "namespaces"} & set(layers()):
        pytest.skip("root may start as many as it likes")
    assert int(run(FORKS, limits=LIMITS).output) < 310


def test_an_endless_program_is_ended_with_all_that_it_started() -> None:
    program = "import os\nprint(os.getpgid(0), flush=True)\nos.fork()\nwhile True: pass"
    outcome = run(program, limits=Limits(seconds=2.0), behind=("limits",))
    assert outcome.code is None
    group = int(outcome.output)
    for _ in range(100):
        running = [one for one in psutil.process_iter() if group_of(one) == group]
        if not running:
            break
        time.sleep(0.05)  # they are killed, and may need a moment to go
    assert not running


def test_an_honest_program_works_behind_all_layers() -> None:
    program = (
        "import json, numpy\nopen('own', 'w').write('1')\nprint(open('own').read() + input(), numpy.ones(2).sum())"
    )
    outcome = run(program, "23", LIMITS)
    assert (outcome.output, outcome.code) == ("123 2.0\n", 0), outcome.errors


def test_doctor_and_a_run_name_the_layers() -> None:
    assert ", ".join(layers()) in check_sandbox().detail
    assert check_sandbox(LAYERS).status == "ok"
    assert (
        plan_environment(EnvironmentConfig(name="python")).load().note == f"programs run behind: {', '.join(layers())}"
    )
    found = check_sandbox(("limits", "landlock"))
    assert found.status == "warn"
    assert "namespaces, seccomp" in found.detail


# The environment


def steps(row: dict[str, Any], *programs: str, **params: Any) -> list[Step]:
    environment = Python(**params)
    assert environment.reset({"prompt": "Write it.", **row}, 0) == []
    return [environment.step({"role": "assistant", "content": f"So:\n```python\n{one}\n```\n"}) for one in programs]


TESTS = {"tests": ["assert double(1) == 2", "assert double(3) == 6"]}
RIGHT, HALF_RIGHT = "def double(x):\n    return 2 * x", "def double(x):\n    return x + 1"


def test_the_reward_is_the_share_of_passing_tests() -> None:
    assert [(one.reward, one.done) for one in steps(TESTS, RIGHT, attempts=3)] == [(1.0, True)]
    assert [one.reward for one in steps(TESTS, HALF_RIGHT)] == [0.5]
    assert [one.reward for one in steps(TESTS, HALF_RIGHT, all_or_nothing=True)] == [0.0]


def test_a_failure_is_told_and_the_last_program_counts() -> None:
    first, second = steps(TESTS, HALF_RIGHT, RIGHT, attempts=2)
    assert first.messages == "assert double(3) == 6\nAssertionError\n\nCorrect the program."
    assert (first.reward + second.reward, first.done, second.done) == (1.0, False, True)
    worse = steps(TESTS, HALF_RIGHT, "x = 1", attempts=2)
    assert sum(one.reward for one in worse) == 0.0


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("raise SystemExit(0)", "The program ended before this test."),
        ("def double(x):\n    import os; os._exit(3)", "The program failed: exit code 3"),
        ("double = (", "The program failed: SyntaxError: '(' was never closed"),
        ("import os; os._exit(0)", "The program ended before this test."),
        ("x = [0] * (1 << 30)", "The program failed: MemoryError"),
    ],
)
def test_a_hostile_program_passes_nothing(program: str, told: str) -> None:
    (found,) = steps(TESTS, program, attempts=2, seconds=10.0)
    assert found.reward == 0.0
    assert told in found.messages[:200]


MAIN = "if __name__ == '__main__':\n    "


@pytest.mark.parametrize(
    "rest",
    [
        f"{MAIN}print(double(*map(int, input().split())))",
        f"import sys\n{MAIN}sys.exit(print(double(2)))",
        f"{MAIN}while True: input()",
        "import unittest\nif '__main__' == __name__: unittest.main()",
        f"{MAIN}raise ValueError",
        "print(double(2))\nexit()",
        "quit(0)",
        "print(double(int(input())))",
        "import pickle\nclass A: pass\npickle.dumps(A())",
    ],
)
def test_the_main_block_of_a_tested_function_does_not_matter(rest: str) -> None:
    """HumanEval's harness and unit tests import the program; so does this test."""
    scope: dict[str, Any] = {"__name__": "candidate"}
    exec(RIGHT, scope)
    assert scope["double"](3) == 6
    assert [one.reward for one in steps(TESTS, f"{RIGHT}\n{rest}", seconds=20.0)] == [1.0]


@pytest.mark.parametrize(
    "rest",
    [
        "print(2 * int(input()))\nexit()",
        "print(2 * int(input()))\nquit()",
        "print(2 * int(open(0).read()))",
        "print(2 * int(open('/dev/stdin').read()))",
        "import os\nassert os.path.basename(__file__) == 'program.py'\nprint(2 * int(input()))",
        "def main():\n    print(2 * int(input()))\nif __name__ == '__main__':\n    main()\n    exit(0)",
    ],
)
def test_a_program_runs_as_python_runs_it(rest: str, tmp_path: Path) -> None:
    (path := tmp_path / "program.py").write_text(rest)
    alone = subprocess.run([sys.executable, path], input="4\n", capture_output=True, text=True, check=True)
    assert alone.stdout == "8\n"
    assert [one.reward for one in steps({"inputs": ["4\n"], "outputs": ["8"]}, rest, seconds=20.0)] == [1.0]


@pytest.mark.parametrize(
    "text",
    [
        f"```python3\n{RIGHT}\n```\nDone.",
        f"```python\n{RIGHT}\n```\nIt prints:\n```\n2\n```\n",
        f"```text\ndouble(1)\n```\nSo:\n```\n{RIGHT}\n```\n",
        f"```Python\n{HALF_RIGHT}\n```\nNo:\n```py\n{RIGHT}\n```\n```bash\npython program.py\n```",
    ],
)
def test_the_program_is_the_last_block_of_python(text: str) -> None:
    environment = Python()
    environment.reset({"prompt": "Write it.", **TESTS}, 0)
    assert environment.step({"role": "assistant", "content": text}).reward == 1.0


@pytest.mark.parametrize(
    ("output", "wanted", "right"),
    [
        ("0.333333", "0.333333333333", True),
        ("0.50\n", "0.5", True),
        ("3.0", "3", True),
        ("3.0000001", "3", False),
        ("1000000", "1000001", False),
        ("0.3334", "0.333333333333", False),
        ("1e-7", "0.0000001", True),
        ("YES 2.0000001\n3", "YES 2.0\n3", True),
        ("1 2", "12", False),
        ("1\n2", "1 2", False),
        ("nan", "nan", True),
        ("inf", "1e999", False),
    ],
)
def test_numbers_of_an_output_count_by_value(output: str, wanted: str, right: bool) -> None:
    """Codeforces and NeMo Gym accept an absolute or relative error of 1e-6; whole numbers are exact."""
    assert alike(output, wanted) == right


def test_rows_may_have_numbers_and_lists_of_lines() -> None:
    row = {"inputs": [["1", "2"], "3\n4"], "outputs": [3, ["7"]]}
    assert [one.reward for one in steps(row, "print(int(input()) + int(input()))", seconds=20.0)] == [1.0]
    with pytest.raises(InputError, match="None among its tests, inputs or outputs"):
        steps({"inputs": ["1"], "outputs": [None]}, "")


def test_long_numbers_are_printed() -> None:
    row = {"inputs": ["5000"], "outputs": ["1" + "0" * 5000]}
    assert [one.reward for one in steps(row, "print(10 ** int(input()))", seconds=20.0)] == [1.0]


@pytest.mark.slow
@pytest.mark.guard
def test_a_program_that_waits_for_a_processor_gets_its_seconds() -> None:
    program = "import os, time\nwhile time.process_time() < 0.7: pass\nprint('done')"
    core = min(os.sched_getaffinity(0))
    pinned = f"import os\nos.sched_setaffinity(0, {{{core}}})\n"
    # Each in a session of its own: Linux shares a processor fairly between sessions (autogroups).
    loop = [sys.executable, "-c", f"{pinned}while True: pass"]
    busy = [subprocess.Popen(loop, start_new_session=True) for _ in range(3)]
    try:
        outcome = run(pinned + program, limits=Limits(seconds=2.0, memory_mib=256))
    finally:
        for one in busy:
            one.kill()
            one.wait()
    assert (outcome.code, outcome.output) == (0, "done\n")
    assert run("import time\ntime.sleep(60)", limits=Limits(seconds=1.0)).code is None


def test_outputs_are_compared_for_each_input() -> None:
    row = {"inputs": ["2\n", "5\n"], "outputs": ["4", "11"]}
    (found,) = steps(row, "print(2 * int(input()), ' ')", attempts=2)
    assert found.reward == 0.5
    assert found.messages == "Input:\n5\n\nOutput:\n10  \n\nExpected:\n11\n\nCorrect the program."


def test_a_message_without_a_program_and_a_row_without_tests() -> None:
    environment = Python(attempts=2)
    environment.reset({"prompt": "", **TESTS}, 0)
    assert "The message has no program." in environment.step({"role": "assistant", "content": "no"}).messages
    with pytest.raises(InputError, match="either `tests`"):
        environment.reset({"prompt": "x", "inputs": ["1"]}, 0)


def test_a_program_that_takes_too_long_is_ended() -> None:
    (found,) = steps(TESTS, "while True: pass", attempts=2, seconds=2.0)
    assert found.messages == "assert double(1) == 2\nThe program took longer than 2 s.\n\nCorrect the program."
