"""Fourth stage of preparing a run: opens and checks weights, data, rewards and tokenizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlctl.checkpoints.model_files import ModelFiles, Tell
from rlctl.config.load import Resolved
from rlctl.config.sources import Value
from rlctl.config.user_code import MODEL
from rlctl.data.cross_tokens import Projection
from rlctl.data.image_rows import require_images
from rlctl.data.image_sources import IMAGE
from rlctl.models.constraints import OVERFLOWS_IN_FLOAT16
from rlctl.models.facts import ModelFacts
from rlctl.preparation.lengths import fitting_length, repeated_rows, steps_of_epochs, tell_of_little_room
from rlctl.preparation.located import Located
from rlctl.preparation.named import CLOCK, TIME
from rlctl.preparation.open_model import NamedModel, open_further_teachers, open_model, open_teacher
from rlctl.preparation.planned import Planned
from rlctl.preparation.step_plan import is_scored
from rlctl.preparation.teacher_tokens import (
    projections_to,
    repeated_teachers,
    require_endpoints,
    require_owned,
    require_same_tokens,
)
from rlctl.rewards.prepare_rewards import mixed_rewards
from rlctl.rewards.reward_plan import Rewards
from rlctl.rollouts.dataset import HeldOutTexts
from rlctl.rollouts.prompt_order import PromptStream
from rlctl.rollouts.validation import ValidationSet
from rlctl.settings.config import RlctlConfig
from rlctl.telemetry.start_watch import bounded_wait
from rlctl.training.capabilities import Refuses
from rlctl.training.method import Method


@dataclass(frozen=True)
class Opened(Located):
    """A run with data and rewards. The configuration contains the lengths and steps derived from the data."""

    base_model: ModelFiles
    """The model at the start of the run."""
    prompts: PromptStream
    rewards: Rewards | None
    """None: nothing is scored."""
    validation: ValidationSet | HeldOutTexts | None = None
    """None: the run does not validate."""
    teacher: NamedModel | None = None
    """The teacher or the reward model; None: the run has neither."""
    projections: Mapping[int, Projection] = field(default_factory=dict)
    """Maps from the policy's tokens to those of the teachers that have their own tokenizer, by their numbers."""
    prompt_tokens: tuple[int, ...] = ()
    """Lengths of the run's first prompts."""
    notes: tuple[str, ...] = ()
    """Notes about rows of the data."""
    further_teachers: tuple[NamedModel, ...] = ()
    """The teachers behind the first, `teacher`, of several."""

    @property
    def teachers(self) -> tuple[NamedModel, ...]:
        """All teachers that the run computes, or the reward model."""
        return (self.teacher, *self.further_teachers) if self.teacher is not None else ()


def open_run(planned: Planned, tell: Tell, *, copies: bool, completion: str | None) -> Opened:
    """Open models, data and rewards. `copies`: write the text part of a multimodal model to the cache. `completion`: a
    text that the rewards score as a trial, in addition to the first row's reference answer.

    Raises InputError for unusable models, data, rewards and prompts.
    """
    config, method = planned.config, planned.method
    model, teacher = open_model(config.model, tell, copies=copies), open_teacher(config, tell, copies=copies)
    further = open_further_teachers(config, teacher, tell, copies=copies)
    directory = model.files.directory
    if isinstance(method, Refuses):
        method.refuse_model(directory)
    if config.model.dtype == "float16" and model.facts.family in OVERFLOWS_IN_FLOAT16:
        tell(f"Warning: activations of {model.facts.family} overflow in float16. model.dtype=bfloat16 can hold them.")
    prompts = method.open_data(directory)
    steps_of_epochs(planned.resolved, prompts)
    teachers = dict(zip(config.listed_teachers or (0,), (teacher, *further), strict=True)) if teacher else {}
    for number, named in teachers.items() if config.named_teacher else ():
        if number not in config.tokenizer_teachers:
            require_same_tokens(config, prompts.encoder.tokenizer, named, _teacher_names(config)[number])
    require_owned(config, prompts)
    require_endpoints(config, prompts.encoder.tokenizer, model.facts, min(method.teacher_top, model.facts.vocab))
    with bounded_wait():  # the trial of the rewards runs in processes with time limits
        rewards = _tried_rewards(config, method, prompts, completion)
        validation = method.open_validation(prompts, directory)
    if (most := _most_images(config)) is not None:
        prompts.require_images(most)
        require_images(validation.rows if isinstance(validation, ValidationSet) else (), most)
    with_tokenizer = {number: teachers[number] for number in config.tokenizer_teachers}
    projections = projections_to(config, prompts, validation, with_tokenizer)
    resolved, length = _decided_by_data(planned.resolved, model.facts, method, prompts, rewards)
    prompt_tokens, new = prompts.lengths(), config.turn_tokens
    if validation:
        validation = validation.fitted(length - 1 if new else length, prompts.room)
    tell_of_little_room(tell, prompt_tokens, new, length)
    return Opened(
        resolved, method, model.facts, planned.teacher_facts, planned.assume, model.files, prompts, rewards,
        validation, teacher, projections, tuple(prompt_tokens),
        (*prompts.notes(), *repeated_rows(config, prompts), *repeated_teachers(config)),
        further, held_adapters=planned.held_adapters,
    )  # fmt: skip


def _teacher_names(config: RlctlConfig) -> dict[int, str]:
    named = config.listed_teachers or {0: config.named_teacher}
    return {number: str(teacher.model) for number, teacher in named.items() if teacher is not None}


def _decided_by_data(
    resolved: Resolved, facts: ModelFacts, method: Method, prompts: PromptStream, rewards: Rewards | None
) -> tuple[Resolved, int]:
    """Return the configuration with `model.max_length`, and the length. With `run.epochs`, also set `run.steps`; drop
    `model.chat_template_time` if no chat template of the run writes a time."""
    without = [TIME] if _is_idle_time(resolved, prompts, rewards) else []
    length = fitting_length(resolved.config, facts, method, prompts)
    values = [Value("model.max_length", length, "prompts")]
    if (steps := steps_of_epochs(resolved, prompts)) is not None:  # again: `fitting_length` may have dropped rows
        values.append(Value("run.steps", steps, "run.epochs"))
        without.append("run.steps")
    return resolved.deciding(values, without), length


def _is_idle_time(resolved: Resolved, prompts: PromptStream, rewards: Rewards | None) -> bool:
    scored = rewards is not None and any(name.startswith(MODEL) for name in rewards.scorers)
    written = scored or any(dataset.encoder.writes_time for dataset in prompts.datasets)
    return resolved.origin[TIME] == CLOCK and not written


def _tried_rewards(
    config: RlctlConfig, method: Method, prompts: PromptStream, completion: str | None
) -> Rewards | None:
    """Try the rewards of all sources and return them; None: nothing is scored."""
    if not is_scored(method, prompts):
        return None
    datasets = [(dataset.label, dataset.reward, dataset.prompts) for dataset in prompts.datasets if dataset.has_scorers]
    opened, time = prompts.encoder.opens_thought, config.model.chat_template_time
    return mixed_rewards(datasets, completion, apart=True, opened=opened, time=time)


def _most_images(config: RlctlConfig) -> int | None:
    """Return `vllm.limit_mm_per_prompt` for images; None: no limit."""
    engines = config.engine_settings
    limits = engines.vllm.passed.get("limit_mm_per_prompt") if engines is not None else None
    image_limit = limits.get(IMAGE) if isinstance(limits, dict) else None
    return image_limit.get("count") if isinstance(image_limit, dict) else image_limit
