"""Settings of several ranks."""

from __future__ import annotations

from typing import Any

import pytest

from snapstream.config import ParallelConfig


def test_one_rank_is_the_default() -> None:
    assert ParallelConfig() == ParallelConfig(size=1, attention="tp", experts="tp")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": 0}, "size is 0; it must be a whole number >= 1"),
        ({"size": "two"}, "size is 'two'"),
        ({"attention": "ep"}, "attention is 'ep'; it must be one of tp, dp"),
        ({"experts": "dp"}, "experts is 'dp'; it must be one of tp, ep"),
        ({"size": 2, "num_local": 3}, "local_ranks is 3; tensor_parallel is 2"),
        ({"size": 2, "num_local": 1}, "local_ranks is 1 of tensor_parallel 2, and leader_address is ''"),
        ({"size": 2, "num_local": 2, "address": "h:1"}, "ranks on other machines need both, and others neither"),
        ({"size": 2, "address": "h:1"}, "local_ranks is 0 of tensor_parallel 2, and leader_address is 'h:1'"),
    ],
)
def test_other_values_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**given)
