"""Sections on models next to the policy: teachers and reward models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import Field

from rlctl.config.facts import FREE, REHEARSAL_DETAIL, SIZE, Flag
from rlctl.config.section import NonNegative, PathText, Positive, PositiveNumber, Section


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


class ListedTeacher(Section):
    """One of several teachers. Those without `endpoint` take turns in the same processes, with the layout of
    `teacher`."""

    model: PathText | None = None
    """As `teacher.model`; with `endpoint` the server's name of the model, unset: its only one."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    endpoint: str | None = None
    """Address of a vLLM or SGLang server that computes the teacher, such as http://host:8000."""
    api_key_env: str | None = None
    """Name of the environment variable with the server's API key; unset: it asks for none."""
    timeout_s: PositiveNumber = 120.0
    """Longest time for an answer of the server."""
    retries: NonNegative = 3
    """Repetitions of a request that the server does not answer or is too busy for."""
    concurrency: Positive = 16
    """Concurrent requests of a policy rank."""
    sources: tuple[str, ...] = ()
    """Names of the entries of `data.sources` that it teaches, where entries with equal names are called `NAME #1`,
    `NAME #2`, ...; with `teacher.field` values of that field. `*`: what no entry names; empty: all prompts or texts."""
    weight: PositiveNumber = 1.0
    """Weight among the teachers of the same source, whose weights are divided by their sum (`teacher.mix`)."""


Mix = Literal["probabilities", "log-probs", "divergences"]
"""How the teachers of one row are combined."""


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
    models: tuple[ListedTeacher, ...] = ()
    """Several teachers instead of `teacher.model`: each with `model`, and data `sources`, a `weight`, or both."""
    field: str | None = None
    """Field of the rows, such as `agent_ref.name`, whose values `sources` name in place of the data sources."""
    policy: bool = False
    """Self-distillation: the teacher is the policy of an earlier step, at first of the start of the run."""
    update_every: Positive | None = None
    """With `policy`: steps between updates of the teacher from the policy's weights; unset: none, and the teacher stays
    the policy of the start."""
    update_rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    """With `update_every`: the policy's share of the teacher's new weights, (1 - rate) teacher + rate policy. 1 copies
    the policy; less is an exponential moving average of its weights."""
    mix: Mix = "probabilities"
    """With several teachers of the same source: learn the weighted mean of their probabilities, or of their log-probs,
    normalized over the compared tokens; or take the weighted mean of the divergences from each, over its own most
    likely tokens."""
    other_tokenizer_hint: ClassVar[str] = ""
    """How a teacher with another tokenizer can be used; empty: it cannot."""

    @property
    def computed(self) -> dict[int, ListedTeacher]:
        """The entries of `models` that the run computes, by number."""
        return {number: entry for number, entry in enumerate(self.models) if entry.endpoint is None}

    @property
    def served(self) -> dict[int, ListedTeacher]:
        """The entries of `models` with an endpoint, by number."""
        return {number: entry for number, entry in enumerate(self.models) if entry.endpoint is not None}


def require_one_kind(teacher: TeacherConfig) -> None:
    """Raise ValueError for a teacher of several kinds, and for keys of self-distillation without effect."""
    if teacher.policy and (teacher.model or teacher.models):
        other = "teacher.model" if teacher.model else "teacher.models"
        raise ValueError(f"teacher.policy = true is the policy as its own teacher, and {other} names another: give one")
    if teacher.update_every is not None and not teacher.policy:
        raise ValueError(f"teacher.update_every = {teacher.update_every} has no effect without teacher.policy = true")
    if teacher.update_rate != 1 and teacher.update_every is None:
        raise ValueError(f"teacher.update_rate = {teacher.update_rate:g} has no effect without teacher.update_every")


ONLY_SERVED = ("api_key_env", "timeout_s", "retries", "concurrency")
"""Keys of a teacher with an endpoint."""


def require_endpoint(number: int, entry: ListedTeacher) -> None:
    """Raise ValueError for an entry with neither model nor endpoint, or with keys without effect."""
    key, plain = f"teacher.models[{number}]", ListedTeacher()
    if entry.endpoint is None:
        if entry.model is None:
            raise ValueError(f"{key} names neither a model nor an endpoint")
        idle, needs = [name for name in ONLY_SERVED if getattr(entry, name) != getattr(plain, name)], "an endpoint"
    else:
        if not entry.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"{key}.endpoint = {entry.endpoint} is no address such as http://host:8000")
        idle, needs = ["revision"] if entry.revision is not None else [], "a model of the hub"
    if idle:
        raise ValueError(f"{key}.{idle[0]} = {getattr(entry, idle[0])} has no effect: it is for {needs}")


REST = "*"
"""Among the sources of a teacher: all that no teacher names."""


def owners(taught: Sequence[Sequence[str]], source: str) -> tuple[int, ...]:
    """Return the numbers of the teachers of a source, where teachers have the sources `taught`."""
    named = source != REST and any(source in sources for sources in taught)
    return tuple(
        number
        for number, sources in enumerate(taught)
        if not sources or source in sources or (REST in sources and not named)
    )


