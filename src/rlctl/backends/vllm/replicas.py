"""One replica of an engine, or several with shared experts: vLLM's data parallelism from one process.

Replicas exchange tokens in every forward pass, so all compute every step; idle ones run a dummy pass. The engine's
process holds the first replica and deals requests; others are workers, possibly on other nodes, that return new tokens.
A replica can span hosts: its process schedules, and a worker on each other host starts that host's ranks.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal, NamedTuple

from rlctl.backends.base import EngineSpec
from rlctl.backends.vllm import compat
from rlctl.backends.vllm.recorded_experts import recorded_shape
from rlctl.checkpoints.hf.tokenizer_files import take_files_as_they_are
from rlctl.cluster.placement import node_address
from rlctl.cluster.session_files import family_shared_memory, note_shared_memory
from rlctl.cluster.workers import PendingCall, WorkerGroup, WorkerPlaces, WorkerSpec, first_done
from rlctl.errors import ConfigError, MachineError, RlctlError, WorkerError

PORTS, PORT_ATTEMPTS = 5, 100
"""vLLM takes up to four for its replicas, and the last is where the ranks of several hosts meet."""
FIRST_PORT, PORT_COUNT = 20_000, 12_000
"""Ports between Ray's and Linux's ephemeral range: vLLM listens seconds after the check, and a taken port would hang
the replicas."""
STEPS_A_CALL = 4
"""Steps that the replicas take between two messages of the first to the others."""
Asked = tuple[str, Any, Any]
"""A request: its name, its prompt and vLLM's parameters of sampling."""


LOST_S = 15.0
"""Time within which a lost host is detected after its first consequence."""
LOOK_S = 1.0


class Meeting(NamedTuple):
    """Where the processes of an engine find each other."""

    replicas: int
    hosts: int
    """Hosts of each replica."""
    address: str
    port: int

    @contextlib.contextmanager
    def joined(self, replica: int) -> Iterator[None]:
        """Let processes of vLLM that start in the block belong to that replica."""
        if self.replicas > 1:
            compat.join_replicas(replica, self.replicas, self.address, self.port)
        try:
            yield
        finally:
            if self.replicas > 1:
                compat.leave_replicas()

    def arguments(self, engine_arguments: dict[str, Any], host: int) -> dict[str, Any]:
        if self.hosts == 1:
            return engine_arguments
        return compat.over_hosts(engine_arguments, host, self.hosts, self.address, self.port + PORTS - 1, self.replicas)


ALONE = Meeting(1, 1, "", 0)
"""The engine has one process."""


class NewTokens(NamedTuple):
    """The tokens that a step has added to one sample."""

    name: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str | None
    """None: it is not finished."""
    stop_reason: str | int | None
    """The stop text or token that ended it; None: the model's end token, or a limit."""
    routed_experts: Any


