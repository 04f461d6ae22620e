"""Workers of the tests' Ray session are forked from two servers that have imported the engines once.

Importing vLLM takes ten seconds of a core, and every run of a command in the tests' process starts an engine. What a
worker imports by itself is held by the runs of the installed command, which start all processes anew. A process with a
session of its own may have its workers from these servers too (`with_servers`).
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest

from rlctl.cluster import ray_session

STUB = Path(__file__).with_name("forked_stub.py")
TESTS = Path(__file__).parents[1]
SOCKETS = "FORKED_WORKERS"
"""Variable with the sockets of the servers."""
PLAIN_JOB = ray_session._job
T = TypeVar("T")


@contextlib.contextmanager
def forked_workers(directory: Path) -> Iterator[None]:
    """Have the session of Ray that starts within the block fork its workers. Its end is that of the servers too."""
    from rlctl.backends.vllm.args import engine_env

    sockets = [directory / "engines", directory / "others"]
    os.environ[SOCKETS] = os.pathsep.join(map(str, sockets))

    def job() -> Any:
        """Called with the variables of Ray's own processes."""
        path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
        for place, more in zip(sockets, (engine_env("cpu", 1), {}), strict=True):
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(str(place))
                listening.listen(64)
                number = listening.fileno()
                command = [sys.executable, "-P", "-m", "support.forked_workers", place.name, str(number)]
                subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path} | more, pass_fds=[number])
        return job_of_stubs()

    patience = mock.patch.dict(os.environ, RAY_worker_register_timeout_seconds="300")  # the servers import first
    with mock.patch.object(ray_session, "_job", job), patience:
        yield


def job_of_stubs() -> Any:
    """The job of a session whose workers come from the servers."""
    job = PLAIN_JOB()
    sockets = os.environ[SOCKETS].split(os.pathsep)
    job.set_runtime_env({"py_executable": " ".join([sys.executable, "-S", "-E", str(STUB), *sockets])})
    return job


def with_servers(function: Callable[[], T]) -> T:
    """Call the function in a process whose sessions have their workers from the servers of the tests."""
    with mock.patch.object(ray_session, "_job", job_of_stubs):
        return function()


@contextlib.contextmanager
def started_anew(test: pytest.Item) -> Iterator[None]:
    """In a test marked gpu, start workers without the servers: those have asked for CUDA, and a process that is forked
    from one that did cannot use it."""
    from rlctl.cluster.workers import WorkerSpec

    plain = WorkerSpec.environment
    with contextlib.ExitStack() as stack:
        if test.get_closest_marker("gpu"):
            anew = mock.patch.object(WorkerSpec, "environment", lambda spec: plain(spec) | {"STARTED_ANEW": "1"})
            stack.enter_context(anew)
        yield


def serve(listening: socket.socket, engines: bool) -> None:
    """Fork a process for each stub that asks; returns in that process, when it has been the worker."""
    loaded = False
    while True:
        stub, _ = listening.accept()
        files = array.array("i")
        message, ancillary, *_ = stub.recvmsg(1 << 20, socket.CMSG_SPACE(3 * files.itemsize))
        files.frombytes(ancillary[0][2])
        wanted = json.loads(message)
        if not loaded:  # what all workers of the session are told is read by Ray when it is imported
            os.environ.update({name: value for name, value in wanted["environment"].items() if name.startswith("RAY_")})
            loaded = load(engines)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what has ended
        if os.fork() == 0:
            listening.close()
            return become(wanted, files)
        for file in files:
            os.close(file)
        stub.close()


def load(engines: bool) -> bool:
    if engines:
        import vllm.model_executor.models.llama  # noqa: F401
        from vllm import LLM  # noqa: F401

        import rlctl.backends.vllm.engine
        import rlctl.backends.vllm.weights.transfer  # noqa: F401
    else:
        import support.forked  # noqa: F401
    from rlctl.vector_math import warm_up

    warm_up()
    gc.collect()
    gc.freeze()
    return True


def become(wanted: dict[str, Any], files: array.array[int]) -> None:
    """Be what the stub was to be, with its arguments, variables, directory and files. The stub ends with this process,
    in which the connection to it stays open."""
    os.setpgid(0, 0)  # Ray kills the group of a worker that has ended
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for target, own in enumerate(files):
        os.dup2(own, target)
        os.close(own)
    os.chdir(wanted["directory"])
    os.environ.clear()
    os.environ.update(wanted["environment"])
    sys.argv = wanted["arguments"]
    sys.path[:0] = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one and one not in sys.path]
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[2])), engines=sys.argv[1] == "engines")
