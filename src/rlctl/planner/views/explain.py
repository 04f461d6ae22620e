"""The arithmetic behind a plan: inputs of its memory and seconds, step by step."""

from __future__ import annotations

from dataclasses import replace

from rlctl.planner.choice import GenerationChoice, TrainingChoice
from rlctl.planner.costs import memory as mem
from rlctl.planner.costs import time as timing
from rlctl.planner.costs.adapters import trained_parameters
from rlctl.planner.costs.engines import generation_time, kv_bytes_per_token_on_device, weight_bytes
from rlctl.planner.costs.parameters import Stage, count, rank_parameters, stages
from rlctl.planner.inputs.cluster import GIB
from rlctl.planner.inputs.request import Request
from rlctl.planner.result import Plan
from rlctl.planner.search.policy_search import TeacherPlan
from rlctl.planner.search.teacher_search import swap_seconds


def explain(plan: Plan) -> str:
    """Lines of arithmetic for memory, training, generation and refit."""
    parts, request = count(plan.facts), plan.request
    training, generation = plan.training, plan.generation
    lines = [
        "model",
        f"{parts.total / 1e9:.3f}B parameters = embedding {parts.embedding / 1e9:.3f} + head {parts.head / 1e9:.3f} + "
        f"{plan.facts.layers} layers {parts.layers / 1e9:.3f} (experts {parts.experts / 1e9:.3f}); "
        f"{parts.active / 1e9:.3f}B for each token",
    ]
    if training is not None:
        lines += ["memory in training", *_memory(request, training, plan.micro_batches)]
        lines += ["training", *_training(request, training, plan.colocated)]
    if plan.teacher is not None:
        lines += [plan.teacher.label, *_teacher(replace(request, facts=plan.teacher.facts), plan.teacher)]
    if generation is not None:
        lines += ["generation", *_generation(request, generation)]
    if training is not None and generation is not None:
        lines += ["refit", *_refit(request, plan, training, generation)]
    titles = ("model", "memory in training", "training", "teacher", "reward model", "generation", "refit")
    return "\n".join(line if line in titles else f"  {line}" for line in lines)


def _memory(request: Request, t: TrainingChoice, micro_batches: int) -> list[str]:
    facts, p = request.facts, t.parallel

    def total(stage: Stage) -> float:
        states = sum(mem.state_bytes(facts, stage, t).values())
        return states + mem.activation_bytes(facts, stage, t, micro_batches, request.constants)

    stage = max(stages(facts, t), key=total)
    params, trained = rank_parameters(facts, stage, t), trained_parameters(facts, stage, t)
    adapters = f"adapters {trained.total / 1e6:.1f}M parameters a rank; " if t.adapters else ""
    states = mem.state_bytes(facts, stage, replace(t, optimizer_offload=False))
    per_token = mem.layer_activation_bytes(facts, t, stage.moe_layers > 0, request.constants)
    copies = f" ({t.float8_copies} copies of the matrices in float8 among them)" if t.precision == "fp8" else ""
    saved = (t.moment_bytes - 4) * trained.owned_hidden(p) / GIB
    muon = f" - {saved:.2f} GiB, as Muon has one momentum for a matrix" if t.muon_steps else ""
    return [
        f"fullest stage: {stage.layers} layers{', embedding' * stage.embedding}{', head' * stage.head}; "
        f"{params.dense / 1e9:.3f}B dense parameters a rank (TP {p.tp}), "
        f"{params.experts / 1e9:.3f}B in experts (EP {p.ep} x ETP {p.etp})",
        f"weights {states['weights'] / GIB:.2f} GiB = {params.total / 1e9:.3f}B x "
        f"{states['weights'] / params.total:.2f} bytes{copies}; gradients {states['gradients'] / GIB:.2f}",
        f"{adapters}optimizer {states['optimizer'] / GIB:.2f} GiB = {mem.master_and_moments(t)} bytes x (dense / "
        f"{p.dp * p.cp} ranks + experts / {p.expert_dp}){muon}{', in host memory' * t.optimizer_offload}",
        f"activations: {per_token:,.0f} bytes a token and layer, {t.micro_batch_tokens // p.cp:,} tokens, "
        f"{stage.layers} layers, up to {min(stage.in_flight, micro_batches)} micro-batches at once, "
        f"recompute {t.recompute}",
    ]


