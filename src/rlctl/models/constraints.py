"""Limits on parallel sizes from the model's heads, widths, layers and experts in Megatron-Core, FSDP2 and vLLM.
Planner, layouts and backends use these."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlctl.config.parallel import ParallelSpec
from rlctl.errors import ConfigError
from rlctl.models.facts import ModelFacts
from rlctl.models.families import has_file, weights_of
from rlctl.models.matrices import Role
from rlctl.models.transformers_classes import why_not_built

OVERFLOWS_IN_FLOAT16 = ("gemma3", "Gemma3ForConditionalGeneration", "Gemma2ForCausalLM", "glm4")
"""Families whose activations are too large for float16, as vLLM knows them (`_FLOAT16_NOT_SUPPORTED_MODELS`)."""

LAYERS_APART = {
    ".linear_attn.": "layers of a gated delta rule take no packed rows",
    ".A_log": "state-space layers need mamba-ssm and CUDA",
}
"""By a part of a tensor's name, why Megatron-Core's layers of that kind do not train here (0.16.1:
ssm/gated_delta_net.py and ssm/mamba_mixer.py)."""


@dataclass(frozen=True)
class Problem:
    """A rule that some sizes break."""

    key: str
    """The configuration key to blame, for example `training.tp`."""
    message: str
    """The rule that is broken, as a clause that can stand after a colon."""
    over: float = math.inf
    """Memory needed over memory there is; infinite where the rule is about something else."""


def require_policy_sizes(facts: ModelFacts, parallel: ParallelSpec, *, fsdp: bool = False) -> None:
    """Raise ConfigError for the first rule of Megatron-Core (or FSDP2) that these sizes of the policy break."""
    for problem in (fsdp_problems if fsdp else policy_problems)(facts, parallel):
        raise ConfigError(f"{problem.key}: {problem.message}.", "Change it, or leave it out.")


def require_engine_sizes(facts: ModelFacts, **sizes: int) -> None:
    """Raise ConfigError where engines of these sizes (`tp`, `pp`, `dp`, `ep`) cannot divide the model."""
    for problem in engine_problems(facts, **sizes):
        value = sizes.get(problem.key.rpartition(".")[2], 1)
        raise ConfigError(f"{problem.key} = {value}: {problem.message}.", "Choose another, or leave it out.")


def policy_problems(facts: ModelFacts, parallel: ParallelSpec) -> list[Problem]:
    """Return the rules of Megatron-Core that these sizes break for this model; empty: they are valid."""
    problems = []
    if parallel.stage_size % parallel.expert_size:
        reason = f"EP {parallel.ep} x ETP {parallel.etp} does not divide TP x CP x DP = {parallel.stage_size}"
        problems.append(Problem("training.ep", reason))
    if parallel.replicate > 1:
        problems.append(Problem("training.replicate", "copies of sharded weights need training.backend=dtensor"))
    return [*problems, *lone_problems(facts, parallel)]


def lone_problems(facts: ModelFacts, parallel: ParallelSpec) -> list[Problem]:
    """Return violations of single sizes by the model, for any number of ranks."""
    rules = (_tensor_problems, _pipeline_problems, _expert_problems)
    problems = [problem for rule in rules for problem in rule(facts, parallel)]
    if facts.wide_qk_norm and facts.kv_heads % parallel.tp:
        reason = f"norms over all {facts.kv_heads} KV heads together need KV heads that divide over the ranks"
        problems.append(Problem("training.tp", reason))
    etp_ignored = facts.moe is not None and parallel.etp > 1 and has_file(facts.family)
    if etp_ignored and Role.EXPERT_DOWN_BIAS in weights_of(facts).roles:
        problems.append(Problem("training.etp", "Megatron-Core cannot split experts that have biases; it must be 1"))
    return problems


def fsdp_problems(facts: ModelFacts, parallel: ParallelSpec) -> list[Problem]:
    """Return the rules of FSDP2 around transformers' modules that these sizes break; empty: they are valid."""
    problems, tp, stages = [], parallel.tp, "FSDP2 has no pipeline stages"
    if parallel.dp % parallel.replicate:
        reason = f"{parallel.dp} data-parallel ranks do not make {parallel.replicate} equal copies"
        problems.append(Problem("training.replicate", reason))
    problems += [Problem(f"training.{key}", stages) for key in ("pp", "vpp") if getattr(parallel, key) > 1]
    ends = ("first_stage_layers", "last_stage_layers")
    problems += [Problem(f"training.{key}", stages) for key in ends if getattr(parallel, key) is not None]
    problems += [*_tensor_problems(facts, parallel), *_expert_problems(facts, parallel)]
    if parallel.dp % parallel.replicate == 0 and parallel.fsdp_shards % parallel.ep:
        reason = f"experts over {parallel.ep} ranks do not divide the {parallel.fsdp_shards} shards of a copy"
        problems.append(Problem("training.ep", reason))
    if facts.unpacked and parallel.cp > 1:
        problems.append(Problem("training.cp", unpacked_rule(facts)))
    if facts.vision is not None and parallel.cp > 1:
        reason = "the tokens of an image are not cut over context-parallel ranks; a model that reads images needs 1"
        problems.append(Problem("training.cp", reason))
    if tp > 1 and not (has_file(facts.family) or _divides(facts)):
        reason = f"how {facts.family} divides over ranks is not known, because its family has no file in rlctl"
        problems.append(Problem("training.tp", reason))
    elif facts.moe is not None and (width := facts.moe.expert_intermediate) % tp:
        problems.append(Problem("training.tp", f"expert width {width} does not split over {tp} ranks"))
    elif facts.moe is not None and parallel.etp != tp:
        problems.append(Problem("training.etp", f"FSDP2 has experts divided as training.tp = {tp} divides the rest"))
    elif tp > 1 and has_file(facts.family) and (reason := _computed_whole(facts)):
        problems.append(Problem("training.tp", reason))
    if facts.quantized is not None and tp > 1:
        problems.append(Problem("training.tp", "packed layers are not divided; ranks of training.dp each hold all"))
    if facts.vocab % tp:
        problems.append(Problem("training.tp", f"a vocabulary of {facts.vocab:,} does not split over {tp} ranks"))
    if tp > 1 and not parallel.sequence_parallel:
        reason = "the dtensor backend divides matrices with sequence parallelism only"
        problems.append(Problem("training.sequence_parallel", reason))
    return problems


