"""A plan as JSON for programs and as text for people."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable
from typing import Any

from rlctl.errors import NoPlanError
from rlctl.models.facts import ModelFacts
from rlctl.planner.choice import TEACHER_SIZES, TRAINING_CHOSEN
from rlctl.planner.costs.checkpoint import save_of
from rlctl.planner.costs.memory import memory_checkpoint_bytes, waiting_bytes
from rlctl.planner.costs.parameters import count
from rlctl.planner.inputs.cluster import GIB
from rlctl.planner.inputs.request import Workload
from rlctl.planner.result import NextBest, Plan
from rlctl.telemetry.phases import Phase

INDENT = " " * 14
ENGINE_ROWS = (
    "engines", "tp", "pp", "dp", "ep", "memory_fraction", "kv_cache_bytes", "kv_cache_tokens", "max_concurrent",
    "max_batched_tokens", "threads",
)  # fmt: skip


WORK = (
    "algorithm", "prompts", "generations", "prompt_tokens", "image_tokens", "measured", "mean_new_tokens",
    "max_new_tokens", "max_length",
)  # fmt: skip
WIDTH, LEAST_WIDTH = 100, 76
"""Columns that a plan takes at most, and at least, as its tables do."""


def columns() -> int:
    """Return the line width: the terminal's (or COLUMNS), up to a plan's maximum."""
    return max(LEAST_WIDTH, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))


def plan_json(plan: Plan) -> dict[str, Any]:
    """The object of `rlctl plan --json`; memory in GiB, seconds a step."""
    training, generation = None, None
    if plan.training is not None:
        training = {"backend": plan.backend} | plan.training.chosen()
        training |= {"precision": plan.training.precision, "threads": plan.training.threads}
        training |= {"accumulation": plan.micro_batches, "world_size": plan.training.parallel.world_size}
    if plan.generation is not None:
        generation = {key: getattr(plan.generation, key) for key in ENGINE_ROWS}
        generation["kv_cache_bytes"] = int(plan.generation.kv_cache_bytes)
        generation["devices"] = plan.engine_devices or None
    teacher = None
    if plan.teacher is not None:
        teacher = {size: getattr(plan.teacher.choice.parallel, size) for size in TEACHER_SIZES}
        teacher |= {"world_size": plan.teacher.choice.parallel.world_size, "seconds": round(plan.teacher.seconds, 3)}
    beside = plan.beside
    return {
        "fits": True,
        "runnable": plan.runnable,
        "not_runnable_because": plan.not_runnable_because,
        "cluster": {
            "gpu": plan.cluster.device.name,
            "nodes": plan.cluster.nodes,
            "gpus_per_node": plan.cluster.gpus_per_node,
            "memory_gib": round(plan.cluster.device.memory / GIB, 1),
            "rates": plan.cluster.origin,
            "factors": dict(plan.cluster.factors),
        },
        "workload": {key: getattr(plan.workload, key) for key in WORK},
        "training": training,
        "generation": generation,
        "teacher": None,
        **({plan.teacher.role: teacher} if plan.teacher is not None else {}),
        "colocated": plan.colocated,
        "mover": plan.mover,
        "memory_gib": {phase: memory.gib() for phase, memory in plan.memory.items()},
        "host_memory_gib": round(plan.host_memory / GIB, 2),
        "checkpoint": _checkpoint(plan),
        "seconds": {phase.value: round(seconds, 3) for phase, seconds in plan.seconds.items()}
        | {"total": round(plan.total_s, 3)},
        "seconds_range": {name: [round(low, 1), round(high, 1)] for name, (low, high) in plan.ranges.items()},
        "waits": plan.waits and {side: round(seconds, 3) for side, seconds in plan.waits.items()},
        "beside": beside and {"plan": beside.name(), "seconds": round(beside.total_s, 3)},
        "tokens_per_s_per_gpu": round(plan.tokens_per_s_per_gpu, 2),
        "mfu": round(plan.mfu, 4),
        "next_best": [vars(alternative) for alternative in plan.next_best],
        "reasons": [{"value": reason.value, "rule": reason.rule} for reason in plan.reasons],
        "rejected": [{"plan": other.plan, "why": other.why} for other in plan.rejected],
    }


NULL = (
    "cluster", "workload", "training", "generation", "teacher", "colocated", "mover", "host_memory_gib", "checkpoint",
    "waits", "beside", "tokens_per_s_per_gpu", "mfu", "seconds_range",
)  # fmt: skip
"""Keys of `plan_json` that are null where nothing fits."""


def _checkpoint(plan: Plan) -> dict[str, float] | None:
    """Return the size of a checkpoint in GB and the seconds to save it; None: the run saves nothing."""
    if plan.training is None or not plan.request.saves:
        return None
    save = save_of(plan.request, plan.training, plan.save_copies)
    return {"gb": round(save.size / 1e9, 2), "copy_s": round(save.copy_s, 1), "write_s": round(save.write_s, 1)}


def no_plan_values(error: NoPlanError) -> dict[str, Any]:
    """The same keys where nothing fits."""
    return {
        "fits": False,
        "runnable": False,
        "not_runnable_because": [error.message],
        **dict.fromkeys(NULL),
        "memory_gib": {},
        "seconds": dict.fromkeys([*(phase.value for phase in Phase), "total"]),
        "next_best": [],
        "reasons": [],
        "rejected": [{"plan": plan, "why": reason} for plan, reason in error.rejected],
    }


def plan_text(plan: Plan, model: str, reasons: bool = True) -> str:
    training, teacher, generation, cluster = plan.training, plan.teacher, plan.generation, plan.cluster
    active = f", {count(plan.facts).active / 1e9:.1f}B active" if plan.facts.moe is not None else ""
    lines = [f"{model} ({_size(plan.facts)}{active}) on {cluster.describe()}", ""]
    lines += wrapped(_work(plan.workload), "  workload    ", INDENT)
    if training is not None:
        number, rows = plan.workload.optimizer_steps, plan.micro_batches
        steps = "one optimizer step" if number == 1 else f"each of {number:,} optimizer steps"
        tokens = f"{training.micro_batch_tokens:,} tokens on each rank in {steps}"
        lines += wrapped(f"{plan.backend}  {training.name()}, {training.precision}", "  training    ", INDENT)
        lines += wrapped(f"{rows:,} row{'s' * (rows != 1)} of up to {tokens}", INDENT, INDENT)
    if teacher is not None:
        where = "next to the policy; " if not cluster.is_cpu else ""
        layout = f"{teacher.choice.parallel.name()}, {teacher.choice.precision}"
        if (several := plan.request.teaching.teachers) > 1:
            kinds = 1 + len(teacher.others)
            place = "all in memory" if kinds > 1 and teacher.together else "one in memory"
            layout += f", {several} teachers{f' of {kinds} architectures' if kinds > 1 else ''} in turn, {place}"
        summary = f"{_size(teacher.facts)} parameters, {layout}, {where}{teacher.seconds:.1f} s a step"
        lines += wrapped(summary, f"  {'scores' if teacher.choice.valued else 'teacher':<12}", INDENT)
    if generation is not None:
        g, tokens = generation, generation.kv_cache_tokens
        share = f", {g.memory_fraction:.0%} of the GPU" if g.memory_fraction is not None else ""
        cache = f"KV cache {g.kv_cache_bytes / GIB:.1f} GiB = {tokens:,} tokens"
        lines += wrapped(f"vllm  {g.name()}{share}, {cache}", "  generation  ", INDENT)
        placement = f"separate {'cores' if cluster.is_cpu else 'GPUs'} ({plan.engine_devices})"
        where = "on the same devices" if plan.colocated else f"on {placement}"
        placed = f", {where}; refit by {plan.mover}" if training is not None else ""
        full = tokens // plan.workload.max_length
        bound = f"; the KV cache bounds them: {full:,} of full length at once" if full < g.max_concurrent else ""
        most = f"at most {g.max_concurrent:,} sequences at once in each replica{bound}{placed}"
        lines += wrapped(most, INDENT, INDENT)
    if (saved := _checkpoint(plan)) is not None:
        summary = f"{saved['gb']:,.1f} GB; a save stops training for {saved['copy_s']:.0f} s and writes for another "
        lines += wrapped(f"{summary}{saved['write_s']:.0f} s meanwhile", "  checkpoint  ", INDENT)
    lines += ["", *_memory_table(plan), "", *_seconds_table(plan)]
    if reasons:
        lines += ["", "  not chosen", *aligned(_not_chosen(plan) or [("", "There is no other layout.")])]
    if not plan.runnable:
        lines += ["", "  rlctl cannot run this plan yet", *(f"    {reason}" for reason in plan.not_runnable_because)]
    if reasons:
        lines += ["", "  why", *aligned((reason.value, reason.rule) for reason in plan.reasons)]
    return "\n".join(lines)


def _not_chosen(plan: Plan) -> list[tuple[str, str]]:
    """Return each layout of one side, then whole plans with further layouts, and why they were not chosen."""
    sides = [(f"{layout.side} {layout.layout}", _next_text(layout)) for layout in plan.next_best]
    return [*sides, *((other.plan, other.why) for other in plan.rejected)]


def _next_text(layout: NextBest) -> str:
    if layout.seconds is None or layout.memory_gib is None:
        return f"does not fit: {layout.why}"
    return f"{layout.seconds:.0f} s a step, {layout.memory_gib:.0f} GiB: {layout.why}"


def _work(work: Workload) -> str:
    if not work.rollouts:
        tokens = f"{work.mean_tokens or work.max_length:,.0f} tokens ({'their mean' if work.measured else 'assumed'})"
        tokens += _of_images(work)
        return f"{work.algorithm}, {work.prompts:,} rows a step of {tokens}, at most {work.max_length:,}"
    each = f"{work.generations:,} {'rollouts' if work.trains else 'completions'} each"
    step = " a step" if work.trains else ""
    algorithm = f"{work.algorithm}, " * bool(work.algorithm and work.trains)
    mean = f"{work.prompt_tokens:,} tokens ({'their mean' if work.measured else 'assumed'})"
    mean += _of_images(work)
    new = f"{work.mean_new_tokens or 0.4 * work.new_tokens_limit:,.0f} (assumed) and at most {work.new_tokens_limit:,}"
    return (
        f"{algorithm}{work.prompts:,} prompts{step}, {each}; prompts of {mean}, completions of {new}; "
        f"together at most {work.max_length:,}"
    )


def _of_images(work: Workload) -> str:
    return f", {work.image_tokens:,} of them of images" if work.image_share else ""


def _size(facts: ModelFacts) -> str:
    total = count(facts).total
    return f"{total / 1e9:.1f}B" if total >= 1e9 else f"{total / 1e6:.0f}M"


NO_BREAK = "\u00a0"


def wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    """Return `text` in lines of at most `columns()`, without breaking words; `first` and `rest` begin the lines."""
    lines = textwrap.wrap(
        text, columns(), initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(NO_BREAK, " ") for line in lines]


def kept(text: str) -> str:
    return text.replace(" ", NO_BREAK)


def aligned(pairs: Iterable[tuple[str, str]]) -> list[str]:
    listed = list(pairs)
    width = max((len(left) for left, _ in listed), default=0)
    if width > columns() // 2:
        return [line for left, right in listed for line in wrapped(f"{left}: {right}", "    ", "      ")]
    return [
        line for left, right in listed for line in wrapped(right, f"    {left:<{width}}  ", " " * (width + 6)) or [left]
    ]


def _memory_table(plan: Plan) -> list[str]:
    phases = list(plan.memory)
    unit = "process" if plan.cluster.is_cpu else "GPU"
    rows = [f"  memory, GiB a {unit:<14}" + "".join(f"{phase:>12}" for phase in phases)]
    for part in dict.fromkeys(name for memory in plan.memory.values() for name in memory.parts):
        values = [plan.memory[phase].parts.get(part, 0.0) / GIB for phase in phases]
        if max(values) >= 0.01:
            rows.append(f"    {part:<24}" + "".join(f"{value:>12.2f}" if value else f"{'':>12}" for value in values))
    rows.append(f"    {'total':<24}" + "".join(f"{plan.memory[phase].total / GIB:>12.2f}" for phase in phases))
    available, host = plan.cluster.device.memory / GIB, plan.cluster.device.host_memory / GIB
    total_host = f" of {host:,.0f}" if host else ""
    rows.append(f"    of {available:.1f} GiB; host memory of a node {plan.host_memory / GIB:,.0f} GiB{total_host}")
    if not plan.save_copies and plan.training is not None and plan.request.saves:
        reason = "run.save_copies=false" if plan.request.save_copies is False else "host memory is short"
        seconds = save_of(plan.request, plan.training, plan.save_copies).copy_s
        rows.append(
            f"    a save copies nothing, and training waits about {seconds:.0f} s until it is written: {reason}"
        )
    rows += [*_waiting_adapters(plan), *_memory_checkpoints(plan)]
    return [row.rstrip() for row in rows]


def _waiting_adapters(plan: Plan) -> list[str]:
    """Return the line about adapters that wait for their turn, if the plan is of a sweep."""
    if plan.training is None or plan.training.adapters is None or (held := plan.training.adapters.held) == 1:
        return []
    size = waiting_bytes(plan.facts, plan.training) / 2**20
    return [f"    {size:,.1f} MiB of host memory a rank: {held} adapters with their optimizer states, which take turns"]


def _memory_checkpoints(plan: Plan) -> list[str]:
    """Return the line about checkpoints in memory, if the plan has some or host memory is short."""
    request = plan.request
    if plan.training is None or request.memory_checkpoint_every == 0:
        return []
    size = memory_checkpoint_bytes(plan.facts, plan.training, plan.cluster) / GIB
    if every := plan.memory_checkpoint_every:
        steps = "each step" if every == 1 else f"every {every} steps"
        return [f"    {size:,.0f} GiB of it: checkpoints in memory after {steps}"]
    if plan.cluster.is_cpu:
        return []
    return [f"    no checkpoints in memory (run.memory_checkpoint_every): {size:,.0f} GiB more"]


def _seconds_table(plan: Plan) -> list[str]:
    listed = [(phase.value, plan.seconds[phase]) for phase in Phase if plan.seconds[phase]] + [("total", plan.total_s)]
    ranges = plan.ranges
    between = {name: f" ({_between(low, high)})" for name, (low, high) in ranges.items() if high >= 1}
    parts = "  ".join(kept(f"{name} {seconds:.1f}{between.get(name, '')}") for name, seconds in listed)
    devices = "node" if plan.cluster.is_cpu else "GPU"
    used = f", MFU {plan.mfu:.0%} while training" if plan.training is not None else ""
    title = f"  seconds{' a step' * (plan.training is not None)}, predicted   "
    lines = []
    if (waits := plan.waits) is not None:
        trains = sum(plan.seconds[phase] for phase in (Phase.LOGPROBS, Phase.TRAINING, Phase.OTHER))
        lines.append(
            f"the policy works {trains:.1f} s and waits {waits['policy']:.1f} s for rollouts; the engines work "
            f"{plan.rollouts_s:.1f} s and wait {waits['engines']:.1f} s for the policy"
        )
    if plan.beside is not None:
        lines.append(f"with engines on the policy's devices a step would take {plan.beside.total_s:.1f} s")
    return [
        *wrapped(parts, title, " " * len(title)),
        *(part for line in lines for part in wrapped(line, "    ", "    ")),
        f"    {plan.tokens_per_s_per_gpu:,.0f} tokens/s a {devices}{used}",
    ]


def _between(low: float, high: float) -> str:
    return f"{low:.0f} to {high:.0f}" if high >= 10 else f"{low:.1f} to {high:.1f}"


def compare_text(plans: list[Plan], names: list[str]) -> str:
    """Plans side by side; lines that differ are marked."""
    rows = [("", *names)]
    for cells in zip(*map(_flat, plans), strict=True):
        rows.append((cells[0][0], *(_cell(value) for _, value in cells)))
    first, *widths = [max(len(row[i]) for row in rows) for i in range(len(plans) + 1)]
    lines = []
    for i, (key, *values) in enumerate(rows):
        mark = "*" if i and len(set(values)) > 1 else " "
        lines.append("  ".join([f"{mark} {key:<{first}}", *map(str.rjust, values, widths)]))
    if all(plan.equals(plans[0]) for plan in plans[1:]):
        lines.append("The times of these plans are equal within the prediction's error.")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return "-" if value is None else str(value)


def _flat(plan: Plan) -> list[tuple[str, Any]]:
    data = plan_json(plan)
    training = ("backend", *TRAINING_CHOSEN, "precision", "threads", "accumulation")
    return [
        *((key, data[key]) for key in ("runnable", "colocated", "mover")),
        *((f"training.{key}", data["training"][key]) for key in training),
        *((f"generation.{key}", (data["generation"] or {}).get(key)) for key in (*ENGINE_ROWS, "devices")),
        *((f"memory_gib.{phase}", data["memory_gib"].get(phase, {}).get("total"))
          for phase in ("training", "logprobs", "refit", "generation")),
        *((f"seconds.{key}", value) for key, value in data["seconds"].items()),
        *((key, data[key]) for key in ("host_memory_gib", "tokens_per_s_per_gpu", "mfu")),
    ]  # fmt: skip
