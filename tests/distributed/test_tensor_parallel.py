"""Two ranks answer as one device does: the same tokens and kept positions, logits equal but for fp32 rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from benchmarks.stand_ins import Pretend
from snapstream import LLM, SamplingParams
from snapstream.config import (
    DType,
    EngineConfig,
    KVBudget,
    KVDType,
    ParallelConfig,
    Selector,
    SplitExperts,
    WeightFormat,
    WeightFormats,
)
from snapstream.config.kv import HeadProfile
from snapstream.distributed.group import Alone, Group, Ranks, ReduceOp
from snapstream.kernels.cpu.looped.build import find_compiler
from snapstream.kv.selectors.diverse import Diverse
from snapstream.kv.selectors.hops import Hops
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.models.checkpoint import load_weights
from snapstream.models.config_json import fingerprint
from snapstream.models.decoder import Decoder
from snapstream.models.quantize import quantize_checkpoint
from snapstream.models.registry import read_model_config
from snapstream.models.sharding import rank_config, weight_bytes
from snapstream.plan.memory import engine_memory
from tests.distributed import cases
from tests.distributed.cases import PROMPTS, UNLIKE, Asked
from tests.distributed.pairs import Pair
from tests.distributed.pool import Pool
from tests.parity.checkpoints import SIZES, make_model, save
from tests.parity.test_decoder_parity import WITH_TOWERS
from tests.parity.test_latents import DELTA_MIXTURE, DELTA_SIZES, narrowed
from tests.parity.test_mxfp4 import narrowed as packed_experts

TOLERANCE = 2e-5  # of logits of order 1
Checkpoint = Callable[[str], Path]
# What no architecture of ARCHITECTURES has.
BLOCKS = {
    "head_dim": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
}  # each rank's parts are whole blocks of FP8
GROUPS = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}  # and whole groups of codes
HALVES = {"num_attention_heads": 4, "num_key_value_heads": 2}
MORE = {
    "llama-all-biases": ("llama-mha", {"attention_bias": True, "mlp_bias": True}),
    "qwen3-blocks": ("qwen3", BLOCKS),
    "deepseek-v3-blocks": (
        "deepseek-v3",
        {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 64,
         "moe_intermediate_size": 256, "intermediate_size": 256},
    ),
    "qwen3-next-blocks": ("qwen3-next", DELTA_MIXTURE),
    "qwen3.5-blocks": ("qwen3.5", DELTA_SIZES),
    "qwen3.5-halves": ("qwen3.5", DELTA_SIZES | {"linear_key_head_dim": 64}),  # of a rank: q and k end within a block
    "qwen3-groups": ("qwen3", GROUPS),
    "ernie-moe-halves": ("ernie-moe", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "ministral3-halves": ("ministral3", {"num_key_value_heads": 2}),
    "phi3-halves": ("phi3-longrope", {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "gemma4-halves": ("gemma4", HALVES),
    "gemma3n-halves": ("gemma3n", HALVES),
    "granite-hybrid-group": ("granite-hybrid", {"mamba_n_groups": 1}),
    "granite-hybrid-experts": ("granite-hybrid-moe", {"mamba_n_groups": 1}),
    "cohere-plus-halves": ("cohere-plus", HALVES),
    "olmo2-halves": ("olmo2", HALVES),
    "olmoe-halves": ("olmoe", HALVES),
    "olmo-hybrid-halves": ("olmo-hybrid", HALVES | {"linear_num_value_heads": 4}),
    "minimax-m2-halves": ("minimax-m2", HALVES),
    "mimo-halves": ("mimo-v2", {"num_attention_heads": 8, "num_key_value_heads": 2}),
    "kimi-halves": ("kimi-linear", {"linear_num_heads": 4}),
    "glm-5.3-halves": ("glm-5.3-flash", {"linear_num_heads": 2}),
    "gpt-oss-groups": ("gpt-oss", {"hidden_size": 64, "intermediate_size": 96}),
}  # fmt: skip
FLOAT = WeightFormat(dtype="float32")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            own, changes = MORE.get(name, (name, {}))
            made[name] = save(make_model(own, **changes), tmp_path_factory.mktemp(name))
        return made[name]

    return get


def check(pool: Pool, asked: Asked, tolerance: float = TOLERANCE) -> None:
    """Every rank says what one device says."""
    alone = cases.answered(Alone(), replace(asked, experts="tp"))
    answers = pool.run(cases.answered, asked)
    assert alone.logits.std() > 0.1, "logits too small for the tolerance to mean anything"
    scale = max(1.0, float(alone.logits.std()))
    for rank in answers:
        torch.testing.assert_close(rank.logits, alone.logits, rtol=0.0, atol=tolerance * scale)
        assert rank.tokens == alone.tokens
        assert rank.kept == alone.kept
        assert rank.row_bytes == alone.row_bytes
        assert rank.logprobs == pytest.approx(alone.logprobs, abs=tolerance)
        assert torch.equal(rank.logits, answers[0].logits)
        assert max(rank.own_bytes[0] / alone.own_bytes[0], rank.own_bytes[1] / alone.own_bytes[1]) <= 1


DENSE = (
    "llama-gqa-tied", "qwen2", "qwen2-windows", "qwen3", "llama-all-biases", "ernie", "granite", "exaone4",
    "gemma2-panels", "gemma3-panels", "cohere2-panels", "ministral3-halves", "granite-swa", "arcee", "glm",
    "hyperclova-x", "apertus", "muse-glimmer-panels", "nanochat-panels",
    "starcoder2-panels", "phi-panels", "minitron-panels", "phi3-halves", "phi3-window", "gemma4-halves",
    "cohere-plus-halves",
)  # fmt: skip


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("budget", [None, 40])
def test_dense_models(two: Pool, checkpoint: Checkpoint, name: str, budget: int | None) -> None:
    """Two kv heads, one on each rank; one on both (qwen2); 199 token ids; biases on every product."""
    check(two, Asked(checkpoint(name), budget=budget))


HYBRIDS = ("lfm2", "lfm2-all", "lfm2-moe", "lfm3", "granite-hybrid", "qwen3.5", "qwen3-next", "nemotron-h",
           "nemotron-3", "nemotron-super", "falcon-h1-norm", "bamba", "kimi-halves", "ling3",
           "glm-5.3-halves")  # fmt: skip
STATES_TOLERANCE = 1e-4  # a gated delta rule amplifies rounding


@pytest.mark.parametrize("name", HYBRIDS)
def test_recurrent_layers(two: Pool, checkpoint: Checkpoint, name: str) -> None:
    """Channels, groups with their heads, key heads with their value heads; projections of several kinds of rows."""
    check(two, Asked(checkpoint(name), budget=40), STATES_TOLERANCE)


@pytest.mark.parametrize(
    "name",
    ["olmo2-halves", "olmo3", "olmoe-halves", "minimax-m2-halves", "olmo-hybrid-halves", "gemma4-shared",
     "gemma3n-halves",
     "granite-hybrid-group", "granite-hybrid-experts"],
)  # fmt: skip
def test_what_ranks_compute_eagerly(two: Pool, checkpoint: Checkpoint, name: str) -> None:
    """Norms over the heads of all ranks, of keys that both may have (olmo3), of a group of Mamba-2, and of the sums of
    an MLP and of experts; embeddings for each layer, shared keys and values; gates cut by the deviation of all.
    """
    check(two, Asked(checkpoint(name), budget=40), STATES_TOLERANCE)


@pytest.mark.parametrize("experts", ["tp", "ep"])
@pytest.mark.parametrize(
    "name",
    ["deepseek-v3", "qwen3-moe", "qwen2-moe", "glm4", "glm4-moe", "gpt-oss", "ernie-moe-halves", "kolibri-panels",
     "cohere2-moe", "axk1", "flint-panels", "hunyuan-moe", "afmoe-panels", "laguna-full", "phimoe-panels",
     "minimax-m3-panels", "laguna", "mimo-halves", "mimo-v2-panels"],
)  # fmt: skip
def test_experts(two: Pool, checkpoint: Checkpoint, name: str, experts: SplitExperts) -> None:
    """The inner size of every expert is split, or whole experts are distributed; latents and shared experts too."""
    check(two, Asked(checkpoint(name), experts=experts, budget=40))


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    "name",
    ["cohere2-panels", "ministral3-halves", "cohere2-moe", "kolibri-panels", "axk1", "afmoe-panels", "phi-panels"],
)
def test_other_recipes_in_looped_steps(two: Pool, checkpoint: Checkpoint, name: str) -> None:
    """An MLP or experts beside attention, whose outputs are added together; queries scaled by position; experts whose
    output is normed.
    """
    check(two, Asked(checkpoint(name), executor="looped", budget=40))


@pytest.mark.parametrize("experts", ["tp", "ep"])
@pytest.mark.parametrize("name", ["mistral4", "hy-v4", "step3.7", "granite-moe-shared", "gemma4-moe"])
def test_experts_of_one_tensor(two: Pool, checkpoint: Checkpoint, name: str, experts: SplitExperts) -> None:
    """Of its rows each rank takes a part of those of gate, and of those of up."""
    check(two, Asked(checkpoint(name), experts=experts, budget=40), STATES_TOLERANCE)


def test_experts_of_one_transposed_tensor(two: Pool, tmp_path: Path) -> None:
    """As Qwen3-VL is published."""
    text, around = WITH_TOWERS["Qwen3VLMoe"]
    config = transformers.Qwen3VLMoeConfig(text_config={**SIZES, **text}, **around)
    save(transformers.Qwen3VLMoeForConditionalGeneration(config).float(), tmp_path)
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    check(two, Asked(tmp_path, budget=40))


@pytest.mark.parametrize("executor", ["eager", "looped"])
@pytest.mark.parametrize("experts", ["tp", "ep"])
def test_mxfp4(two: Pool, checkpoint: Checkpoint, experts: SplitExperts, executor: str, tmp_path: Path) -> None:
    """96 inner numbers are three groups: one rank has two, the other one and a padded one."""
    if executor == "looped" and find_compiler() is None:
        pytest.skip("no C++ compiler")
    folder, _ = packed_experts(checkpoint("gpt-oss-groups"), tmp_path)
    formats = WeightFormats(layers=WeightFormat(dtype="mxfp4", group=32), tables=FLOAT, attention=FLOAT)
    check(two, Asked(folder, experts=experts, formats=formats, executor=executor, budget=40))


@pytest.mark.parametrize("selector", [Hops(observation_len=8, num_hops=2), Diverse(observation_len=8)])
def test_selectors(two: Pool, checkpoint: Checkpoint, selector: Selector) -> None:
    """Where one kv head is on both ranks, which must keep the same tokens."""
    check(two, Asked(checkpoint("qwen2"), budget=40, selector=selector))


@pytest.mark.parametrize("executor", ["eager", "looped"])
@pytest.mark.parametrize(("name", "experts"), [("qwen3-blocks", "tp"), ("deepseek-v3-blocks", "tp"),
                                               ("deepseek-v3-blocks", "ep"), ("qwen3-next-blocks", "tp"),
                                               ("qwen3.5-blocks", "tp"), ("qwen3.5-halves", "tp")])  # fmt: skip
def test_fp8_blocks(
    two: Pool, checkpoint: Checkpoint, name: str, experts: SplitExperts, executor: str, tmp_path: Path
) -> None:
    folder, _ = narrowed(checkpoint(name), tmp_path)
    formats = WeightFormats(layers=WeightFormat(dtype="fp8"), tables=FLOAT)
    if executor == "looped" and find_compiler() is None:
        pytest.skip("no C++ compiler")
    # Logits of this model of latents reach 7, and products that are rounded less move them by 1.5e-4 on one device.
    # A DeltaNet amplifies it: as much with the same numbers as floats.
    tolerance = {"deepseek-v3-blocks": 2, "qwen3-blocks": 1}.get(name, 25) * TOLERANCE
    check(two, Asked(folder, experts=experts, formats=formats, executor=executor), tolerance)


def test_codes_in_groups(two: Pool, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Of a checkpoint, and made while it is read, embeddings too."""
    source = checkpoint("qwen3-groups")
    (source / "tokenizer.json").write_text("{}")
    form = WeightFormat(dtype="int4", group=32)
    quantize_checkpoint(source, tmp_path / "codes", form)
    check(two, Asked(tmp_path / "codes", formats=WeightFormats(layers=form, tables=FLOAT)))
    check(two, Asked(source, formats=WeightFormats.of("int8")))


