"""Rows as a cache of transformers: the engine's tokens, for every family; padding, compiled steps, refusals."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounter

from snapstream.assets import TINY_MODEL
from snapstream.config import KVBudget
from snapstream.integrations.transformers import SnapStreamCache, SnapStreamLayer
from snapstream.llm import LLM
from snapstream.types import SamplingParams
from tests.parity.checkpoints import ARCHITECTURES, LATENTS, VOCAB, make_model, save

NEW = 40
BUDGET = 64
REFUSED = (
    "gpt-oss", "granite-swa", "granite-moe-swa", "flint", "falcon-h1", "gemma2", "vaultgemma", "phi3-longrope",
    "phi3-window", "mistral-window", "llama4", "gemma3n", "gemma4", "kimi-linear", "minimax-m3",
    "mimo-v2", "glm-5.3",
)  # fmt: skip
ONE_OF_EACH = {config: name for name, (config, _) in reversed(ARCHITECTURES.items())}  # the first of each class
FAMILIES = [
    name
    for name, (_, changes) in ARCHITECTURES.items()
    if not set(LATENTS) <= set(changes) and not name.startswith(REFUSED)
    and name in {*ONE_OF_EACH.values(), "llama-dynamic", "qwen2", "lfm2-all", "granite-4-dense"}
]  # fmt: skip
PARAMS = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)


def prompts(*lengths: int) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


def batch(texts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Padded on the left."""
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, inputs: dict[str, torch.Tensor], cache: Any, **options: Any) -> list[list[int]]:
    model.generation_config.eos_token_id = None
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    out = model.generate(**inputs, past_key_values=cache, **settings)
    return out[:, inputs["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]


def engine(folder: Path, texts: list[list[int]], **settings: Any) -> list[list[int]]:
    with LLM(folder, max_rows=4, max_model_len=200, progress=False, **settings) as llm:
        return [output.token_ids for output in llm.generate(texts, PARAMS)]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_engines_tokens(name: str, tmp_path: Path) -> None:
    """Below the budget, at it and above; beyond the end of the ring. (Dynamic RoPE remembers longer texts.)"""
    model = make_model(name)
    texts = prompts(1, BUDGET, 150)
    wanted = engine(save(model, tmp_path), texts, budget=BUDGET)
    cache = SnapStreamCache(model.config, budget=BUDGET)
    for text, tokens in zip(texts, wanted, strict=True):
        cache.reset()
        assert generate(model, batch([text]), cache) == [tokens], len(text)
    rows = [layer for layer in cache.layers if isinstance(layer, SnapStreamLayer)]
    assert rows and all(layer.keys.shape[2] == BUDGET for layer in rows)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("mistral-window", "sliding windows in all layers, to which no budget applies"),
        ("falcon-h1", "attention and recurrence side by side in a layer, which SnapStreamCache does not support"),
        ("minimax-m3", "an indexer of sparse attention, which SnapStreamCache does not support"),
        ("gemma2-full", "a cap of attention scores, which SnapStreamCache does not support"),
        ("phi3-longrope", "longrope.*SnapStreamCache does not support"),
    ],
)
def test_models_that_the_cache_does_not_support(name: str, problem: str) -> None:
    model = make_model(name)
    model.config.architectures = [type(model).__name__]
    with pytest.raises(ValueError, match=f"has {problem}"):
        SnapStreamCache(model.config, budget=BUDGET)


@pytest.mark.parametrize(
    "settings",
    [
        {"budget": KVBudget(num_sink=4, num_topk=30, num_window=8, num_recent=22)},
        {"budget": KVBudget(num_sink=4, num_topk=0, num_recent=40)},
        {"budget": BUDGET, "selector": "hops"},
        {"budget": BUDGET, "selector": "diverse"},
    ],
)
def test_other_budgets_and_selectors(settings: dict[str, Any], tmp_path: Path) -> None:
    model = make_model("llama-gqa-tied")
    texts = prompts(150, 50)
    wanted = engine(save(model, tmp_path), texts, **settings)
    for text, tokens in zip(texts, wanted, strict=True):
        assert generate(model, batch([text]), SnapStreamCache(model.config, **settings)) == [tokens]