def _computed_whole(facts: ModelFacts) -> str:
    """Return why modules of transformers cannot compute with a part of their weights; empty: they can."""
    if facts.wide_qk_norm:
        return f"norms of {facts.family} are over all heads together, and transformers' modules of a rank have some"
    for tensor, matrices in weights_of(facts).by_tensor.items():
        if len({matrix.role for matrix in matrices}) > 1 and matrices[0].expert is None:
            return f"{tensor} has several matrices, which transformers' modules separate by their whole sizes"
    return ""


def _divides(facts: ModelFacts) -> bool:
    """Whether tensor parallelism is known for a model without a family file: multimodal ones need a file for their
    language part."""
    return facts.vision is not None and has_file(facts.vision.text_family)


def unpacked_rule(facts: ModelFacts) -> str:
    """Return why rollouts cannot be packed, as a clause after a colon."""
    return f"transformers computes each rollout of {facts.family} as a separate sequence, because {facts.unpacked}"


def engine_problems(facts: ModelFacts, tp: int, pp: int = 1, dp: int = 1, ep: int = 1) -> list[Problem]:
    """Return the rules of vLLM that these sizes of one engine break for this model; empty: they are valid."""
    problems = _head_problems(facts, tp, "generation.tp")
    width = facts.moe.expert_intermediate if facts.moe else facts.intermediate
    shares = tp * dp if facts.moe else tp
    if ep == 1 and width % shares:
        key = "generation.dp" if width % tp == 0 else "generation.tp"
        problems.append(Problem(key, f"MLP width {width} does not split over {shares} ranks"))
    if dp > 1 and facts.moe is None:
        reason = (
            "the replicas of an engine share its experts, and this model has none (generation.engines makes copies)"
        )
        problems.append(Problem("generation.dp", reason))
    if pp > facts.layers:
        problems.append(Problem("generation.pp", f"{facts.layers} layers are fewer than {pp} stages"))
    if ep > 1 and facts.moe is None:
        problems.append(Problem("generation.ep", "expert parallelism needs a model with experts"))
    elif facts.moe is not None and facts.moe.experts % ep:
        problems.append(Problem("generation.ep", f"{facts.moe.experts} experts do not split over {ep} ranks"))
    if facts.moe is not None and ep not in (1, tp * dp):
        problems.append(Problem("generation.ep", f"expert parallelism spans TP x DP = {tp * dp}"))
    return problems


def float8_problems(facts: ModelFacts, parallel: ParallelSpec) -> Iterator[Problem]:
    """Yield sides of products that are no multiples of 16, as TransformerEngine's `assert_dim_for_fp8_exec` wants."""
    sides = [
        ("training.tp", "hidden size", facts.hidden, 1),
        ("training.tp", "MLP width", facts.intermediate, parallel.tp),
    ]
    if facts.mla is None:
        sides.append(("training.tp", "attention width", facts.heads * facts.head_dim, parallel.tp))
    if facts.moe is not None:
        sides.append(("training.etp", "expert width", facts.moe.expert_intermediate, parallel.etp))
    for key, name, side, ranks in sides:
        if side % (16 * ranks):
            has = f"a rank has {side / ranks:g} of the {name} (megatron.fp8)"
            blamed = key if side % 16 == 0 else "megatron.fp8"
            yield Problem(blamed, f"float8 products take multiples of 16, and {has}")


