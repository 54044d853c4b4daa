"""Sizes of a cached token, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from snapstream.cache.prefix_blocks import PrefixBlocks
from snapstream.cache.spec import KVSpec
from snapstream.config import RescoringConfig

GROUPED = KVSpec(num_layers=3, num_heads=8, num_kv_heads=2, key_dim=16, value_dim=16, dtype="bfloat16")
LATENT = KVSpec(num_layers=3, num_heads=8, num_kv_heads=1, key_dim=576, value_dim=512, values_are_keys=True)


def test_bytes_of_grouped_attention() -> None:
    assert GROUPED.token_size == 2 * 2 * 16
    assert GROUPED.row_bytes(10) == 10 * GROUPED.token_bytes() == 10 * 3 * 64 * 2
    assert GROUPED.staging_bytes(7) == 7 * 64 * 2  # one layer
    assert GROUPED.query_bytes(5) == 5 * 8 * 16 * 2


def test_fp8_rows_have_a_byte_per_number_and_two_scales_per_head() -> None:
    narrow = replace(GROUPED, kv_dtype="fp8")
    assert narrow.row_bytes(10) == 10 * 3 * 64 + 2 * 3 * 2 * 4
    assert narrow.staging_bytes(7) == GROUPED.staging_bytes(7)


def test_latents_are_stored_once() -> None:
    """As DeepSeek V3 stores them: 576 numbers for all heads, of which the values are the first 512."""
    assert LATENT.token_size == 576
    assert LATENT.row_bytes(10) == 10 * 3 * 576 * 4
    assert replace(LATENT, kv_dtype="fp8").scale_bytes() == 3 * 4


def test_rescoring_keeps_queries_and_a_vote_per_slot() -> None:
    rescoring = RescoringConfig(every=4, num_queries=6)
    assert GROUPED.rescoring_bytes(rescoring, 10) == 3 * (GROUPED.query_bytes(6) + 4 * 2 * 10)
    assert GROUPED.refresh_bytes(rescoring, 10) == 2 * GROUPED.staging_bytes(10)
    assert GROUPED.rescoring_bytes(None, 10) == GROUPED.refresh_bytes(None, 10) == 0


@pytest.mark.parametrize("spec", [GROUPED, replace(LATENT, expanded_dim=192)])
def test_the_prefix_store_takes_what_it_is_said_to_take(spec: KVSpec) -> None:
    """Of latents nothing that is expanded from them."""
    blocks = PrefixBlocks(spec, 4, 16)
    for block in range(4):
        blocks.whole(block)
    assert blocks.num_bytes == 4 * 16 * spec.prefix_token_bytes
