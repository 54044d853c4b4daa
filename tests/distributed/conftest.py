"""Ranks that the tests of a module share: a process takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool, ranks


@pytest.fixture(scope="package")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Two ranks over gloo."""
    with ranks(2, tmp_path_factory.mktemp("ranks")) as pool:
        yield pool


@pytest.fixture(scope="package")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Four ranks over gloo."""
    with ranks(4, tmp_path_factory.mktemp("ranks")) as pool:
        yield pool
