"""Which settings give the selection of SnapKV's authors (their public code, commit e216ddc, was run beside ours).

There: every query head keeps a set of its own, the softmax runs over the whole row, the voting tokens are cut off after
it, there are no sinks, and the voting tokens themselves are kept. Here: as many kv heads as query heads,
``softmax_over="row"``, ``pool_half_life=0``, no sinks, a ring for the voting tokens. On 240 heads of random tensors the
sets were equal with average pooling; with max pooling they differed in 137 of 240, always among tied scores, of which
ours takes the lowest positions.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from evals.selectors import Variant
from snapstream.cache.compress import kept_positions
from snapstream.config import KVBudget
from snapstream.kernels.bound import bind


def authors_scores(queries: Tensor, keys: Tensor, num_queries: int, width: int) -> Tensor:
    """The published rule for one head, from its description: scores of the tokens before those that vote."""
    num_keys, head_dim = keys.shape
    scores = torch.zeros(num_keys - num_queries, dtype=torch.float64)
    for i in range(num_keys - num_queries, num_keys):
        weights = (keys[: i + 1].double() @ queries[i].double() / head_dim**0.5).softmax(0)
        scores += weights[: num_keys - num_queries]
    padded = torch.nn.functional.pad(scores, (width // 2, width // 2))
    return padded.unfold(0, width, 1).mean(-1)


@pytest.mark.parametrize("width", [1, 5, 7, 13])
@pytest.mark.parametrize("num_queries", [8, 32])
def test_settings_of_the_authors_give_their_tokens(width: int, num_queries: int) -> None:
    torch.manual_seed(width)
    num_kept, num_keys, num_heads = 60, 300, 4
    queries, keys = 3 * torch.randn(num_keys, num_heads, 16), torch.randn(num_heads, num_keys, 16)
    budget = KVBudget(num_sink=0, num_topk=num_kept, num_recent=num_queries)
    selector = Variant(
        observation_len=num_queries, pool_width=width, pooling="avg", pool_half_life=0, softmax_over="row"
    )
    kernels, candidates_alone = bind("cpu"), replace(selector, softmax_over="candidates")
    row = kept_positions(queries[-num_queries:], keys, 0, budget, selector, kernels)
    other = kept_positions(queries[-num_queries:], keys, 0, budget, candidates_alone, kernels)
    num_different = 0
    for head in range(num_heads):
        want = authors_scores(queries[:, head], keys[head], num_queries, width).topk(num_kept).indices
        last_positions = set(range(num_keys - num_queries, num_keys))
        assert set(row[head].tolist()) == set(want.tolist()) | last_positions
        num_different += set(other[head].tolist()) != set(row[head].tolist())
    assert num_different > 0  # the default, a softmax over the candidates alone, is another rule
