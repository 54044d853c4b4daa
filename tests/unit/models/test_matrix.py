"""FP8 blocks of a weight: views, products of few and many tokens, bytes, shares, refusals."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from benchmarks.stand_ins import random_weights
from snapstream.config import ModelConfig, WeightFormat, WeightFormats
from snapstream.kernels.cpu.looped.library import Library
from snapstream.kernels.interface import CosSin, HeadNorm, KernelVersion, bind
from snapstream.models.decoder import Decoder
from snapstream.models.matrix import FEW, Matrix, make_matrix
from snapstream.models.panels import make_panels
from snapstream.models.registry import tensor_specs
from snapstream.models.sharding import check_groups, dequantized_bytes, num_parameters, weight_bytes
from snapstream.models.tensors import stacked_shape
from snapstream.models.weights import DecoderWeights
from tests.parity.heads import whole_layer

SHAPE = (2, 300, 200)  # the last block of either direction is cut


def numbers() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(SHAPE) * torch.logspace(-3, 3, SHAPE[1])[:, None]


def made() -> Matrix:
    weight = make_matrix(WeightFormat(dtype="fp8"), SHAPE, torch.float32, "cpu")
    assert weight.form.is_fp8 and weight.scales is not None
    weight.fill(numbers())
    return weight


def test_stored_numbers_and_bytes() -> None:
    weight, wanted = made(), numbers()
    assert weight.num_bytes == WeightFormat(dtype="fp8").num_bytes(SHAPE) == 2 * (300 * 200 + 4 * 3 * 2)
    largest = torch.stack([block.abs().amax() for block in wanted[0].split(128)])
    error = (weight.dense()[0] - wanted[0]).abs()
    for block, most in zip(error.split(128), largest, strict=True):
        assert block.max() <= most / 16  # three bits of mantissa
    out = torch.empty(SHAPE)
    weight.dequantize_into(out)
    assert torch.equal(out, weight.dense())


def test_whole_blocks_are_views() -> None:
    weight = made()
    part = weight[1, slice(128, 300)]
    assert part.shape == (172, 200) and part.scales is not None and part.scales.shape == (2, 2)
    assert torch.equal(part.dense(), weight.dense()[1, 128:])
    part.fill(torch.ones(172, 200))
    assert torch.equal(weight.dense()[1, 128:], torch.ones(172, 200))
    for rows in (slice(1, 128), slice(0, 100), slice(128, 299)):
        with pytest.raises(ValueError, match=f"rows {rows.start} to {rows.stop} .* are not whole blocks of 128"):
            weight[0, rows]


@pytest.mark.parametrize("version", ["cpu", "torch"])
@pytest.mark.parametrize("count", [1, 7, FEW, FEW + 1])
def test_products(version: KernelVersion, count: int) -> None:
    weight, x, bias, kernels = made(), torch.randn(count, 200), torch.randn(300), bind("cpu", version)
    wanted = x @ weight.dense()[1].t()
    scale = wanted.abs().max()
    for given in (None, bias):
        got = weight[1].multiply(x, given, kernels)
        torch.testing.assert_close(got / scale, (wanted + (0 if given is None else given)) / scale, rtol=0, atol=1e-6)


def test_no_table() -> None:
    with pytest.raises(TypeError, match="embedding tables"):
        made()[0].lookup(torch.tensor([1]))


# Narrow forms of a weight: views, products, bytes, shares; stacks of a model in every width, and their wide buffer.

FORMS = [
    WeightFormat(dtype="bfloat16"),
    WeightFormat(dtype="float16"),
    WeightFormat(dtype="int8", group=32),
    WeightFormat(dtype="int4", group=64),
]
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=300, hidden_size=64, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=16, intermediate_size=160, max_position=64, qkv_bias=True,
)  # fmt: skip
WIDTHS = ["float32", "bfloat16", "float16", "int8", "int4"]


def narrow_made(form: WeightFormat, shape: tuple[int, ...] = (3, 8, 128)) -> Matrix:
    weight = make_matrix(form, shape, torch.float32, "cpu")
    weight.fill(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.float64))
    return weight


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.describe())
class TestForms:
    def test_views(self, form: WeightFormat) -> None:
        weight = narrow_made(form)
        before = weight.dense().clone()
        weight[1, slice(2, 5)].fill(torch.ones(3, 128))
        after = weight.dense()
        torch.testing.assert_close(after[1, 2:5], torch.ones(3, 128), rtol=1e-3, atol=0)
        before[1, 2:5] = after[1, 2:5]
        assert torch.equal(before, after)
        assert weight[0].shape == (8, 128) and weight[0, slice(1, 3)].shape == (2, 128)

    def test_bytes_are_those_of_the_form(self, form: WeightFormat) -> None:
        assert narrow_made(form).num_bytes == form.num_bytes((3, 8, 128)) < 3 * 8 * 128 * 4

    def test_product_lookup_and_widened(self, form: WeightFormat) -> None:
        weight, x, bias, kernels = narrow_made(form), torch.randn(5, 128), torch.randn(8), bind("cpu")
        wide = weight.dense()
        assert wide.dtype == torch.float32
        torch.testing.assert_close(weight[2].multiply(x, bias, kernels), x @ wide[2].t() + bias)
        torch.testing.assert_close(weight[2].multiply(x, None, kernels), x @ wide[2].t())
        assert torch.equal(weight[0].lookup(torch.tensor([7, 0])), wide[0, [7, 0]])
        out = torch.empty_like(wide)
        weight.dequantize_into(out)
        assert torch.equal(out, wide)

    def test_blocks_of_rows_change_nothing(self, form: WeightFormat, monkeypatch: pytest.MonkeyPatch) -> None:
        weight, x, bias, kernels = narrow_made(form), torch.randn(5, 128), torch.randn(8), bind("cpu")
        whole = weight[1].multiply(x, bias, kernels)
        monkeypatch.setattr("snapstream.models.matrix.dequantized_block", lambda _: 3 * 128)
        torch.testing.assert_close(weight[1].multiply(x, bias, kernels), whole)
        again = narrow_made(form)
        assert torch.equal(again.dense(), weight.dense())
        out = torch.empty(3, 8, 128)
        again.dequantize_into(out)
        assert torch.equal(out, weight.dense())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_takes_the_bytes_that_are_counted(width: str, tied: bool) -> None:
    config, formats = replace(CONFIG, tie_word_embeddings=tied), WeightFormats.of(width)
    weights = DecoderWeights.empty(config, torch.float32, "cpu", formats)
    assert weights.num_bytes == weight_bytes(config, "float32", formats)
    held = 0 if weights.dequantized is None else weights.dequantized.num_bytes
    assert (
        held
        == dequantized_bytes(config, "float32", formats)
        == (0 if width == "float32" else 4 * 64 * (128 + 64 + 3 * 160))
    )


def test_the_buffer_holds_the_layer_that_was_asked_for() -> None:
    source = random_weights(CONFIG, torch.float32, "cpu", seed=1)
    narrow = DecoderWeights.empty(CONFIG, torch.float32, "cpu", WeightFormats.of("int8"))
    for role, numbers in source.stored().items():
        narrow.fill(role, (), numbers)
    decoder, x = Decoder(CONFIG, narrow), torch.randn(4, 64)
    for index in (0, 2, 2, 1, 0):
        decoder.prefill_layer(index)
        wide = narrow.prefill_layer(index)
        for role, matrix in narrow.layer(index).matrices.items():
            assert not wide.matrix(role).is_low_precision and matrix.is_low_precision
            assert torch.equal(wide.matrix(role).dense(), matrix.dense()), (index, role)
        own = narrow.layer(index).matrix("qkv").multiply(x, None, decoder.kernels)
        torch.testing.assert_close(wide.matrix("qkv").multiply(x, None, decoder.kernels), own)


def test_rows_that_are_no_whole_groups() -> None:
    odd = replace(CONFIG, intermediate_size=80)
    with pytest.raises(ValueError, match="int8 in groups of 32; the rows of down have 80 numbers, which must"):
        check_groups(odd, WeightFormats.of("int8"))
    check_groups(CONFIG, WeightFormats.of("int4"))
    with pytest.raises(ValueError, match="group is 48; it must be one of 32, 64, 128"):
        WeightFormats.of("int4", 48)


# Panels whose products a processor cannot do are refused where they are made.


def test_prefill_in_bf16_is_refused_on_a_processor_that_does_not_multiply_it() -> None:
    """Of ranks on several machines the leader's processor decides what all of them compute."""
    bare = cast(Library, SimpleNamespace(multiplies_bf16=lambda: 0))
    with pytest.raises(ValueError, match="this processor has no bfloat16 products.*use activations 'dtype'"):
        make_panels(bare, prefill_inputs="bfloat16")
    make_panels(bare)


