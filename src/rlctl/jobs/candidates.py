"""The models and checkpoints that an evaluation compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlctl.config.load import DEFAULT, Resolved
from rlctl.config.sources import Source, Value
from rlctl.errors import InputError, listed
from rlctl.jobs.run_configuration import of_run
from rlctl.methods.configuration import from_sources
from rlctl.preparation.named import TIME, with_time
from rlctl.runs.directory import Checkpoint
from rlctl.runs.evaluation_file import SampleFile

TEMPERATURE = "generation.temperature"
SHARED = (
    "data.system_prompt", "data.prompt_template", "data.prompt_suffix", "generation.max_new_tokens", "generation.stop",
    TEMPERATURE, "generation.top_p", "generation.top_k", "generation.min_p", "run.seed", TIME,
)  # fmt: skip
"""Keys with the same value for all models of an evaluation: the command line's, else the first run's, else the first
model's."""
SOURCES = ("data.", "environment.", "reward.", "validation.holdout")
"""Keys that say what the sources of the data are, and how they are played and scored."""


@dataclass(frozen=True)
class Candidate:
    """A model or a run's checkpoint to evaluate."""

    label: str
    resolved: Resolved
    checkpoint: Checkpoint | None = None


def candidates(
    sources: Sequence[str | Path], steps: Sequence[int], resolve: Callable[[str | None], Resolved], n: int
) -> tuple[Candidate, ...]:
    """Return the models and checkpoints to evaluate, in the order of `sources`. A name is a model; a path is a run,
    whose newest checkpoint (or the checkpoints of `steps`) is evaluated. `resolve` returns the command line's
    configuration with a given model.

    Raises InputError for no candidates, for duplicates, and for `steps` without a run.
    """
    if steps and not any(isinstance(source, Path) for source in sources):
        raise InputError(f"--step {steps[0]} is a checkpoint of a run, and there is no --run-dir.", "Give --run-dir.")
    settings_asked, chosen = resolve(None), list[Candidate]()
    for source in sources:
        if isinstance(source, Path):
            chosen += [_of_run(source, step, settings_asked) for step in (steps or [None])]
        else:
            chosen.append(_of_model(resolve(source)))
    if not sources and settings_asked.config.model.name:
        chosen = [_of_model(settings_asked)]
    if not chosen:
        raise InputError("There is no model to evaluate.", "Give --model NAME, or --run-dir DIR.")
    labels = [candidate.label for candidate in chosen]
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise InputError(f"{listed(sorted(twice))} is given twice.", "Name each model and each step once.")
    first = leading(chosen)
    shared = dict(first.resolved.leaves())
    origin = f"eval, as {first.label}"
    values = {key: Value(key, shared[key], origin) for key in SHARED}
    if settings_asked.origin[TEMPERATURE] == DEFAULT:
        # A run's temperature is for rollouts. A single sample is greedy.
        values[TEMPERATURE] = Value(TEMPERATURE, 0.0 if n == 1 else 1.0, f"eval, with --n {n}")
    # A run's maximum length follows from its training prompts, and does not apply to a task's prompts.
    free_keys = set() if settings_asked.origin["model.max_length"] != DEFAULT else {"model.max_length"}
    return tuple(
        replace(candidate, resolved=_with(candidate.resolved, list(values.values()), free_keys)) for candidate in chosen
    )


def on_the_same_sources(chosen: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Give all models the data, environments and rewards of the first run, else of the first model."""
    first = leading(chosen)
    values = [value for value in first.resolved.given() if value.key.startswith(SOURCES)]

    def with_sources(resolved: Resolved) -> Resolved:
        below = [value for value in resolved.given() if not value.key.startswith(SOURCES)]
        return from_sources([Source(below), Source(values, shared=True)], type(resolved.config))

    return tuple(c if c is first else replace(c, resolved=with_sources(c.resolved)) for c in chosen)


def leading(listed: Sequence[Candidate]) -> Candidate:
    return next((candidate for candidate in listed if candidate.checkpoint), listed[0])


def _with(resolved: Resolved, values: Sequence[Value], left_out: set[str]) -> Resolved:
    """Return the configuration with the `values` that differ from its values, and without the keys `left_out`."""
    values_given = dict(resolved.leaves())
    below = [value for value in resolved.given() if value.key not in left_out]
    changed = [value for value in values if values_given.get(value.key) != value.value]
    return from_sources([Source(below), Source(changed, shared=True)], type(resolved.config))


def _of_run(directory: Path, step: int | None, base: Resolved) -> Candidate:
    resolved, checkpoint = of_run(directory, step, base)
    return Candidate(f"{directory.resolve().name} step {checkpoint.step}", resolved, checkpoint)


def _of_model(resolved: Resolved) -> Candidate:
    name = resolved.config.model.name or ""
    return Candidate(Path(name).name if Path(name).is_dir() else name, resolved)


def with_vision(candidate: Candidate) -> Candidate:
    """Return the candidate with `model.images = true` if it is a model without a setting. A run keeps its setting."""
    resolved = candidate.resolved
    if candidate.checkpoint is not None or resolved.config.model.images is not None:
        return candidate
    return replace(candidate, resolved=resolved.with_values({"model.images": True}))


def at_one_time(listed: Sequence[Candidate], file: SampleFile) -> list[Candidate]:
    """Give all chat templates the same time: the first candidate's, else the time in the samples file, else now."""
    time = with_time(leading(listed).resolved, file.setting(TIME)).config.model.chat_template_time
    return [replace(candidate, resolved=with_time(candidate.resolved, time)) for candidate in listed]
