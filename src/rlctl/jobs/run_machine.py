"""Resource use and progress of a run's processes: memory, CPU, and the progress of a phase."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlctl.cluster.usage import UsageSampler, system_metrics
from rlctl.config.files import write_json
from rlctl.errors import RlctlError, WorkerError
from rlctl.preparation.run_workers import RunWorkers
from rlctl.refit.sync import WeightSync
from rlctl.runs.directory import RunDirectory
from rlctl.settings.run import BatchConfig
from rlctl.telemetry.display import Display
from rlctl.telemetry.phases import Phase


class Machine:
    """Measures once per step the memory and CPU use of driver, ranks and engines."""

    def __init__(self, workers: RunWorkers, sync: WeightSync | None) -> None:
        self._workers, self._sync, self._driver = workers, sync, UsageSampler()
        self._told_engines = 0
        self.metrics()  # each measurement covers the time since the previous one, so start the first interval here

    def losses(self) -> dict[str, int]:
        """Return `lost_engines` since the last call; empty: none were lost."""
        lost = 0 if self._sync is None else self._sync.lost_engines
        new, self._told_engines = lost - self._told_engines, lost
        return {"lost_engines": new} if new else {}

    def metrics(self) -> dict[str, Any]:
        """Return the `system` object of a metrics line, without processes that have ended."""
        driver = self._driver.sample()
        try:
            used = {name: group.usage() for name, group in self._workers.groups.items()}
            policy = [usage for name in ("policy", "teacher", "reward-model") for usage in used.get(name, [])]
            return system_metrics(driver, policy, used.get("engine", []))
        except RlctlError:  # Ray is broken; the next call that needs Ray reports it
            return system_metrics(driver, [], [])


def keep_memory(run: RunDirectory, workers: RunWorkers, display: Display) -> None:
    """Write the peak memory of the processes for `rlctl plan --run`. Report a failure without failing the run."""
    display.doing("stopping the processes")
    try:
        write_json(run.memory, {name: group.peak_memory() for name, group in workers.groups.items()})
    except (WorkerError, OSError) as error:
        display.say(f"The processes' memory was not recorded: {error}")


def progress_of(workers: RunWorkers, batch: BatchConfig) -> Callable[[Phase], tuple[int, int] | None]:
    def progress(phase: Phase) -> tuple[int, int] | None:
        if phase is Phase.GENERATION and workers.engines is not None:
            rates = workers.engines.group.progress()
            return (sum(done for done, _ in rates.values()), batch.rollouts) if rates else None
        if phase in (Phase.TRAINING, Phase.LOGPROBS, Phase.CRITIC):
            return workers.policy.group.part([0]).progress().get(0)
        return None

    return progress
