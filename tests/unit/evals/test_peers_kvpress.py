"""The runner for kvpress, where kvpress is: in an environment of its own (evals/README.md), with pytest added to it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("kvpress", reason="kvpress is not installed; it needs an older transformers (evals/README.md)")

import torch
from kvpress.utils import get_prerope_query_states
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from evals.arms import AS_KVPRESS
from evals.cells import Cell, items_of
from evals.peers_kvpress import ARMS, Prefilled, answers, decode, peer_arm, press_of, stacked
from evals.shared import generate_shared
from snapstream.assets import TINY_MODEL
from snapstream.config import KVBudget
from snapstream.kernels.interface import bind
from snapstream.kv.compress import kept_positions
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.llm import LLM

PROMPT_LEN, MAX_TOKENS, SLOTS = 600, 32, 200
PROMPTS = 6


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32, local_files_only=True).eval()


def prompts_of(task: str) -> list[list[int]]:
    arm = peer_arm("full", SLOTS, PROMPT_LEN + MAX_TOKENS, MAX_TOKENS)
    cell = Cell(model=TINY_MODEL, task=task, arm=arm, prompt_len=PROMPT_LEN, num_prompts=PROMPTS, source="kvpress")
    return [item.prompt_ids for item in items_of(cell)[1]]


@torch.inference_mode()
def plainly(model: Any, prompt: list[int], press: Any) -> list[int]:
    """As kvpress is meant to be used: the press around the prefill, then decoding."""
    from transformers import DynamicCache

    cache = DynamicCache()
    torch.manual_seed(0)
    with press(model):
        logits = model(torch.tensor([prompt]), past_key_values=cache, logits_to_keep=1).logits[:, -1]
    return decode(model, logits, cache, [len(prompt)], MAX_TOKENS)[0]


@pytest.mark.parametrize("task", ["multi_uuid", "variable"])
def test_one_prefill_for_all_presses_changes_no_answer(model: Any, task: str) -> None:
    arms = [peer_arm(name, SLOTS, PROMPT_LEN + MAX_TOKENS, MAX_TOKENS) for name in ARMS]
    different = 0
    prompts = prompts_of(task)
    outputs, counts = answers(model, prompts, arms, MAX_TOKENS)
    for prompt, found, kept in zip(prompts, outputs, counts, strict=True):
        for arm, output, count in zip(arms[1:], found[1:], kept[1:], strict=True):
            press = press_of(arm.name, len(prompt), SLOTS - MAX_TOKENS)
            assert output == plainly(model, prompt, press), arm.name
            unused = SLOTS - MAX_TOKENS - count
            assert 0 <= unused < 40 if arm.name == "chunkkv" else unused == 0, arm.name
            different += output != found[0]
    assert different  # the presses did something


def test_full_attention_is_the_same_in_both_engines(model: Any) -> None:
    prompts = prompts_of("multi_uuid") + prompts_of("kv")
    arm = peer_arm("full", SLOTS, PROMPT_LEN + MAX_TOKENS, MAX_TOKENS)
    with LLM(TINY_MODEL, budget="full", max_model_len=PROMPT_LEN + MAX_TOKENS, max_rows=1, progress=False) as llm:
        own = generate_shared(llm, prompts, [()] * len(prompts), MAX_TOKENS, [(arm.budget, arm.selector)])
        ends = set(llm.model_config.eos_token_ids)
    outputs, _ = answers(model, prompts, [arm], MAX_TOKENS)
    for [ours], [theirs] in zip(own, outputs, strict=True):
        assert [token for token in ours if token not in ends] == theirs


@torch.inference_mode()
def test_at_the_settings_of_their_snapkv_ours_keeps_the_same_tokens(model: Any) -> None:
    """On the keys and queries of a real prompt, in every layer and kv head; our default keeps others."""
    num_queries, num_kept = AS_KVPRESS.observation_len, 168
    budget = KVBudget(num_sink=0, num_topk=num_kept - num_queries, num_recent=num_queries)
    prompt = prompts_of("kv")[0]
    press = press_of("snapkv", len(prompt), num_kept)
    num_different, kernels, default = 0, bind("cpu"), SnapKV(observation_len=num_queries)
    for module, kwargs, _ in Prefilled(model, prompt).calls:
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        scores = press.score(module, kwargs["hidden_states"], layer.keys, layer.values, None, kwargs)
        theirs = scores.topk(num_kept, dim=-1).indices[0]
        queries = get_prerope_query_states(module, kwargs["hidden_states"])
        queries, _ = apply_rotary_pos_emb(queries, queries, *kwargs["position_embeddings"])
        last = queries[0, :, -num_queries:].transpose(0, 1)
        ours = kept_positions(last, layer.keys[0], module.layer_idx, budget, AS_KVPRESS, kernels)
        other = kept_positions(last, layer.keys[0], module.layer_idx, budget, default, kernels)
        for head in range(len(theirs)):
            assert set(ours[head].tolist()) == set(theirs[head].tolist())
            num_different += set(other[head].tolist()) != set(ours[head].tolist())
    assert num_different


@torch.inference_mode()
def test_a_pruned_cache_leaves_the_others_alone(model: Any) -> None:
    prompt = prompts_of("kv")[0]
    prefilled = Prefilled(model, prompt)
    before = stacked([prefilled.pruned(None)])
    pruned = prefilled.pruned(press_of("snapkv", len(prompt), 100))
    after = prefilled.pruned(None)
    assert pruned.get_seq_length() == 100 and after.get_seq_length() == len(prompt)
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(before.layers, after.layers, strict=True))


def test_a_press_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="96 slots leave nothing to select"):
        peer_arm("snapkv", 96, PROMPT_LEN + MAX_TOKENS, MAX_TOKENS)
