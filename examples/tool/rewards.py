"""A tool: the program that a completion writes is run, and the reward looks at what it prints.

A program runs in a process of its own, in an empty folder, without the environment of the run, and with limits of
time, memory and output. This keeps mistakes of a model away from the run. It is not a protection against a program that
wants to do harm: run untrusted models in a container.
"""

import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

PROGRAM = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)
AT_ONCE, SECONDS = 4, 2
LIMITED = f"""
import resource, sys
for limit, most in ((resource.RLIMIT_CPU, {SECONDS}), (resource.RLIMIT_AS, 1 << 30), (resource.RLIMIT_FSIZE, 1 << 16)):
    resource.setrlimit(limit, (most, most))
exec(compile(sys.stdin.read(), "program", "exec"), {{"__name__": "__main__"}})
"""


def printed(program: str) -> str | None:
    """Return what a Python program prints; None where it fails or goes beyond its limits."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", LIMITED],
                input=program.encode(errors="replace"), stdout=output, stderr=subprocess.DEVNULL,
                cwd=folder, env={}, timeout=5 * SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return None
        output.seek(0)
        return None if done.returncode else output.read().decode(errors="replace")


def reward(completion: str, answer: str) -> float:
    """Return 1 where the last program prints the answer at the end, 0.1 where it runs at all, and 0 otherwise."""
    programs = PROGRAM.findall(completion)
    output = printed(programs[-1]) if programs else None
    if output is None:
        return 0.0
    return 1.0 if output.split()[-1:] == [answer] else 0.1


def solved(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """Return the reward of each completion of a step; a few programs run at once."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(reward, completions, answer))
