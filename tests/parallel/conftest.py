"""One pool of policy processes per world size, started when a test first needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from parallel.pool import Pool


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], Pool]]:
    """world size -> its pool."""
    started: dict[int, Pool] = {}

    def pool(world_size: int) -> Pool:
        if world_size not in started:
            started[world_size] = Pool(world_size)
        return started[world_size]

    yield pool
    for each in started.values():
        each.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Parity comes last: its idle pools keep polling threads, which would slow every test after them."""
    here = Path(__file__).parent
    items.sort(key=lambda item: here in item.path.parents)