class Replica:
    """vLLM's engine in this process, with version-independent names."""

    def __init__(self, spec: EngineSpec, rank: int = 0, meeting: Meeting = ALONE) -> None:
        """Load the model. Raises ConfigError or MachineError if vLLM refuses."""
        from vllm import LLM

        gc.freeze()  # vLLM collects garbage twice while it loads, and would look through all that was imported
        _look_for_ports_elsewhere()
        compat.skip_chat_warm_up()
        take_files_as_they_are()
        try:
            with meeting.joined(rank), compat.memory_to_itself():
                self._llm = LLM(**meeting.arguments(spec.arguments, host=0))
        except ValueError as error:
            raise ConfigError(f"vLLM refuses this engine: {error}.", "Adjust the generation section.") from error
        self._shared_memory = family_shared_memory()
        note_shared_memory(self._shared_memory)
        engine = self._llm.llm_engine
        if engine.vllm_config.model_config.hf_config.model_type == "gemma3":
            compat.join_lines_at_images_alone()
        self._engine, self._together = engine, compat.StepTogether(engine) if meeting.replicas > 1 else None
        self.enter = compat.stream_of_engine(engine)
        """To be called in a thread before it uses the engine."""
        self.add_request, self.abort_request = engine.add_request, engine.abort_request
        self.collective_rpc = engine.collective_rpc
        self.wake_up = engine.wake_up

    @property
    def max_length(self) -> int:
        return self._engine.vllm_config.model_config.max_model_len

    @property
    def recorded_shape(self) -> tuple[int, int]:
        """(layers, experts a token) of the record of chosen experts."""
        return recorded_shape(self._engine.vllm_config.model_config)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._engine.get_tokenizer().decode(list(tokens), skip_special_tokens=False))

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Drop the prefix cache, including connectors, which know tokens but not weights, and image embeddings."""
        elsewhere = self._engine.vllm_config.kv_transfer_config is not None
        done = self._engine.reset_prefix_cache(reset_running_requests=reset_running_requests, reset_connector=elsewhere)
        if done and self._engine.vllm_config.model_config.is_multimodal_model:
            self._engine.reset_encoder_cache()
        return done

    def step(self) -> list[Any]:
        return self._engine.step() if self._together is None else self._together.step()

    def sleep(self, level: int, mode: Literal["abort", "wait", "keep"]) -> None:
        with compat.memory_to_itself():
            self._engine.sleep(level=level, mode=mode)

    def pause(self) -> list[Any]:
        return compat.pause(self._engine)

    def resume(self) -> None:
        compat.resume(self._engine)

    def asleep(self) -> frozenset[str]:
        return compat.asleep(self._engine)

    def give_up(self) -> None:
        compat.give_up(self._engine)

    def shut_down(self) -> None:
        compat.shut_down(self._llm)
        for path in self._shared_memory:  # vLLM's ranks leave theirs
            path.unlink(missing_ok=True)


def _look_for_ports_elsewhere() -> None:
    """Up to 0.27 vLLM looks for a free port long before it listens, so engines that start together look elsewhere."""
    os.environ.setdefault("VLLM_PORT", str(FIRST_PORT + secrets.randbelow(PORT_COUNT)))


class LaterHosts:
    """Workers on a replica's other hosts. The loss of one loses the engine, because its ranks would wait for each other
    forever."""

    def __init__(self, ranks: WorkerGroup[VllmReplica], replica: Replica) -> None:
        self._ranks, self._replica, self._closing = ranks, replica, False
        self._known, self._lost = threading.Event(), ""
        threading.Thread(target=self._watch, daemon=True).start()

    def require(self, engine: str) -> None:
        """After an error that may follow from it: raise WorkerError where a host of `engine` is lost."""
        if self._known.wait(LOST_S):
            raise WorkerError(f"{engine} {self._lost}")

    def close(self) -> None:
        self._closing = True
        self._ranks.kill()

    def _watch(self) -> None:
        """Wait until a host is lost, then end this process."""
        waiting = [self._ranks.part([at]).submit(VllmReplica.wait) for at in range(len(self._ranks))]
        while not (ended := first_done(waiting, LOOK_S)):
            pass
        if self._closing:
            return
        node, reason = ended[0].group.specs[0].bundles[0].node, "a rank of the engine there has ended."
        try:
            ended[0].results()
        except RlctlError as error:
            reason = error.message
        self._lost = f"has lost its host {node}: {reason}"
        print(f"The engine {self._lost}", flush=True)
        self._known.set()
        self._replica.give_up()
        time.sleep(LOST_S)
        os._exit(1)  # what waits for an answer over the network cannot be ended otherwise


class VllmReplica:
    """A process of an engine after the first: a replica, or a replica's ranks on another host."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec, self._ended = spec, threading.Event()
        self._told: dict[str, tuple[int, int]] = {}
        """Tokens and characters of each sample already sent."""

    def start(self, rank: int, host: int, meeting: Meeting) -> None:
        """As `EngineWorker.start`; collective over all processes of the engine."""
        if host == 0:
            self._replica = Replica(self.spec, rank, meeting)
            return
        _look_for_ports_elsewhere()
        with meeting.joined(rank):
            self._ranks = compat.start_ranks(meeting.arguments(self.spec.arguments, host), self._ended.set)
        note_shared_memory(family_shared_memory())

    def wait(self) -> None:
        """Return once a rank without a local scheduler has ended."""
        self._ended.wait()

    def step(self, commands: Sequence[Asked]) -> list[NewTokens]:
        for request in commands:
            self._replica.add_request(*request)
        return [new_tokens for _ in range(STEPS_A_CALL) for new_tokens in self._progress(self._replica.step())]

    def pause(self) -> list[NewTokens]:
        return self._progress(self._replica.pause())

    def abort(self, names: Sequence[str]) -> None:
        self._replica.abort_request(list(names))
        for name in names:
            self._told.pop(name, None)

    def do(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._replica, method)(*args, **kwargs)

    def close(self) -> None:
        if hasattr(self, "_replica"):
            self._replica.shut_down()

    def _progress(self, outputs: Sequence[Any]) -> list[NewTokens]:
        return [self._added(output.request_id, output.outputs[0], output.finished) for output in outputs]

    def _added(self, name: str, completion: Any, finished: bool) -> NewTokens:
        first, announced = self._told.pop(name, (0, 0))
        tokens = tuple(completion.token_ids[first:])
        logprobs = tuple(completion.logprobs[first + at][token].logprob for at, token in enumerate(tokens))
        if not finished:
            self._told[name] = (first + len(tokens), len(completion.text))
        reason = str(completion.finish_reason) if finished else None
        routed = getattr(completion, "routed_experts", None) if finished else None
        return NewTokens(name, tokens, logprobs, completion.text[announced:], reason, completion.stop_reason, routed)


