"""Check that the files, directories and scorers in a configuration exist."""

from __future__ import annotations

from rlctl.data.chat import read_template, require_directory
from rlctl.data.mixing import errors_of_source, source_settings
from rlctl.environments.environment_plan import plan_environment
from rlctl.rewards.prepare_rewards import require_known
from rlctl.settings.config import RlctlConfig


def require_places(config: RlctlConfig) -> None:
    """Raise InputError for missing files, directories and scorers. Loads none of them."""
    require_directory(config.model.tokenizer)
    if config.model.chat_template:
        read_template(config.model.chat_template)
    for dataset in source_settings(config):
        require_known(dataset.reward)
        with errors_of_source(dataset.label):
            plan_environment(dataset.environment)
    if rollouts := config.rollout_settings:
        require_known(rollouts.reward.model_copy(update={"terms": rollouts.validation.reward}))