# Of four ranks each has 48 columns of ``o``, one and a half groups; 96 inner numbers are three groups.
ODD = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 24, "num_attention_heads": 8, "num_key_value_heads": 4}
ODD_EXPERTS = ODD | {"moe_intermediate_size": 96}


@pytest.mark.parametrize("width", ["int8", "int4"])
def test_shards_that_cut_through_groups(width: str, two: Pool, four: Pool, tmp_path: Path) -> None:
    """Dense and experts, in both executors, of weights quantized at load and of a quantized checkpoint."""
    dense = save(make_model("qwen3", **ODD), tmp_path / "dense")
    mixture = save(make_model("qwen3-moe", **ODD_EXPERTS), tmp_path / "mixture")
    (dense / "tokenizer.json").write_text("{}")
    form = WeightFormat(dtype=width, group=32)  # type: ignore[arg-type]
    quantize_checkpoint(dense, tmp_path / "codes", form)
    executors = ["eager"] if find_compiler() is None else ["eager", "looped"]
    made, own = WeightFormats.of(width), WeightFormats(layers=form, tables=FLOAT)
    for executor in executors:
        check(two, Asked(mixture, formats=made, executor=executor))
        check(four, Asked(tmp_path / "codes", formats=own, executor=executor))
        check(four, Asked(dense, formats=made, executor=executor))