def _training(request: Request, t: TrainingChoice, colocated: bool) -> list[str]:
    w, sigma = request.workload, request.constants.length_sigma
    time, (number, tokens) = timing.training_time(request, t, colocated), timing.micro_batches(request, t)
    f, rate = time.forward, timing.matmul_rate(request, t, tokens / t.parallel.cp)
    frozen = f" - {1e3 * f.matmul:.1f} ms each for gradients of frozen weights" if t.adapters else ""
    lines = [
        f"{w.tokens(sigma):,.0f} tokens a step, {w.trained_tokens(sigma):,.0f} of them trained = {w.samples:,} "
        f"rollouts x ({w.prompt_tokens:,} + {w.lengths(sigma).mean:,.0f}); {number:,} micro-batches of "
        f"{tokens:,.0f} tokens a rank, {w.optimizer_steps} optimizer steps",
        f"forward of a micro-batch {1e3 * f.total:.1f} ms: compute {1e3 * f.compute:.1f} at {rate / 1e12:.2f} "
        f"TFLOP/s, tensor {1e3 * f.tensor:.1f}, experts {1e3 * f.expert:.1f}, context {1e3 * f.context:.1f}; host at "
        f"least {1e3 * f.host:.1f}",
        f"{time.compute:.2f} s = {w.optimizer_steps * w.epochs} x {number} x {timing.PASSES[t.recompute]:g} forward "
        f"passes{frozen}; bubble {time.bubble:.2f} = (PP - 1) / VPP micro-batches; data parallel {time.data:.2f}; "
        f"update {time.optimizer:.2f}; onload {time.onload:.2f}",
    ]
    if t.optimizer_offload:
        rate = request.cluster.device.host_link * request.constants.pinned_copy
        room = max(mem.update_bytes(request.facts, stage, t) for stage in stages(request.facts, t))
        lines.append(
            f"of each update {timing.state_traffic(t)} bytes a parameter of a rank's share cross the host link, down "
            f"and up, at {rate / 1e9:.1f} GB/s; {room / GIB:.2f} GiB of the device while they do"
        )
    return lines


def _teacher(request: Request, teacher: TeacherPlan) -> list[str]:
    t, weights = teacher.choice, teacher.weights
    number, tokens = timing.micro_batches(request, t)
    milliseconds = 1e3 * timing.forward_time(request, t, tokens).total
    moved = "" if request.cluster.is_cpu else ", and its weights from host memory and back"
    teaching = request.teaching
    if swaps := teaching.swaps:
        moved += f", and {swaps} x {swap_seconds(request):.2f} s to read another teacher's weights"
    return [
        f"{count(teacher.facts).total / 1e9:.3f}B parameters as {t.parallel.name()}: weights {weights / GIB:.2f} "
        "GiB a rank, no gradients and no optimizer",
        f"{teacher.seconds:.2f} s = {teaching.passes * request.workload.optimizer_steps * number:g} forward passes of "
        f"{milliseconds:.1f} ms{moved}",
    ]


def _generation(request: Request, g: GenerationChoice) -> list[str]:
    time, sigma = generation_time(request, g), request.constants.length_sigma
    lengths, share = request.workload.lengths(sigma), request.workload.share(g.of_run, g.dp)
    return [
        f"weights {weight_bytes(request.facts, g) / GIB:.2f} GiB, KV "
        f"{kv_bytes_per_token_on_device(request.facts, g):,.0f} bytes a token a device",
        f"lengths: mean {lengths.mean:,.0f}, longest {lengths.longest:,.0f} of {lengths.limit:,.0f} (log-normal, "
        f"sigma {sigma:g})",
        f"{time.steps:,.0f} decode steps, {1e3 * time.first_step:.1f} ms with {min(g.max_concurrent, share)} sequences "
        f"down to {1e3 * time.last_step:.1f} ms with the last: {time.decode:.1f} s; prefill {time.prefill:.1f} s",
    ]


def _refit(request: Request, plan: Plan, t: TrainingChoice, g: GenerationChoice) -> list[str]:
    received, pieces = weight_bytes(request.facts, g), timing.tensor_count(request.facts)
    terms = timing.refit_terms(request, t, g, plan.colocated, plan.mover)
    seconds = sum(terms.values())
    lines = [f"{received / 1e9:.2f} GB a worker in parts of {pieces:,} tensors by {plan.mover}: {seconds:.2f} s"]
    if not request.cluster.is_cpu:
        device, constants = request.cluster.device, request.constants
        far, efficiency = timing.remote_share(t, request.cluster, plan.colocated), constants.refit_link_efficiency
        lines.append(" + ".join(f"{name} {value:.2f} s" for name, value in terms.items() if value >= 0.005))
        lines.append(
            f"links: {far:.0%} of it from other nodes at {device.network * efficiency / 1e9:.1f} GB/s, the rest at "
            f"{device.link * efficiency / 1e9:.0f} GB/s ({efficiency:.0%} of the links); boxes: "
            f"{1e6 * constants.refit_piece_s:.0f} us a copy"
        )
    return lines