def owners_of(teacher: TeacherConfig, sources: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return for each of `sources`, the labels of `data.sources`, the numbers of its teachers in `teacher.models`; with
    `teacher.field` for each value that they name. Data without several sources has the label ""."""
    taught = [entry.sources for entry in teacher.models]
    if teacher.field is not None:
        sources = tuple(dict.fromkeys(source for named in taught for source in named))
    return {source: owners(taught, source) for source in sources or ("",)}


def require_owners(teacher: TeacherConfig, sources: tuple[str, ...]) -> None:
    """Raise ValueError unless each of `sources`, the labels of `data.sources`, has a teacher among `teacher.models`,
    and weights and `teacher.mix` have an effect."""
    require_one_kind(teacher)
    if teacher.models and teacher.model:
        raise ValueError("teacher.model names one teacher and teacher.models lists several: give one of them")
    for number, entry in enumerate(teacher.models):
        require_endpoint(number, entry)
        key = f"teacher.models[{number}].sources"
        if teacher.field is not None:
            continue
        if entry.sources and not sources:
            raise ValueError(f"{key} needs data.sources, whose names say which teacher reads which prompts or texts")
        for source in entry.sources:
            if source not in (*sources, REST):
                raise ValueError(f"{key}: data.sources has no {source!r}, only {', '.join(sources)}")
            if entry.sources.count(source) > 1:
                raise ValueError(f"{key} names {source!r} twice")
    if teacher.field is not None and not any(entry.sources for entry in teacher.models):
        raise ValueError(f"teacher.field = {teacher.field} has no effect: no teacher of teacher.models has `sources`")
    numbers_of = owners_of(teacher, sources)
    if teacher.models and (missing := [source for source, numbers in numbers_of.items() if not numbers]):
        raise ValueError(
            f"teacher.models: no teacher has the data source {', '.join(missing)}; add it to `sources` of one"
        )
    sharing = {number for numbers in numbers_of.values() if len(numbers) > 1 for number in numbers}
    for number, entry in enumerate(teacher.models):
        if entry.weight != 1 and number not in sharing:
            raise ValueError(
                f"teacher.models[{number}].weight = {entry.weight:g} has no effect: no other teacher has its sources"
            )
    if teacher.mix != "probabilities" and not sharing:
        raise ValueError(f"teacher.mix = {teacher.mix} has no effect: no source has several teachers")


def repeated(teacher: TeacherConfig, sources: Sequence[str]) -> dict[int, int]:
    """Return the entries of `teacher.models` that are an earlier one, with its number, for rows that both teach."""
    pairs = {pair for numbers in owners_of(teacher, sources).values() for pair in combinations(numbers, 2)}
    plain = [entry.model_dump(exclude={"weight", "sources"}) for entry in teacher.models]
    return {second: first for first, second in sorted(pairs, reverse=True) if plain[first] == plain[second]}


Teaches = TypeVar("Teaches", bound=TeacherConfig)


def first_of(teacher: Teaches) -> Teaches | None:
    """Return the run's teacher, or the first of several that it computes, with the layout of `teacher`; None: it
    computes none."""
    if teacher.models:
        if not teacher.computed:
            return None
        first = next(iter(teacher.computed.values()))
        return teacher.model_copy(update={"model": first.model, "revision": first.revision})
    return teacher if teacher.model else None


class ListedTextTeacher(ListedTeacher):
    """One of several teachers of `train distill`."""

    own_tokenizer: bool = False
    """As `teacher.own_tokenizer`, for this teacher."""


class TextTeacherConfig(TeacherConfig):
    """The teacher, which provides probabilities of the texts. The policy's training backend computes it on the policy's
    devices."""

    other_tokenizer_hint: ClassVar[str] = (
        " With plain texts, --set teacher.own_tokenizer=true (in teacher.models: own_tokenizer of the entry) compares "
        "them across tokenizers."
    )

    models: tuple[ListedTextTeacher, ...] = ()
    """Several teachers instead of `teacher.model`: each with `model`, and data `sources`, a `weight`, or both."""
    own_tokenizer: bool = False
    """With plain texts: allow a teacher with another tokenizer. Both models are compared on tokens that cover the same
    characters."""

    @property
    def with_tokenizer(self) -> tuple[int, ...]:
        """The numbers of the teachers with their own tokenizer; a single teacher has the number 0."""
        if not self.models:
            return (0,) if self.own_tokenizer else ()
        return tuple(number for number, entry in enumerate(self.models) if entry.own_tokenizer)


def require_mixable(teacher: TextTeacherConfig, sources: tuple[str, ...]) -> None:
    """Raise ValueError for teachers with their own tokenizer behind an endpoint, or that `teacher.mix` cannot combine
    with others."""
    for number in teacher.with_tokenizer if teacher.models else ():
        key = f"teacher.models[{number}].own_tokenizer"
        if teacher.models[number].endpoint is not None:
            raise ValueError(
                f"{key}: a server does not give the likely tokens of a whole text, over which tokenizers are compared; "
                "name the model in place of the endpoint"
            )
        if teacher.mix != "divergences" and any(len(numbers) > 1 for numbers in owners_of(teacher, sources).values()):
            raise ValueError(
                f"{key}: probabilities of tokens of different vocabularies have no mean, which is what teacher.mix = "
                f"{teacher.mix} takes of teachers of the same texts; set teacher.mix=divergences"
            )
