"""A process that holds one tiny engine at a time, and a policy whose published tensors go to it whole."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlctl.cluster.workers import PendingCall
from rlctl.rollouts.episodes import ONE_TURN
from support.engine_policies import WholeTensorPolicy
from support.engines import plays_episodes

VLLM = "rlctl.backends.vllm.engine:VllmEngine"
TESTS = Path(__file__).parents[1]
PYTHONPATH = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))


class SwappingEngine:
    """A worker that starts one engine after the other: their imports are paid for once."""

    def __init__(self, places: Any = None) -> None:
        """`places` are for the second replica of an engine that has one."""
        self.engine: Any = None
        self.runner: Any = None
        self.places = places

    def swap(self, spec: Any, episode: str = ONE_TURN) -> None:
        """End the engine and start another, which plays that kind of episode."""
        from rlctl.rollouts.episodes import engine_process

        self.close()
        self.runner = engine_process(VLLM, episode, spec=spec, places=self.places if spec.replicas > 1 else None)
        self.engine = self.runner.engine()
        self.runner.start()

    def play(self, spec: Any, episode: Any) -> None:
        """As `swap`, but an engine that would be the same goes on, with the other kind of episode."""
        from rlctl.cluster.worker_host import imported
        from rlctl.rollouts.episodes import PlaySpec

        engine = self.engine
        if engine is None or engine.spec != spec or engine.version:
            self.swap(spec, episode)
            return
        runner = self.runner
        if isinstance(runner._spec, PlaySpec):
            runner._play.close()
        runner._spec = imported(episode) if isinstance(episode, str) else episode
        runner._play = runner._spec.started() if isinstance(runner._spec, PlaySpec) else runner._spec

    def call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the engine, or of what plays episodes against it."""
        return getattr(self.runner if plays_episodes(method) else self.engine, method.__name__)(*args)

    def when_in_flight(self, tokens: int, method: Callable[..., Any], *args: Any, limit_s: float = 100.0) -> Any:
        """Call `method` once more than `tokens` are in flight. Waited for here, and not in the test's process: what
        that one would have to hear of may be over by then."""
        deadline = time.monotonic() + limit_s
        while self.tokens_in_flight() <= tokens:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {tokens} tokens in flight within {limit_s:.0f} s")
            time.sleep(0.001)
        return self.call(method, *args)

    def tokens_in_flight(self) -> int:
        """Tokens that the samples being generated have so far; 0 if nothing is generated."""
        with self.engine._lock.ask():
            return sum(sample.tokens for sample in self.engine._samples.values())

    def thread_and_stream(self) -> tuple[int, int]:
        """The thread of this call, and the CUDA stream on which it uses the engine."""
        import torch

        with self.engine._lock.ask():
            return threading.get_ident(), torch.cuda.current_stream().cuda_stream

    def free_device_bytes(self) -> int:
        import torch

        return torch.cuda.mem_get_info()[0]

    def fail_steps(self, message: str) -> None:
        """Let every step raise from now on; the process lives."""

        def step() -> Any:
            raise RuntimeError(message)

        with self.engine._lock.ask():
            self.engine._engine.step = step

    def share_device(self) -> None:
        """Let the engine give its memory back as on a GPU. vLLM's CPU platform keeps the books and moves nothing."""
        from rlctl.backends.vllm.engine import DeviceMemory

        with self.engine._lock.ask():
            self.engine._memory = DeviceMemory(self.engine._engine, shared=True)
            self._levels, sleep = [], self.engine._engine.sleep

            def counted(level: int, mode: Any) -> None:
                self._levels.append(level)
                sleep(level, mode)

            self.engine._engine.sleep = counted

    def sleep_levels(self) -> list[int]:
        """The levels of vLLM's sleep mode that were asked for since `share_device`."""
        return self._levels

    def spoil(self) -> int:
        """Fill the weights with NaN; return the number of tensors."""
        with self.engine._lock.ask():
            return sum(self.engine._rpc("rlctl_weights.poison"))

    def unreadable_if_quantized(self, leaf: str) -> dict[str, str]:
        """What could not be read back if the layers called `leaf` were quantized, and why."""
        from rlctl.backends.vllm.weights import locate

        def look(worker: Any) -> dict[str, str]:
            model = worker.model_runner.get_model()
            layers = [module for name, module in model.named_modules() if name.endswith(f".{leaf}")]
            methods = [layer.quant_method for layer in layers]
            try:
                for layer in layers:
                    layer.quant_method = type("Fp8LinearMethod", (), {})()
                return locate.stored_matrices(model).unreadable
            finally:
                for layer, method in zip(layers, methods, strict=True):
                    layer.quant_method = method

        return self.on_model(look)[0]

    def declare_unknown(self, *leaves: str) -> None:
        """From now on rlctl does not know how modules called so keep their weights; none: it knows what it does."""

        def declare(worker: Any) -> None:
            from rlctl.backends.vllm import compat

            model = worker.model_runner.get_model()
            chosen = {id(module) for name, module in model.named_modules() if name.rpartition(".")[2] in leaves}
            known = getattr(compat.why_quantized, "known", compat.why_quantized)

            def why(module: Any) -> str:
                return "is declared unknown" if id(module) in chosen else known(module)

            why.known = known  # type: ignore[attr-defined]
            compat.why_quantized = why

        self.on_model(declare)

    def ways(self) -> list[dict[str, tuple[str, str]]]:
        """Of each worker of the engine: how each tensor comes into it, and why."""

        def look(worker: Any) -> dict[str, tuple[str, str]]:
            taken = worker.rlctl_weights.assignment.routes()
            return {tensor: (one.path, one.reason) for one in taken for tensor in one.tensors}

        return self.on_model(look)

    def reloaded(self) -> tuple[str, ...]:
        """Paths of the modules that a refit gives to vLLM's loader, in any worker."""
        of_workers = self.on_model(lambda worker: worker.rlctl_weights.assignment.reloaded)
        return tuple(sorted({path for own in of_workers for path in own}))

    def break_parameter(self, tensor: str) -> None:
        """Spoil one element of every copy of `tensor` that can be spoiled in place."""
        from rlctl.backends.vllm.weights import locate

        def spoil(worker: Any) -> None:
            for matrix in locate.stored_matrices(worker.model_runner.get_model()).found:
                if any(part.tensor == tensor for part in matrix.parts) and not matrix.packed:
                    matrix.kept().view(-1)[3] += 1.0

        self.on_model(spoil)

    def break_buffer(self, name: str, by: float = 2.0) -> None:
        """Change one element of a buffer, as a reload that loses it would."""

        def spoil(worker: Any) -> None:
            buffers = dict(worker.model_runner.get_model().named_buffers())
            if name in buffers:  # else another pipeline stage has it
                buffers[name].view(-1)[-1] *= by

        self.on_model(spoil)

    def on_model(self, function: Any) -> Any:
        with self.engine._lock.ask():
            return self.engine._engine.collective_rpc(function)

    def other_processes(self) -> list[int]:
        """The processes of the replicas after the first."""
        return list(self.engine._engine._others.pids)

    def buffers(self) -> list[str]:
        def names(worker: Any) -> list[str]:
            return [name for name, _ in worker.model_runner.get_model().named_buffers()]

        return self.on_model(names)[0]

    def close(self) -> None:
        if self.runner is not None:
            self.runner.close()
            self.runner = self.engine = None
            gc.collect()