# The plain form of a weight: views, products, bytes, and shares of several devices.


@pytest.fixture
def weight() -> Matrix:
    made = make_matrix(WeightFormat(dtype="float32"), (3, 8, 6), torch.float32, "cpu")
    made.fill(torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(0)).to(torch.float64))
    return made


def test_a_layer_and_a_slice_are_views(weight: Matrix) -> None:
    part = weight[1, slice(2, 5)]
    part.fill(torch.ones(3, 6))
    assert torch.equal(weight.dense()[1, 2:5], torch.ones(3, 6))
    assert weight[1].dense().data_ptr() == weight.dense()[1].data_ptr()
    assert weight.num_bytes == 3 * 8 * 6 * 4 and weight[0].shape == (8, 6)


def test_product_and_lookup(weight: Matrix) -> None:
    x, bias, kernels = torch.randn(5, 6), torch.randn(8), bind("cpu")
    torch.testing.assert_close(weight[2].multiply(x, bias, kernels), x @ weight.dense()[2].t() + bias)
    torch.testing.assert_close(weight[2].multiply(x, None, kernels), x @ weight.dense()[2].t())
    assert torch.equal(weight[0].lookup(torch.tensor([7, 0])), weight.dense()[0, [7, 0]])


# Stacked storage: shapes, counts and views agree; random weights keep activations of order 1.

