"""One random model for all engines of these tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.engine.running import write_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("served"))
