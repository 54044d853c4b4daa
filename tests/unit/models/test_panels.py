"""Panels whose products a processor cannot do are refused where they are made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from snapstream.kernels.cpu.looped.library import Library
from snapstream.models.panels import make_panels


def test_prefill_in_bf16_is_refused_on_a_processor_that_does_not_multiply_it() -> None:
    """Of ranks on several machines the leader's processor decides what all of them compute."""
    bare = cast(Library, SimpleNamespace(multiplies_bf16=lambda: 0))
    with pytest.raises(ValueError, match="this processor cannot; use activations 'dtype'"):
        make_panels(bare, rounds_prefill=True)
    make_panels(bare)