PLAIN = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=300, hidden_size=64, num_layers=8, num_heads=8,
    num_kv_heads=2, head_dim=8, intermediate_size=160, max_position=64,
)  # fmt: skip
RICH = replace(PLAIN, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True, tie_word_embeddings=True)


@pytest.mark.parametrize("config", [PLAIN, RICH], ids=["plain", "rich"])
def test_stored_tensors_have_the_counted_shapes(config: ModelConfig) -> None:
    weights = DecoderWeights.empty(config, torch.bfloat16, "meta")
    shapes = {name: stacked_shape(spec, config.num_layers) for name, spec in tensor_specs(config).items()}
    assert {role: tuple(tensor.shape) for role, tensor in weights.stored().items()} == shapes
    assert weights.num_bytes == 2 * num_parameters(config)


def test_known_parameter_counts() -> None:
    """Published sizes: Llama 3.1 8B has 8,030,261,248 parameters, Qwen2.5 0.5B 494,032,768."""
    llama = replace(PLAIN, vocab_size=128256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8,
                    head_dim=128, intermediate_size=14336)  # fmt: skip
    qwen = replace(PLAIN, vocab_size=151936, hidden_size=896, num_layers=24, num_heads=14, num_kv_heads=2,
                   head_dim=64, intermediate_size=4864, qkv_bias=True, tie_word_embeddings=True)  # fmt: skip
    assert num_parameters(llama) == 8_030_261_248
    assert num_parameters(qwen) == 494_032_768


def test_layers_are_views() -> None:
    weights = random_weights(RICH, torch.float32, "cpu", seed=0)
    for index in range(RICH.num_layers):
        layer = weights.layer(index)
        for role in layer.matrices:
            assert layer.matrix(role).dense().data_ptr() == weights.matrices[role].dense()[index].data_ptr(), role
        for role in layer.vectors:
            assert layer.vector(role).data_ptr() == weights.vectors[role][index].data_ptr(), role
        assert len(layer.matrices) == 4 and len(layer.vectors) == 8


@pytest.mark.parametrize("config", [PLAIN, RICH], ids=["plain", "rich"])
def test_random_weights_are_seeded_and_tame(config: ModelConfig) -> None:
    weights = random_weights(config, torch.float32, "cpu", seed=3)
    again = random_weights(config, torch.float32, "cpu", seed=3)
    other = random_weights(config, torch.float32, "cpu", seed=4)
    assert all(torch.equal(tensor, again.stored()[role]) for role, tensor in weights.stored().items())
    assert not torch.equal(weights.stored()["qkv"], other.stored()["qkv"])

    class Echo:
        def attend(self, layer: int, heads: torch.Tensor, norm: HeadNorm, rope: CosSin) -> torch.Tensor:
            return heads[:, -config.num_kv_heads :].repeat_interleave(config.group_size, 1)

    decoder = Decoder(config, weights)
    positions = torch.arange(32)
    with torch.inference_mode():
        hidden = decoder.embed(positions)
        for index in range(config.num_layers):
            hidden = whole_layer(decoder, index, hidden, decoder.rope(positions, positions + 1), Echo())
        assert 0.3 < decoder.logits(hidden).std() < 3.0
        assert 0.3 < hidden.std() < 3.0
