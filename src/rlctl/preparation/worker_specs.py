"""Specifications of the processes that a plan starts: policy, teacher, engines and scorers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlctl.backends.base import (
    CriticSpec,
    Device,
    EngineSpec,
    OwnTeacher,
    PolicySpec,
    Teaching,
    resolve_dtype,
)
from rlctl.backends.lookup import EngineBackend, PolicyBackend, engine_backend, policy_backend
from rlctl.backends.messages import Truncation
from rlctl.errors import ConfigError
from rlctl.models.facts import ModelFacts, architectures
from rlctl.planner.choice import TrainingChoice
from rlctl.planner.make_plan import Refusal
from rlctl.planner.result import Plan
from rlctl.preparation.exact_numbers import require_exact
from rlctl.rewards.reward_plan import Rewards
from rlctl.rollouts.episodes import ONE_TURN, PlaySpec
from rlctl.settings.config import EngineConfig, RlctlConfig
from rlctl.settings.run import ClusterConfig
from rlctl.settings.training import TrainingConfig
from rlctl.training.capabilities import HasCritic, PacksWholeGroups, ScalarHead
from rlctl.training.method import Method
from rlctl.training.running_parts import CriticSettings


@dataclass(frozen=True)
class EnginesSpec:
    """The engines to start. Engine i uses the devices after engine i-1."""

    backend: EngineBackend
    engine: EngineSpec
    count: int
    ranks: int
    """Devices of one replica of an engine."""
    nodes: int = 1
    """Maximum number of nodes of one replica."""
    episode: str | PlaySpec = ONE_TURN
    """How an episode is played, or the path of a function as `module:function`."""

    @property
    def devices(self) -> int:
        return self.count * self.engine.replicas * self.ranks


@dataclass(frozen=True)
class RunWorkersSpec:
    """The processes to start. Policy rank r uses device r; engines use the same devices (colocated) or separate
    ones."""

    backend: PolicyBackend
    policy: PolicySpec
    training: TrainingConfig
    micro_batch_tokens: int
    """Maximum number of tokens in a packed row."""
    engines: EnginesSpec | None
    """None: the run samples nothing."""
    reward: Rewards | None
    """The scorer of training; None: the run has none."""
    limits: ClusterConfig
    """Time limits of the processes, and the cluster to join."""
    validation: Rewards | None = None
    """The scorer of validation; None: the run has none."""
    teacher: PolicySpec | None = None
    """The teacher or the reward model, on the policy's devices; None: the run has neither."""
    colocated: bool = True
    """False: the engines use separate devices."""
    own_nodes: bool = False
    """The engines use nodes without policy ranks."""
    whole_groups: bool = False
    """The loss compares the rollouts of a group, so a packed row contains whole groups."""

    @property
    def policy_devices(self) -> int:
        """Number of devices that policy and teacher share."""
        return max(spec.parallel.world_size for spec in (self.policy, self.teacher) if spec is not None)


def device_of(plan: Plan) -> Device:
    """Return the device type of policy and engines."""
    return "cpu" if plan.cluster.is_cpu else "cuda"


def converts(config: RlctlConfig, plan: Plan) -> bool:
    """Return whether the policy starts from a converted checkpoint of the model."""
    return config.model.convert and policy_backend(plan.backend).takes_conversion


def training_of(plan: Plan) -> TrainingChoice:
    """Return the training half of a plan. Plans for completions only have none."""
    assert plan.training is not None
    return plan.training


def planned_truncation(config: RlctlConfig, facts: ModelFacts, plan: Plan, method: Method | None) -> Truncation | None:
    """Return the truncation (top-k, top-p, min-p) in the policy's log-probs; ties at top-k as in the run's engines."""
    rollouts = config.rollout_settings if method else None
    truncation = Truncation.from_config(rollouts.generation, facts.vocab) if rollouts else None
    if truncation is None or (engines := config.engine_settings) is None:
        return truncation
    exact = engine_backend(engines.generation.backend).exact_top_k(device_of(plan))
    return replace(truncation, exact_top_k=exact)


def planned_policy(config: RlctlConfig, facts: ModelFacts, plan: Plan, method: Method | None = None) -> PolicySpec:
    """Return the specification of a plan's policy. `config` contains the plan's values. `method` None: the policy is
    not trained. Raises ConfigError if the backend refuses the policy."""
    training = training_of(plan)
    if config.model.freeze and facts.vision is None:
        raise ConfigError(
            f"model.freeze = {', '.join(config.model.freeze)} is refused: {config.model.name} is trained as a model of "
            "text, which has no such parts.",
            "Remove it, or set model.images=true.",
        )
    policy = PolicySpec(
        facts=facts,
        parallel=training.parallel,
        dtype=resolve_dtype(config.model.dtype, device_of(plan)),
        device=device_of(plan),
        optimizer=config.optimizer,
        temperature=config.rollout_settings.generation.temperature if method and config.rollout_settings else 1.0,
        truncation=planned_truncation(config, facts, plan, method),
        never=facts.never_sampled if plan.generation is not None else (),
        threads=training.threads,
        seed=config.run.seed,
        timeout_s=config.cluster.step_limit_s,
        recompute=training.recompute,
        optimizer_offload=training.optimizer_offload,
        reference_offload=training.reference_offload,
        save_copies=plan.save_copies,
        freeze_router=config.training.freeze_router,
        freeze=config.model.freeze,
        router_replay=config.training.router_replay,
        lora=config.training.lora,
        quantization=config.training.quantization,
        critic=planned_critic(config, method.critic, plan) if isinstance(method, HasCritic) and method.critic else None,
        own_teacher=_own_teacher(config, method) if method else None,
        valued=isinstance(method, ScalarHead),
        megatron=config.megatron.passed,
        ddp=config.ddp.passed,
        exact=method is not None and config.checks.computes_exactly,
    )
    if policy.exact:
        require_exact(config, policy, plan)
    policy_backend(plan.backend).require(policy)
    return policy