def family_problem(facts: ModelFacts, backend: str | None) -> str | None:
    """Return why `backend` (None: engines) cannot use the family, as a clause; None: it can."""
    if facts.quantized is not None and backend == "megatron":
        return f"model.name: the backend megatron trains no packed layers ({facts.quantized.method}); dtensor does"
    if has_file(facts.family):
        return None
    missing = "" if facts.listed else why_not_built(facts.family)
    if backend in (None, "dtensor"):
        return f"model.name: rlctl has no file of the family {facts.family}, and {missing}" if missing else None
    if facts.vision is not None:
        return f"model.name: the backend {backend} trains no images of {facts.family}; --backend dtensor does"
    reason = f"model.name: family {facts.family} has no weight map for the backend {backend}"
    names = [tensor.name for tensor in facts.listed] if backend == "megatron" else []
    lacking = next(
        (description for part, description in LAYERS_APART.items() if any(part in name for name in names)), ""
    )
    reason += f", whose {lacking}" if lacking else ""
    return f"{reason}, and {missing}" if missing else f"{reason}; --backend dtensor needs none"


def _head_problems(facts: ModelFacts, tp: int, key: str) -> list[Problem]:
    if facts.heads % tp:
        return [Problem(key, f"{facts.heads} attention heads do not split over {tp} ranks")]
    # KV heads are split, or repeated if ranks outnumber them.
    if facts.mla is None and facts.kv_heads % tp and tp % facts.kv_heads:
        return [Problem(key, f"{facts.kv_heads} KV heads neither divide nor are divided by {tp}")]
    return []


def _tensor_problems(facts: ModelFacts, parallel: ParallelSpec) -> list[Problem]:
    problems, tp, sp = _head_problems(facts, parallel.tp, "training.tp"), parallel.tp, parallel.sequence_parallel
    if facts.intermediate % tp:
        problems.append(Problem("training.tp", f"MLP width {facts.intermediate} does not split over {tp} ranks"))
    if facts.moe is not None and (width := facts.moe.shared_expert_intermediate) % tp:
        problems.append(Problem("training.tp", f"shared experts' width {width} does not split over {tp} ranks"))
    for part, name in ((facts.moe, "experts"), (facts.mla, "multi-head latent attention")):
        if tp > 1 and part is not None and not sp:
            reason = f"{name} with tensor parallelism need{'s' * (part is facts.mla)} sequence parallelism"
            problems.append(Problem("training.sequence_parallel", reason))
    if sp and tp == 1:
        problems.append(Problem("training.sequence_parallel", "sequence parallelism needs training.tp > 1"))
    return problems


def _pipeline_problems(facts: ModelFacts, parallel: ParallelSpec) -> list[Problem]:
    pp, vpp, layers = parallel.pp, parallel.vpp, facts.layers
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    ends = "training.first_stage_layers" if first is not None else "training.last_stage_layers"
    named = (first, last) != (None, None)
    if pp == 1:
        problems = [Problem("training.vpp", "virtual stages need training.pp > 1")] if vpp > 1 else []
        return problems + ([Problem(ends, f"{ends} needs training.pp > 1")] if named else [])
    if not named and pp * vpp > layers:
        key = "training.vpp" if vpp > 1 else "training.pp"
        return [Problem(key, f"{layers} layers are fewer than PP {pp} x VPP {vpp} stages")]
    if not named and vpp > 1 and layers % (pp * vpp):
        return [Problem("training.vpp", f"{layers} layers do not split into PP {pp} x VPP {vpp}")]
    stages = parallel.stage_layers(layers)
    if stages is None and not named:
        return [Problem("training.pp", f"{layers} layers leave a stage of PP {pp} empty")]
    if stages is None:
        given = [f"first {first}"] * (first is not None) + [f"last {last}"] * (last is not None)
        reason = f"{layers} layers with {' and '.join(given)} do not split evenly over the other stages of PP {pp}"
        return [Problem(ends, reason)]
    uneven = next((size for size in stages if size % vpp), None)
    if uneven is not None:
        return [Problem("training.vpp", f"a stage of {uneven} layers does not split into {vpp} virtual stages")]
    return []


def _expert_problems(facts: ModelFacts, parallel: ParallelSpec) -> list[Problem]:
    ep, etp = parallel.ep, parallel.etp
    if facts.moe is None:
        wrong = [key for key, broken in (("ep", ep > 1), ("etp", etp not in (1, parallel.tp))) if broken]
        return [Problem(f"training.{key}", "expert parallelism needs a model with experts") for key in wrong[:1]]
    problems = []
    if facts.moe.experts % ep:
        problems.append(Problem("training.ep", f"{facts.moe.experts} experts do not split over {ep} ranks"))
    if facts.moe.expert_intermediate % etp:
        reason = f"expert width {facts.moe.expert_intermediate} does not split over {etp} ranks"
        problems.append(Problem("training.etp", reason))
    return problems
