"""A generation engine: vLLM in this process, token ids in, rollout columns out, weights replaced in place.

`VllmEngine` is a plain class; a worker group hosts it in a process whose environment is `args.engine_env`. Every token
is stamped with the version of the weights that chose it, and no token is ever chosen by half-updated ones.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from rlctl.backends.vllm import compat
from rlctl.backends.vllm.args import EngineSpec
from rlctl.backends.vllm.messages import EngineInfo, GroupRequest, GroupResult, Sampling
from rlctl.data.rollouts import RolloutColumns
from rlctl.errors import ConfigError, InputError, RlctlError, WaitTimeoutError, WorkerError

Put = Callable[[Any], Any]


class VllmEngine:
    """One engine. Calls are taken one at a time, from any thread."""

    def __init__(self, spec: EngineSpec, index: int = 0, put: Put | None = None) -> None:
        """`put` stores columns and texts and returns their handle; by default they are returned themselves."""
        self.spec, self.index = spec, index
        self._put: Put = put or (lambda value: value)
        self._lock = threading.RLock()
        self._version = 0
        self._updating: int | None = None
        """Version of the refit that has begun and not succeeded; nothing is generated until one does."""
        self._calls = 0
        self._llm: Any = None

    # Start and end

    def start(self) -> EngineInfo:
        """Load the model. Raises ConfigError or MachineError where vLLM refuses what was asked for."""
        begun = time.perf_counter()
        _require_environment(self.spec.environment)
        version = compat.check_version()
        from vllm import LLM

        arguments = compat.supported_arguments(self.spec.arguments)
        try:
            self._llm = LLM(**arguments)
        except ValueError as error:
            raise ConfigError(f"vLLM refuses this engine: {error}.", "Adjust the generation section.") from error
        config = self._llm.llm_engine.vllm_config
        cache = config.cache_config
        return EngineInfo(
            vllm_version=version,
            device=self.spec.device,
            max_length=config.model_config.max_model_len,
            kv_cache_tokens=int(cache.num_gpu_blocks or 0) * int(cache.block_size),
            stop_token_ids=self._stop_token_ids(),
            seconds=time.perf_counter() - begun,
            arguments=arguments,
        )

    def _stop_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's end token and those of the model's generation config."""
        listed = self._llm.llm_engine.vllm_config.model_config.try_get_generation_config().get("eos_token_id", [])
        ids = {listed} if isinstance(listed, int) else set(listed or ())
        return tuple(sorted({i for i in (*ids, self._llm.get_tokenizer().eos_token_id) if i is not None}))

    def close(self) -> None:
        """Let go of the model and of shared memory."""
        with self._lock:
            if self._llm is None:
                return
            self._rpc("rlctl_release")
            compat.shut_down(self._llm)
            self._llm = None

    # Generation

    def generate(self, requests: Sequence[GroupRequest], sampling: Sampling, timeout_s: float) -> list[GroupResult]:
        """One result a request, in their order.

        Raises InputError for a prompt that does not fit, WaitTimeoutError after `timeout_s`, and WorkerError while
        the weights are half-updated.
        """
        with self._lock:
            self._require_whole_weights()
            self._require_prompts_fit(requests)
            self._calls += 1
            ids = {
                f"{self._calls}.{row}.{sample}": (row, sample)
                for row, request in enumerate(requests)
                for sample in range(len(request.seeds))
            }
            finished = self._run(requests, sampling, ids, time.monotonic() + timeout_s, timeout_s)
            return [
                self._result(request, [finished[row, sample] for sample in range(len(request.seeds))])
                for row, request in enumerate(requests)
            ]

    def _run(
        self,
        requests: Sequence[GroupRequest],
        sampling: Sampling,
        ids: dict[str, tuple[int, int]],
        deadline: float,
        timeout_s: float,
    ) -> dict[tuple[int, int], Any]:
        """vLLM's completion of every (request, sample)."""
        engine = self._llm.llm_engine
        finished: dict[tuple[int, int], Any] = {}
        try:
            for name, (row, sample) in ids.items():
                request = requests[row]
                params = _sampling_params(sampling, request.seeds[sample])
                engine.add_request(name, {"prompt_token_ids": list(request.prompt_tokens)}, params)
            while len(finished) < len(ids):
                if time.monotonic() > deadline:
                    raise WaitTimeoutError(
                        f"Engine {self.index} completed {len(finished)} of {len(ids)} samples in {timeout_s:.0f} s.",
                        "Raise cluster.step_timeout_s, or ask for fewer or shorter completions.",
                    )
                for output in engine.step():
                    if output.finished:
                        finished[ids[output.request_id]] = output.outputs[0]
        except BaseException:
            left = [name for name, place in ids.items() if place not in finished]
            engine.abort_request(left)
            raise
        return finished

    def _result(self, request: GroupRequest, completions: list[Any]) -> GroupResult:
        columns = _columns(request.prompt_tokens, completions, self._version)
        return GroupResult(
            group=request.group,
            columns=self._put(columns),
            texts=self._put([completion.text for completion in completions]),
            prompt_tokens=len(request.prompt_tokens),
            response_tokens=tuple(len(completion.token_ids) for completion in completions),
            truncated=tuple(completion.finish_reason == "length" for completion in completions),
            finish_reasons=tuple(str(completion.finish_reason) for completion in completions),
            weight_versions=(self._version,) * len(completions),
            logprob_sums=tuple(float(columns.logprobs_T[columns.slice(g)].sum()) for g in range(len(completions))),
        )

    def _require_prompts_fit(self, requests: Sequence[GroupRequest]) -> None:
        limit = self._llm.llm_engine.vllm_config.model_config.max_model_len
        for request in requests:
            if not 0 < len(request.prompt_tokens) < limit:
                raise InputError(
                    f"The prompt of group {request.group} has {len(request.prompt_tokens)} tokens; the engine "
                    f"takes 1 to {limit - 1}.",
                    "Raise --max-length, or shorten the prompt.",
                )

    # Weights

    def weight_version(self) -> int:
        """Version of the weights in use; 0 is those of the model directory. Raises WorkerError while half-updated."""
        self._require_whole_weights()
        return self._version

    def _require_whole_weights(self) -> None:
        if self._llm is None:
            raise WorkerError(f"Engine {self.index} is not started.")
        if self._updating is not None:
            raise WorkerError(
                f"Engine {self.index} holds half-updated weights: "
                f"the refit to version {self._updating} did not succeed.",
                "It generates again after a full refit.",
            )

    def refit_open(self, init_info: dict[str, Any]) -> None:
        """Exchange what stays the same over all refits (`transfer.InitInfo`)."""
        with self._lock:
            self._rpc("init_weight_transfer_engine", init_info)

    def refit_begin(self, version: int) -> None:
        """From here until `refit_finish` the engine refuses to generate."""
        with self._lock:
            if self._llm is None:
                raise WorkerError(f"Engine {self.index} is not started.")
            self._updating = version
            self._rpc("rlctl_restart_update")
            self._rpc("start_weight_update")

    def refit_receive(self, update_info: dict[str, Any]) -> None:
        """Load one part of the weights (`transfer.UpdateInfo`)."""
        with self._lock:
            if self._updating is None:
                raise WorkerError("refit_receive without refit_begin.")
            self._rpc("update_weights", update_info)

    def refit_finish(self, version: int) -> dict[str, float]:
        """Complete the refit, drop the prefix cache, and take on `version`; returns the seconds of each."""
        with self._lock:
            if self._updating != version:
                raise WorkerError(f"refit_finish({version}), but the refit begun is {self._updating}.")
            begun = time.perf_counter()
            self._rpc("finish_weight_update")
            loaded = time.perf_counter()
            if not self._llm.reset_prefix_cache():
                raise WorkerError(f"Engine {self.index} could not drop its prefix cache: requests are still running.")
            compat.set_weight_version(self._llm.llm_engine, str(version))
            self._version, self._updating = version, None
            return {"load": loaded - begun, "cache_reset": time.perf_counter() - loaded}

    def refit_reject(self, version: int) -> None:
        """The weights of `version` did not pass verification: refuse to generate until a full refit succeeds."""
        with self._lock:
            self._updating = version

    def refit_close(self) -> None:
        """Let go of what `refit_open` mapped."""
        with self._lock:
            if self._llm is not None:
                self._rpc("rlctl_release")

    def received(self) -> list[Any]:
        """What each of the engine's workers did in the last refit (`messages.Received`)."""
        with self._lock:
            return self._rpc("rlctl_received")

    def readings(self, tensors: list[str] | None = None) -> list[Any]:
        """Fingerprints of what the engine computes with, of all its workers (`messages.Reading`)."""
        with self._lock:
            return [reading for worker in self._rpc("rlctl_readings", tensors) for reading in worker]

    def values(self, tensor: str) -> list[tuple[str, tuple[int, ...], np.ndarray]]:
        """Every copy of one published tensor in the engine's workers: (site, start of its box, values)."""
        with self._lock:
            return [held for worker in self._rpc("rlctl_values", tensor) for held in worker]

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every vLLM worker."""
        try:
            return self._llm.llm_engine.collective_rpc(method, args=args)
        except (RlctlError, MemoryError):
            raise
        except (RuntimeError, ValueError, KeyError, TypeError, AssertionError, AttributeError) as error:
            raise WorkerError(f"Engine {self.index} failed in {method}: {type(error).__name__}: {error}.") from error

    @contextmanager
    def exclusively(self) -> Iterator[Any]:
        """The vLLM object, with every other call held off: for measurements and tests."""
        with self._lock:
            yield self._llm


def _require_environment(environment: dict[str, str]) -> None:
    """vLLM reads these at import, so setting them here would come too late for a process that imported it before."""
    wrong = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    if wrong:
        raise WorkerError(
            "The engine's process was started without " + ", ".join(f"{k}={v}" for k, v in sorted(wrong.items())) + ".",
            "Pass EngineSpec.environment when starting it.",
        )


def _sampling_params(sampling: Sampling, seed: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop=list(sampling.stop) or None,
        stop_token_ids=list(sampling.stop_token_ids) or None,
        seed=seed,
        logprobs=0,  # the sampled token's alone
        flat_logprobs=True,
        skip_special_tokens=True,
    )


def _columns(prompt: Sequence[int], completions: list[Any], version: int) -> RolloutColumns:
    """The group's columns: prompt and completion of each sample, one behind the other."""
    lengths = [len(prompt) + len(completion.token_ids) for completion in completions]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = np.zeros(offsets[-1], np.int32)
    mask = np.zeros(offsets[-1], bool)
    logprobs = np.zeros(offsets[-1], np.float32)
    versions = np.full(offsets[-1], -1, np.int32)
    for begin, completion in zip(offsets, completions, strict=False):
        first = begin + len(prompt)
        chosen = slice(first, first + len(completion.token_ids))
        tokens[begin:first] = prompt
        tokens[chosen] = completion.token_ids
        mask[chosen] = True
        logprobs[chosen] = _chosen_logprobs(completion)
        versions[chosen] = version
    return RolloutColumns(tokens, offsets, mask, logprobs, versions)


def _chosen_logprobs(completion: Any) -> list[float]:
    """The log-prob of each token of the completion. Raises WorkerError where vLLM's record lacks one."""
    record = completion.logprobs
    if record is None or len(record) != len(completion.token_ids):
        raise WorkerError(f"vLLM returned {len(record or ())} log-probs for {len(completion.token_ids)} tokens.")
    return [record[index][token].logprob for index, token in enumerate(completion.token_ids)]