BF16 = WeightFormats.of("bfloat16")
INT4 = WeightFormats.of("int4")


@pytest.mark.parametrize("executor", ["eager", "looped"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "formats", "exact"),
    [
        ("bfloat16", "auto", BF16, BF16),
        ("float32", "bfloat16", BF16, BF16),
        ("float32", "int8", BF16, BF16),
        ("float32", "int4", BF16, BF16),
        ("float32", "int8/int4", BF16, BF16),
        ("float32", "auto", INT4.rounding_inputs(), INT4),
        ("float32", "auto", INT4, INT4),
    ],
    ids=["bf16", "bf16-rows", "int8-rows", "int4-rows", "int8-int4-rows", "int4-weights-int8-inputs", "int4-weights"],
)
def test_ranks_differ_by_rounding_of_near_ties(
    two: Pool, checkpoint: Checkpoint, dtype: DType, kv_dtype: KVDType, formats: WeightFormats, exact: WeightFormats,
    executor: str,
) -> None:  # fmt: skip
    """Fed the same tokens, two ranks are as far from logits without that rounding as one rank is, and where they choose
    another token, its margin on one rank is within that rounding.
    """
    if executor == "looped" and (dtype != "float32" or find_compiler() is None):
        pytest.skip("looped steps compute in fp32, by a C++ compiler")
    asked = Asked(checkpoint("qwen3-groups"), formats=formats, executor=executor)
    one = cases.forced_logits(Alone(), asked, dtype, kv_dtype, 60)
    tokens = one.argmax(-1)
    ideal = cases.forced_logits(Alone(), replace(asked, formats=exact), "float32", "auto", 60, tokens)
    both = two.run(cases.forced_logits, asked, dtype, kv_dtype, 60, tokens)
    assert torch.equal(*both)
    errors = [float((found - ideal).square().mean().sqrt()) for found in (one, both[0])]
    best = one.topk(2).values
    margins = best[..., 0] - best[..., 1]
    differs = both[0].argmax(-1) != tokens
    assert errors[1] <= 1.5 * errors[0] + TOLERANCE
    assert bool((margins[differs] <= 6 * errors[0]).all())


