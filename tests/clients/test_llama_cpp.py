"""The same GGUF files in llama.cpp (xllamacpp): the same greedy tokens, and the same ids of texts.

Files are those of ``tests/gguf_files.py``; what both programs agree on is what their names and settings mean.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch

from snapstream.llm import LLM
from snapstream.models.tokenizer import PATTERNS, load_tokenizer
from snapstream.types import SamplingParams
from tests.gguf_files import MODELS, longrope, write_gguf
from tests.parity.checkpoints import VOCAB, make_model, save
from tests.unit.models.test_gguf import LLAMA3, TEXTS, by_id, merges_of, metadata, trained

xllamacpp = pytest.importorskip("xllamacpp")

END = 2
PROMPTS = [[3 + (11 * i + 7 * n) % (VOCAB - 10) for i in range(n)] for n in (3, 17, 33, 64, 90)]
WORDS = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [f"w{index}" for index in range(VOCAB)],
    "tokenizer.ggml.scores": [0.0] * VOCAB,
    "tokenizer.ggml.token_type": [2, 3, 3, *[1] * (VOCAB - 3)],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": END,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.add_bos_token": False,
}


# In a process of its own: some models leave llama.cpp in a state in which the next one ends the process.
RUN = """
import json, os, sys, urllib.request, xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_parallel, params.n_ctx, params.port = 1, 256, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.cache_prompt, params.cache_ram_mib, params.warmup = False, 0, False
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
server = xllamacpp.Server(params)
def tokenize(body):
    address, headers = server.listening_address + "/tokenize", {"Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(address, json.dumps(body).encode(), headers)))
ask = tokenize if sys.argv[2] == "tokenize" else server.handle_completions
answers = [ask(body) for body in json.loads(sys.argv[3])]
print("\\n" + json.dumps(answers), flush=True)
os._exit(0)
"""


def llama_cpp(file: Path, what: str, bodies: list[dict[str, Any]]) -> list[Any]:
    """Its answers to requests, with rows and sums in fp32."""
    command = [sys.executable, "-c", RUN, str(file), what, json.dumps(bodies)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found: list[Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def greedy_tokens(file: Path, count: int) -> list[list[int]]:
    """Of each prompt, without the end token."""
    request = {"n_predict": count, "temperature": 0.0, "top_k": 1, "ignore_eos": True}
    found = llama_cpp(file, "complete", [request | {"prompt": prompt} for prompt in PROMPTS])
    return [[int(number) for number in re.findall(r"w(\d+)", one["choices"][0]["text"])] for one in found]


# What llama.cpp does not read or computes otherwise: some biases, windows of Phi-3 and small EXAONEs, sizes of heads,
# groups of experts that are scored by softmax, another epsilon inside of latent and delta attention, YaRN of
# DeepSeek-V3.2, two ropes of Mellum, the scale of queries of Mistral Small 4.
_HEADS = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
_MAMBA = {"mamba_expand": 2, "mamba_d_head": 16}
_LATENT = {"rms_norm_eps": 1e-6}
_SPARSE = {"index_head_dim": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_MELLUM = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0,
                       "original_max_position_embeddings": 64},
}  # fmt: skip
_MISTRAL4 = {
    "n_group": 1, "topk_group": 1,
    "rope_parameters": {**MODELS["mistral4"]["rope_parameters"], "original_max_position_embeddings": 128},
}  # fmt: skip
_GEMMA3N = {  # numbers that it has for every file
    "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_kv_shared_layers": 0, "altup_num_inputs": 4, "laurel_rank": 64, "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": VOCAB, "activation_sparsity_pattern": [0.95] * 3,
}  # fmt: skip
_LAGUNA = {  # whose beta_slow it does not read
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    "full_attention": {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 8.0, "partial_rotary_factor": 0.5,
                       "original_max_position_embeddings": 64, "beta_fast": 8.0, "beta_slow": 1.0},
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "olmo2": {"attention_bias": False}, "seed-oss": {"attention_out_bias": False}, "smollm3": {"attention_bias": False},
    "phi3-window": {"sliding_window": None}, "phi3-longrope": longrope(512), "cohere2": {"attention_bias": False},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    "qwen3-next": _HEADS, "qwen3.5": _HEADS, "qwen3.5-moe": _HEADS, "granite-hybrid": _MAMBA,
    "granite-hybrid-moe": {**_MAMBA, "mamba_conv_bias": True}, "dots1": {"num_key_value_heads": 4},
    "olmoe": {"num_key_value_heads": 6}, "lfm2-moe": {"routed_scaling_factor": 1.0}, "kimi-k2": _LATENT,
    "glm4-lite": _LATENT, "deepseek-v3": {**_LATENT, "n_group": 1, "topk_group": 1},
    "deepseek-v2": {**_LATENT, "q_lora_rank": 20, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "deepseek-v3.2": {**_LATENT, **_SPARSE, "n_group": 1, "topk_group": 1}, "glm-5": {**_LATENT, **_SPARSE},
    "arcee": {"attention_bias": False}, "llama4": {"attention_bias": False}, "hunyuan-moe": {"attention_bias": False},
    "laguna": {"rope_parameters": _LAGUNA}, "falcon-h1-norm": {"mamba_conv_bias": True},
    "exaone-moe": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "nemotron-h": {"use_bias": False}, "starcoder2-plain": {"use_bias": True}, "minitron": {"head_dim": 12},
    "nemotron-3": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "use_conv_bias": True},
    "gemma4-shared": {"num_kv_shared_layers": 2}, "gemma3n": _GEMMA3N, "gemma3n-panels": _GEMMA3N,
    "youtu": _LATENT, "mellum": {"rope_parameters": _MELLUM}, "mistral4": {**_LATENT, **_MISTRAL4},
    "kimi-linear": {**_LATENT, "q_lora_rank": None}, "kimi-linear-48b": _LATENT, "ling3": _LATENT,
    "apertus": {"tie_word_embeddings": False}, "cohere-plus": {"num_hidden_layers": 64},
    "mimo-v2": {"attention_bias": False},
    "mimo-v2-full": {"layer_types": ["full_attention", "full_attention", "sliding_attention"], "sliding_window": 21},
    "minimax-m3-panels": {"layer_types": ["full_attention", "full_attention", "minimax_m3_sparse"],
                          "index_n_heads": 1, "index_head_dim": 32},
    "deepseek-v2-lite": {**_LATENT, "num_hidden_layers": 27, "initializer_range": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens(name: str, tmp_path: Path) -> None:
    """Of five prompts one may differ, where two tokens score equally but for how sums are rounded; three of Gemma 3n,
    whose gates are a table in fp16 there.
    """
    most, gap = (3, 0.5) if name.startswith("gemma3n") else (1, 0.1)
    model = make_model(name, **MODELS[name] | CHANGES.get(name, {}))
    file = write_gguf(save(model, tmp_path), tmp_path / "model.gguf", tokens=WORDS)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logit_bias={END: -100.0})
    with LLM(file, max_model_len=128, budget="full", progress=False, executor="eager", activations="dtype") as llm:
        ours = [output.token_ids for output in llm.generate(PROMPTS, params)]
    theirs = greedy_tokens(file, 8)
    shown = [[token for token in tokens if token > END] for tokens in ours]  # the others have no text
    wrong = [at for at in range(len(PROMPTS)) if theirs[at] != shown[at]]
    assert len(wrong) <= most
    for at in wrong:
        place = next(i for i, pair in enumerate(zip(theirs[at], shown[at], strict=False)) if pair[0] != pair[1])
        before = ours[at][: [i for i, token in enumerate(ours[at]) if token > END][place]]
        with torch.no_grad():
            scores = model(torch.tensor([PROMPTS[at] + before])).logits[0, -1]
        assert abs(scores[theirs[at][place]] - scores[shown[at][place]]) < gap


def test_log_probabilities_of_gpt_oss(tmp_path: Path) -> None:
    """Experts are MXFP4, whose inputs llama.cpp rounds: by up to 0.31 here, where another rotation makes 2.1 to 5.1. It
    truncates YaRN, unlike the published model.
    """
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 64,
                             "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}  # fmt: skip
    folder = save(make_model("gpt-oss", **sizes, swiglu_limit=7.0), tmp_path)
    file = write_gguf(folder, tmp_path / "model.gguf", {"exps": "MXFP4", "": "F32"}, tokens=WORDS)
    with LLM(file, max_model_len=128, budget="full", progress=False, activations="dtype") as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=1, temperature=0.0, logprobs=20))
    found = llama_cpp(file, "complete", [{"n_predict": 1, "n_probs": 6, "prompt": prompt} for prompt in PROMPTS])
    for output, theirs in zip(outputs, found, strict=True):
        assert output.logprobs is not None
        ours = dict(output.logprobs[0].top)
        for own in theirs["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            assert ours[own["id"]] == pytest.approx(own["logprob"], abs=0.7)


PRES = [name for name in PATTERNS if name != "kimi-k2"]  # which has no merges there


@pytest.mark.parametrize("pre", PRES)
def test_ids_of_texts(pre: str, tmp_path: Path) -> None:
    """Of texts in Unicode's NFC, which llama.cpp does not make."""
    own = trained(None if pre in ("gpt-2", "olmo") else LLAMA3)
    tokens = metadata("gpt2", by_id(own), merges=merges_of(own), pre=pre, bos_token_id=0, eos_token_id=1)
    folder = save(make_model("qwen2", vocab_size=len(by_id(own))), tmp_path)
    file = write_gguf(folder, tmp_path / "model.gguf", tokens=tokens)
    ours, texts = load_tokenizer(file), [unicodedata.normalize("NFC", text) for text in TEXTS if text]
    bodies = [{"content": text, "add_special": True} for text in texts]
    for text, theirs in zip(texts, llama_cpp(file, "tokenize", bodies), strict=True):
        assert ours(text)["input_ids"] == theirs["tokens"], text
