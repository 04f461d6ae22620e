"""Compares the planner with published runs: whether they fit, how long they take, and which layout it would choose.

    python benchmarks/planner.py [--data benchmarks/data] [--rows] [--fit]

`--rows` prints every row. `--fit` fits the constants within their bounds without each publication and each model in
turn, and prints the errors on what was left out.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))

from published_refits import gathered_refit_s, show_shard_to_shard
from published_rows import PROVEN, Row, device_of, facts_of, size, usable, workload_of
from published_steps import left_out, model_of, read_steps, show_choices, show_fit, show_ranges, show_steps

from rlctl.errors import RlctlError
from rlctl.models.catalog import lookup
from rlctl.planner.choice import GenerationChoice
from rlctl.planner.costs import memory as mem
from rlctl.planner.costs import time as timing
from rlctl.planner.costs.engines import (
    generation_time,
    overhead_bytes,
    plan_kv,
    steady_generation_time,
    weight_bytes,
)
from rlctl.planner.costs.parameters import count
from rlctl.planner.inputs.cluster import GIB, make_cluster
from rlctl.planner.inputs.constants import DEFAULTS, Constants
from rlctl.planner.inputs.request import Request, Workload
from rlctl.planner.make_plan import make_plan

CUDA_GRAPHS = {"layer_host_s": 0.0, "moe_layer_host_s": 0.001, "micro_batch_host_s": 0.0, "host_exposed": 0.0}
"""Megatron-Bridge's tables are of runs with CUDA graphs, which leave the host little to do."""


def for_row(row: Row, constants: Constants) -> Constants:
    """Adapt the constants to Megatron-Bridge's tables: CUDA graphs, balanced routing, a fused cross-entropy, rows of a
    fixed length, and Megatron-FSDP, whose communication is hidden where computation is long enough."""
    if row.fields["kind"] != "pretrain" and "megatron-bridge perf" not in row.fields["source"]:
        return constants
    return replace(
        constants, expert_imbalance=1.0, logit_copy_bytes=0.0, gather_overlap=1.0, backward_overlap=1.0,
        matmul_efficiency=0.72, network_efficiency=0.75, **CUDA_GRAPHS,
    )  # fmt: skip


def request_of(row: Row, constants: Constants = DEFAULTS) -> Request:
    """Return what the costs of a published layout are computed from."""
    return Request(row.facts, row.cluster, row.workload, constants=constants)


@dataclass(frozen=True)
class Fit:
    """The memory of a published layout by phase, and the phases in which it does not fit."""

    row: Row
    training: mem.PhaseMemory
    recompute: str
    problems: tuple[str, ...]

    @property
    def headroom(self) -> float:
        return self.row.cluster.device.memory - self.training.total


def fit_of(row: Row, constants: Constants = DEFAULTS) -> Fit:
    """Compare the memory of a published layout with the device.

    Where a pretraining table does not state recomputation, the least that fits is assumed.
    """
    constants = for_row(row, constants)
    device = row.cluster.device.memory
    asleep = constants.engine_asleep_bytes if row.colocated and row.generation else 0.0
    request = request_of(row, constants)
    number, _ = timing.micro_batches(request, row.training)
    modes = ["none", "selective", "full"] if row.fields["kind"] == "pretrain" else [row.training.recompute]
    for mode in modes:
        choice = replace(row.training, recompute=mode)
        memory = mem.training_memory(request, choice, asleep, number)
        if memory.total <= device:
            break
    problems = [] if memory.total <= device else [f"training {memory.total / GIB:.0f} of {device / GIB:.0f} GiB"]
    if row.generation is not None:
        problems += generation_fit(row, row.generation, constants)
    return Fit(row, memory, mode, tuple(problems))


def generation_fit(row: Row, generation: GenerationChoice, constants: Constants) -> list[str]:
    request = request_of(row, constants)
    _, tokens = plan_kv(request, generation)
    problems = []
    if tokens < row.workload.max_length:
        problems.append(f"KV cache of {tokens} tokens, one sequence needs {row.workload.max_length}")
    if row.colocated:
        refit = mem.refit_memory(request, row.training, weight_bytes(row.facts, generation))
        if refit.total > row.cluster.device.memory:
            problems.append(f"refit {refit.total / GIB:.0f} GiB")
    return problems


