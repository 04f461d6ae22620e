"""The arithmetic behind a plan: the numbers that its memory and its seconds were computed from, step by step."""

from __future__ import annotations

from dataclasses import replace

from rlctl.planner.choice import GenerationChoice, TrainingChoice
from rlctl.planner.costs import memory as mem
from rlctl.planner.costs import time as timing
from rlctl.planner.costs.generation import generation_time, kv_bytes_per_token_on_device, weight_bytes
from rlctl.planner.costs.parameters import Stage, count, rank_parameters, stages, trained_parameters
from rlctl.planner.costs.time import refit_time, remote_share, tensor_count
from rlctl.planner.inputs.cluster import GIB
from rlctl.planner.inputs.constants import DEFAULTS, Constants
from rlctl.planner.result import Plan
from rlctl.planner.search.policy_search import TeacherPlan


def explain(plan: Plan, constants: Constants = DEFAULTS) -> str:
    """Lines of arithmetic for memory, training, generation and refit."""
    lines = ["model", *_model(plan)]
    training, generation = plan.training, plan.generation
    if training is not None:
        lines += ["memory in training", *_memory(plan, training, constants)]
        lines += ["training", *_training(plan, training, constants)]
    if plan.teacher is not None:
        lines += ["teacher", *_teacher(plan, plan.teacher, constants)]
    if generation is not None:
        lines += ["generation", *_generation(plan, generation, constants)]
    if training is not None and generation is not None:
        lines += ["refit", *_refit(plan, training, generation, constants)]
    return "\n".join(lines)


def _model(plan: Plan) -> list[str]:
    parts = count(plan.facts)
    f = plan.facts
    return [
        f"  {parts.total / 1e9:.3f}B parameters = embedding {parts.embedding / 1e9:.3f} + head "
        f"{parts.head / 1e9:.3f} + "
        f"{f.layers} layers {parts.layers / 1e9:.3f} (experts {parts.experts / 1e9:.3f}); "
        f"{parts.active / 1e9:.3f}B for each token",
    ]


def _fullest(plan: Plan, t: TrainingChoice, constants: Constants) -> Stage:
    def total(stage: Stage) -> float:
        states = sum(mem.state_bytes(plan.facts, stage, t).values())
        return states + mem.activation_bytes(plan.facts, stage, t, plan.micro_batches, constants)

    return max(stages(plan.facts, t), key=total)


def _memory(plan: Plan, t: TrainingChoice, constants: Constants) -> list[str]:
    stage = _fullest(plan, t, constants)
    params, trained = rank_parameters(plan.facts, stage, t), trained_parameters(plan.facts, stage, t)
    states_of = (
        "optimizer" if t.adapters is None else f"adapters {trained.total / 1e6:.1f}M parameters a rank; optimizer"
    )
    states = mem.state_bytes(plan.facts, stage, replace(t, optimizer_offload=False))
    per_token = mem.layer_activation_bytes(plan.facts, t, stage.moe_layers > 0, constants)
    return [
        f"  fullest stage: {stage.layers} layers{', embedding' * stage.embedding}{', head' * stage.head}; "
        f"{params.dense / 1e9:.3f}B dense parameters a rank (TP {t.parallel.tp}), "
        f"{params.experts / 1e9:.3f}B in experts (EP {t.parallel.ep} x ETP {t.parallel.etp})",
        f"  weights {states['weights'] / GIB:.2f} GiB = {params.total / 1e9:.3f}B x "
        f"{states['weights'] / params.total:.2f} bytes"
        + (f" ({t.float8_copies} copies of the matrices in float8 among them)" if t.precision == "fp8" else "")
        + f"; gradients {states['gradients'] / GIB:.2f}",
        f"  {states_of} {states['optimizer'] / GIB:.2f} GiB = {mem.master_and_moments(t)} bytes x (dense / "
        f"{t.parallel.dp * t.parallel.cp} ranks + experts / {t.parallel.expert_dp})"
        + (", in host memory" if t.optimizer_offload else ""),
        f"  activations: {per_token:,.0f} bytes a token and layer, {t.micro_batch_tokens // t.parallel.cp:,} tokens, "
        f"{stage.layers} layers, "
        f"up to {min(stage.in_flight, plan.micro_batches)} micro-batches at once, recompute {t.recompute}",
    ]


