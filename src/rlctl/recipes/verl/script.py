"""Shell scripts that start verl, read for the trainer's command line. Bash reads them as a restricted shell without
programs: variables, arrays and conditions work, nothing else runs, and no file is written."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rlctl.config.files import read_text
from rlctl.errors import ConfigError, first_line

LIMIT_S = 20
HINT = "Name a script with `python3 -m verl.trainer.main_ppo`, or a YAML file of verl's."
TRAINERS = re.compile(r"(?:^|[./])(main_(?:ppo|dapo)\w*|fully_async_main|fsdp_sft_trainer|sft_trainer\w*)(?:\.py)?$")
"""Training modules in a command line: verl's and its recipes'."""
INTO_FILES = re.compile(r"(?m)\s(?:[12]?>>?|&>>?)\s*[^\s&|;()<>]+(?=(?:\s+2>&1)?\s*[|&]?\s*\\?$)")
"""Output that goes into a file at the end of a line."""
INTO_NOTHING = re.compile(r"(?:[12]?>>?|&>)\s*/dev/null")
PRELUDE = r"""
command_not_found_handle() {
    case "$*" in
        *main_ppo*|*main_dapo*|*fully_async_main*|*sft_trainer*) printf '%s\0' "$@" >&3; printf '\n\0' >&3;;
    esac
    case "$*" in *" -c "*) return 1;; esac
    while builtin read -r _; do :; done
    return 0
}
source() { :; }; cd() { :; }; kill() { :; }; wait() { :; }; ulimit() { :; }; set() { :; }; exit() { :; }
exec() { "$@"; }
"""
"""Bash calls the first function for every command, because no program exists. Import checks (`python -c`) fail."""


@dataclass(frozen=True)
class CommandLine:
    """How a script starts a trainer."""

    module: str
    arguments: tuple[str, ...]
    """Arguments after the module: overrides and Hydra options."""

    @property
    def overrides(self) -> list[str]:
        return [text for text in self.arguments if re.match(r"[+~]*[A-Za-z_][\w./@-]*(=|$)", text)]

    def option(self, *names: str) -> str | None:
        """Return the value of an option, such as `--config-name=NAME` or `--config-name NAME`."""
        for index, text in enumerate(self.arguments):
            name, equals, value = text.partition("=")
            if name in names:
                return value if equals else next(iter(self.arguments[index + 1 : index + 2]), None)
        return None


def names_trainer(text: str) -> bool:
    """Return whether a script names a module of verl's that trains."""
    return re.search(r"\bverl\.\w+|\bmain_(?:ppo|dapo)", text) is not None


def command_line(path: Path) -> CommandLine:
    """Return the command line that a script starts a trainer with. Raises ConfigError if it starts none."""
    text = INTO_FILES.sub("", INTO_NOTHING.sub("", read_text(path, "script")))
    environment = os.environ | {"PATH": "/nowhere", "BASH_ENV": ""}
    with tempfile.TemporaryFile() as calls:
        try:
            done = subprocess.run(
                [
                    "/bin/bash",
                    "--noprofile",
                    "--norc",
                    "-c",
                    f"exec 3>&{calls.fileno()}\n{PRELUDE}\nbuiltin set -r\n{text}",
                    path,
                ],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                pass_fds=[calls.fileno()],
                env=environment,
                timeout=LIMIT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"{path} cannot be read by bash: {first_line(error)}.", HINT) from error
        calls.seek(0)
        called = [call.split("\0")[:-1] for call in calls.read().decode(errors="replace").split("\n\0")]
    for call in called:
        for index, word in enumerate(call):
            if search := TRAINERS.search(word):
                return CommandLine(search[1], tuple(call[index + 1 :]))
    lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line and not line.startswith("+")]
    suffix = f": {lines[-1]}" if lines else ""
    raise ConfigError(f"{path} starts no trainer of verl{suffix}.", HINT)
