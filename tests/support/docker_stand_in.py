"""A stand-in of the client of Docker 28. It records its arguments, and runs commands as plain processes, with the
container's paths /app, /tests and /logs in a folder. It shows the commands that Docker gets, not what it does."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(os.environ["DOCKER_STAND_IN"])
PATHS = ("/app", "/tests", "/logs")
VALUES = {
    "--name", "--label", "--memory", "--memory-swap", "--pids-limit", "--network", "--cpus", "--entrypoint", "--env",
    "--user", "--workdir", "--tag", "--format",
}  # fmt: skip
"""Options that take a value."""


def inside(text: str, container: Path) -> str:
    for path in PATHS:
        text = text.replace(path, f"{container}{path}")
    return text


def parsed(words: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the options before the first other word, and the rest."""
    options: dict[str, list[str]] = {}
    while words and words[0].startswith("--"):
        name = words.pop(0)
        options.setdefault(name, []).append(words.pop(0) if name in VALUES else "")
    return options, words


def main(command: str, *words: str) -> int:
    with (ROOT / "commands.jsonl").open("a") as file:
        file.write(json.dumps([command, *words]) + "\n")
    options, rest = parsed(list(words))
    if command == "info":
        print("{}")
    elif command == "image":
        return int(not (ROOT / "images" / rest[-1]).exists())
    elif command == "build":
        (ROOT / "images").mkdir(exist_ok=True)
        (ROOT / "images" / options["--tag"][0]).write_text(rest[0])
    elif command == "run":
        image = ROOT / "images" / rest[0]
        if not image.exists():
            sys.exit(f"Unable to find image '{rest[0]}' locally")
        container = ROOT / "containers" / options["--name"][0]
        shutil.copytree(image.read_text(), container / "app")
        for line in sys.stdin.buffer:  # `cat`
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
        shutil.rmtree(container)
    elif command == "exec":
        container = ROOT / "containers" / rest[0]
        given: dict[str, str] = {}
        for variable in options.get("--env", ()):
            name, equals, value = variable.partition("=")
            given[name] = value if equals else os.environ[name]
        os.chdir(container / "app")
        inner = [inside(word, container) for word in rest[1:]]
        variables = {name: inside(value, container) for name, value in given.items()}
        os.execvpe(inner[0], inner, {"PATH": os.environ["PATH"], **variables})
    elif command == "cp":
        source, (name, target) = Path(rest[0]), rest[1].split(":")
        container = ROOT / "containers" / name
        for path in [source] if source.is_file() else source.iterdir():
            copy = Path(f"{container}{target}", path.name)
            copy.write_text(inside(path.read_text(), container))
            copy.chmod(path.stat().st_mode)
    elif command == "container":
        print(4096)
    return 0


sys.exit(main(*sys.argv[1:]))