def _training(plan: Plan, t: TrainingChoice, constants: Constants) -> list[str]:
    facts, cluster, w = plan.facts, plan.cluster, plan.workload
    time = timing.training_time(facts, t, w, cluster, plan.colocated, constants)
    number, tokens = timing.micro_batches(t, w, constants)
    f = time.forward
    rate = timing.matmul_rate(facts, t, cluster, tokens / t.parallel.cp, constants)
    passes = timing.PASSES[t.recompute]
    frozen = f" - {1e3 * f.matmul:.1f} ms each for gradients of frozen weights" if t.adapters else ""
    return [
        f"  {w.tokens(constants.length_sigma):,.0f} tokens a step, {w.trained_tokens(constants.length_sigma):,.0f} "
        f"of them trained = {w.samples:,} rollouts x ({w.prompt_tokens:,} + "
        f"{w.lengths(constants.length_sigma).mean:,.0f}); {number:,} micro-batches of {tokens:,.0f} tokens a rank, "
        f"{w.optimizer_steps} optimizer steps",
        f"  forward of a micro-batch {1e3 * f.total:.1f} ms: compute {1e3 * f.compute:.1f} at {rate / 1e12:.2f} "
        f"TFLOP/s, tensor "
        f"{1e3 * f.tensor:.1f}, experts {1e3 * f.expert:.1f}, context {1e3 * f.context:.1f}; host at least "
        f"{1e3 * f.host:.1f}",
        f"  {time.compute:.2f} s = {w.optimizer_steps} x {number} x {passes:g} forward passes{frozen}; bubble "
        f"{time.bubble:.2f} = (PP - 1) / VPP "
        f"micro-batches; data parallel {time.data:.2f}; update {time.optimizer:.2f}; onload {time.onload:.2f}",
        *_streaming(plan, t, constants),
    ]


def _teacher(plan: Plan, teacher: TeacherPlan, constants: Constants) -> list[str]:
    t, cluster, w = teacher.choice, plan.cluster, plan.workload
    number, tokens = timing.micro_batches(t, w, constants)
    f = timing.forward_time(teacher.facts, t, cluster, tokens, w.mean_keys(constants.length_sigma), constants)
    weights = teacher.memory.parts["teacher weights"]
    moved = "" if cluster.is_cpu else ", and its weights from host memory and back"
    return [
        f"  {count(teacher.facts).total / 1e9:.3f}B parameters as {t.parallel.name()}: weights {weights / GIB:.2f} "
        "GiB a rank, no gradients and no optimizer",
        f"  {teacher.seconds:.2f} s = {w.optimizer_steps * number} forward passes of {1e3 * f.total:.1f} ms{moved}",
    ]


def _streaming(plan: Plan, t: TrainingChoice, constants: Constants) -> list[str]:
    if not t.optimizer_offload:
        return []
    rate = plan.cluster.device.host_link * constants.pinned_copy
    room = max(mem.update_bytes(plan.facts, stage, t) for stage in stages(plan.facts, t))
    return [
        f"  of each update {timing.state_traffic(t)} bytes a parameter of a rank's share cross the host link, down and "
        f"up, at {rate / 1e9:.1f} GB/s; {room / GIB:.2f} GiB of the device while they do"
    ]


def _generation(plan: Plan, g: GenerationChoice, constants: Constants) -> list[str]:
    time = generation_time(plan.facts, g, plan.workload, plan.cluster, constants)
    lengths = plan.workload.lengths(constants.length_sigma)
    return [
        f"  weights {weight_bytes(plan.facts, g) / GIB:.2f} GiB, KV "
        f"{kv_bytes_per_token_on_device(plan.facts, g):,.0f} bytes a token a device",
        f"  lengths: mean {lengths.mean:,.0f}, longest {lengths.longest:,.0f} of {lengths.limit:,.0f} (log-normal, "
        f"sigma {constants.length_sigma:g})",
        f"  {time.steps:,.0f} decode steps, {1e3 * time.first_step:.1f} ms with "
        f"{min(g.max_concurrent, plan.workload.share(g.engines, g.dp))} sequences "
        f"down to {1e3 * time.last_step:.1f} ms with the last: {time.decode:.1f} s; prefill {time.prefill:.1f} s",
    ]


def _refit(plan: Plan, t: TrainingChoice, g: GenerationChoice, constants: Constants) -> list[str]:
    received, pieces = weight_bytes(plan.facts, g), tensor_count(plan.facts)
    far = remote_share(t, plan.cluster, plan.colocated)
    seconds = refit_time(plan.facts, t, g, plan.cluster, plan.colocated, constants, mover=plan.mover)
    lines = [f"  {received / 1e9:.2f} GB a worker in parts of {pieces:,} tensors by {plan.mover}: {seconds:.2f} s"]
    if not plan.cluster.is_cpu:
        device, efficiency = plan.cluster.device, constants.refit_link_efficiency
        lines.append(
            f"  {far:.0%} of it from other nodes at {device.network * efficiency / 1e9:.1f} GB/s, the rest at "
            f"{device.link * efficiency / 1e9:.0f} GB/s ({efficiency:.0%} of the links), "
            f"{1e6 * constants.refit_piece_s:.0f} us a tensor, {constants.refit_handshake_s:g} s of handshakes"
        )
    return lines
