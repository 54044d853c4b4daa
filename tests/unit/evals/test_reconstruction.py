"""Scores of repeating, against attention weights that a plain pass over the whole text has."""

from __future__ import annotations

from typing import cast

import torch

from evals.chat import Chat
from evals.reconstruction import NUM_BEFORE, Repeated, Repeating, requests_to_repeat
from snapstream.assets import TINY_MODEL
from snapstream.config import DEFAULT_SINK
from snapstream.kernels.bound import bind
from snapstream.llm import LLM
from snapstream.models.layer_pass import LayerPass, PassTokens
from snapstream.runner.model_runner import ModelRunner

CHUNK = 32
TEXT = "Let oak = 3921253. The mill kept a stone in a box under the stairs. Let plum = oak. Nobody came. " * 3


@torch.inference_mode()
def test_scores_are_the_largest_weights_of_who_repeats() -> None:
    chat = Chat(TINY_MODEL)
    ids = chat.chat_token_ids([{"role": "user", "content": TEXT}])
    chunks = list(requests_to_repeat(chat, ids, CHUNK))
    assert [token for _, chunk in chunks for token in chunk] == list(range(len(ids)))
    assert len(chunks) > 2
    for asked, chunk in chunks[1:]:
        before = ids[chunk.start - NUM_BEFORE : chunk.start]
        assert any(asked[i : i + NUM_BEFORE] == before for i in range(len(asked)))
    with LLM(TINY_MODEL, budget="full", max_rows=1, max_model_len=512, executor="eager", progress=False) as llm:
        runner = cast(ModelRunner, llm.engine.runner)
        got = Repeating(runner, ids).scores(chat, CHUNK)
        for asked, chunk in chunks:
            for layer, wanted in enumerate(_weights(runner, [*ids, *asked, *(ids[i] for i in chunk)], len(ids), chunk)):
                start = max(chunk.start, DEFAULT_SINK)
                torch.testing.assert_close(got[layer][:, start : chunk.stop], wanted, atol=1e-5, rtol=1e-4)


def _weights(runner: ModelRunner, text: list[int], num_prompt: int, chunk: range) -> list[torch.Tensor]:
    """By layer, one query at a time: the largest weight of the chunk's tokens ``[G, n]``."""
    found: list[torch.Tensor] = []
    places = [*range(DEFAULT_SINK), *range(max(chunk.start, DEFAULT_SINK), chunk.stop)]

    def layer_done(
        prompt: int, layer: int, queries: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        assert queries is not None
        group = queries.shape[1] // keys.shape[0]
        best = torch.zeros(keys.shape[0], len(places))
        for token in range(num_prompt, len(text)):
            seen = keys[:, places + list(range(num_prompt, token + 1))]
            for head, query in enumerate(queries[token - num_prompt]):
                logits = seen[head // group] @ query * query.shape[-1] ** -0.5
                weights = logits.softmax(-1)[: len(places)]
                best[head // group] = torch.maximum(best[head // group], weights)
        found.append(best[:, DEFAULT_SINK:])

    tokens = PassTokens(
        token_ids=torch.tensor(text),
        positions=torch.arange(len(text)),
        seq_lens=torch.full((len(text),), len(text)),
        prompt_lens=[len(text)],
        num_queries=[len(text) - num_prompt],
    )
    LayerPass(runner.decoder, runner.buffers, tokens, CHUNK, runner.prefill_attention, layer_done).run()
    return found


def test_a_share_is_taken_by_votes_first() -> None:
    torch.manual_seed(0)
    queries, keys, scores = torch.randn(4, 2, 8), torch.randn(1, 40, 8), torch.rand(1, 40)
    kernels, candidates = bind(torch.device("cpu")), range(4, 36)
    mine = Repeated(share=0.5, scores=(scores,))
    votes = mine.pool(mine.votes(queries, keys, candidates, kernels))[0]
    first = {4 + int(i) for i in votes.topk(4).indices}
    rest = [i for i in (4 + scores[0, 4:36].argsort(descending=True)).tolist() if i not in first][:4]
    chosen = mine.select(queries, keys, 0, candidates, 8, kernels)
    assert chosen[0].tolist() == sorted([*first, *rest])
