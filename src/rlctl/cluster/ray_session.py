"""A Ray session: start Ray on this machine or join a running cluster, and take down what was started."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from typing import Any

import psutil

from rlctl.errors import MachineError

# Object store for rollouts and small tensors; weights travel through shared memory of their own.
OBJECT_STORE_BYTES = 512 << 20
CONNECT_TIMEOUT_S = 10.0
START_ATTEMPTS = 3


@contextlib.contextmanager
def ray_session(address: str | None = None, *, gpus: int | None = None, namespace: str = "rlctl") -> Iterator[None]:
    """Connect to Ray for the duration of the block.

    `address` None starts Ray on this machine and stops it at the end, with all its workers; otherwise the cluster
    at `address` is joined and left running. `gpus` limits the GPUs offered by a session started here (0: none).

    Raises MachineError when Ray cannot be started or the address does not answer.
    """
    import ray

    if ray.is_initialized():
        # A caller (a test, a notebook) brought its own session: use it and leave it alone.
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # every failure is in the result that is waited for
    # We choose devices ourselves: two engines share each GPU, which Ray's own masking cannot express.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)  # its notices at start-up are not the user's to act on
    children_before = {child.pid for child in psutil.Process().children(recursive=True)}
    try:
        if address is None:
            _start(gpus, namespace)
        else:
            _require_answer(address)
            ray.init(
                address=address,
                job_config=_job(),
                log_to_driver=False,
                logging_level=logging.ERROR,
                namespace=namespace,
            )
    except (ConnectionError, OSError, RuntimeError, ValueError, TimeoutError) as error:
        if address is None:
            raise MachineError(
                f"Ray on {socket.gethostname()} did not start: {error}.", "Run `rlctl doctor` to see why."
            ) from error
        raise MachineError(f"--ray-address {address} did not answer: {error}.", _joining_hint()) from error
    _keep_stdout_clean()
    try:
        yield
    finally:
        ray.shutdown()
        if address is None:
            _end_children(children_before)


def _job() -> Any:
    """Return a job whose workers do not import from the working directory of this process.

    Ray puts it in front of their `sys.path`, except for jobs that its own client has submitted.
    """
    from ray.job_config import JobConfig

    return JobConfig(_client_job=True)


def _keep_stdout_clean() -> None:
    """Ray prints what its raylets report of dead workers to stdout, which belongs to results, whatever `log_to_driver`
    says. The death is in the result that is waited for, and there it is told."""
    from ray._private import worker

    worker._worker_logs_enabled = False


def _joining_hint() -> str:
    """Advise on a cluster that does not let us in. Ray sends its token to a named address only when told to."""
    if "RAY_AUTH_MODE" in os.environ:
        return "`ray status --address` shows whether it runs; the token must be the one of its head node."
    return "`ray status --address` shows whether it runs. If it asks for a token, set RAY_AUTH_MODE=token."


def _start(gpus: int | None, namespace: str) -> None:
    """Start Ray on this machine; again where a busy machine was too slow for the half minute that Ray waits."""
    import ray

    for attempt in range(START_ATTEMPTS):
        try:
            ray.init(
                address="local",
                job_config=_job(),
                num_gpus=gpus,
                # Workers are placed by bundles, a core each; a small machine holds more workers than it has cores.
                num_cpus=max(16, 4 * (os.cpu_count() or 1)),
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
                object_store_memory=_object_store_bytes(),
                namespace=namespace,
                # Ray would start an idle process for each CPU slot, on a machine that has work for every core.
                _system_config={"prestart_worker_first_driver": False},
            )
            return
        except Exception as error:  # Ray gives the timeout no class of its own; others are raised again
            if "timed out during startup" not in str(error):
                raise
            ray.shutdown()
            if attempt + 1 == START_ATTEMPTS:
                raise TimeoutError(f"{error} (tried {START_ATTEMPTS} times)") from error


def _require_answer(address: str) -> None:
    """Connect once: Ray itself tries a wrong address for minutes. Raises OSError or ValueError."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon:  # else `auto`, which Ray resolves
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()


def _object_store_bytes() -> int:
    """As much of shared memory as rollouts need, and never more than a third of what is free."""
    free = psutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else OBJECT_STORE_BYTES
    return max(78_643_200, min(OBJECT_STORE_BYTES, free // 3))  # Ray refuses less than 75 MiB


def _end_children(before: set[int]) -> None:
    """End what the session started and Ray's own shutdown left behind."""
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()
    _, alive = psutil.wait_procs(left, timeout=5)
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
