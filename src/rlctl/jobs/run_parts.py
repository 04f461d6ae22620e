"""Construction of the loop's parts from a run's job and processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rlctl.backends.clients import PolicyClient
from rlctl.cluster.workers import WorkerGroup
from rlctl.jobs.run_journal import RunJournal
from rlctl.preparation.job import Job
from rlctl.preparation.run_workers import RunWorkers
from rlctl.refit.sync import WeightSync
from rlctl.rewards.reward_worker import RewardWorker
from rlctl.rollouts.sampled_ahead import SampledAhead
from rlctl.rollouts.scored_groups import Scorers
from rlctl.rollouts.source import RolloutSource
from rlctl.rollouts.validation import Validation
from rlctl.runs.directory import Checkpoint
from rlctl.telemetry.display import Display
from rlctl.telemetry.phases import StepTimer
from rlctl.training.running_parts import SourceParts, ValidationParts


def restored(saved: Checkpoint | None, rollouts: RolloutSource, validation: Validation | None) -> tuple[int, int]:
    """Restore rollouts and validation from a checkpoint; return its step and its version of the weights (0, 0 without
    one)."""
    if saved is None:
        return 0, 0
    state = saved.state()
    rollouts.restore(state["source"], saved.path)
    if validation is not None:
        validation.restore(state.get("validation") or {})
    return state["step"], state["version"]


def validation_of(
    job: Job, workers: RunWorkers, policy: PolicyClient, sync: WeightSync | None, journal: RunJournal
) -> Validation | None:
    if job.validation is None:
        return None
    scorers = scorers_of(job, workers.validation, policy)
    return job.method.validation(job.validation, ValidationParts(policy, scorers, sync, journal.refitted))


def rollouts_of(
    job: Job, workers: RunWorkers, sync: WeightSync | None, timer: StepTimer, display: Display
) -> contextlib.AbstractContextManager[RolloutSource]:
    scorers = scorers_of(job, workers.reward, workers.policy)
    return job.method.source(SourceParts(job.prompts, timer, scorers, sync, display.say))


@contextlib.contextmanager
def sampled_ahead(
    job: Job, workers: RunWorkers, sync: WeightSync | None, timer: StepTimer, display: Display
) -> Iterator[SampledAhead]:
    """As `rollouts_of`, with a source whose next batch can begin early."""
    assert sync is not None  # engines sample
    with rollouts_of(job, workers, sync, StepTimer(), display) as source:
        ahead = SampledAhead(source, sync, timer)
        yield ahead
        ahead.close()  # not after an error, which ends the engines


def scorers_of(job: Job, workers: WorkerGroup[RewardWorker] | None, policy: PolicyClient) -> Scorers | None:
    model = None if job.config.has_teacher else policy.teacher
    return None if workers is None else Scorers(workers, model, job.rewards is not None and job.rewards.compares)
