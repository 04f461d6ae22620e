"""Sections on models next to the policy: teachers and reward models."""

from __future__ import annotations

from typing import Annotated, ClassVar, TypeVar

from rlctl.config.facts import FREE, REHEARSAL_DETAIL, SIZE, Flag
from rlctl.config.section import PathText, Positive, Section


class ModelSizes(Section):
    """The layout of a second model; the planner decides unset values."""

    tp: Annotated[Positive | None, SIZE] = None
    """Tensor parallel size."""
    pp: Annotated[Positive | None, SIZE] = None
    """Pipeline parallel size."""
    cp: Annotated[Positive | None, SIZE] = None
    """Context parallel size."""
    ep: Annotated[Positive | None, SIZE] = None
    """Expert parallel size."""
    etp: Annotated[Positive | None, SIZE] = None
    """Tensor parallel size of the experts."""
    dp: Annotated[Positive | None, SIZE] = None
    """Data parallel size."""


class RewardModelConfig(ModelSizes):
    """The layout of the reward model in `reward.terms` (`model:DIR`). The policy's training backend computes it on the
    policy's devices; the planner decides unset values."""


class SourceTeacher(Section):
    """One of several teachers, each for the prompts or texts of some data sources. They have one architecture and the
    policy's tokenizer, and compute one after the other in the same processes, with the layout of `teacher`."""

    model: PathText
    """As `teacher.model`."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    sources: tuple[str, ...]
    """Names of entries of `data.sources`; entries with equal names are called `NAME #1`, `NAME #2`, ..."""


class TeacherConfig(ModelSizes):
    """The teacher, which provides log-probs of the policy's rollouts. It uses the policy's tokenizer; the policy's
    training backend computes it on the policy's devices."""

    model: Annotated[
        PathText | None,
        FREE | REHEARSAL_DETAIL,
        Flag("teacher", "Teacher model, for --algorithm distillation or `train distill`.", metavar="NAME|DIR"),
    ] = None
    """Local Hugging Face directory, or name on the hub; unset: no teacher."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    models: tuple[SourceTeacher, ...] = ()
    """Several teachers instead of `teacher.model`, each with `model` and the `sources` of data that it reads."""
    other_tokenizer_hint: ClassVar[str] = ""
    """How a teacher with another tokenizer can be used; empty: it cannot."""


def require_one_owner(teacher: TeacherConfig, sources: tuple[str, ...]) -> None:
    """Raise ValueError unless each of `sources`, the labels of `data.sources`, has exactly one of `teacher.models`."""
    if not teacher.models:
        return
    if teacher.model:
        raise ValueError("teacher.model names one teacher and teacher.models lists several: give one of them")
    if not sources:
        raise ValueError(
            "teacher.models needs data.sources, whose names say which teacher reads which prompts or texts"
        )
    owners: dict[str, int] = {}
    for number, entry in enumerate(teacher.models):
        for source in entry.sources:
            if source not in sources:
                raise ValueError(
                    f"teacher.models[{number}].sources: data.sources has no {source!r}, only {', '.join(sources)}"
                )
            if source in owners:
                raise ValueError(
                    f"teacher.models[{number}].sources: {source!r} already belongs to models[{owners[source]}]; a "
                    "source has one teacher"
                )
            owners[source] = number
    if missing := [source for source in sources if source not in owners]:
        raise ValueError(
            f"teacher.models: no teacher has the data source {', '.join(missing)}; add it to `sources` of one"
        )


Teaches = TypeVar("Teaches", bound=TeacherConfig)


def first_of(teacher: Teaches) -> Teaches | None:
    """Return the run's teacher, or the first of several with the layout of `teacher`; None: none is named."""
    if teacher.models:
        first = teacher.models[0]
        return teacher.model_copy(update={"model": first.model, "revision": first.revision})
    return teacher if teacher.model else None


class TextTeacherConfig(TeacherConfig):
    """The teacher, which provides probabilities of the texts. The policy's training backend computes it on the policy's
    devices."""

    other_tokenizer_hint: ClassVar[str] = (
        " With plain texts, --set teacher.own_tokenizer=true compares them across tokenizers."
    )

    own_tokenizer: bool = False
    """With plain texts: allow a teacher with another tokenizer. Both models are compared on tokens that cover the same
    characters."""
