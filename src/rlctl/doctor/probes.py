"""The probes of `rlctl doctor --deep`.

A layer's probe is a function in a separate process (`python -m rlctl.doctor.probes NAME DEVICE FOLDER`) that prints one
JSON object with key figures or the error, and imports its libraries itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 1024**3
GPU, CPU = "cuda", "cpu"
BILLION = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "rope_theta": 500000.0, "dtype": "bfloat16",
    "tie_word_embeddings": True,
}  # fmt: skip
"""The sizes of Llama 3.2 1B: 1.24 billion parameters."""
REWARD = '''
def letters(completion: str) -> float:
    """Return the share of letters, which varies between the completions of a random model."""
    return sum(c.isalpha() for c in completion) / max(1, len(completion))
'''

Figures = dict[str, float | str]


@dataclass(frozen=True)
class Probe:
    """One test of `doctor --deep`."""

    name: str
    layer: str
    """The layer that a failure points to, as the page names it."""
    limit_s: float
    """Seconds until a GPU machine's probe is stopped; `CPU_PATIENCE` times as many without GPUs."""
    advice: str
    """The next step after a failure."""
    run: tuple[str, ...] = ()
    """Arguments of `rlctl`, with {models} and {runs} for folders; empty for a function of this file."""
    cuda_only: bool = False
    cuda_run: tuple[str, ...] = ()
    """Further arguments on a GPU."""
    package: str = ""
    """The import without which the probe is skipped."""
    models: bool = True
    """Whether it needs the files of the probe `models`."""
    later: tuple[str, ...] = ()
    """Arguments of all later runs once this probe has failed."""


BODIES: dict[str, Callable[[str, Path], Figures]] = {}
LAYERS: dict[str, Probe] = {}


def probe(
    name: str, layer: str, limit_s: float, advice: str, *, models: bool = False, **more: Any
) -> Callable[[Callable[[str, Path], Figures]], Any]:
    """Register a function of the device and the folder of models as a probe."""

    def register(body: Callable[[str, Path], Figures]) -> Callable[[str, Path], Figures]:
        BODIES[name] = body
        LAYERS[name] = Probe(name, layer, limit_s, advice, models=models, **more)
        return body

    return register