class Logprob(NamedTuple):
    logprob: float


@dataclass
class Completion:
    """A sample of another process, in the form of vLLM's completions."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    routed_experts: Any = None

    def add(self, more: NewTokens) -> None:
        self.token_ids += more.tokens
        self.logprobs += [{token: Logprob(value)} for token, value in zip(more.tokens, more.logprobs, strict=True)]
        self.text += more.text
        self.finish_reason, self.stop_reason = more.finish_reason, more.stop_reason
        self.routed_experts = more.routed_experts


class Output(NamedTuple):
    """The completion of one request, in the form of vLLM's outputs."""

    request_id: str
    outputs: list[Completion]
    finished: bool


class Replicas:
    """All replicas of an engine, with the methods of one."""

    def __init__(self, first: Replica, others: WorkerGroup[VllmReplica]) -> None:
        self._first, self._others = first, others
        self._home: dict[str, int] = {}
        """Replica of each active group; 0 is in this process."""
        self._samples: Counter[str] = Counter()
        """Samples of each group that are not finished."""
        self._asked: list[list[Asked]] = [[] for _ in range(len(others))]
        """Requests for the others that the next step takes along."""
        self._completions: dict[str, Completion] = {}
        self.max_length = first.max_length
        self.enter, self.decode = first.enter, first.decode

    @property
    def recorded_shape(self) -> tuple[int, int]:
        return self._first.recorded_shape

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        """Give the samples of a group to one replica, which computes their prompt once: to that with the fewest."""
        group = _group(name)
        if group not in self._home:
            load: Counter[int] = Counter()
            for other, home in self._home.items():
                load[home] += self._samples[other]
            self._home[group] = min(range(len(self._asked) + 1), key=lambda at: load[at])
        self._samples[group] += 1
        home = self._home[group]
        if home == 0:
            self._first.add_request(name, prompt, params)
        else:
            self._asked[home - 1].append((name, prompt, params))
            self._completions[name] = Completion()

    def step(self) -> list[Any]:
        commands, self._asked = self._asked, [[] for _ in self._asked]
        theirs = self._others.submit_each(VllmReplica.step, [(command,) for command in commands])
        outputs = [output for _ in range(STEPS_A_CALL) for output in self._first.step()]
        return self._taken(outputs, theirs.results())

    def pause(self) -> list[Any]:
        theirs = self._others.submit(VllmReplica.pause)
        return self._taken(self._first.pause(), theirs.results())

    def _taken(self, outputs: list[Any], theirs: Sequence[Sequence[NewTokens]]) -> list[Any]:
        outputs = list(outputs)
        for new_tokens in itertools.chain.from_iterable(theirs):
            if (completion := self._completions.get(new_tokens.name)) is not None:
                completion.add(new_tokens)
                outputs.append(Output(new_tokens.name, [completion], new_tokens.finish_reason is not None))
        for output in outputs:
            if output.finished:
                self._forget(output.request_id)
        return outputs

    def _forget(self, name: str) -> None:
        group = _group(name)
        self._completions.pop(name, None)
        self._samples[group] -= 1
        if not self._samples[group]:
            del self._samples[group], self._home[group]

    def abort_request(self, names: Sequence[str]) -> None:
        """End samples that are not finished."""
        shares: list[list[str]] = [[] for _ in range(len(self._asked) + 1)]
        for name in names:
            shares[self._home[_group(name)]].append(name)
        self._first.abort_request(shares[0])
        self._asked = [[command for command in commands if command[0] not in names] for commands in self._asked]
        self._others.call_each(VllmReplica.abort, [(share,) for share in shares[1:]])
        for name in names:
            self._forget(name)

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [answer for of_replica in self._everywhere("collective_rpc", method, args=args) for answer in of_replica]

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return all(self._everywhere("reset_prefix_cache", reset_running_requests=reset_running_requests))

    def sleep(self, level: int, mode: str) -> None:
        self._everywhere("sleep", level=level, mode=mode)

    def wake_up(self, tags: list[str]) -> None:
        self._everywhere("wake_up", tags=tags)

    def resume(self) -> None:
        self._everywhere("resume")

    def asleep(self) -> frozenset[str]:
        return frozenset().union(*self._everywhere("asleep"))

    def shut_down(self) -> None:
        self._others.kill()  # their ranks end with them, and a group that they have left would be waited for
        self._first.shut_down()

    def _everywhere(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        theirs = self._others.submit(VllmReplica.do, method, *args, **kwargs)
        return [getattr(self._first, method)(*args, **kwargs), *theirs.results()]


def _group(name: str) -> str:
    return name.rpartition(".")[0]


def started(spec: EngineSpec, places: WorkerPlaces | None) -> tuple[Replica | Replicas, LaterHosts | None]:
    """Start an engine. Later processes use `places`; all have equal numbers of devices."""
    if places is None:
        return Replica(spec), None
    ranks = spec.arguments["tensor_parallel_size"] * spec.arguments.get("pipeline_parallel_size", 1)
    count = spec.replicas * ranks - len(places.bundles)
    hosts = ranks // count
    meeting = Meeting(spec.replicas, hosts, *_open_port())
    shares = [places.bundles[first : first + count] for first in range(0, len(places.bundles), count)]
    members = list(product(range(spec.replicas), range(hosts)))[1:]
    others = places.start(VllmReplica, [WorkerSpec({"spec": spec}, share, spec.environment) for share in shares])
    each = [others.within(places.start_timeout_s).part([at]) for at in range(len(members))]
    starting = [
        replica.submit(VllmReplica.start, *member, meeting) for replica, member in zip(each, members, strict=True)
    ]
    try:
        with _none_fails(starting):
            first = Replica(spec, 0, meeting)
        for call in starting:
            call.results()
    except BaseException:
        others.kill()
        raise
    replicas, later = ([at for at, (_, host) in enumerate(members) if (host > 0) == on] for on in (False, True))
    engine = Replicas(first, others.part(replicas)) if replicas else first
    return engine, LaterHosts(others.part(later), first) if later else None


@contextlib.contextmanager
def _none_fails(starting: Sequence[PendingCall[None]]) -> Iterator[None]:
    """If one call fails, end this process's ranks, which would wait for the other's, and raise its error."""
    over, failed = threading.Event(), list[RlctlError]()

    def watch() -> None:
        waiting = list(starting)
        while waiting and not failed and not over.is_set():
            for done in first_done(waiting, LOOK_S):
                waiting.remove(done)
                try:
                    done.results()
                except RlctlError as error:
                    failed.append(error)
        while failed and not over.wait(LOOK_S):
            for rank in multiprocessing.active_children():  # some may not have been started before
                rank.kill()

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    except Exception:
        if failed:
            raise failed[0] from None
        raise
    finally:
        over.set()


def _open_port() -> tuple[str, int]:
    """Return this node's address and the first of several consecutive free ports. Raises MachineError without free
    ports."""
    address = node_address() or "127.0.0.1"
    for _ in range(PORT_ATTEMPTS):
        with contextlib.ExitStack() as sockets, contextlib.suppress(OSError, OverflowError):
            first = FIRST_PORT + secrets.randbelow(PORT_COUNT)
            for more in range(PORTS):
                sockets.enter_context(socket.socket()).bind(("", first + more))  # vLLM listens on all addresses
            return address, first
    raise MachineError(f"There are no {PORTS} consecutive free ports at {address}.", "End what holds so many of them.")
