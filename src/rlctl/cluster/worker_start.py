"""A program that a local session runs for each worker in place of Ray's `setup_worker.py`: it sets the worker's
variables and becomes the worker. Ray's program imports Ray before, which takes half a CPU second; it is still run for
what rlctl's workers never ask for (containers, other languages)."""

import json
import os
import re
import shlex
import sys

CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="


def become_worker(words: list[str]) -> None:
    """Replace this process by the worker. `words`, as Ray 2.60 gives them: the worker's file and arguments, its
    language, and JSON with its environment variables and its Python."""
    context = json.loads(next((word.removeprefix(CONTEXT) for word in words if word.startswith(CONTEXT)), "{}"))
    variables, python = context.pop("env_vars", None) or {}, context.pop("py_executable", None) or sys.executable
    if any(context.values()) or f"{LANGUAGE}PYTHON" not in words:
        ray_folder = os.path.dirname(words[0])  # of `default_worker.py`
        os.execv(sys.executable, [sys.executable, os.path.join(ray_folder, "setup_worker.py"), *words])
    for name, value in variables.items():
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    command = [*shlex.split(python), *(word for word in words if not word.startswith((CONTEXT, LANGUAGE)))]
    os.execvp(command[0], command)


if __name__ == "__main__":
    become_worker(sys.argv[1:])
