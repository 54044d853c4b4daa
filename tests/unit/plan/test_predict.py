"""Predicted times of steps and prompts over ranks, against arithmetic done by hand at the sizes of DeepSeek-R1."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import DEEPSEEK_V3, MIXTRAL_8X7B, QWEN3_30B
from snapstream.cli.__main__ import main
from snapstream.config import EngineOptions, KVBudget, ModelConfig, WeightFormats
from snapstream.config.model import StoredWeights, WeightFormat
from snapstream.config.values import parse_flops
from snapstream.models.registry import kv_spec_of, model_config_from_dict
from snapstream.plan.fit import engine_config
from snapstream.plan.memory import EngineMemory, engine_memory
from snapstream.plan.plan import HOST_S, LINKS, PRODUCT_SHARE, READ_SHARE, Link, Predictor, make_plan

R1 = replace(model_config_from_dict(DEEPSEEK_V3), stored=StoredWeights(quantized=WeightFormat(dtype="fp8")))
FORMS = WeightFormats(layers=WeightFormat(dtype="fp8"), tables=WeightFormat(dtype="bfloat16"))
BANDWIDTH, FLOP = 4.8e12, 989e12


def predictor(size: int, model: ModelConfig = R1, formats: WeightFormats = FORMS, **ways: Any) -> Predictor:
    options = EngineOptions(dtype="bfloat16", tensor_parallel=size, **(ways if size > 1 else {}))
    return Predictor.of(model, options, formats, BANDWIDTH, FLOP)


def test_rows_of_latents_are_bound_by_products_where_a_rank_has_all_heads() -> None:
    """4 rows of 32k slots on each of 16 ranks: 2 x 128 x (576 + 512) operations for 1,152 bytes."""
    step = predictor(16, attention="dp").step(64, 32_768)
    slots = 4 * 32_768 * 61
    assert step.rows_s == pytest.approx(slots * 278_528 / (PRODUCT_SHARE * FLOP))
    assert step.rows_s > slots * 1152 / (READ_SHARE * BANDWIDTH)


def test_rows_are_read_by_every_rank_where_heads_are_split() -> None:
    """8 heads of a rank are few products for the bytes, and all 64 rows lie on each."""
    step = predictor(16).step(64, 32_768)
    assert step.rows_s == pytest.approx(64 * 32_768 * 70_272 / (READ_SHARE * BANDWIDTH))


def test_weights_of_a_step() -> None:
    """64 rows choose 222.5 of 256 experts: 653.9 billion numbers in FP8, a 16th of them on each rank; beside them
    attention whole (11.4) or split, shared experts, dense layers and the head.
    """
    chosen = 653.9e9 * 222.5 / 256 / 16
    dealt, split = (predictor(16, attention=way).step(64, 32_768) for way in ("dp", "tp"))
    read = [step.weights_s * READ_SHARE * BANDWIDTH - chosen for step in (dealt, split)]
    assert read[0] == pytest.approx(13.2e9, rel=0.03) and read[1] == pytest.approx(2.4e9, rel=0.1)
    whole_experts = predictor(16, attention="dp", experts="ep").step(64, 32_768)
    assert whole_experts.weights_s == pytest.approx(dealt.weights_s, rel=1e-3)


def test_collectives_are_two_per_layer_and_two() -> None:
    step = predictor(16, attention="dp").step(64, 32_768)
    assert step.num_collectives == 124
    hidden, logits = 64 * 7168 * 2, 64 * 129_280 * 2
    for link, seconds in zip(LINKS, step.collectives_s, strict=True):
        sent = (62 * 2 * hidden + 61 * hidden + logits) * 15 / 16
        assert seconds == pytest.approx(124 * link.latency_s + sent / link.bytes_per_s)
    assert step.seconds[0] == pytest.approx(step.weights_s + step.rows_s + HOST_S + step.collectives_s[0])
    assert step.tokens_per_s[0] == pytest.approx(64 / step.seconds[0])


def test_one_rank_has_nobody_to_talk_to() -> None:
    step = predictor(1).step(8, 8192)
    assert step.num_collectives == 0 and step.collectives_s == (0.0, 0.0)
    link = Link(name="any", latency_s=1.0, bytes_per_s=1.0)
    assert link.all_reduce_s(5, 1) == link.all_gather_s(5, 1) == 0.0
    assert (link.all_reduce_s(8, 4), link.all_gather_s(8, 4)) == (13.0, 7.0)


def test_a_prompt_reads_the_weights_once_per_chunk() -> None:
    """Attention does not depend on chunks; short chunks of a sparse model are bound by reading its experts."""
    short, long = (predictor(16).prompt(131_072, chunk) for chunk in (512, 4096))
    pairs = 131_072 * 131_073 / 2
    expanded = 61 * pairs * 4 * 8 * 192  # 8 heads; keys and values are expanded to 192 numbers both
    assert short.attention_s == long.attention_s == pytest.approx(expanded / (PRODUCT_SHARE * FLOP))
    assert long.layers_s < short.layers_s / 2
    products = 2 * 131_072 * 36.5e9 / 16
    assert long.layers_s == pytest.approx(products / (PRODUCT_SHARE * FLOP), rel=0.5)


def test_restored_tokens_are_attended_to_and_not_computed() -> None:
    whole, first = (predictor(16).prompt(tokens, 4096) for tokens in (131_072, 65_536))
    rest = predictor(16).prompt(131_072, 4096, 65_536)
    assert rest.attention_s == pytest.approx(whole.attention_s - first.attention_s)
    assert rest.layers_s == pytest.approx(whole.layers_s / 2)


def test_more_ranks_share_the_work() -> None:
    mixtral, bf16 = model_config_from_dict(MIXTRAL_8X7B), WeightFormats.of("bfloat16")
    one, four = (predictor(size, mixtral, bf16).step(32, 8192) for size in (1, 4))
    assert one.weights_s == pytest.approx(4 * four.weights_s, rel=0.01)
    assert one.rows_s == pytest.approx(4 * four.rows_s)


def test_the_plan_of_ranks() -> None:
    options = EngineOptions(dtype="bfloat16", tensor_parallel=8)
    plan = make_plan(model_config_from_dict(MIXTRAL_8X7B), options, budgets=[4096], prompt_len=32_768)
    assert plan.ranks is not None and plan.weight_bytes == sum(plan.ranks.tensor_bytes.values())
    one = make_plan(model_config_from_dict(MIXTRAL_8X7B), EngineOptions(dtype="bfloat16"), prompt_len=32_768)
    assert one.ranks is None and one.token_bytes == 8 * plan.token_bytes
    assert plan.rows[1].full_fraction == 4096 / 32_768
    for row in plan.rows:
        step = plan.ranks.steps[row.name]
        assert step.num_rows == row.max_rows
        assert max(step.tokens_per_s) < row.tokens_per_s_max  # what is predicted is less than what bytes allow


def test_the_command_plans_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    asked = ["plan", str(tmp_path), "--tensor-parallel", "16", "--attention", "dp", "--prompt-len", "131072",
             "--budget", "32768", "--memory", "141GB", "--bandwidth", "4.8TB/s"]  # fmt: skip
    assert main([*asked, "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    ranks = told["ranks"]
    assert ranks["parallel"]["size"] == 16 and ranks["parallel"]["attention"] == "dp" and ranks["flop_per_s"] == 989e12
    rows = told["rows"][1]["max_rows"]
    assert ranks["steps"]["32768"]["num_rows"] == rows and 400 < rows < 560
    near, far = ranks["steps"]["32768"]["seconds"]
    assert near < far and ranks["links"][1]["latency_s"] == 180e-6
    assert main([*asked, "--flops", "500TFLOP/s"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "rows distributed (dp)" in shown and "60% of 500 TFLOP/s" in shown and "experts_gate_up" in shown
    assert main(["plan", str(tmp_path), "--tensor-parallel", "7"]) != 0
    assert "cannot be split over 7 ranks" in " ".join(capsys.readouterr().err.split())


def test_rates_of_products() -> None:
    assert parse_flops("989TFLOP/s") == parse_flops("989 T") == 989 * 10**12
    with pytest.raises(ValueError, match="'989' is not a rate of products"):
        parse_flops("989")


@pytest.mark.parametrize(
    ("published", "ways", "told"),
    [
        (DEEPSEEK_V3, [], "rows of latents, whole on each rank of its weights:"),
        (
            DEEPSEEK_V3,
            ["--attention", "dp", "--experts", "ep"],
            "rows distributed (dp), whole experts (ep) of its weights:",
        ),
        (QWEN3_30B, [], "rows split by heads of its weights:"),
    ],
)
def test_the_plan_says_where_rows_lie(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], published: dict[str, Any], ways: list[str], told: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert main(["plan", str(tmp_path), "--tensor-parallel", "4", "--prompt-len", "4096", *ways]) == 0
    assert told in " ".join(capsys.readouterr().out.split())


# What ``plan`` counts of engines on several ranks, at the sizes of published models.

QWEN = model_config_from_dict(QWEN3_30B)
LENGTH = 32_768


def memory(model: ModelConfig, size: int, max_rows: int = 1, slots: int = 8192, **ways: Any) -> EngineMemory:
    options = EngineOptions(dtype="bfloat16", tensor_parallel=size, **(ways if size > 1 else {}))
    config = engine_config(model, options, KVBudget.of(slots), LENGTH, device="cuda", max_rows=max_rows)
    return engine_memory(model, config)


@pytest.mark.parametrize("attention", ["tp", "dp"])
@pytest.mark.parametrize("size", [1, 8, 16])
def test_no_row_more_would_fit(size: int, attention: str) -> None:
    """Rows that are said to fit do, and one more does not, for all remainders of rows and ranks."""
    for more in range(6):
        room = (141 if size > 1 else 720) * 10**9 + more * 7 * 10**8
        fit = memory(R1, size, attention=attention).rows_that_fit(room)
        assert fit > 0
        assert memory(R1, size, fit, attention=attention).total_bytes <= room
        assert memory(R1, size, fit + 1, attention=attention).total_bytes > room


def test_rows_that_are_dealt_out_take_one_rank_each() -> None:
    """Latents lie whole on every rank where heads are split; dealt out, 16 ranks hold about 16 times the rows."""
    split, dealt = (memory(R1, 16, attention=attention) for attention in ("tp", "dp"))
    assert split.row_bytes == dealt.row_bytes == kv_spec_of(R1, "bfloat16").row_bytes(8192)
    free = 20 * 10**9
    more_rows = dealt.rows_that_fit(dealt.fixed_bytes + free) / split.rows_that_fit(split.fixed_bytes + free)
    assert 11 < more_rows < 16  # less than 16: each rank draws the tokens of all rows
    rows = [memory(R1, 16, max_rows, attention="dp").total_bytes for max_rows in (16, 17, 32)]
    everywhere = dealt.state_bytes + dealt.batch_bytes
    assert rows[1] - rows[0] == dealt.row_bytes + everywhere
    assert rows[2] - rows[1] == 15 * everywhere


def test_heads_are_split() -> None:
    """A rank of 4 has a quarter of the keys and values; ranks more than kv heads share them."""
    row, staging = (kv_spec_of(QWEN, "bfloat16").row_bytes(8192), kv_spec_of(QWEN, "bfloat16").staging_bytes(1))
    one, four, eight = (memory(QWEN, size) for size in (1, 4, 8))
    assert [one.row_bytes, four.row_bytes, eight.row_bytes] == [row, row // 4, row // 4]
    pool = LENGTH + 4096
    assert one.staging_bytes - four.staging_bytes == pool * (staging - staging // 4)
    assert four.state_bytes == one.state_bytes


def test_staging_of_latents_expands_a_ranks_heads() -> None:
    """128 heads over 16 ranks: 8 are expanded on each, the latents and hidden states are whole."""
    pool = LENGTH + 4096
    for attention in ("tp", "dp"):
        found = memory(R1, 16, attention=attention).staging_bytes
        assert found == 2 * pool * (7168 + 576 + 2 * 8 * 192)


def test_a_ranks_chunks_may_be_longer() -> None:
    """Its temporaries are smaller, and weights are read once per chunk."""
    budget = KVBudget.of(8192)
    model = model_config_from_dict(MIXTRAL_8X7B)
    chunks = [
        engine_config(
            model, EngineOptions(dtype="bfloat16", tensor_parallel=size), budget, LENGTH, device="cuda"
        ).chunking
        for size in (1, 8)
    ]
    assert chunks[0].chunk_len < chunks[1].chunk_len


@pytest.mark.parametrize("size", [3, 256])
def test_sizes_that_do_not_divide_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"split over {size} ranks"):
        memory(R1, size)
