"""A hub that cannot be reached is asked once, for a bounded time, and the rest of the run is offline."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PROGRAM = """
import sys
from rlctl.checkpoints.model_files import resolve_model, tokenizer_directory
from rlctl.data.prompts import open_prompts
from rlctl.errors import AbsentError
from rlctl.settings.data import DataConfig
from rlctl.telemetry import terminal

terminal.be_quiet(sys.argv[1] == "quiet")
asked = [
    lambda: resolve_model("someone/model", weights=False, tell=print),
    lambda: tokenizer_directory("someone/tokenizer"),
    lambda: open_prompts(DataConfig(name="someone/data")),
    lambda: open_prompts(DataConfig(name="someone/data:part", split="test")),
    lambda: resolve_model("someone/model", tell=print),
]
for one in asked:
    try:
        one()
    except AbsentError as error:
        print(error.message)
"""


@contextmanager
def listening(answer: bytes) -> Iterator[tuple[str, list[socket.socket]]]:
    """Serve an address that answers each connection with `answer`; empty: never, as behind a firewall that drops
    packets. Yields the address and the connections."""
    accepted: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                accepted.append(server.accept()[0])
            except OSError:
                return
            if answer:
                accepted[-1].recv(65536)
                accepted[-1].sendall(answer)
                accepted[-1].close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", accepted


def asked(endpoint: str, place: Path, verbosity: str = "") -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    environment = known | {"HF_ENDPOINT": endpoint, "HF_HOME": str(place)}
    command = [sys.executable, "-c", PROGRAM, verbosity]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    assert all("the hub cannot be reached" in line for line in lines)
    return done


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(b"", "it did not answer within 5 s"), (b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", "status 503")],
    ids=["silent", "unavailable"],
)
def test_a_hub_out_of_reach_is_asked_once_for_models_tokenizers_and_data(
    answer: bytes, reason: str, tmp_path: Path
) -> None:
    """huggingface_hub itself retries each request five times and prints a line each time."""
    with listening(answer) as (endpoint, connections):
        done = asked(endpoint, tmp_path)
    assert len(connections) == 1
    [said] = done.stderr.splitlines()
    assert said.startswith(f"The Hugging Face hub ({endpoint}) cannot be reached: ")
    assert reason in said


def test_nothing_is_said_of_a_hub_whose_name_is_unknown_where_quiet(tmp_path: Path) -> None:
    assert asked("http://hub.invalid", tmp_path, "quiet").stderr == ""