@pytest.mark.parametrize("name", ["qwen3", "qwen2-windows", "lfm2"])
def test_a_batch_with_padding_is_each_prompt_alone(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    texts = prompts(150, 30, 90, 66)
    wanted = engine(save(model, tmp_path), texts, budget=BUDGET)
    assert generate(model, batch(texts), SnapStreamCache(model.config, budget=BUDGET)) == wanted
    several = generate(model, batch(texts[:1]), SnapStreamCache(model.config, budget=BUDGET), do_sample=True,
                       num_return_sequences=3, temperature=1e-4)  # fmt: skip
    assert several == wanted[:1] * 3


def test_other_caches_are_what_they_were() -> None:
    model = make_model("mistral")
    text = batch(prompts(90))
    before = generate(model, text, transformers.DynamicCache(config=model.config))
    SnapStreamCache(model.config, budget=BUDGET)
    assert generate(model, text, transformers.DynamicCache(config=model.config)) == before
    assert generate(model, text, SnapStreamCache(model.config, budget=400)) == before
    logits = model(**text).logits
    assert logits.shape[1] == 90


def test_a_step_compiles_once_and_whole() -> None:
    model = make_model("llama-gqa-tied")
    text = batch(prompts(150, 90))
    wanted = generate(model, text, SnapStreamCache(model.config, budget=BUDGET))
    counted = CompileCounter()
    step = torch.compile(model.forward, backend=counted, fullgraph=True, dynamic=False)
    cache = SnapStreamCache(model.config, budget=BUDGET)
    positions = text["attention_mask"].cumsum(-1) - 1
    with torch.no_grad():
        logits = model(**text, position_ids=positions.clamp(min=0), past_key_values=cache).logits
        tokens = [logits[:, -1].argmax(-1)]
        addresses = [layer.keys.data_ptr() for layer in cache.layers]
        for number in range(NEW - 1):
            place = positions[:, -1:] + 1 + number
            out = step(input_ids=tokens[-1][:, None], position_ids=place, past_key_values=cache)
            tokens.append(out.logits[:, -1].argmax(-1))
    assert torch.stack(tokens, 1).tolist() == wanted
    assert counted.frame_count == 1
    assert [layer.keys.data_ptr() for layer in cache.layers] == addresses


def test_memory_is_constant_after_the_prompt() -> None:
    model = make_model("llama-mha")
    cache = SnapStreamCache(model.config, budget=BUDGET)
    generate(model, batch(prompts(300)), cache)
    assert all(layer.keys.shape == layer.values.shape == (1, 4, BUDGET, 12) for layer in cache.layers)
    held = {id(x): x.untyped_storage().nbytes() for layer in cache.layers for x in vars(layer).values()
            if isinstance(x, torch.Tensor)}  # fmt: skip
    assert sum(held.values()) < 3 * (2 * 4 * BUDGET * 12 * 4 + BUDGET * 8 + 64)


def refusal(model: Any, cache: Any, texts: list[list[int]] | None = None, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        generate(model, batch(texts or prompts(90)), cache, **options)
    return str(caught.value)


def test_what_rows_cannot_do_is_refused() -> None:
    model = make_model("llama-mha")

    def cache() -> SnapStreamCache:
        return SnapStreamCache(model.config, budget=BUDGET)

    assert "num_beams" in refusal(model, cache(), num_beams=2)
    assert "prefill_chunk_size" in refusal(model, cache(), prefill_chunk_size=32)
    assert "another cache" in refusal(model, cache(), assistant_model=make_model("llama-mha"))
    used = cache()
    generate(model, batch(prompts(90)), used)
    assert "reset()" in refusal(model, used, prompts(200))
    right = batch(prompts(90, 60))
    right = {name: value.flip(1) for name, value in right.items()}
    with pytest.raises(ValueError, match="padded on the left"):
        generate(model, right, cache())
    foreign = SnapStreamCache(make_model("llama-mha").config, budget=BUDGET)
    assert "did not reach the cache" in refusal(make_model("llama-mha"), foreign)


def test_models_and_budgets_that_the_engine_would_refuse() -> None:
    config = make_model("llama-mha").config
    with pytest.raises(ValueError, match="36"):
        SnapStreamCache(config, budget=20)
    with pytest.raises(ValueError, match="sliding"):
        SnapStreamCache(transformers.MistralConfig(sliding_window=64, max_position_embeddings=512), budget=BUDGET)
    with pytest.raises(ValueError, match="gpt2|GPT2"):
        SnapStreamCache(transformers.GPT2Config(), budget=BUDGET)
    with pytest.raises(ValueError, match="latents"):
        SnapStreamCache(make_model("deepseek-v3-dense").config, budget=BUDGET)
    for name, reason in (("mimo-v2", "differ in their heads"), ("mimo-v2-full", "values smaller than keys")):
        with pytest.raises(ValueError, match=reason):
            SnapStreamCache(make_model(name).config, budget=BUDGET)
    config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2"):
        SnapStreamCache(config, budget=BUDGET)


def test_attention_weights_are_refused() -> None:
    model = make_model("llama-mha")
    with pytest.raises(ValueError, match="output_attentions is True"):
        generate(model, batch(prompts(5)), SnapStreamCache(model.config, budget=BUDGET), output_attentions=True)


def test_wrong_arguments_name_the_remedy() -> None:
    model = make_model("llama-mha")
    with pytest.raises(TypeError, match="LlamaForCausalLM.*SnapStreamCache\\(model.config"):
        SnapStreamCache(model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="budget is missing.*budget="):
        SnapStreamCache(model.config)


def blocks() -> list[str]:
    text = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
    text = text.split("## SnapStreamCache")[1]
    found = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    return [block.replace("path/to/model", str(TINY_MODEL)) for block in found]


def test_the_examples_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "example"}
    first, second, _ = blocks()
    for block in (first, second):
        exec(compile(block, "docs/python.md", "exec", dont_inherit=True), names)
    one, two = capsys.readouterr().out.splitlines()[:2]
    assert one and names["cache"].layers[0].keys.shape[2] == 128
    assert one.strip().startswith(two.strip()[:5])


def test_lm_evals_own_model() -> None:
    """Its answers are those of the engine with the same rows."""
    harness = pytest.importorskip("lm_eval.models.huggingface", reason="lm-eval is not installed (extra: clients)")
    names: dict[str, Any] = {"__name__": "example", "SnapStreamCache": SnapStreamCache}
    exec(compile(blocks()[2], "docs/python.md", "exec", dont_inherit=True), names)
    assert issubclass(names["RowsLM"], harness.HFLM)
    model = names["RowsLM"](str(TINY_MODEL), device="cpu", dtype="float32", batch_size=1)
    text = "The ticket of dense arrow is 5024160. The number of golden oar is 6517328. " * 20 + "What is the ticket?"
    ask = SimpleNamespace(args=(text, {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}))
    (answer,) = model.generate_until([ask], disable_tqdm=True)
    with LLM(TINY_MODEL, budget=128, max_rows=1, max_model_len=1024, progress=False) as llm:
        wanted = llm.generate(text, SamplingParams(max_tokens=12, temperature=0.0, stop=["\n\n"]))[0].text
    assert answer.strip() == wanted.strip()