@probe("rates", "the driver and torch", 60, "Run `rlctl doctor`: it compares the driver with torch's CUDA version.")
def rates(device: str, models: Path) -> Figures:
    """Measure matrix products, memory, and the link to the host."""
    import torch

    from rlctl.doctor.calibrate import rate

    place, figures = torch.device(device), Figures()
    size, count, dtype = (8192, 2 * GIB, torch.bfloat16) if device == GPU else (1024, GIB // 8, torch.float32)
    a, b = (torch.randn(size, size, device=place).to(dtype) for _ in range(2))
    work = 2.0 * size**3
    figures[f"{str(dtype).removeprefix('torch.')} TFLOP/s"] = rate(work, lambda: torch.mm(a, b), place) / 1e12
    x = torch.zeros(count, dtype=torch.uint8, device=place)
    y = torch.empty_like(x)
    figures["memory GB/s"] = rate(2.0 * count, lambda: y.copy_(x), place) / 1e9
    if device == CPU:
        return figures
    pinned = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    figures["host to device GB/s"] = rate(count, lambda: x.copy_(pinned, non_blocking=True), place) / 1e9
    figures["device to host GB/s"] = rate(count, lambda: pinned.copy_(x, non_blocking=True), place) / 1e9
    if torch.cuda.get_device_capability() >= (8, 9):
        left, right = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        unit = torch.ones((), device=place)
        product = lambda: torch._scaled_mm(left, right, unit, unit, out_dtype=torch.bfloat16)  # noqa: E731
        figures["float8 TFLOP/s"] = rate(work, product, place) / 1e12
    return figures


@probe(
    "disk",
    "the run directory",
    60,
    "Put --run-dir on a faster file system, or save less often (run.checkpoint_minutes).",
)
def disk(device: str, models: Path) -> Figures:
    """Write a file as a checkpoint is written, past the page cache where that is faster, and one through it."""
    from rlctl.checkpoints.background_writes import DigestedFile

    directory = Path(os.environ.get("RLCTL_PROBE_DIRECTORY") or "runs").absolute()
    place = next(folder for folder in (directory, *directory.parents) if folder.is_dir())
    block, count = os.urandom(16 << 20), 32
    figures: Figures = {"directory": str(place)}
    path = place / f".rlctl-doctor-{os.uname().nodename}-{os.getpid()}"
    try:
        for name, opened in (("checkpoint GB/s", DigestedFile), ("page cache GB/s", _through_cache)):
            began = time.perf_counter()
            with opened(path) as file:
                for _ in range(count):
                    file.write(block)
            figures[name] = count * len(block) / (time.perf_counter() - began) / 1e9
    finally:
        path.unlink(missing_ok=True)
    return figures


@contextlib.contextmanager
def _through_cache(path: Path) -> Iterator[Any]:
    with path.open("wb", buffering=0) as file:
        yield file
        os.fsync(file.fileno())


@probe(
    "triton", "Triton and torch.compile", 120, cuda_only=True, later=("--set", "vllm.enforce_eager=true"),
    advice="Install gcc and Python's headers (`kernel-compiler` in `rlctl doctor`); "
    "until then run with TORCHDYNAMO_DISABLE=1 and `--set vllm.enforce_eager=true`.",
)  # fmt: skip
def triton(device: str, models: Path) -> Figures:
    """Compile an activation with its gradient, and compare with the same function uncompiled."""
    import torch

    def swiglu(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    x = torch.randn(64, 512, device=device, requires_grad=True)
    began = time.perf_counter()
    compiled = torch.compile(swiglu, dynamic=True)(x)
    (gradient,) = torch.autograd.grad(compiled.sum(), x)
    seconds = time.perf_counter() - began
    torch.testing.assert_close(compiled, swiglu(x))
    torch.testing.assert_close(gradient, torch.autograd.grad(swiglu(x).sum(), x)[0])
    return {"first call s": seconds}


@probe(
    "collectives", "NCCL (gloo without GPUs)", 120,
    "Try again with NCCL_DEBUG=INFO; start a container with --ipc=host and --ulimit memlock=-1.",
)  # fmt: skip
def collectives(device: str, models: Path) -> Figures:
    """Sum a tensor over all local GPUs, over a group of one GPU, or over two processes without GPUs."""
    import torch
    from torch.cuda import nccl

    from rlctl.doctor.calibrate import group_rates

    processes = torch.cuda.device_count() if device == GPU else 2
    if processes > 1:
        bus, pair = group_rates(processes, device == GPU)
        return {"processes": float(processes), "all-reduce GB/s": bus / 1e9, "point to point GB/s": pair / 1e9}
    with group_of_one(device) as group:
        x = torch.ones(1 << 20, device=device)
        gathered = torch.empty_like(x)
        group.all_reduce(x)
        group.all_gather_into_tensor(gathered, x)
        group.barrier()
        require(bool((gathered == 1).all()), "a gathered tensor has other values")
    return {"NCCL": ".".join(map(str, nccl.version()))}


@probe(
    "cuda-ipc", "CUDA IPC between two processes", 90, cuda_only=True, later=("--set", "refit.mover=shared-memory"),
    advice="Run with `--set refit.mover=shared-memory` (`refit-test --mover shared-memory`); "
    "containers need --ipc=host, and some virtual machines forbid CUDA IPC.",
)  # fmt: skip
def cuda_ipc(device: str, models: Path) -> Figures:
    """Write into memory of this process from another one."""
    import torch
    import torch.multiprocessing as mp
    from torch.multiprocessing.reductions import reduce_tensor

    context = mp.get_context("spawn")
    handles, answers = context.Queue(), context.Queue()
    child = context.Process(target=_add_one, args=(handles, answers), daemon=True)
    child.start()
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        buffer = torch.ones(64 << 20, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    handles.put(reduce_tensor(buffer)[1])
    while True:
        with contextlib.suppress(queue.Empty):
            answer = answers.get(timeout=1)
            break
        require(child.is_alive(), f"the other process ended with exit code {child.exitcode}")
    require(not answer, f"the other process could not use the memory: {answer}")
    require(bool((buffer == 2).all()), "bytes that the other process wrote have not arrived")
    child.join()
    return {"shared MB": buffer.numel() / 1e6}


def _add_one(handles: Any, answers: Any) -> None:
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    try:
        tensor = rebuild_cuda_tensor(*handles.get())
        tensor.add_(1)
        torch.cuda.synchronize()
        del tensor
        answers.put("")
    except Exception as error:  # noqa: BLE001 - reported by the parent
        answers.put(f"{type(error).__name__}: {error}")


@probe(
    "sleep", "vLLM's sleep mode", 90, cuda_only=True, package="vllm",
    advice="Policy and engine cannot take turns on a GPU then: run with --split on two GPUs or more.",
)  # fmt: skip
def sleep(device: str, models: Path) -> Figures:
    """Move memory of vLLM's allocator to the host and back."""
    import torch
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.get_instance()
    with allocator.use_memory_pool(tag="weights"):
        weights = torch.full((GIB // 2,), 3.0, device=device)  # 2 GiB
    with allocator.use_memory_pool(tag="kv_cache"):
        cache = torch.ones(GIB // 2, device=device)
    torch.cuda.synchronize()
    mapped = allocator.get_current_usage()
    began = time.perf_counter()
    allocator.sleep(offload_tags=("weights",))
    asleep = time.perf_counter()
    allocator.wake_up(tags=["weights"])
    torch.cuda.synchronize()
    awake = time.perf_counter()
    allocator.wake_up(tags=["kv_cache"])
    require(bool((weights == 3.0).all()), "weights differ after the sleep")
    cache.fill_(2.0)
    torch.cuda.synchronize()
    return {"GiB": mapped / GIB, "sleep s": asleep - began, "wake s": awake - asleep}


@probe("fsdp2", "FSDP2, which the backend dtensor uses", 90, "Train with `--backend megatron`.")
def fsdp2(device: str, models: Path) -> Figures:
    """Train a small Llama of transformers by FSDP2 on one rank."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512,
    )  # fmt: skip
    with group_of_one(device):
        model: Any = LlamaForCausalLM(config).to(device)  # pyright: ignore[reportArgumentType]
        mesh = init_device_mesh(device, (1,))
        precision = MixedPrecisionPolicy(torch.bfloat16 if device == GPU else None, torch.float32)
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh, mp_policy=precision)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        tokens = torch.randint(0, 512, (4, 64), device=device)

        def step() -> float:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        return falling(step)


@probe(
    "megatron", "Megatron-Core alone", 90, "Train with `--backend dtensor`; compare versions with docs/engines.md.",
    package="megatron.core",
)  # fmt: skip
def megatron(device: str, models: Path) -> Figures:
    """Train two Megatron layers with its data parallelism and distributed optimizer."""
    return train_megatron(device, te=False)


@probe(
    "transformer-engine", "TransformerEngine", 120, cuda_only=True, package="transformer_engine",
    later=("--set", "megatron.transformer_impl=local"),
    advice="Train on Megatron's own layers: `--set megatron.transformer_impl=local`, or uninstall TransformerEngine.",
)  # fmt: skip
def transformer_engine(device: str, models: Path) -> Figures:
    """Train two of Megatron's TransformerEngine layers, after a float8 layer if supported."""
    import torch
    import transformer_engine.pytorch as te  # pyright: ignore[reportMissingImports]

    figures = Figures()
    if torch.cuda.get_device_capability() >= (8, 9):
        layer = te.Linear(1024, 1024, bias=False, params_dtype=torch.bfloat16).to(device)
        x = torch.randn(512, 1024, device=device, dtype=torch.bfloat16)
        exact = layer(x).float()
        with te.fp8_autocast(enabled=True):
            for _ in range(3):  # the scale follows from earlier calls
                out = layer(x).float()
        figures["float8 error"] = ((out - exact).norm() / exact.norm()).item()
        require(float(figures["float8 error"]) < 0.1, f"float8 is off by {figures['float8 error']}")
    return figures | train_megatron(device, te=True)


def train_megatron(device: str, te: bool) -> Figures:
    import torch

    if device == CPU:
        from rlctl.backends.megatron import cpu

        cpu.install()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    on_gpu = device == GPU
    dtype = torch.bfloat16 if on_gpu else torch.float32
    spec = (
        gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
        if te
        else gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    )
    with group_of_one(device):
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        config = TransformerConfig(
            num_layers=2, hidden_size=128, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=256,
            normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
            add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=dtype, bf16=on_gpu,
            pipeline_dtype=dtype, bias_activation_fusion=on_gpu, bias_dropout_fusion=on_gpu,
            use_cpu_initialization=not on_gpu, gradient_accumulation_fusion=False, masked_softmax_fusion=False,
            persist_layer_norm=False,
        )  # fmt: skip
        model = GPTModel(config, spec, vocab_size=512, max_sequence_length=64, position_embedding_type="rope")
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        wrapped = DistributedDataParallel(config, settings, model.to(device))
        adam = OptimizerConfig(lr=1e-3, bf16=on_gpu, params_dtype=dtype, use_distributed_optimizer=True)
        optimizer = get_megatron_optimizer(adam, [wrapped])
        tokens = torch.randint(0, 512, (4, 64), device=device)
        positions = torch.arange(64, device=device).expand(4, -1)
        mask = torch.ones(1, 1, 64, 64, dtype=torch.bool, device=device).triu(1)

        def step() -> float:
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()
            loss = wrapped(tokens, positions, mask, labels=tokens).mean()
            loss.backward()
            wrapped.finish_grad_sync()
            optimizer.step()
            return loss.item()

        return falling(step)


@probe("ray", "Ray", 90, "Run `rlctl doctor`: its checks of Ray name ports and directories.", package="ray")
def ray(device: str, models: Path) -> Figures:
    """Start Ray like a run, and ask a worker for its device."""
    import ray as cluster

    from rlctl.cluster.ray_session import ray_session

    def look() -> str:
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else ""

    on_gpu = int(device == GPU)
    with ray_session(gpus=on_gpu):
        name = cluster.get(cluster.remote(num_gpus=on_gpu)(look).remote())
    require(bool(name) or not on_gpu, "the worker sees no GPU")
    return {"worker's device": name or CPU}


@probe(
    "models", "the disk of the temporary folder", 90,
    "Set TMPDIR to a folder with room: the models take 3 GB on a GPU machine and 10 MB otherwise.",
)  # fmt: skip
def write_models(device: str, models: Path) -> Figures:
    """Write the random models and the rows that the runs use."""
    from rlctl.tiny_models.text import write_tiny_family

    sums = [(a, b) for a in range(16) for b in range(16)]
    rows = {
        "prompts": [{"prompt": f"What is {a} + {b}?"} for a, b in sums],
        "texts": [{"text": f"What is {a} + {b}? It is {a + b}. " * 12} for a, b in sums],
    }
    for name, values in rows.items():
        (models / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in values))
    (models / "reward.py").write_text(REWARD)
    write_tiny_family(models / "tiny")
    write_tiny_family(models / "experts", "qwen3_moe")
    if device == GPU:
        _write_billion(models / "billion")
    written = sum(path.stat().st_size for path in models.rglob("*") if path.is_file())
    return {"MB": written / 1e6}


def _write_billion(directory: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from rlctl.config.files import write_json
    from rlctl.models.families import facts_from_hf_config, weights_of
    from rlctl.tiny_models.text import llama_config, write_tokenizer

    directory.mkdir()
    config = llama_config(tied=True) | BILLION
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    write_tokenizer(directory)
    draw = torch.Generator(GPU).manual_seed(0)

    def tensor(shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        return torch.empty(shape, dtype=torch.bfloat16, device=GPU).normal_(std=0.02, generator=draw).cpu()

    tensors = {name: tensor(shape) for name, shape in weights_of(facts_from_hf_config(config)).tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@probe(
    "vllm", "vLLM alone, without graphs", 150, models=True, package="vllm",
    advice="Compare versions with docs/engines.md; a program that holds the GPU's memory is in `nvidia-smi`.",
)  # fmt: skip
def vllm(device: str, models: Path) -> Figures:
    return generate(device, models / "tiny", eager=True)


@probe(
    "vllm-graphs", "vLLM alone, compiled, with CUDA graphs", 180, models=True, package="vllm", cuda_only=True,
    later=("--set", "vllm.enforce_eager=true"), advice="Run with `--set vllm.enforce_eager=true`.",
)  # fmt: skip
def vllm_graphs(device: str, models: Path) -> Figures:
    return generate(device, models / "tiny", eager=False)


def generate(device: str, model: Path, eager: bool) -> Figures:
    from rlctl.backends.vllm.args import engine_env

    os.environ.update(engine_env("cuda" if device == GPU else "cpu", 1))
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    # With a KV cache of given size vLLM measures no memory, so other probes may use the GPU meanwhile.
    arguments: dict[str, Any] = {"kv_cache_memory_bytes": GIB // 8, "enforce_eager": eager, "disable_log_stats": True}
    arguments |= {"gpu_memory_utilization": 0.1, "dtype": "bfloat16"} if device == GPU else {"dtype": "float32"}
    llm = LLM(str(model), max_model_len=256, max_num_seqs=16, **arguments)
    figures: Figures = {"start s": time.perf_counter() - began}
    prompts: Any = [{"prompt_token_ids": list(range(40, 60 + index))} for index in range(8)]
    sampling = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)

    llm.generate(prompts, sampling, use_tqdm=False)
    began = time.perf_counter()
    lengths = [len(output.outputs[0].token_ids) for output in llm.generate(prompts, sampling, use_tqdm=False)]
    figures["tokens/s"] = sum(lengths) / (time.perf_counter() - began)
    require(lengths == [32] * 8, f"8 completions of 32 tokens were asked for, and vLLM gave {lengths}")
    return figures


@contextlib.contextmanager
def group_of_one(device: str) -> Iterator[Any]:
    """Make this process a group of one rank for the block; yields torch.distributed."""
    import torch.distributed as dist

    dist.init_process_group("nccl" if device == GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist
    dist.destroy_process_group()


def falling(step: Callable[[], float]) -> Figures:
    """Take five steps on the same batch. Raises RuntimeError unless the loss falls."""
    losses = [step() for _ in range(5)]
    require(losses[-1] < losses[0], f"the loss does not fall on one batch: {losses[0]} to {losses[-1]}")
    return {"first loss": losses[0], "last loss": losses[-1]}


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RuntimeError(otherwise)


def main(name: str, device: str, models: str) -> None:
    """Run a probe; its figures or its error go to stdout as JSON, everything else to stderr."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if device == CPU:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        value: dict[str, Any] = dict(BODIES[name](device, Path(models)))
    except Exception as error:  # noqa: BLE001 - whatever a library raises is the finding
        traceback.print_exc()
        value = {"error": {"message": f"{type(error).__name__}: {error}"}}
    with answer:
        json.dump(value, answer)
    sys.stderr.flush()
    os._exit(1 if "error" in value else 0)  # libraries' threads are not waited for


if __name__ == "__main__":
    main(*sys.argv[1:])
