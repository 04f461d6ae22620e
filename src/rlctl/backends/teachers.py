"""The teachers of a run as the driver asks them: which of them read a row, and whose weights the processes hold."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock

from rlctl.backends.base import Teaching
from rlctl.backends.batching.batch import TrainBatch
from rlctl.backends.batching.mixtures import ALONE, Mixture, Taught
from rlctl.backends.clients import PolicyClient, TeacherHandles
from rlctl.backends.teacher_endpoint import Endpoint
from rlctl.errors import InputError
from rlctl.settings.other_models import owners


@dataclass(frozen=True)
class Member:
    """One of several teachers."""

    place: Path | Endpoint
    """Its weights, or the server that computes it."""
    weight: float = 1.0
    """Its weight in the mixture with other teachers of the same source."""
    sources: tuple[str, ...] = ()
    """The data sources or values of `teacher.field` that it teaches, as in the configuration; empty: all."""
    model: int = 0
    """The model of the teacher's processes that has its architecture (`PolicyWorker.use_model`)."""
    task: Teaching | None = None
    """What it computes, where the teachers differ in that."""


@dataclass(frozen=True)
class Teacher:
    """A frozen teacher, reference or reward model on the policy's devices, in host memory while others compute if
    needed. Several teachers compute in turn in its processes."""

    student: PolicyClient
    policy: PolicyClient | None
    """The teacher's ranks; None: servers compute all teachers."""
    offload: bool
    members: tuple[Member, ...] = ()
    """Several teachers; empty: one."""
    mixture: Mixture = ALONE
    _busy: Lock = field(default_factory=Lock)
    """Validation and concurrent rollouts may call at once."""
    _loaded: dict[int, Path] = field(default_factory=dict)
    """The weights that each model of its processes holds; none while they change."""
    _used: list[int] = field(default_factory=lambda: [0])
    """The model in use."""

    def load_model(self, directory: Path) -> None:
        """Load the first teacher, and the first of each further architecture."""
        self._load(0, directory)
        for member in self.members:
            if isinstance(member.place, Path) and member.model not in self._loaded:
                self._load(member.model, member.place)
        if self.offload:
            self._ranks.sleep()

    @property
    def _ranks(self) -> PolicyClient:
        assert self.policy is not None  # nobody asks for what servers compute
        return self.policy

    def _load(self, model: int, directory: Path) -> None:
        if self._used != [model]:
            self._ranks.use_model(model)
            self._used[:] = [model]
        if self._loaded.get(model) != directory:
            self._loaded.pop(model, None)
            self._ranks.load_model(directory)
            self._loaded[model] = directory

    def handles(self, batch: TrainBatch) -> TeacherHandles:
        """Return for each group of a batch the weight of each of its teachers, and the handles of that teacher's
        log-probs or scores."""
        with self._busy:
            if self.offload:
                self._ranks.wake()
            handles = self._of_members(batch) if self.members else self._of_one(batch)
            if self.offload:
                self._ranks.sleep()
            return handles

    def _of_one(self, batch: TrainBatch) -> TeacherHandles:
        self._ranks.load_batch(replace(batch, minibatches=batch.for_teachers.get(0, batch.minibatches)))
        return {position: [Taught(1.0, parts)] for position, parts in self._ranks.export_logprobs().items()}

    def _of_members(self, batch: TrainBatch) -> TeacherHandles:
        positions = sorted({text.position for minibatch in batch.minibatches for text in minibatch})
        owners = {position: self._owners(batch.sources.get(position, "")) for position in positions}
        parts = dict[tuple[int, int], list[object]]()
        """Handles by group and member."""
        for number, member in enumerate(self.members):
            if isinstance(member.place, Endpoint):
                places = frozenset(at for at, numbers in owners.items() if number in numbers)
                answers = self.student.ask_teacher(member.place, places, self.mixture.top)
                parts |= {(at, number): handles for at, handles in answers.items()}
        for number in self._turns(owners.values()):
            own_batch = replace(batch, minibatches=batch.for_teachers.get(number, batch.minibatches))
            self._ranks.load_batch(_part(own_batch, {at for at, numbers in owners.items() if number in numbers}))
            parts |= {(at, number): handles for at, handles in self._ranks.export_logprobs().items()}
        if self.mixture.asks_again:
            parts |= self._asked_again(
                batch, {at: numbers for at, numbers in owners.items() if len(numbers) > 1}, parts
            )
        return {
            at: [Taught(self.members[number].weight, parts[at, number], number) for number in numbers]
            for at, numbers in owners.items()
        }

    def _asked_again(
        self, batch: TrainBatch, owners: dict[int, tuple[int, ...]], parts: dict[tuple[int, int], list[object]]
    ) -> dict[tuple[int, int], list[object]]:
        """Return the handles of each member's log-probs of the tokens that all teachers of a row find most likely."""
        again = dict[tuple[int, int], list[object]]()
        for number in self._turns(owners.values()):
            for together in sorted({numbers for numbers in owners.values() if number in numbers}):
                places = {at for at, numbers in owners.items() if numbers == together}
                self._ranks.load_batch(_part(batch, places))
                self._ranks.give_tokens({at: [parts[at, each] for each in together] for at in places})
                again |= {(at, number): handles for at, handles in self._ranks.export_logprobs().items()}
        return again

    def _owners(self, source: str) -> tuple[int, ...]:
        if numbers := owners([member.sources for member in self.members], source):
            return numbers
        raise InputError(
            f"teacher.models: no teacher has rows with {source!r} in teacher.field.",
            'Name it in `sources` of one, or give one sources=["*"] for the rest.',
        )

    def _turns(self, owners: Collection[tuple[int, ...]]) -> Iterator[int]:
        """Yield the members with weights that are among `owners`, each when it is loaded; first the one that is."""
        numbers = sorted({number for each in owners for number in each})
        computed = [number for number in numbers if isinstance(self.members[number].place, Path)]

        def moves(number: int) -> tuple[bool, int, bool]:
            model = self.members[number].model
            return model not in self._used, model, self._loaded.get(model) != self.members[number].place

        for number in sorted(computed, key=moves):
            member = self.members[number]
            assert isinstance(member.place, Path)
            self._load(member.model, member.place)
            if member.task is not None:
                self._ranks.teach(member.task)
            yield number


def _part(batch: TrainBatch, places: set[int]) -> TrainBatch:
    """Return the groups of a batch at `places`."""
    minibatches = tuple(tuple(text for text in minibatch if text.position in places) for minibatch in batch.minibatches)
    return replace(batch, minibatches=minibatches, columns={at: batch.columns[at] for at in sorted(places)})
