"""Measures refits into a running vLLM engine against memcpy, and the decode speed of the same engine.

`python benchmarks/refit.py engine` runs this. A random Llama of the size asked for (bfloat16, layers as wide as
those of published models) is held by one policy process in Megatron's layout, without a trainer around it, and refitted
into a real engine on this machine: through the loader, directly into repacked matrices, and directly into plain
ones, where changed elements alone are sent too. Decode speed is that of the engine as it then is.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlctl.backends.base import EpisodeWorker
from rlctl.backends.messages import GroupRequest, Sampling
from rlctl.backends.vllm.args import engine_spec
from rlctl.cluster.placement import Placement
from rlctl.cluster.ray_session import ray_session
from rlctl.cluster.workers import WorkerGroup, WorkerSpec
from rlctl.config.parallel import ParallelSpec
from rlctl.methods.configuration import resolve
from rlctl.models.facts import ModelFacts
from rlctl.preparation.run_workers import ENGINE_PROCESS
from rlctl.refit.session import Receive, RefitSession
from rlctl.refit.synthetic import SyntheticSender
from rlctl.refit.weight_sender import WeightSender
from rlctl.weights.megatron import MegatronWorld

SOURCE, ENGINE = "rlctl.refit.synthetic:SyntheticSender", "rlctl.backends.vllm.engine:VllmEngine"
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 32, 32
LIMIT_S = 280.0
NOISE = 0.02


def llama_of(gigabytes: float) -> ModelFacts:
    """Return a Llama of about this size in bfloat16, with tensors as wide as those of published models."""
    layer = 4 * 2048 * 2048 // 2 * 3 // 2 + 3 * 2048 * 5632
    layers = max(1, round((gigabytes * 5e8 - 2 * 16000 * 2048) / layer))
    return ModelFacts("llama", layers, 2048, 16, 8, 128, 5632, 16000, 4096, norm_eps=1e-5)


def write_model(directory: Path, facts: ModelFacts, dtype: str = "bfloat16") -> None:
    """Write a Hugging Face directory without weights; the engine holds noise until the first refit."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    LlamaConfig(
        hidden_size=facts.hidden, intermediate_size=facts.intermediate, num_hidden_layers=facts.layers,
        num_attention_heads=facts.heads, num_key_value_heads=facts.kv_heads, head_dim=facts.head_dim,
        vocab_size=facts.vocab, max_position_embeddings=facts.max_length, rms_norm_eps=facts.norm_eps,
        tie_word_embeddings=False, torch_dtype=dtype, architectures=["LlamaForCausalLM"],
        bos_token_id=1, eos_token_id=2,
    ).save_pretrained(directory)  # fmt: skip
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>").save_pretrained(directory)


@contextmanager
def engine_process(
    facts: ModelFacts, directory: Path, *, plain: bool, threads: int, dtype: str
) -> Iterator[WorkerGroup]:
    """Start the process of an engine alone, with random weights."""
    config = resolve(None, [], {"generation.plain_parameters": plain}, []).config
    spec = engine_spec(config, facts, directory, device="cpu", max_length=256, dtype=dtype, threads=threads,
                       dummy_weights=True)  # fmt: skip
    logs = directory / "logs"
    logs.mkdir()
    placement = Placement(1, gpus=False, timeout_s=LIMIT_S)
    worker = WorkerSpec({"worker": ENGINE, "spec": spec}, (placement.bundles[0],), spec.environment)
    group: WorkerGroup | None = None
    try:
        group = WorkerGroup("engine", ENGINE_PROCESS, [worker], placement, logs, start_timeout_s=LIMIT_S,
                            call_timeout_s=LIMIT_S, concurrency=2)  # fmt: skip
        group.call(EpisodeWorker.start)
        yield group
    finally:
        if group is not None:
            group.kill()
        placement.release()


@contextmanager
def processes(facts: ModelFacts, directory: Path, *, plain: bool, threads: int) -> Iterator[tuple[Any, Any]]:
    """Start the processes of the policy and of the engine."""
    config = resolve(None, [], {"generation.plain_parameters": plain}, []).config
    spec = engine_spec(config, facts, directory, device="cpu", max_length=256, dtype="bfloat16", threads=threads,
                       dummy_weights=True)  # fmt: skip
    logs = directory / ("logs-plain" if plain else "logs-repacked")
    logs.mkdir()
    placement = Placement(1, gpus=False, timeout_s=LIMIT_S)
    world = MegatronWorld(facts, ParallelSpec(), "local", "bfloat16")
    policy = {"rank": 0, "world": world, "threads": threads}
    engine = WorkerSpec({"worker": ENGINE, "spec": spec}, (placement.bundles[0],), spec.environment)
    source = WorkerSpec(policy, (placement.bundles[0],), {"OMP_NUM_THREADS": str(threads)})
    groups: list[WorkerGroup] = []
    try:
        for name, kind, worker in (("policy", SOURCE, source), ("engine", ENGINE_PROCESS, engine)):
            groups.append(WorkerGroup(name, kind, [worker], placement, logs, start_timeout_s=LIMIT_S,
                                      call_timeout_s=LIMIT_S, wait=False, concurrency=2))  # fmt: skip
        for group in groups:
            group.ready()
        groups[0].call(SyntheticSender.setup)
        groups[1].call(EpisodeWorker.start)
        yield groups[0], groups[1]
    finally:
        for group in groups:
            group.kill()
        placement.release()


