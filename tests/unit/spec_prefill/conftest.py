"""The shipped model as a draft, loaded once."""

from __future__ import annotations

import pytest

from snapstream.assets import TINY_MODEL
from snapstream.spec_prefill.draft import Draft


@pytest.fixture(scope="session")
def draft() -> Draft:
    return Draft.load(TINY_MODEL)
