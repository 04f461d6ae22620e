"""Python functions for the commands: configuration, plan, run, completions, evaluations and metrics.

Every function raises the errors of `rlctl.errors`, all derived from `RlctlError`.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.config.load import Resolved
from rlctl.config.sources import Source, Value, flatten, sources_in_order
from rlctl.errors import InputError, missing_package
from rlctl.methods.available import register as register_algorithm
from rlctl.methods.configuration import from_sources, registry, schema

if TYPE_CHECKING:
    from rlctl.jobs.run_summary import RunSummary
    from rlctl.planner.result import Plan
    from rlctl.training.loop import Loop

__all__ = ["evaluate", "generate", "load_config", "plan", "read_metrics", "register_algorithm", "train"]


def load_config(
    preset: str | None = None, files: Sequence[str | Path] = (), values: Mapping[str, Any] | None = None
) -> Resolved:
    """Return the configuration of a preset, YAML files, the environment and `values`; later ones win over earlier ones.

    `values` holds keys as `rlctl config schema` lists them, dotted or nested: `{"run.steps": 20, "optimizer": {"lr":
    1e-5}}`. A function or class of a file of yours stands for its `path/to/file.py:name`, so that rewards, losses and
    algorithms can be given as they are.

    Raises ConfigError for a wrong key or value, naming the nearest known one.
    """
    sources = sources_in_order(preset, files, os.environ, {}, (), registry=registry())
    return from_sources([*sources, Source(flatten(with_references(values or {}), "program", schema()))])


def plan(config: Resolved) -> Plan:
    """Return how a run of this configuration would be laid out; needs neither its weights nor its GPUs.

    `plan.config_values()` are the keys that it decides, `plan.seconds` and `plan.total_s` the predicted step. Raises
    NoPlanError when nothing fits.
    """
    from rlctl.preparation.shown_plan import shown_plan

    with installed_engines():
        return shown_plan(config, 0, tell)


def train(
    config: Resolved,
    *,
    resume: bool = False,
    allow_changes: bool = False,
    quiet: bool = False,
    loop: type[Loop] | None = None,
) -> RunSummary:
    """Begin a run, or continue the one in `run.dir` (or the newest), and return its summary when it has ended.

    `loop` is a class derived from `rlctl.Loop`, for steps of your own. `quiet` keeps the progress off the terminal;
    the run's log has it in any case. Ctrl-C finishes the step and saves, as on the command line.

    Raises InputError for what the configuration names wrongly and in any thread but the main one, NoPlanError when no
    plan fits, MachineError where this machine lacks what was asked for, and the error of whatever failed.
    """
    if threading.current_thread() is not threading.main_thread():
        raise InputError("A run takes Ctrl-C, which only the main thread can.", "Call rlctl.train there.")
    with installed_engines():
        from rlctl.jobs.train import train_grpo

        return train_grpo(config, resume=resume, quiet=quiet, allow_changes=allow_changes, loop=loop)


def generate(
    config: Resolved, prompts: Sequence[str], *, n: int = 1, run_dir: str | Path | None = None, step: int | None = None
) -> list[dict[str, Any]]:
    """Return a record for each prompt: `prompt`, and `completions` with text, token_ids, logprobs and finish_reason.

    `model.name` has the weights, or with `run_dir` a run's checkpoint: of `step`, or the newest.
    """
    with installed_engines():
        from rlctl.jobs.completion_job import completion_job
        from rlctl.jobs.generate import complete
        from rlctl.jobs.given_prompts import read_prompts
        from rlctl.jobs.run_configuration import of_run

        checkpoint = None
        if run_dir is not None:
            config, checkpoint = of_run(Path(run_dir), step, config)
        rows = read_prompts(prompts, None, config.config.data)
        return list(complete(completion_job(config, n, checkpoint, len(rows), tell), rows, tell))


def evaluate(
    config: Resolved,
    tasks: Sequence[str],
    *,
    n: int = 1,
    k: Sequence[int] = (),
    limit: int | None = None,
    models: Sequence[str | Path] = (),
    run_dirs: Sequence[str | Path] = (),
    steps: Sequence[int] = (),
    output: str | Path | None = None,
) -> list[dict[str, Any]]:
    """Return how often models answer tasks rightly, as `rlctl eval --json` has it: for each task and model a dictionary
    of `task`, `model`, `samples` and `metrics`, whose entries have `value` and `stderr`.

    Evaluates the checkpoints of `run_dirs` (of `steps`, or the newest of each), then `models`; without either,
    `model.name`. `n` is the number of samples of each prompt, `k` lists the k of pass@k, `limit` is the
    number of prompts of each task, and `output` names a file of samples, which a second call goes on with.

    Raises InputError for a task or model that is wrong, and NoPlanError where a model does not fit.
    """
    for name, number in (("n", n), ("limit", limit)):
        if number is not None and number < 1:
            raise InputError(f"{name}={number} leaves nothing to sample.", "Give a number from 1.")

    def of_model(name: str | None) -> Resolved:
        chosen = [] if name is None else [Value("model.name", name, "program")]
        return from_sources([Source(list(config.given())), Source(chosen)], type(config.config))

    with installed_engines():
        from rlctl.jobs.candidates import candidates
        from rlctl.jobs.evaluate import evaluate as run_evaluation
        from rlctl.jobs.evaluate import evaluation
        from rlctl.rewards.statistics import default_ks
        from rlctl.runs.evaluation_file import SampleFile

        evaluated = candidates([*map(Path, run_dirs), *map(str, models)], steps, of_model, n)
        job = evaluation(evaluated, tasks, n, k or default_ks(n), limit)
        with SampleFile(None if output is None else Path(output)) as file:
            return [result.to_json() for result in run_evaluation(job, file, tell)]


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Return the metrics of each finished step of a run, as `metrics.jsonl` has them."""
    from rlctl.runs.directory import RunDirectory
    from rlctl.telemetry import metrics

    file = RunDirectory(Path(run_dir)).metrics
    if not (lines := metrics.read_metrics(file)):
        raise InputError(f"{run_dir} has no {file.name}.", "Give the directory of a run that has finished a step.")
    return lines


@contextlib.contextmanager
def installed_engines() -> Iterator[None]:
    """Raise MachineError, naming the package and how it is installed, where an engine that is needed is not there."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing_package(error) from error


def with_references(value: Any) -> Any:
    """Return `value` with the `path/to/file.py:name` of each function and class in it."""
    if isinstance(value, Mapping):
        return {key: with_references(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_references(item) for item in value]
    return reference(value) if inspect.isfunction(value) or inspect.isclass(value) else value


def reference(made: Callable[..., Any]) -> str:
    """Return the `path/to/file.py:name` of a function or class. Raises InputError where it is not at the top of a file,
    from which the processes of a run could read it."""
    module = sys.modules.get(made.__module__)
    file = getattr(module, "__file__", None)
    if file is None or getattr(module, made.__qualname__, None) is not made:
        raise InputError(
            f"{made.__qualname__} is not defined at the top of a file, where other processes can read it.",
            "Move it to the top of a .py file.",
        )
    return f"{Path(file).absolute()}:{made.__qualname__}"


def tell(text: str) -> None:
    """Show a message on stderr."""
    print(text, file=sys.stderr, flush=True)
