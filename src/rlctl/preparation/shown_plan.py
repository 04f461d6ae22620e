"""The plan that `rlctl plan` shows. Models and data need not be on this machine."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from rlctl.backends.lookup import require_backends
from rlctl.checkpoints.model_files import Tell
from rlctl.config.load import Resolved
from rlctl.config.sources import Value
from rlctl.errors import InputError
from rlctl.methods.available import method_from_config
from rlctl.planner.from_config import local_gpus
from rlctl.planner.result import Plan
from rlctl.preparation.lengths import fitting_length
from rlctl.preparation.located import ASSUMED_GPU, Located, locate_published
from rlctl.preparation.named import Named, with_images
from rlctl.preparation.open_model import find_model
from rlctl.preparation.planned import no_room, refuse_without_effect
from rlctl.preparation.step_plan import step_plan
from rlctl.rollouts.prompt_order import PromptStream


def shown_plan(resolved: Resolved, top: int, tell: Tell) -> Plan:
    """Return the plan of a configuration with `top` alternatives and all reasons why it cannot run. Raises NoPlanError
    if nothing fits."""
    resolved = with_images(resolved)
    require_backends(resolved.config)
    located = locate_published(Named(resolved, method_from_config(resolved.config, tries_loss=False)), tell)
    facts, method = located.facts, located.method
    refuse_without_effect(located.resolved, facts)
    prompts = _prompts_here(located, tell)
    length = fitting_length(located.config, facts, method, prompts)
    if (new := located.config.turn_tokens) >= length:
        raise no_room(new, length)
    config = located.resolved.deciding([Value("model.max_length", length, "prompts")]).config
    plan = step_plan(config, facts, method, prompts, located.teacher_facts, ASSUMED_GPU, top)
    if config.cluster.gpu == "auto" and not plan.cluster.is_cpu and not local_gpus():
        tell(f"This machine has no GPU; planned for {ASSUMED_GPU.upper()}. Another type: --gpu.")
    too_long = [f"model.max_length = {length}: the model takes {facts.max_length}"] if length > facts.max_length else []
    return replace(plan, blocked=(*plan.blocked, *resolved.refusals, *too_long))


def _prompts_here(located: Located, tell: Tell) -> PromptStream | None:
    """Return the run's prompts; None if it has no data, or if its tokenizer or its preset's data is unavailable here.
    Raises InputError for unavailable data that the user named."""
    config = located.config
    if not (config.data.name or config.data.sources):
        return None
    if find_spec("transformers") is None:
        tell("transformers is not installed, so the lengths of prompts are assumed.")
        return None
    try:
        model = config.model
        files = find_model(model.name or "", model.revision, weights=False, images=model.images)
    except InputError:
        tell(f"The tokenizer of {config.model.name} is not on this machine, so the lengths of prompts are assumed.")
        return None
    try:
        return located.method.open_data(files.directory)
    except InputError as error:
        if not located.resolved.origin["data.name"].startswith("preset"):
            raise
        tell(f"The lengths of prompts are assumed. {error.message}")
        return None