def test_four_ranks(four: Pool, checkpoint: Checkpoint) -> None:
    """A head of queries each; two ranks share a kv head, all share the latents; the last has 49 of 199 token ids.

    Of kv heads with unlike slots one keeps a prompt that another compresses, and their numbers of candidates differ: no
    rank waits for scores that do not come, or that have another shape.
    """
    for selector in (SnapKV(observation_len=8), Hops(observation_len=8, num_hops=2)):
        check(four, Asked(checkpoint("llama-gqa-tied"), budget=24, heads=cases.UNLIKE, selector=selector))
    check(four, Asked(checkpoint("llama-gqa-tied"), budget=40))
    check(four, Asked(checkpoint("deepseek-v3"), experts="ep", budget=40))


def test_a_share_alone(checkpoint: Checkpoint) -> None:
    """One rank of two without the other answers, in the shapes of the whole, from its share of the bytes."""
    asked = Asked(checkpoint("deepseek-v3"), budget=40)
    alone, pretended = cases.answered(Alone(), asked), cases.answered(Pretend(1, 2), asked)
    assert pretended.logits.shape == alone.logits.shape and not torch.equal(pretended.logits, alone.logits)
    assert pretended.own_bytes[0] < 0.7 * alone.own_bytes[0]


def test_weights_that_are_no_share_of_these_ranks(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama-gqa-tied")
    model = read_model_config(folder)
    whole = load_weights(folder, model, torch.float32, "cpu", progress=False)
    with pytest.raises(ValueError, match="these weights have 4 of 4 query heads, and there are 2 ranks"):
        Decoder(model, whole, group=Pretend(0, 2))


def test_random_shares(two: Pool, checkpoint: Checkpoint) -> None:
    """What both ranks hold is the same on both, what is split differs, and together they are a model."""
    model = read_model_config(checkpoint("qwen2"))
    (logits, own, size), (other_logits, others, other_size) = two.run(cases.random_logits, model)
    assert torch.equal(logits, other_logits) and logits.shape == (1, 199) and 0.3 < logits.std() < 3.0
    assert size == other_size == weight_bytes(rank_config(model, ParallelConfig(size=2)), "float32")
    q, k, v = own["qkv"].split((24, 12, 12), 1)  # two of four query heads, and the only kv head
    other_q, other_k, other_v = others["qkv"].split((24, 12, 12), 1)
    assert torch.equal(k, other_k) and torch.equal(v, other_v) and not torch.equal(q, other_q)
    assert not torch.equal(own["down"], others["down"]) and torch.equal(own["input_norm"], others["input_norm"])


# Rows whose kv heads have slots of their own, over ranks: each has those of its heads, and answers as one device.

__all__ = ["checkpoint"]  # a fixture
SHARED = HeadProfile(shares=((0.5,), (0.1,), (0.4,)), model="")


def asked(folder: Path, profile: HeadProfile = UNLIKE, **more: object) -> Asked:
    return Asked(folder, budget=24, heads=profile, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("executor", ["eager", "looped"])
@pytest.mark.parametrize(("name", "profile"), [("llama-gqa-tied", UNLIKE), ("qwen3", UNLIKE), ("qwen2", SHARED)])
def test_heads_of_each_rank(two: Pool, checkpoint: Checkpoint, name: str, profile: HeadProfile, executor: str) -> None:
    """A kv head on each rank, or one on both."""
    if executor == "looped" and find_compiler() is None:
        pytest.skip("no C++ compiler")
    budgets = profile.slots(KVBudget.of(24, observation_len=8), 100).budgets
    sizes = [own.capacity for layer in budgets for own in layer]
    assert min(sizes) < len(PROMPTS[1]) < max(sizes) < len(PROMPTS[0])
    given = asked(checkpoint(name), profile, executor=executor)
    plain = cases.answered(Alone(), Asked(given.folder, budget=24))
    assert cases.answered(Alone(), given).logits.ne(plain.logits).any(), "the profile matters"
    check_rows(two, given)


def check_rows(pool: Pool, given: Asked) -> None:
    """Tokens and logits of one device; ranks have the rows of their heads, and none has more than ``plan`` says."""
    check(pool, given)
    size = len(rows := [rank.own_bytes[1] for rank in pool.run(cases.answered, given)])
    model, budget = read_model_config(given.folder), KVBudget.of(24, observation_len=8)
    assert given.heads is not None
    heads = given.heads.slots(budget, 100)
    config = EngineConfig(budget=budget, max_model_len=100, max_rows=2, heads=heads, selector=given.selector,
                          parallel=ParallelConfig(size=size))  # fmt: skip
    token = 4 * 2 * model.head_dim  # fp32, key and value
    assert rows == [3 * heads.of_rank(rank, size).row_slots * token for rank in range(size)]
    planned = 3 * engine_memory(model, config).row_bytes
    assert max(rows) <= planned <= max(rows) + 3 * model.num_layers * model.num_kv_heads * token


def test_a_whole_engine_tells_what_each_head_kept(checkpoint: Checkpoint) -> None:
    folder = checkpoint("qwen3")
    heads = HeadProfile(shares=UNLIKE.shares, model=fingerprint(folder))
    settings = {"budget": KVBudget.of(24, observation_len=8), "selector": SnapKV(observation_len=8), "heads": heads,
                "max_rows": 2, "max_model_len": 128, "executor": "eager", "progress": False}  # fmt: skip
    with LLM(folder, **settings) as one, LLM(folder, **settings, tensor_parallel=2) as two:
        for way in (True, "bitmap"):
            params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, return_kept=way)
            [output, _] = Pair(one, two).same([[7 * i % 190 + 3 for i in range(70)], list(range(5, 25))], params)
            assert output.compression is not None
            kept = output.compression.kept_positions
            assert (kept is None) == (way == "bitmap")
            assert kept is None or len({len(head) for layer in kept for head in layer}) > 1, "heads keep unlike numbers"


# Groups of ranks: what collectives return, alone, pretended and between processes.


def test_alone_and_pretend_communicate_nothing() -> None:
    x = torch.arange(6.0).view(2, 3)
    one: Group = Alone()
    assert (one.rank, one.size) == (0, 1)
    assert one.all_reduce(x) is x and one.all_gather(x, 1) is x and one.broadcast(x, 0) is x
    third: Group = Pretend(2, 4)
    assert (third.rank, third.size) == (2, 4)
    assert third.all_reduce(x, "max") is x and third.broadcast(x, 1) is x
    assert torch.equal(third.all_gather(x, 1), x.repeat(1, 4))
    assert third.all_gather(x, 0).shape == (8, 3)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_is_one_of_its_group(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank is {rank}; it must be from 0 to 3"):
        Pretend(rank, 4)


@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ranks_hold_the_same_bits_after_a_reduction(two: Pool, dtype: torch.dtype, op: ReduceOp) -> None:
    answers = two.run(cases.reduced, dtype, op)
    assert [rank for rank, _, _ in answers] == [0, 1]
    both = [before for _, before, _ in answers]
    assert not torch.equal(*both)
    wanted = both[0] + both[1] if op == "sum" else torch.maximum(*both)
    for _, _, after in answers:
        assert after.dtype == dtype and torch.equal(after, wanted)


def test_ranks_reduce_what_is_not_contiguous(two: Pool) -> None:
    for after in two.run(cases.reduced_view):
        assert torch.equal(after, (2 * torch.arange(6.0).view(2, 3) + 1).t())


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_ranks_gather_in_the_order_of_ranks(two: Pool, dim: int) -> None:
    first = torch.arange(6.0).view(2, 3)
    for after in two.run(cases.gathered, dim):
        assert torch.equal(after, torch.cat((first, first + 100), dim))


@pytest.mark.parametrize("source", [0, 1])
def test_ranks_have_what_one_of_them_had(two: Pool, source: int) -> None:
    for after in two.run(cases.broadcast, source):
        assert torch.equal(after, (torch.arange(6.0).view(2, 3) + 100 * source).t())


@pytest.mark.parametrize(("device", "wanted"), [("cuda", "cuda:3"), ("cuda:1", "cuda:1"), ("cpu", None)])
def test_a_gpu_joins_by_its_number(device: str, wanted: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses a GPU without one."""
    asked: dict[str, Any] = {}

    def init(**given: Any) -> None:
        asked.update(given)
        raise InterruptedError  # nobody is there to meet

    monkeypatch.setattr(torch.distributed, "init_process_group", init)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with pytest.raises(InterruptedError):
        Ranks.join(0, 2, "file:///nowhere", device, 1.0)
    assert asked["device_id"] == (None if wanted is None else torch.device(wanted))
    assert asked["backend"] == ("gloo" if wanted is None else "nccl")
