"""`rlctl diverge` on both trainers: each planted fault is found where it is, and nothing is found without one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from rlctl.backends.hidden_states import OUT, States, joined
from rlctl.config.parallel import ParallelSpec
from rlctl.divergence.causes import cause_of
from rlctl.divergence.compare import Examined, examine, first_parting, logprobs
from rlctl.divergence.reference import Reference, load_reference
from support.divergence_cases import EARLIER, FAULTS, SEQUENCES, Fault, earlier, plant, record
from support.family_models import hf_model
from support.pool import SLOW, Pools, slowly
from support.rows import every_row

BACKENDS = ("megatron", "dtensor")
VOCAB = 252  # divided by two ranks
LENGTHS = [len(sequence) for sequence in SEQUENCES]
DTYPES = ("float32", "bfloat16", "float16")


class Models:
    """Tiny published models, and their references in a dtype."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.reference = cache(self._reference)

    @cache  # noqa: B019 - lives as long as the module's tests
    def directory(self, family: str) -> Path:
        hf_model(family, VOCAB).save_pretrained(self.place / family)
        return self.place / family

    def _reference(self, family: str, dtype: str = "float32") -> Reference:
        return load_reference(self.directory(family), SEQUENCES, getattr(torch, dtype))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("divergence"))


def examined(reference: Reference, ranks: list[list[States]], dtype: str = "float32") -> list[Examined]:
    """The points of a policy; all of the reference's."""
    states = joined([part for rank in ranks for part in rank], LENGTHS)
    assert {name for name in states if name.endswith(OUT)} == {f"{point}{OUT}" for point in reference.points[1:]}
    pairs = logprobs(reference, states, ())
    assert len(pairs) == 24
    return examine(reference, states, getattr(torch, dtype))


def parts_of(found: list[Examined]) -> Iterator[str]:
    return (str(one.measure) for one in found if one.measure.parts)


GUARDS = (SLOW, pytest.mark.guard)
USUAL = ("llama", "qwen3-moe")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in USUAL else GUARDS)
        for family in dict.fromkeys(fault.family for fault in FAULTS.values())
    ],
)
def test_each_fault_is_located_with_its_cause(pools: Pools, models: Models, family: str) -> None:
    reference = models.reference(family)
    before = plant(models.directory(family), Fault("", "", "", "", tensors=earlier))
    reference.remember(EARLIER, load_reference(before, SEQUENCES, torch.float32))
    names = [name for name, fault in FAULTS.items() if fault.family == family]

    def check(backend: str, name: str, states: list[States]) -> None:
        fault, found = FAULTS[name], examined(reference, [states])
        first = first_parting(found)
        assert first is not None
        cause = cause_of(reference, first, torch.float32)
        assert (first.measure.point, cause.operation) == (fault.point, fault.operation), cause
        assert fault.words in cause.words
        assert cause.difference is not None

    paths, rows = reference.paths(), list[tuple[str, str, list[States]]]()
    for backend in BACKENDS:
        (recorded,) = pools(1).run(record, backend, models.directory(family), paths, ["", *names])
        assert list(parts_of(examined(reference, [recorded.pop("")]))) == []
        rows += [(backend, name, states) for name, states in recorded.items()]
    every_row(rows, check)


NARROW = {
    f"{family}-{dtype}": (family, dtype)
    for family in ("llama", "qwen3", "qwen2-yarn", "qwen3-moe", "gemma3", "mistral-windowed", "deepseek-v3", "gpt-oss")
    for dtype in DTYPES[1:]
}
GUARDED = [name for number, name in enumerate(NARROW) if number % 4 in (0, 3)]
"""Each family in one of the formats."""


@pytest.mark.parametrize(
    ("family", "dtype"), slowly(NARROW, "llama-bfloat16", guards=set(GUARDED) - {"llama-bfloat16"})
)
def test_nothing_is_found_without_a_fault(pools: Pools, models: Models, family: str, dtype: str) -> None:
    reference = models.reference(family, dtype)
    for backend in BACKENDS:
        ranks = pools(1).run(record, backend, models.directory(family), reference.paths(), [""], dtype)
        assert list(parts_of(examined(reference, [ranks[0][""]], dtype))) == []


DIVIDED = {
    "tp2": ("gemma3", ParallelSpec(tp=2), BACKENDS, "attention scale"),
    "pp2": ("deepseek-v3", ParallelSpec(pp=2), ("megatron",), "router bias"),
    "cp2": ("llama", ParallelSpec(cp=2), BACKENDS, "gate and up"),
    "ep2": ("qwen3-moe", ParallelSpec(dp=2, ep=2), BACKENDS, "permuted experts"),
}


@pytest.mark.slow
@pytest.mark.guard
@pytest.mark.parametrize("name", DIVIDED)
def test_values_of_divided_models_are_put_together(pools: Pools, models: Models, name: str) -> None:
    family, parallel, backends, fault = DIVIDED[name]
    reference = models.reference(family)
    arguments = (models.directory(family), reference.paths(), ["", fault], "float32", parallel)
    for backend in backends:
        ranks = pools(2).run(record, backend, *arguments)
        assert list(parts_of(examined(reference, [rank[""] for rank in ranks]))) == []
        first = first_parting(examined(reference, [rank[fault] for rank in ranks]))
        assert first is not None
        assert first.measure.point == FAULTS[fault].point