def decode(engine: WorkerGroup, seed: int) -> float:
    """Return the generated tokens per second of `PROMPTS` samples at once; the time includes their prompts."""
    requests = [
        GroupRequest(i, tuple(3 + (7 * i + 11 * j + seed) % 1000 for j in range(PROMPT_TOKENS)), (seed + i,))
        for i in range(PROMPTS)
    ]
    begun = time.perf_counter()
    results = engine.within(LIMIT_S).call(EpisodeWorker.generate, requests, Sampling(NEW_TOKENS), LIMIT_S)[0]
    return sum(sum(result.response_tokens) for result in results) / (time.perf_counter() - begun)


def measure(
    policy: WorkerGroup, engine: WorkerGroup, facts: ModelFacts, *, receive: Receive, mover: str, staging_mb: int,
    repeats: int, changed: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure one way to receive: refits into the engine, of which the first is verified, then decoding.

    With `changed`, that share of the elements changes between refits, and only these elements are sent.
    """
    flags = {"refit.staging_mb": staging_mb, "refit.sparse": changed is not None, "refit.mover": mover}
    settings = resolve(None, [], flags, []).config.refit
    receivers = engine.held(EpisodeWorker.engine)
    session = RefitSession(policy, receivers, facts, settings=settings, dtype="bfloat16", receive=receive)
    session.open()
    reports = [session.refit(1, verify=True)]
    for version in range(2, repeats + 2):
        policy.call(WeightSender.refit_perturb, version, NOISE, changed or 1.0)
        reports.append(session.refit(version, verify=version == repeats + 1))
    speed = policy.call(WeightSender.refit_copy_gb_per_s, session.payload_bytes)[0]
    best = min(reports[1:], key=lambda report: sum(report.seconds.values()))
    seconds = sum(best.seconds.values())
    found = {
        "receive": best.receive, "mover": best.mover, "payload_bytes": best.bytes, "staging_mb": staging_mb,
        "seconds": seconds,
        "seconds_first": sum(reports[0].seconds.values()), "sent_bytes": best.sent_bytes, "sparse": best.sparse,
        "phases": {phase.value: value for phase, value in best.seconds.items()}, "packing_s": best.packing_s,
        "memcpy_gb_per_s": speed, "fraction_of_memcpy": best.bytes / 1e9 / seconds / speed,
        "verified": reports[-1].verified,
        "tokens_per_s": max(decode(engine, seed) for seed in range(2)),
    }  # fmt: skip
    session.close()
    return found


def engine(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every way to receive, for every size."""
    found = []
    for gigabytes in args.gb:
        facts = llama_of(gigabytes)
        with tempfile.TemporaryDirectory(prefix="refit-engine-") as work, ray_session(None):
            write_model(Path(work), facts)
            for plain in [kept == "plain" for kept in args.kept]:
                with processes(facts, Path(work), plain=plain, threads=args.threads) as (policy, one):
                    ways: list[tuple[Receive, float | None]] = [(way, None) for way in args.receive]
                    ways += [("direct", share) for share in args.changed] if plain else []
                    for receive, changed in ways:
                        row = measure(policy, one, facts, receive=receive, mover=args.mover,
                                      staging_mb=args.staging_mb, repeats=args.repeats, changed=changed)  # fmt: skip
                        found.append(row | {"kept": "plain" if plain else "repacked", "asked": receive})
                        tell(found[-1])
    return {"engine": found}


def tell(row: dict[str, Any]) -> None:
    sent = f", {row['sparse']}, {row['sent_bytes'] / 1e6:.1f} MB sent" if row["sparse"] else ""
    print(f"{row['payload_bytes'] / 1e9:.2f} GB, {row['mover']}, {row['kept']:<9}{row['asked']:<7}({row['receive']}): "
          f"{row['seconds']:.3f} s (first {row['seconds_first']:.3f}), {row['fraction_of_memcpy']:.2f} of memcpy "
          f"({row['memcpy_gb_per_s']:.1f} GB/s), {row['tokens_per_s']:.1f} tokens/s{sent}", flush=True)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gb", type=float, nargs="+", default=[0.5])
    parser.add_argument("--kept", nargs="+", choices=("plain", "repacked"), default=["repacked", "plain"],
                        help="how the engine keeps matrices")  # fmt: skip
    parser.add_argument("--receive", nargs="*", choices=("loader", "direct", "auto"), default=["loader", "auto"])
    parser.add_argument(
        "--changed",
        type=float,
        nargs="*",
        default=[0.01, 0.03],
        help="shares of the elements that change and are sent alone (with plain parameters)",
    )
    parser.add_argument("--mover", choices=("auto", "shared-memory", "collective"), default="auto")
    parser.add_argument("--staging-mb", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
