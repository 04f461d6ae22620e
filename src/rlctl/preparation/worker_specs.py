"""What a plan starts: the specifications of policy, teacher, engines and scorers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rlctl.backends.base import (
    CriticSpec,
    Device,
    EngineSpec,
    PolicySpec,
    Teaching,
    resolve_dtype,
)
from rlctl.backends.lookup import EngineBackend, PolicyBackend, engine_backend, policy_backend
from rlctl.backends.messages import Truncation
from rlctl.errors import ConfigError
from rlctl.models.facts import ModelFacts
from rlctl.planner.choice import TrainingChoice
from rlctl.planner.make_plan import Refusal
from rlctl.planner.result import Plan
from rlctl.rewards.reward_plan import Rewards
from rlctl.rollouts.episodes import ONE_TURN, PlaySpec
from rlctl.settings.config import EngineConfig, RlctlConfig
from rlctl.settings.run import ClusterConfig
from rlctl.settings.training import LoraConfig, QuantizationConfig, TrainingConfig
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
    """Most nodes of one replica."""
    episode: str | PlaySpec = ONE_TURN
    """The course of an episode, or its name as `module:function`."""

    @property
    def devices(self) -> int:
        return self.count * self.engine.replicas * self.ranks


@dataclass(frozen=True)
class RunWorkersSpec:
    """The processes to start. Policy rank r is on device r, and engines are on the same devices or on others."""

    backend: PolicyBackend
    policy: PolicySpec
    training: TrainingConfig
    micro_batch_tokens: int
    """Most tokens of a packed row."""
    engines: EnginesSpec | None
    """None: nothing is sampled."""
    reward: Rewards | None
    """None: there is no scorer."""
    limits: ClusterConfig
    """How long processes may take."""
    validation: Rewards | None = None
    """The scorer of validation; None: there is none."""
    teacher: PolicySpec | None = None
    """The teacher or the reward model, on the policy's devices; None: there is neither."""
    colocated: bool = True
    """False: the engines have devices of their own."""
    own_nodes: bool = False
    """The engines' devices are on nodes without the policy."""
    whole_groups: bool = False
    """The loss compares the rollouts of a group, which are trained on in one row."""

    @property
    def policy_devices(self) -> int:
        """Devices of the policy, which its teacher shares."""
        return max(spec.parallel.world_size for spec in (self.policy, self.teacher) if spec is not None)


def device_of(plan: Plan) -> Device:
    """The kind of device that policy and engines compute on."""
    return "cpu" if plan.cluster.is_cpu else "cuda"


def converts(config: RlctlConfig, plan: Plan) -> bool:
    """Whether the policy of a plan starts from a conversion of the model."""
    return config.model.convert and policy_backend(plan.backend).takes_conversion


def training_of(plan: Plan) -> TrainingChoice:
    """The training half of a plan that has one, as all but those for completions alone."""
    assert plan.training is not None
    return plan.training


def planned_truncation(config: RlctlConfig, facts: ModelFacts, plan: Plan, method: Method | None) -> Truncation | None:
    """The truncated sampling that a policy is trained on, with ties as the run's engines treat them."""
    rollouts = config.rollout_settings if method else None
    truncation = Truncation.from_config(rollouts.generation, facts.vocab) if rollouts else None
    if truncation is None or (engines := config.engine_settings) is None:
        return truncation
    exact = engine_backend(engines.generation.backend).exact_top_k(device_of(plan))
    return replace(truncation, exact_top_k=exact)


def planned_policy(config: RlctlConfig, facts: ModelFacts, plan: Plan, method: Method | None = None) -> PolicySpec:
    """The policy that a plan starts; `config` holds the plan's values. `method` None: it is not trained.

    Raises ConfigError for what its backend refuses."""
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
        valued=isinstance(method, ScalarHead),
        megatron=config.megatron.passed,
        ddp=config.ddp.passed,
    )
    policy_backend(plan.backend).require(policy)
    return policy


def refusal_of(
    config: RlctlConfig, facts: ModelFacts, method: Method | None = None, teacher: ModelFacts | None = None
) -> Refusal:
    """Return what says why the backend of a plan refuses the configuration."""

    def refused(plan: Plan) -> str | None:
        try:
            planned_policy(config, facts, plan, method)
            if teacher is not None:
                planned_teacher(config, facts, teacher, plan, method)
        except ConfigError as error:
            return error.message
        return None

    return refused


def planned_critic(config: RlctlConfig, critic: CriticSettings, plan: Plan) -> CriticSpec:
    """The critic next to the policy. Raises ConfigError where the backend has none."""
    if not policy_backend(plan.backend).has_critic:
        raise ConfigError(
            f"advantage.baseline = critic needs a value model, and the backend {plan.backend} trains none.",
            "Train with --backend megatron, or with an algorithm without a critic.",
        )
    optimizer_values = {"lr": critic.lr, "weight_decay": critic.weight_decay, "clip_grad": critic.clip_grad}
    turns = training_of(plan).critic_offload if config.training.offload is None else config.training.offload
    return CriticSpec(config.optimizer.model_copy(update=optimizer_values), offload=turns)


def planned_teacher(
    config: RlctlConfig, student: ModelFacts, teacher: ModelFacts, plan: Plan, method: Method | None = None
) -> PolicySpec:
    """The teacher or the reward model that a plan starts; `config` holds the plan's values, and `method` says how many
    of the most likely tokens of each position of a teacher are needed. It computes as the policy does, without its
    adapters, quantization, critic, routers that follow the engines, and fields that are passed through."""
    assert plan.teacher is not None  # it was planned with the policy
    own_tokenizer, top = (config.teacher_has_tokenizer, method.teacher_top) if method else (False, 0)
    choice, vocab = plan.teacher.choice, teacher.vocab if own_tokenizer else min(student.vocab, teacher.vocab)
    spec = replace(
        planned_policy(config, student, plan, method),
        facts=teacher,
        parallel=choice.parallel,
        threads=choice.threads,
        recompute="none",
        optimizer_offload=False,
        freeze_router=False,
        router_replay=False,
        lora=LoraConfig(),
        quantization=QuantizationConfig(),
        critic=None,
        valued=choice.valued,
        megatron={},
        ddp={},
        teaches=Teaching(vocab, min(top, vocab), by_text=own_tokenizer),
    )
    policy_backend(plan.backend).require(spec)
    return spec


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
    """The processes that a plan starts; `config` holds the plan's values. `dummy_weights`: the engines
    read none; `method` None: the policy's weights are read and refitted, and not trained.

    Raises ConfigError for what a backend refuses.
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
    """The engines that a plan starts; `config` holds the plan's values. `colocated` off: they have devices to
    themselves, and never sleep."""
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