@contextlib.contextmanager
def hosted(placement: Any, logs: Path) -> Iterator[Any]:
    """A worker group of one process, for one engine after the other."""
    from rlctl.backends.vllm.args import engine_env
    from rlctl.cluster.workers import WorkerGroup, WorkerSpec

    env = engine_env("cpu", 1) | {"PYTHONPATH": PYTHONPATH}
    worker = WorkerSpec({}, (placement.bundles[0],), env, others=(placement.bundles[1],))
    group = WorkerGroup(
        "families", SwappingEngine, [worker], placement, logs, start_timeout_s=240.0, call_timeout_s=120.0
    )
    yield group
    group.stop()


class PublishedPolicy(WholeTensorPolicy):
    """Tensors as a model directory holds them; transformers reads them from there for reference log-probs."""

    def __init__(self, directory: Path, dtype: str = "float32") -> None:
        """In `dtype`, but for the routers' correction bias, which is float32 in every engine."""
        import torch
        from safetensors.torch import load_file

        self.directory, self._tensors, self._model = directory, load_file(directory / "model.safetensors"), None
        for name, tensor in self._tensors.items():
            if not name.endswith("e_score_correction_bias"):
                self._tensors[name] = tensor.to(getattr(torch, dtype))
        self._place(self._tensors)

    def tensors(self) -> dict[str, Any]:
        return self._tensors

    def _parameters(self) -> list[Any]:
        self._model = None
        return list(self._tensors.values())

    def save(self, directory: Path) -> Path:
        """A model directory of the tensors as they are now."""
        import shutil

        from safetensors.torch import save_file

        shutil.copytree(self.directory, directory)
        save_file(self._tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    @property
    def model(self) -> Any:
        """The transformers model of the tensors as they are now."""
        import tempfile

        import torch
        from transformers import AutoModelForCausalLM

        if self._model is None:
            with tempfile.TemporaryDirectory() as copy:
                saved = self.save(Path(copy) / "model")
                # Eager: the batched forms of experts and of attention with sinks sum in another order.
                model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32, attn_implementation="eager")
            self._model = model.eval()
        return self._model


class FamilyEngine:
    """What tests call an engine of one family through."""

    def __init__(
        self, group: Any, family: str, model: Path, tp: int, *, dtype: str = "float32", **sections: Any
    ) -> None:
        from rlctl.backends.vllm.args import engine_spec
        from rlctl.checkpoints.hf.model_facts import facts_in
        from rlctl.methods.rl.rl_config import RlConfig
        from rlctl.weights.vllm import VllmParallel

        self.group, self.family, self.model = group, family, model
        generation = {"max_concurrent": 16, "kv_cache_bytes": 32 << 20} | sections.pop("generation", {})
        config = RlConfig.model_validate({"generation": generation} | sections)
        sizes = config.generation
        self.parallel = VllmParallel(tp, sizes.dp or 1, bool(sizes.ep), sizes.pp or 1)
        facts = facts_in(model)
        spec = engine_spec(config, facts, model, device="cpu", dtype=dtype, max_length=256, tp=tp, threads=1)
        log = group.log_path(0)
        said_before = len(log.read_text())
        group.within(240.0).call(SwappingEngine.swap, spec)
        self.start_log = log.read_text()[said_before:]
        self.policy = PublishedPolicy(model, dtype)

    def call(self, method: Callable[..., Any], *args: Any) -> Any:
        return self.group.call(SwappingEngine.call, method, *args)[0]

    def submit(self, method: Callable[..., Any], *args: Any) -> PendingCall[Any]:
        return self.group.submit(SwappingEngine.call, method, *args)

    def host(self, method: Callable[..., Any], *args: Any) -> Any:
        """A method of the host itself."""
        return self.group.call(method, *args)[0]
