"""A pass shows every layer of a prompt whole, the same however it is cut, and computes no output that nobody reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.stand_ins import random_weights
from snapstream.config import ModelConfig
from snapstream.config.model import LatentConfig
from snapstream.kernels.backends.autotune import automatic
from snapstream.kernels.backends.prefill import Case
from snapstream.kernels.cpu.looped.build import find_compiler
from snapstream.kernels.cpu.looped.library import load
from snapstream.models.decoder import Decoder
from snapstream.models.layers import DenseLayer
from snapstream.models.panels import make_panels
from snapstream.models.prefill import LayerPass, Outputs, PassTokens
from snapstream.models.views import StagingBuffers
from snapstream.models.weights import DecoderWeights

MODEL = ModelConfig(
    architecture="Qwen3ForCausalLM", vocab_size=60, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=8, intermediate_size=48, max_position=128, qk_norm=True,
)  # fmt: skip
LATENT = LatentConfig(q_rank=16, kv_rank=12, nope_dim=6, rope_dim=4, value_dim=14, softmax_scale=0.4)
LATENTS = replace(
    MODEL, architecture="DeepseekV3ForCausalLM", num_kv_heads=1, head_dim=LATENT.latent_dim, qk_norm=False,
    latent=LATENT,
)  # fmt: skip
LENS, QUERIES, START = (13, 1, 30), (4, 1, 0), 5
Seen = dict[tuple[int, int], tuple[Tensor | None, Tensor, Tensor]]


@pytest.fixture(scope="module", params=[MODEL, LATENTS], ids=["heads", "latents"])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return Decoder(request.param, random_weights(request.param, torch.float32, "cpu", seed=2))


def read(decoder: Decoder, chunk_len: int, outputs: Outputs = "last") -> tuple[Seen, LayerPass]:
    """What the hook saw by prompt and layer, and the pass."""
    seen: Seen = {}

    def done(prompt: int, layer: int, queries: Tensor | None, keys: Tensor, values: Tensor) -> None:
        seen[prompt, layer] = (None if queries is None else queries.clone(), keys.clone(), values.clone())

    positions = torch.cat([torch.arange(n) for n in LENS])
    tokens = PassTokens(
        token_ids=(positions * 7 + 3) % 60,
        positions=positions,
        seq_lens=torch.cat([torch.full((n,), n) for n in LENS]),
        prompt_lens=LENS,
        num_queries=QUERIES,
        staging_start=START,
    )
    buffers = StagingBuffers(decoder.kv_spec(), MODEL.hidden_size, START + sum(LENS), torch.float32, "cpu")
    for buffer in (*buffers.layer(0), buffers.hidden):
        buffer.fill_(float("nan"))
    attention = automatic(Case.of_model(torch.device("cpu"), torch.float32, decoder.config))
    one = LayerPass(decoder, buffers, tokens, chunk_len, attention, done, outputs)
    with torch.inference_mode():
        one.run()
    assert one.is_done and one.num_units == 3 * -(-sum(LENS) // chunk_len)
    return seen, one


@pytest.mark.parametrize("chunk_len", [1, 5, 13, 44])
def test_the_hook_sees_the_same_however_a_pass_is_cut(decoder: Decoder, chunk_len: int) -> None:
    whole, expected = read(decoder, 100)
    seen, one = read(decoder, chunk_len)
    spec = decoder.kv_spec()
    assert list(seen) == [(prompt, layer) for layer in range(3) for prompt in range(3)]
    for place, (queries, keys, values) in seen.items():
        prompt = place[0]
        assert keys.shape == (spec.num_kv_heads, LENS[prompt], spec.key_dim)
        assert values.shape == (spec.num_kv_heads, LENS[prompt], spec.value_dim)
        assert (queries is None) == (QUERIES[prompt] == 0)
        if queries is not None:
            assert queries.shape == (QUERIES[prompt], 4, spec.key_dim)
            torch.testing.assert_close(queries, whole[place][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(keys, whole[place][1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(values, whole[place][2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one.last_hidden(), expected.last_hidden(), rtol=1e-5, atol=1e-5)


def test_the_last_layer_computes_what_is_read(decoder: Decoder) -> None:
    full, last, none = (read(decoder, 20, outputs)[1] for outputs in ("all", "last", "none"))
    ends = [12, 13, 43]
    torch.testing.assert_close(last.last_hidden(), full.hidden[ends], rtol=1e-5, atol=1e-5)
    others = [i for i in range(44) if i not in ends]
    assert not torch.isclose(last.hidden[others], full.hidden[others]).all(-1).any()
    torch.testing.assert_close(last.hidden[others], none.hidden[others], rtol=1e-5, atol=1e-5)
    assert not torch.isclose(none.hidden[ends], full.hidden[ends]).all(-1).any()


def test_units_run_in_order(decoder: Decoder) -> None:
    _, one = read(decoder, 20)
    with pytest.raises(RuntimeError, match="unit 3 was planned, unit 9 is next"):
        one.run_unit(3)


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_last_tokens_are_finished_together_where_that_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over panels, whose sums do not depend on the company; other products take a prompt at a time."""
    plain = random_weights(MODEL, torch.float32, "cpu", seed=2)
    weights = DecoderWeights.empty(MODEL, torch.float32, "cpu", make=make_panels(load()))
    for role, numbers in plain.stored().items():
        weights.fill(role, (), numbers)
    over_panels, over_plain = Decoder(MODEL, weights), Decoder(MODEL, plain)
    finished: list[int] = []
    finish = DenseLayer.finish

    def counted(layer: DenseLayer, residual: Tensor, attended: Tensor) -> Tensor:
        finished.append(len(residual))
        return finish(layer, residual, attended)

    monkeypatch.setattr(DenseLayer, "finish", counted)
    together = read(over_panels, 100)[1].last_hidden()
    assert finished == [44, 44, 3]
    expected = read(over_plain, 100)[1].last_hidden()
    assert finished[3:] == [44, 44, 1, 1, 1]
    monkeypatch.setattr(Decoder, "is_batch_invariant", False)
    assert torch.equal(read(over_panels, 100)[1].last_hidden(), together)
    torch.testing.assert_close(together, expected, rtol=1e-4, atol=1e-4)