def seconds_of(row: Row, constants: Constants = DEFAULTS) -> dict[str, float]:
    """Predict the seconds of the published layout by phase, and their `total`."""
    constants = for_row(row, constants)
    choice = replace(row.training, recompute=fit_of(row, constants).recompute)
    request = request_of(row, constants)
    seconds = {"training": timing.training_time(request, choice, row.colocated).total}
    if row.generation is not None:
        generation = sized(row, row.generation, constants)
        if row.workload.overlaps:
            seconds["generation"] = steady_generation_time(request, generation)
        else:
            seconds["generation"] = generation_time(request, generation).total
        seconds["logprobs"] = timing.logprobs_time(request, choice)
        refit = gathered_refit_s if row.colocated else partial(timing.refit_time, colocated=False)
        seconds["refit"] = refit(request, choice, generation)
        seconds["other"] = constants.other_s + constants.reward_s
        if row.workload.overlaps and not row.colocated:
            return seconds | {"total": sum(seconds.values()) - min(sides_of(seconds))}
    return seconds | {"total": sum(seconds.values())}


def sides_of(seconds: dict[str, float]) -> tuple[float, float]:
    """Return the seconds in which the policy works, and those in which the engines do."""
    return seconds["training"] + seconds["logprobs"], seconds["generation"]


def sized(row: Row, generation: GenerationChoice, constants: Constants) -> GenerationChoice:
    free, tokens = plan_kv(request_of(row, constants), generation)
    return replace(generation, kv_cache_bytes=free, kv_cache_tokens=max(1, tokens))


def section(title: str) -> None:
    print(f"\n== {title}")


# --- fits


def show_fits(rows: list[Row], every: bool) -> None:
    section("Published and CI-tested configurations: does the planner say that they fit?")
    proven = [row for row in rows if row.fields["status"] in PROVEN]
    for kinds, label in (
        (("rl", "off-policy distillation"), "RL"),
        (("sft/dpo/rm",), "SFT, DPO"),
        (("pretrain",), "pretraining"),
    ):
        chosen = [fit_of(row) for row in proven if row.fields["kind"] in kinds]
        good = [fit for fit in chosen if not fit.problems]
        print(f"{label:<12} {len(good)} of {len(chosen)} fit ({100 * len(good) / max(1, len(chosen)):.1f}%)")
        for fit in chosen:
            if fit.problems or every:
                print(f"   {fit.row.name} {fit.row.training.name():<34} {'; '.join(fit.problems) or 'fits'}")


def show_squeezed(rows: list[Row], every: bool) -> None:
    section("The same with half the GPUs, and with four times the length: refused, or its headroom in GiB")
    counts: Counter[str] = Counter()
    for row in rows:
        if row.fields["status"] not in PROVEN or row.fields["kind"] == "pretrain" or fit_of(row).problems:
            continue
        cells = []
        for label, squeezed in (("half", halved(row)), ("4x length", longer(row))):
            if squeezed is None:
                cells.append(f"{label}: refused (cannot be split over fewer)")
                counts[f"{label} refused"] += 1
                continue
            fit = fit_of(squeezed)
            counts[f"{label} {'refused' if fit.problems else 'fits with headroom'}"] += 1
            verdict = (
                f"refused ({fit.problems[0]})"
                if fit.problems
                else f"{fit.headroom / GIB:.0f} of {row.cluster.device.memory / GIB:.0f} free"
            )
            cells.append(f"{label}: {verdict}")
        if every:
            print(f"   {row.name} {'; '.join(cells)}")
    print("  ".join(f"{key}: {value}" for key, value in sorted(counts.items())))