def _own_teacher(config: RlctlConfig, method: Method) -> OwnTeacher | None:
    teacher = config.own_teacher
    return OwnTeacher(method.teacher_top, teacher.update_every, teacher.update_rate) if teacher else None


def refusal_of(
    config: RlctlConfig, facts: ModelFacts, method: Method | None = None, teachers: Sequence[ModelFacts] = ()
) -> Refusal:
    """Return a function that gives the reason why a plan's backend refuses the configuration, or None."""

    def refused(plan: Plan) -> str | None:
        try:
            planned_policy(config, facts, plan, method)
            if teachers:
                planned_teacher(config, facts, teachers, plan, method)
        except ConfigError as error:
            return error.message
        return None

    return refused


def planned_critic(config: RlctlConfig, critic: CriticSettings, plan: Plan) -> CriticSpec:
    """Return the specification of the policy's critic. Raises ConfigError if the backend has no critic."""
    if not policy_backend(plan.backend).has_critic:
        raise ConfigError(
            f"advantage.baseline = critic needs a value model, and the backend {plan.backend} trains none.",
            "Train with --backend megatron, or with an algorithm without a critic.",
        )
    optimizer_values = {"lr": critic.lr, "weight_decay": critic.weight_decay, "clip_grad": critic.clip_grad}
    turns = training_of(plan).critic_offload if config.training.offload is None else config.training.offload
    return CriticSpec(config.optimizer.model_copy(update=optimizer_values), offload=turns)


def planned_teacher(
    config: RlctlConfig, student: ModelFacts, teachers: Sequence[ModelFacts], plan: Plan, method: Method | None = None
) -> PolicySpec:
    """Return the specification of a plan's teachers or reward model, with the facts of each. `config` contains the
    plan's values; `method` determines how many top tokens per position a teacher returns. The settings are the
    policy's, without adapters, quantization, critic, router replay and passed-through fields."""
    assert plan.teacher is not None  # planned with the policy
    top = method.teacher_top if method else 0
    choice, vocab = plan.teacher.choice, min([student.vocab, *(teacher.vocab for teacher in teachers)])
    policy = planned_policy(config, student, plan, method).teaching(Teaching(vocab, min(top, vocab)))
    spec = replace(policy, parallel=choice.parallel, threads=choice.threads, valued=choice.valued)
    first, *others = (replace(spec, facts=facts) for facts in architectures(teachers))
    for each in (first, *others):
        policy_backend(plan.backend).require(each)
    return replace(first, beside=tuple(others), together=plan.teacher.together)


def planned_workers(
    config: RlctlConfig,
    facts: ModelFacts,
    plan: Plan,
    model_dir: Path,
    rewards: Rewards | None,
    method: Method | None = None,
    *,
    max_length: int | None = None,
    dummy_weights: bool = False,
) -> RunWorkersSpec:
    """Return the specification of a plan's processes. `config` contains the plan's values. `dummy_weights`: the engines
    read no weights; `method` None: the policy is loaded and refitted, but not trained.

    Raises ConfigError if a backend refuses the configuration.
    """
    policy = replace(planned_policy(config, facts, plan, method), model_dir=model_dir)
    max_length = max_length or config.model.max_length or plan.workload.max_length
    engines, pairs = None, isinstance(method, PacksWholeGroups)
    if plan.generation is not None and (with_engines := config.engine_settings):
        engines = planned_engines(
            with_engines, facts, plan, model_dir, max_length, colocated=plan.colocated, dummy_weights=dummy_weights
        )
    return RunWorkersSpec(
        backend=policy_backend(plan.backend),
        policy=policy,
        training=config.training,
        micro_batch_tokens=max(training_of(plan).micro_batch_tokens, max_length * (2 if pairs else 1)),
        engines=engines,
        reward=rewards,
        limits=config.cluster,
        colocated=plan.colocated,
        own_nodes=plan.engines_have_nodes,
        whole_groups=pairs,
    )


def planned_engines(
    config: EngineConfig,
    facts: ModelFacts,
    plan: Plan,
    model_dir: Path,
    max_length: int,
    *,
    colocated: bool = True,
    dummy_weights: bool = False,
) -> EnginesSpec:
    """Return the specification of a plan's engines. `config` contains the plan's values. `colocated` False: the engines
    use separate devices and never sleep."""
    backend, generation = engine_backend(config.generation.backend), plan.generation
    assert generation is not None  # a plan without engines starts none
    spec = backend.spec(
        config,
        facts,
        model_dir,
        device=device_of(plan),
        max_length=max_length,
        tp=generation.tp,
        threads=generation.threads,
        colocated=colocated,
        dummy_weights=dummy_weights,
    )
    ranks, cluster = generation.replica_gpus, plan.cluster
    nodes = cluster.nodes if cluster.is_cpu else cluster.nodes_of(ranks)
    return EnginesSpec(backend, spec, generation.engines, ranks, nodes)
