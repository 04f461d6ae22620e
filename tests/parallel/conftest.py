"""Pools of policy processes, and published models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from support.pool import Pool, close_pools, pool_of
from support.reference_policy import hf_model


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], Pool]]:
    """world size -> the pool of that size."""
    pool_of(1).run(abs)  # the server of the ranks has imported its libraries: this is no test's time
    yield pool_of
    close_pools()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """kind -> a directory with the reference's weights."""

    @cache
    def directory(kind: str) -> Path:
        place = tmp_path_factory.mktemp(kind)
        hf_model(kind).save_pretrained(place)
        return place

    return directory
