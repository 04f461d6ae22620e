"""The processes that a plan starts: the specs of policy, critic, teacher and engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rlctl.apps.crew import CrewSpec, EnginesSpec
from rlctl.backends.base import CriticSpec, Device, PolicySpec, Teaching, resolve_dtype
from rlctl.backends.lookup import engine_backend, policy_backend
from rlctl.config.schema import LoraConfig, RlctlConfig
from rlctl.envs.scorers import Rewards
from rlctl.errors import ConfigError
from rlctl.models.facts import ModelFacts
from rlctl.planner.choice import TrainingChoice
from rlctl.planner.make_plan import Refusal
from rlctl.planner.result import Plan


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


def planned_policy(config: RlctlConfig, facts: ModelFacts, plan: Plan, *, trains: bool = True) -> PolicySpec:
    """The policy that a plan starts; `config` holds the plan's values. Raises ConfigError for what its backend
    refuses."""
    training = training_of(plan)
    policy = PolicySpec(
        facts=facts,
        parallel=training.parallel,
        dtype=resolve_dtype(config.model.dtype, device_of(plan)),
        device=device_of(plan),
        optimizer=config.optimizer,
        temperature=config.generation.temperature if trains and config.makes_rollouts else 1.0,
        threads=training.threads,
        seed=config.run.seed,
        timeout_s=config.cluster.step_timeout_s,
        recompute=training.recompute,
        optimizer_offload=training.optimizer_offload,
        freeze_router=config.training.freeze_router,
        router_replay=config.training.router_replay,
        lora=config.training.lora,
        critic=planned_critic(config, plan) if trains else None,
        valued=config.trains_reward_model,
        megatron=config.megatron.passed,
        ddp=config.ddp.passed,
    )
    policy_backend(plan.backend).refuse(policy)
    return policy


def refusal_of(config: RlctlConfig, facts: ModelFacts, teacher: ModelFacts | None = None) -> Refusal:
    """Return what says why the backend of a plan refuses the configuration."""

    def refused(plan: Plan) -> str | None:
        try:
            planned_policy(config, facts, plan)
            if teacher is not None:
                planned_teacher(config, facts, teacher, plan)
        except ConfigError as error:
            return error.message
        return None

    return refused


def planned_critic(config: RlctlConfig, plan: Plan) -> CriticSpec | None:
    """The critic next to the policy. Raises ConfigError where the backend has none."""
    if not config.has_critic:
        return None
    if not policy_backend(plan.backend).has_critic:
        raise ConfigError(
            f"advantage.baseline = critic needs a value model, and the backend {plan.backend} trains none.",
            "Train with --backend megatron, or with an algorithm without a critic.",
        )
    critic = config.critic
    own = {"lr": critic.lr, "weight_decay": critic.weight_decay, "clip_grad": critic.clip_grad}
    turns = training_of(plan).critic_offload if config.training.offload is None else config.training.offload
    return CriticSpec(config.optimizer.model_copy(update=own), offload=turns)


def planned_teacher(
    config: RlctlConfig, student: ModelFacts, teacher: ModelFacts, plan: Plan, *, top: int = 0
) -> PolicySpec:
    """The teacher that a plan starts; `config` holds the plan's values, and the algorithm needs the `top` most likely
    tokens of each position. It computes as the policy does, without what is the policy's own: adapters, a critic,
    routers that follow the engines, and fields that are passed through."""
    assert plan.teacher is not None  # it was planned with the policy
    choice, vocab = plan.teacher.choice, min(student.vocab, teacher.vocab)
    spec = replace(
        planned_policy(config, student, plan),
        facts=teacher,
        parallel=choice.parallel,
        threads=choice.threads,
        recompute="none",
        optimizer_offload=False,
        freeze_router=False,
        router_replay=False,
        lora=LoraConfig(),
        critic=None,
        megatron={},
        ddp={},
        teaches=Teaching(vocab, min(top, vocab)),
    )
    policy_backend(plan.backend).refuse(spec)
    return spec


def planned_crew(
    config: RlctlConfig,
    facts: ModelFacts,
    plan: Plan,
    model_dir: Path,
    rewards: Rewards | None,
    *,
    max_length: int | None = None,
    dummy_weights: bool = False,
    trains: bool = True,
) -> CrewSpec:
    """The processes that a plan starts; `config` holds the plan's values. `dummy_weights`: the engines
    read none; `trains` off: the policy's weights are read and refitted, whatever completions are sampled with.

    Raises ConfigError for what a backend refuses.
    """
    policy = replace(planned_policy(config, facts, plan, trains=trains), model_dir=model_dir)
    max_length = max_length or config.model.max_length or plan.workload.max_length
    engines, pairs = None, config.data.rows == "pairs"
    if plan.generation is not None:
        engines = planned_engines(
            config, facts, plan, model_dir, max_length, colocated=plan.colocated, dummy_weights=dummy_weights
        )
    return CrewSpec(
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
    config: RlctlConfig,
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
    sizes = {key: getattr(generation, key) for key in ("pp", "dp", "ep")}
    config = config.model_copy(update={"generation": config.generation.model_copy(update=sizes)})
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
    return EnginesSpec(backend, spec, generation.engines, generation.replica_gpus)
