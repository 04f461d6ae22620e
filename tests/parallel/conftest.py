"""Pools of policy processes, one at a time: idle ones keep polling threads, which would slow the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from support.pool import Pool
from support.reference_policy import hf_model


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], Pool]]:
    """world size -> the pool of that size."""
    known: dict[int, Pool] = {}

    def pool(world_size: int) -> Pool:
        for size, other in known.items():
            if size != world_size:
                other.close()
        return known.setdefault(world_size, Pool(world_size))

    yield pool
    for each in known.values():
        each.close()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """kind -> a directory with the reference's weights."""

    @cache
    def directory(kind: str) -> Path:
        place = tmp_path_factory.mktemp(kind)
        hf_model(kind).save_pretrained(place)
        return place

    return directory


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Parity comes last: its idle pool keeps polling threads, which would slow every test after it."""
    here = Path(__file__).parent
    items.sort(key=lambda item: here in item.path.parents)
