"""Narrow forms of a weight: views, products, bytes, shares; stacks of a model in every width, and their wide buffer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from snapstream.config import ModelConfig, WeightForm, WeightForms
from snapstream.kernels.bound import bind
from snapstream.models.decoder import Decoder
from snapstream.models.narrow import make_weight
from snapstream.models.shapes import check_groups, weight_bytes, wide_bytes
from snapstream.models.weight import Dense, Weight
from snapstream.models.weights import DecoderWeights

FORMS = [
    WeightForm(width="bfloat16"),
    WeightForm(width="float16"),
    WeightForm(width="int8", group=32),
    WeightForm(width="int4", group=64),
]
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=300, hidden_size=64, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=16, intermediate_size=160, max_position=64, qkv_bias=True,
)  # fmt: skip
WIDTHS = ["float32", "bfloat16", "float16", "int8", "int4"]


def made(form: WeightForm, shape: tuple[int, ...] = (3, 8, 128)) -> Weight:
    weight = make_weight(form, shape, torch.float32, "cpu")
    weight.fill(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.float64))
    return weight


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.describe())
class TestForms:
    def test_views(self, form: WeightForm) -> None:
        weight = made(form)
        before = weight.dense().clone()
        weight[1, slice(2, 5)].fill(torch.ones(3, 128))
        after = weight.dense()
        torch.testing.assert_close(after[1, 2:5], torch.ones(3, 128), rtol=1e-3, atol=0)
        before[1, 2:5] = after[1, 2:5]
        assert torch.equal(before, after)
        assert weight[0].shape == (8, 128) and weight[0, slice(1, 3)].shape == (2, 128)

    def test_bytes_are_those_of_the_form(self, form: WeightForm) -> None:
        assert made(form).num_bytes == form.num_bytes((3, 8, 128)) < 3 * 8 * 128 * 4

    def test_product_lookup_and_widened(self, form: WeightForm) -> None:
        weight, x, bias, kernels = made(form), torch.randn(5, 128), torch.randn(8), bind("cpu")
        wide = weight.dense()
        assert wide.dtype == torch.float32
        torch.testing.assert_close(weight[2].multiply(x, bias, kernels), x @ wide[2].t() + bias)
        torch.testing.assert_close(weight[2].multiply(x, None, kernels), x @ wide[2].t())
        assert torch.equal(weight[0].lookup(torch.tensor([7, 0])), wide[0, [7, 0]])
        out = torch.empty_like(wide)
        weight.widen(out)
        assert torch.equal(out, wide)

    def test_blocks_of_rows_change_nothing(self, form: WeightForm, monkeypatch: pytest.MonkeyPatch) -> None:
        weight, x, bias, kernels = made(form), torch.randn(5, 128), torch.randn(8), bind("cpu")
        whole = weight[1].multiply(x, bias, kernels)
        monkeypatch.setattr("snapstream.models.row_major.widened_block", lambda _: 3 * 128)
        torch.testing.assert_close(weight[1].multiply(x, bias, kernels), whole)
        again = made(form)
        assert torch.equal(again.dense(), weight.dense())
        out = torch.empty(3, 8, 128)
        again.widen(out)
        assert torch.equal(out, weight.dense())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_takes_the_bytes_that_are_counted(width: str, tied: bool) -> None:
    config, forms = replace(CONFIG, tie_word_embeddings=tied), WeightForms.of(width)
    weights = DecoderWeights.empty(config, torch.float32, "cpu", forms)
    assert weights.num_bytes == weight_bytes(config, "float32", forms)
    held = 0 if weights.wide is None else weights.wide.num_bytes
    assert held == wide_bytes(config, "float32", forms) == (0 if width == "float32" else 4 * 64 * (128 + 64 + 3 * 160))


def test_the_buffer_holds_the_layer_that_was_asked_for() -> None:
    source = DecoderWeights.random(CONFIG, torch.float32, "cpu", seed=1)
    narrow = DecoderWeights.empty(CONFIG, torch.float32, "cpu", WeightForms.of("int8"))
    for role, numbers in source.stored().items():
        narrow.fill(role, (), numbers)
    decoder, x = Decoder(CONFIG, narrow), torch.randn(4, 64)
    for index in (0, 2, 2, 1, 0):
        decoder.wide_layer(index)
        wide = narrow.wide_layer(index)
        for role, matrix in narrow.layer(index).matrices.items():
            assert isinstance(wide.matrix(role), Dense) and not isinstance(matrix, Dense)
            assert torch.equal(wide.matrix(role).dense(), matrix.dense()), (index, role)
        own = narrow.layer(index).matrix("qkv").multiply(x, None, decoder.kernels)
        torch.testing.assert_close(wide.matrix("qkv").multiply(x, None, decoder.kernels), own)


def test_rows_that_are_no_whole_groups() -> None:
    odd = replace(CONFIG, intermediate_size=80)
    with pytest.raises(ValueError, match="int8 in groups of 32; the rows of down have 80 numbers, which must"):
        check_groups(odd, WeightForms.of("int8"))
    check_groups(CONFIG, WeightForms.of("int4"))
    with pytest.raises(ValueError, match="group is 48; it must be one of 32, 64, 128"):
        WeightForms.of("int4", 48)