def halved(row: Row) -> Row | None:
    """Halve the training GPUs: data parallelism first, then pipeline, context, tensor. None: it is one GPU already."""
    t = row.training.parallel
    for key in ("dp", "pp", "cp", "tp"):
        value = getattr(t, key)
        if value % 2 == 0:
            ep = min(t.ep, t.tp * t.cp * t.dp // 2) if t.ep > 1 else 1
            smaller = replace(t, **{key: value // 2, "ep": ep})
            smaller = replace(smaller, vpp=1 if smaller.pp == 1 else smaller.vpp)
            return replace(row, training=replace(row.training, parallel=smaller))
    return None


def longer(row: Row) -> Row:
    workload = replace(row.workload, max_length=4 * row.workload.max_length)
    training = replace(row.training, micro_batch_tokens=4 * row.training.micro_batch_tokens)
    return replace(row, workload=workload, training=training)


IMPOSSIBLE = (
    # model, gpu, nodes, GPUs a node, length, pins: what it leaves out
    ("meta-llama/Llama-3.1-70B", "h100", 1, 1, 4096, {}),
    ("meta-llama/Llama-3.1-70B", "h100", 1, 8, 4096, {"training.tp": 1, "training.optimizer_offload": False}),
    ("meta-llama/Llama-3.1-405B", "h100", 1, 8, 4096, {}),
    ("meta-llama/Llama-3.1-405B", "h100", 8, 8, 8192, {"training.optimizer_offload": False}),
    ("deepseek-ai/DeepSeek-V3", "h100", 1, 8, 4096, {}),
    ("deepseek-ai/DeepSeek-V3", "h100", 8, 8, 4096, {"training.optimizer_offload": False}),
    ("deepseek-ai/DeepSeek-V3", "h200", 16, 8, 4096, {"training.ep": 1, "training.pp": 1}),
    ("Qwen/Qwen3-235B-A22B", "h100", 2, 8, 4096, {"training.optimizer_offload": False}),
    ("Qwen/Qwen3-235B-A22B", "a100-40gb", 4, 8, 4096, {"training.optimizer_offload": False}),
    ("Qwen/Qwen3-32B", "h100", 1, 1, 4096, {}),
    ("Qwen/Qwen3-32B", "l40s", 1, 4, 4096, {}),
    ("Qwen/Qwen3-30B-A3B", "h100", 1, 1, 4096, {}),
    ("meta-llama/Llama-3.1-8B", "h100", 1, 1, 4096, {"training.optimizer_offload": False}),
    ("meta-llama/Llama-3.1-8B", "l4", 1, 8, 4096, {"training.tp": 1, "training.pp": 1}),
    ("meta-llama/Llama-3.1-8B", "rtx4090", 1, 1, 2048, {}),
    ("meta-llama/Llama-3.1-8B", "h100", 1, 8, 1_000_000, {"training.cp": 1, "training.tp": 1}),
    ("Qwen/Qwen2.5-7B", "h100", 1, 8, 8192, {"generation.memory_fraction": 0.15, "generation.tp": 1}),
    ("Qwen/Qwen2.5-72B", "a100", 1, 8, 4096, {"training.optimizer_offload": False}),
    ("moonshotai/Kimi-K2-Instruct", "h100", 16, 8, 4096, {"training.optimizer_offload": False}),
    ("meta-llama/Llama-3.1-8B", "h100", 1, 8, 4096, {"training.tp": 3}),
    ("Qwen/Qwen3-30B-A3B", "h100", 8, 8, 4096, {"training.ep": 24}),
    ("meta-llama/Llama-3.1-70B", "h100", 8, 8, 4096, {"training.pp": 128}),
)  # fmt: skip


def show_impossible() -> None:
    section("Deliberately impossible requests: all must be refused")
    refused = 0
    for model, gpu, nodes, per_node, length, pins in IMPOSSIBLE:
        facts = lookup(model)
        assert facts is not None
        label = f"{model.rsplit('/', 1)[-1]} on {nodes} x {per_node} {gpu}, {length} tokens {pins or ''}"
        try:
            asked = pins | {"training.backend": "megatron"}  # whose layouts they are
            plan = make_plan(Request(facts, make_cluster(gpu, nodes, per_node), Workload(64, 16, length), asked))
            print(f"   NOT refused: {label}: {plan.name()}")
        except RlctlError as error:
            refused += 1
            print(f"   {label}: {error.message[:120]} {(error.hint or '')[:110]}")
    print(f"{refused} of {len(IMPOSSIBLE)} refused")


def show_memory_bounds(rows: list[Row]) -> None:
    section(
        "Memory against CI bounds (GB, maximum over GPUs) and published peaks: predicted must be below, and not "
        "far below"
    )
    for row in rows:
        text = row.fields["ci_gpu_mem_bound_gb"]
        if text:
            limit = float("".join(c for c in text.rsplit("<", 1)[1] if c.isdigit() or c == "."))
            predicted = fit_of(row).training.total / 1e9
            if row.generation is not None and row.generation.memory_fraction:
                predicted = max(predicted, row.generation.memory_fraction * row.cluster.device.memory / 1e9)
            print(
                f"   {row.name} predicted {predicted:5.1f} GB, bound {limit:.0f}: "
                f"{'below' if predicted < limit else 'ABOVE'} ({predicted / limit:.2f})"
            )
        notes = row.fields["notes"]
        if "peak" in notes:
            fit = fit_of(row)
            print(
                f"   {row.name} predicted {fit.training.total / GIB:5.1f} GiB ({fit.training.total / 1e9:.1f} GB); "
                f"published: {notes[:80]}"
            )


def show_vllm_profile(path: Path) -> None:
    section("vLLM's memory on an H100 against its published profile (GiB)")
    names = {"Llama-3.3-70B-FP8": "Llama-3.3-70B-Instruct", "Mistral-Small-3.2-24B": "Mistral-Small-24B-Base-2501"}
    errors = []
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            facts = lookup(names.get(line["model"], line["model"]))
            if facts is None or not line["activation_gib"]:
                continue
            old = "pre-0.17" in line["vllm"] or "v0.15" in line["vllm"]
            constants = replace(DEFAULTS, sampler_bytes=40.0 if old else 16.0)
            quantized = 1.0 if "FP8" in line["model"] else 0.55 if "gpt-oss" in line["model"] else 2.0
            choice = GenerationChoice(
                1, int(line["tp"] or 1), max_concurrent=1024, weight_bytes=quantized, memory_fraction=0.9
            )
            choice = replace(choice, memory_fraction=float(line["gpu_memory_utilization"] or 0.9))
            parts = overhead_bytes(facts, choice, constants)
            text = (
                f"   {line['model']:<22} TP{choice.tp} {line['vllm'][:16]:<16} activations "
                f"{parts['activations'] / GIB:5.2f} published {line['activation_gib']}"
            )
            errors.append(abs(parts["activations"] / GIB / float(line["activation_gib"]) - 1))
            if line["weights_gib"]:
                text += f"  weights {weight_bytes(facts, choice) / GIB:6.2f} published {line['weights_gib']}"
            if line["kv_cache_gib"]:
                free, _ = plan_kv(Request(facts, make_cluster("h100"), constants=constants), choice)
                text += f"  KV {free / GIB:6.2f} published {line['kv_cache_gib']}"
            print(text)
    print(f"median error of activations {100 * median(errors):.0f}%")


# --- times


PHASES = {"training": "train_s", "generation": "gen_s", "refit": "refit_s", "logprobs": "logprob_s"}


def show_published_steps(data: Path, every: bool, refit: bool) -> None:
    """Compare the plans of `rlctl plan` with published step times; `refit` the constants without a part of them."""
    section("Published step times: the plan of each recipe, with its layout, against what was published")
    steps = read_steps(data)
    columns = {}
    if refit:
        columns["each publication left out of the fit"] = left_out(steps, lambda step: step.publication)
        columns["each model on each GPU left out of the fit"] = left_out(steps, model_of)
    columns["all rows in the fit"] = {i: step.errors(DEFAULTS) for i, step in enumerate(steps)}
    show_steps(steps, every, columns)
    section("The planner's own choice against the published layout, both predicted")
    show_choices(steps)
    if refit:
        section("Ranges that hold nine of ten published times (published over predicted), each publication left out")
        show_ranges(next(iter(columns.values())))
        section("The constants, fitted to all rows")
        show_fit(steps)


def show_backends(rows: list[Row]) -> None:
    section("Both backends, published for one model and machine: does the prediction keep their order?")
    pairs: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        backend = row.fields["train_backend"]
        if row.published("train_s") is not None and row.fields["kind"] == "rl" and backend in ("megatron", "dtensor"):
            pairs.setdefault((row.fields["model"], row.cluster.gpus), {})[backend] = row
    for (model, gpus), pair in pairs.items():
        if len(pair) < 2:
            continue
        cells, order = [], []
        for phases in (("training", "logprobs"), ("total",)):
            predicted, seen = ([sum(one[phase] for phase in phases) for one in two] for two in (
                [seconds_of(pair[name]) for name in ("megatron", "dtensor")],
                [{"total": row.published("step_time_s")} | {p: row.published(f) for p, f in PHASES.items()}
                 for row in (pair["megatron"], pair["dtensor"])],
            ))  # fmt: skip
            cells.append(f"{' and '.join(phases)} {predicted[1] / predicted[0]:.2f} / {seen[1] / seen[0]:.2f}")
            order.append((predicted[1] > predicted[0]) == (seen[1] > seen[0]))
        verdict = "the same order" if all(order) else "ANOTHER ORDER"
        row = pair["megatron"]
        own = make_plan(Request(row.facts, row.cluster, row.workload, gradient_bytes=2))
        print(f"   {model} on {gpus}: dtensor over megatron, predicted / published: {'; '.join(cells)}: {verdict}; "
              f"auto chooses {own.backend}")  # fmt: skip


def bound_of(row: Row) -> float | None:
    text = row.fields["ci_step_time_bound_s"]
    if "<" not in text:
        return None
    return float("".join(c for c in text.rsplit("<", 1)[1].split()[0] if c.isdigit() or c == "."))


def show_bounds(rows: list[Row], every: bool) -> None:
    section("CI bounds on step time: predicted total must be below (mean lengths are not published: 40% of the limit)")
    below = total = 0
    for row in rows:
        limit = bound_of(row)
        if limit is None:
            continue
        if (
            not row.workload.rollouts
        ):  # supervised rows pad to the longest of a micro-batch, whose length is not published
            row = replace(row, workload=replace(row.workload, max_length=int(0.4 * row.workload.max_length)))
            row = replace(
                row, training=replace(row.training, micro_batch_tokens=int(0.4 * row.training.micro_batch_tokens))
            )
        seconds = seconds_of(row)["total"]
        total, below = total + 1, below + (seconds <= limit)
        if every or seconds > limit:
            print(f"   {row.name} predicted {seconds:6.1f} bound {limit:6.1f} ({seconds / limit:.2f})")
    print(f"{below} of {total} below their bound")


def show_throughput(rows: list[Row], every: bool) -> None:
    section("Published tokens/s a GPU (pretraining, and LoRA): predicted / published")
    errors: dict[str, list[float]] = {}
    for row in rows:
        seen = throughput(row)
        if seen is None:
            continue
        made = row.workload.tokens(1.0) / seconds_of(row)["training"] / row.cluster.gpus
        errors.setdefault(kind_of(row), []).append(abs(made / seen - 1))
        if every:
            print(
                f"   {row.name} {row.training.precision:<5} {made:7.0f} / {seen:7.0f} ({made / seen:.2f})  "
                f"{row.fields['source'][-28:]}"
            )
    for kind, values in errors.items():
        print(f"{kind}: median error {100 * median(values):.0f}% of {len(values)} rows")
    show_releases(rows)


def show_releases(rows: list[Row]) -> None:
    """Return how much releases of the software differ with the same layout on the same machine.

    No prediction from the stated columns can tell these apart.
    """
    groups: dict[tuple[str, tuple], list[float]] = {}
    for row in rows:
        seen = throughput(row)
        if seen is not None:
            key = (row.facts, row.cluster, row.training, row.workload)
            groups.setdefault((kind_of(row), key), []).append(seen)
    for kind in dict.fromkeys(kind for kind, _ in groups):
        many = [values for (of, _), values in groups.items() if of == kind and len(values) > 1]
        if not many:
            continue
        spread = [max(values) / min(values) - 1 for values in many]
        best = [abs(seen / median(values) - 1) for values in many for seen in values]
        print(
            f"{kind}: {len(many)} layouts were published more than once: fastest over slowest release "
            f"{100 * median(spread):.0f}% in the median, {100 * max(spread):.0f}% at most; each layout's own median "
            f"would be {100 * median(best):.0f}% off in the median, {100 * max(best):.0f}% at most"
        )


def kind_of(row: Row) -> str:
    return "LoRA" if row.training.adapters else "MoE" if row.facts.moe else "dense"


def throughput(row: Row) -> float | None:
    if row.fields["kind"] != "pretrain" and not (row.training.adapters and not row.workload.rollouts):
        return None
    seen = row.published("tokens_per_s_per_gpu")
    step = row.published("step_time_s")
    return seen or (row.workload.tokens(1.0) / step / row.cluster.gpus if step else None)


# --- own choice


def show_divisions(rows: list[Row]) -> None:
    section(
        "Engines on devices of their own: the published division of the devices, and the planner's (policy + engines)"
    )
    ratios = []
    for row in rows:
        if row.colocated or row.generation is None or row.fields["train_backend"] != "megatron":
            continue
        seconds = seconds_of(row)
        policy, engines = sides_of(seconds)
        waits = "policy" if engines > policy else "engines"
        pins = {"generation.colocated": False}
        try:
            plan = make_plan(
                Request(row.facts, row.cluster, row.workload, pins, gradient_bytes=row.training.gradient_bytes),
                prefer_runnable=False,
            )
        except RlctlError as error:
            print(f"   {row.name} no plan: {error.message[:90]}")
            continue
        assert plan.training is not None
        own, theirs = plan.training.parallel.world_size, row.training.parallel.world_size
        ratios.append(plan.total_s / seconds["total"])
        print(
            f"   {row.name} {'async' if row.workload.overlaps else 'turns'} published "
            f"{theirs} + {row.generation.gpus}: {seconds['total']:.0f} s, policy {policy:.0f} "
            f"and engines {engines:.0f} ({waits} wait); own {own} + {plan.engine_devices}: "
            f"{plan.total_s:.0f} s ({ratios[-1]:.2f})"
        )
    print(f"{len(ratios)} rows; own over published seconds: median {median(ratios):.2f}, largest {max(ratios):.2f}")


def show_partly_stated(skipped: list[tuple[int, dict[str, str], str]]) -> None:
    """Compare rows that state a part of their layout: the best plan with that part pinned, the planner's own choice,
    and the published phases."""
    for number, fields, why in skipped:
        if why != "TP and PP not stated" or not fields["step_time_s"]:
            continue
        cluster = make_cluster(device_of(fields), size(fields, "num_nodes"), size(fields, "gpus_per_node"))
        facts, workload, cp = facts_of(fields), workload_of(fields), size(fields, "cp")
        own, pinned = (
            make_plan(Request(facts, cluster, workload, pins, gradient_bytes=2), prefer_runnable=False)
            for pins in ({}, {"training.cp": cp})
        )
        seconds = {phase.value: value for phase, value in pinned.seconds.items()}
        cells = "  ".join(f"{phase} {seconds[phase]:.0f}/{fields[field]}" for phase, field in PHASES.items())
        gain = own.total_s / pinned.total_s - 1
        print(
            f"   {number:>3} {fields['model'].rsplit('/', 1)[-1]} on {cluster.gpus}: published CP{cp} (TP and PP not "
            f"stated); best with it {pinned.name()}: {pinned.total_s:.0f} s; own {own.name()}: "
            f"{own.total_s:.0f} s ({100 * gain:+.1f}%)\n       phases predicted/published: {cells}"
        )
        tokens = workload.samples * workload.max_length
        print(
            f"       {workload.tokens(DEFAULTS.length_sigma) / 1e6:.1f} M tokens a step in packed rows; padded to "
            f"{workload.max_length} they would be {tokens / 1e6:.1f} M, and forward passes of those alone "
            f"{2 * count(facts).total * tokens / cluster.gpus / 4e14:.0f} s at 400 TFLOP/s a GPU"
        )


def show_speed() -> None:
    section("Planning time: 671B MoE on 10,000 GPUs (limit 2 s)")
    facts = lookup("deepseek-ai/DeepSeek-V3")
    assert facts is not None
    for nodes in (32, 1250):
        began = time.perf_counter()
        plan = make_plan(Request(facts, make_cluster("h100", nodes), Workload(512, 32, 16384, mean_new_tokens=4000)))
        print(f"   {nodes * 8} GPUs: {time.perf_counter() - began:.2f} s: {plan.name()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--rows", action="store_true", help="print rows that are fine, too")
    parser.add_argument("--fit", action="store_true", help="fit without each publication, and each model")
    arguments = parser.parse_args()
    rows, skipped = usable(arguments.data / "published_recipes.csv")
    reasons = Counter(why.split(":")[0] for _, fields, why in skipped if fields["status"] in PROVEN)
    print(f"{len(rows)} rows can be planned; of the others that ran: {dict(reasons)}")
    show_fits(rows, arguments.rows)
    show_impossible()
    show_squeezed(rows, arguments.rows)
    show_memory_bounds(rows)
    show_vllm_profile(arguments.data / "vllm_memory_profile.csv")
    show_published_steps(arguments.data, arguments.rows, arguments.fit)
    show_backends(rows)
    section("Published refits from shard to shard: predicted / published seconds")
    show_shard_to_shard(arguments.data / "refit_numbers.csv")
    show_bounds(rows, arguments.rows)
    show_throughput(rows, arguments.rows)
    show_divisions(rows)
    show_partly_stated(skipped)
    show_speed()


if __name__ == "__main__":
    main()
