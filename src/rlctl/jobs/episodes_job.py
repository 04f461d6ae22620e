"""Episodes to play without training: prompts, rewards, and the model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlctl.checkpoints.model_files import Tell
from rlctl.config.load import Resolved
from rlctl.errors import InputError
from rlctl.jobs.completion_job import CompletionJob, completion_job
from rlctl.preparation.named import with_images, with_time
from rlctl.rewards.prepare_rewards import any_reward, mixed_rewards
from rlctl.rewards.reward_plan import Rewards
from rlctl.rollouts.prompt_order import PromptStream
from rlctl.runs.directory import Checkpoint


@dataclass(frozen=True)
class EpisodesJob:
    """Episodes to play: the model, the data rows, the rewards, and the number of episodes."""

    completions: CompletionJob
    prompts: PromptStream
    rewards: Rewards | None
    count: int

    def describe(self) -> list[str]:
        """Return lines for the terminal about data, environment and rewards."""
        environment = self.prompts.environment
        of_rewards = self.rewards.describe() if self.rewards else []
        return [*self.prompts.describe(), *(environment.describe() if environment else []), *of_rewards]


def episodes_job(
    resolved: Resolved, checkpoint: Checkpoint | None, count: int, compares: bool, tell: Tell
) -> EpisodesJob:
    """Open model, data and environment. Raises InputError for problems with any of them."""
    resolved = with_time(resolved if checkpoint else with_images(resolved))
    job = replace(completion_job(resolved, 1, checkpoint, count, tell), compares=compares)
    if checkpoint is not None and compares:
        raise InputError("--check applies to a model: a checkpoint's refit is verified anyway.", "Leave it out.")
    prompts = PromptStream.open_rollouts(job.config, job.model.files.directory)
    for note in prompts.datasets[0].encoder.notes_on(prompts.prompt_at(position) for position in range(count)):
        tell(note)
    listed = [(dataset.label, dataset.reward, dataset.prompts) for dataset in prompts.datasets if dataset.has_scorers]
    opened, time = prompts.encoder.opens_thought, job.config.model.chat_template_time
    rewards = mixed_rewards(listed, opened=opened, time=time) if any_reward(listed) else None
    if rewards is None and prompts.environment is None:
        raise InputError(
            "There is no environment and no reward: nothing to look at.", "Give --env, --tool or --reward."
        )
    return EpisodesJob(job, prompts, rewards, count)
