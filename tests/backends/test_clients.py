"""The teacher of a policy, as the driver asks for it: whose turn the devices are, and who gets which handles."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlctl.backends.base import PolicySpec, Teaching
from rlctl.backends.batching.batch import TrainBatch, WeightedSequence
from rlctl.backends.batching.mixtures import Mixture
from rlctl.backends.clients import PolicyClient
from rlctl.backends.messages import Truncation
from rlctl.backends.teachers import Member, Teacher
from rlctl.config.parallel import ParallelSpec
from rlctl.errors import InputError
from rlctl.settings.training import TrainingConfig
from support.engines import tiny_facts


class Ranks:
    """Stands for the ranks of a policy. It remembers what each was asked, and answers `export_logprobs` with names."""

    def __init__(self, ranks: int, asked: list[str], name: str) -> None:
        self.ranks, self.asked, self.name = ranks, asked, name
        self.imported: list[dict[int, list[object]]] = []

    def __len__(self) -> int:
        return self.ranks

    def call(self, method: Any, *args: Any) -> list[Any]:
        self.asked.append(f"{self.name} {method.__name__}")
        return [0] * self.ranks

    def call_each(self, method: Any, args_by_rank: list[Any]) -> None:
        self.call(method)
        if method.__name__ == "import_logprobs":
            self.imported = [args[0] for args in args_by_rank]

    def submit_by_handle(self, method: Any, args: list[Any], values: list[int]) -> tuple[Any, list[list[str]]]:
        self.call(method)
        handles = [[f"rank {rank} value {i}" for i in range(count)] for rank, count in enumerate(values)]
        return SimpleNamespace(results=lambda: None), handles


def client(group: Ranks, parallel: ParallelSpec) -> PolicyClient:
    spec = PolicySpec(tiny_facts(tied=False), parallel)
    return PolicyClient(cast(Any, group), spec, TrainingConfig(), micro_batch_tokens=32)


@pytest.mark.parametrize("offload", [True, False])
def test_a_teacher_has_the_devices_while_it_computes_and_hands_its_columns_to_the_ranks_that_train(
    offload: bool,
) -> None:
    asked: list[str] = []
    own, others = Ranks(2, asked, "policy"), Ranks(4, asked, "teacher")
    policy, teacher = client(own, ParallelSpec(dp=2)), client(others, ParallelSpec(tp=2, dp=2))
    policy.teacher = Teacher(policy, teacher, offload)
    rows = tuple(WeightedSequence(group, sample, 4, 12, 0.0, 1.0) for group in range(4) for sample in range(2))
    policy.load_batch(TrainBatch((rows,), {group: f"columns {group}" for group in range(4)}))
    policy.add_logprobs("teacher_logprobs")
    between = ["teacher load_batch", "teacher export_logprobs"]
    turn = ["teacher wake", *between, "teacher sleep"] if offload else between
    assert asked == ["policy load_batch", *turn, "policy import_logprobs"]
    given = [handle for rank in own.imported for taught in rank.values() for each in taught for handle in each.handles]
    assert {str(handle).partition(" value")[0] for handle in given} == {"rank 0", "rank 2"}  # one of each tp pair
    assert {group for rank in own.imported for group in rank} == set(range(4))
    for rank in range(2):  # a rank that trains gets what it trains on, and no more
        assert set(own.imported[rank]) == set(policy._shards[rank].columns)


def test_a_teacher_gives_log_probs_over_the_whole_vocabulary() -> None:
    """Rows of its output would be others with truncated sampling."""
    policy = PolicySpec(tiny_facts(tied=False), truncation=Truncation(top_p=0.8))
    assert policy.teaching(Teaching(8, 2)).truncation is None


def test_other_log_probs_are_the_policys_own() -> None:
    asked: list[str] = []
    client(Ranks(1, asked, "policy"), ParallelSpec()).add_logprobs("old_logprobs")
    assert asked == ["policy add_logprobs"]


def test_teachers_of_several_sources_take_turns_and_the_one_that_is_loaded_goes_first() -> None:
    asked: list[str] = []
    own, others = Ranks(1, asked, "policy"), Ranks(1, asked, "teacher")
    policy, members = (
        client(own, ParallelSpec()),
        (Member(Path("of-a"), 1.0, ("a",)), Member(Path("of-b"), 1.0, ("b", "c"))),
    )
    policy.teacher = source = Teacher(policy, client(others, ParallelSpec()), False, members)
    source.load_model(Path("of-b"))
    rows = tuple(WeightedSequence(group, 0, 4, 12, 0.0, 1.0) for group in range(3))
    columns: dict[int, object] = {group: f"columns {group}" for group in range(3)}
    for _ in range(2):
        asked.clear()
        policy.load_batch(TrainBatch((rows,), columns, sources=dict(enumerate("abc"))))
        policy.add_logprobs("teacher_logprobs")
        turn = ["teacher load_batch", "teacher export_logprobs"]
        assert asked == ["policy load_batch", *turn, "teacher load_model", *turn, "policy import_logprobs"]
        assert set(own.imported[0]) == {0, 1, 2}


def test_one_teacher_may_have_what_no_other_names() -> None:
    asked: list[str] = []
    own, others = Ranks(1, asked, "policy"), Ranks(1, asked, "teacher")
    policy = client(own, ParallelSpec())
    for rest, wanted in ((("b", "*"), [2.0, 3.0, 3.0]), (("b",), None)):
        members = (Member(Path("a"), 2.0, ("a",)), Member(Path("b"), 3.0, rest))
        policy.teacher = source = Teacher(policy, client(others, ParallelSpec()), False, members)
        source.load_model(Path("a"))
        rows = tuple(WeightedSequence(group, 0, 4, 12, 0.0, 1.0) for group in range(3))
        policy.load_batch(TrainBatch((rows,), dict(enumerate(("c0", "c1", "c2"))), sources=dict(enumerate("abc"))))
        if wanted is None:
            with pytest.raises(InputError, match=r"no teacher has rows with 'c' in teacher\.field"):
                policy.add_logprobs("teacher_logprobs")
            continue
        policy.add_logprobs("teacher_logprobs")
        assert [each.weight for _, [each] in sorted(own.imported[0].items())] == wanted


def test_teachers_of_other_architectures_keep_their_weights_while_another_computes() -> None:
    asked: list[str] = []
    own, others = Ranks(1, asked, "policy"), Ranks(1, asked, "teacher")
    policy, members = (
        client(own, ParallelSpec()),
        (Member(Path("a")), Member(Path("b"), model=1), Member(Path("c"), model=1)),
    )
    policy.teacher = source = Teacher(policy, client(others, ParallelSpec()), True, members)
    source.load_model(Path("a"))
    assert asked == [f"teacher {name}" for name in ("load_model", "use_model", "load_model", "sleep")]
    rows = (WeightedSequence(0, 0, 4, 12, 0.0, 1.0),)
    asked.clear()
    policy.load_batch(TrainBatch((rows,), {0: "c0"}))
    policy.add_logprobs("teacher_logprobs")
    turn = ["load_batch", "export_logprobs"]
    moves = ["wake", *turn, "load_model", *turn, "use_model", *turn, "sleep"]
    assert asked == ["policy load_batch", *(f"teacher {name}" for name in moves), "policy import_logprobs"]
    assert [len(parts) for parts in own.imported[0].values()] == [3]


@pytest.mark.parametrize(("top", "looks"), [(0, 1), (4, 2)])
def test_teachers_of_one_row_are_asked_for_each_others_likely_tokens(top: int, looks: int) -> None:
    """The first row has one teacher, and the second both of them."""
    asked: list[str] = []
    own, others = Ranks(1, asked, "policy"), Ranks(1, asked, "teacher")
    policy, members = client(own, ParallelSpec()), (Member(Path("of-a"), 3.0), Member(Path("of-b"), 1.0, ("b",)))
    policy.teacher = source = Teacher(policy, client(others, ParallelSpec()), False, members, Mixture(top=top))
    source.load_model(Path("of-a"))
    asked.clear()
    rows = tuple(WeightedSequence(group, 0, 4, 12, 0.0, 1.0) for group in range(2))
    policy.load_batch(TrainBatch((rows,), {0: "c0", 1: "c1"}, sources=dict(enumerate("ab"))))
    policy.add_logprobs("teacher_logprobs")
    first, again = [["teacher load_batch", *more, "teacher export_logprobs"] for more in ([], ["teacher take_tokens"])]
    wanted = [*first, "teacher load_model", *first]
    wanted += [*again, "teacher load_model", *again] if looks == 2 else []  # beginning with the one that is loaded
    assert asked == ["policy load_batch", *wanted, "policy import_logprobs"]
    assert {group: [each.weight for each in taught] for group, taught in own.imported[0].items()} == {
        0: [3.0],
        1: [3.0, 1.0],
    }
