"""The same GGUF files in llama.cpp (xllamacpp): the same greedy tokens, and the same ids of texts.

Files are those of ``tests/gguf_files.py``; what both programs agree on is what their names and settings mean.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from snapstream.llm import LLM
from snapstream.types import SamplingParams
from tests.gguf_files import write_gguf
from tests.parity.checkpoints import VOCAB, make_model, save

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


def llama_cpp(file: Path, count: int) -> list[list[int]]:
    """Greedy tokens of each prompt, without the end token, with rows and sums in fp32."""
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_parallel, params.n_ctx, params.port = 1, 256, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_prompt, params.cache_ram_mib, params.warmup = False, 0, False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    found = []
    for prompt in PROMPTS:
        answer: Any = server.handle_completions(
            {"prompt": prompt, "n_predict": count, "temperature": 0.0, "top_k": 1, "ignore_eos": True}
        )
        assert "choices" in answer, answer
        found.append([int(number) for number in re.findall(r"w(\d+)", answer["choices"][0]["text"])])
    return found


CASES = [
    ("llama-mha", "F32", {"head_dim": 20}), ("llama-gqa-tied", "F32", {}), ("llama-llama3", "F32", {}),
    ("llama-linear", "F32", {}), ("llama-yarn", "F32", {}), ("qwen2", "F32", {}), ("qwen3", "F32", {}),
    ("qwen3-moe", "F32", {}), ("mixtral", "F32", {}), ("gemma3", "F32", {"query_pre_attn_scalar": 20}),
    ("granite", "F32", {}), ("olmo2", "F32", {"attention_bias": False}),
    ("seed-oss", "F32", {"attention_out_bias": False}),
    ("smollm3", "F32", {"num_hidden_layers": 4, "no_rope_layer_interval": 4, "attention_bias": False}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "sizes"), CASES, ids=[name for name, _, _ in CASES])
def test_greedy_tokens(name: str, kind: str, sizes: dict[str, int], tmp_path: Path) -> None:
    """Of five prompts one may differ, where two tokens score equally but for how sums are rounded."""
    model = make_model(name, **sizes)
    file = write_gguf(save(model, tmp_path), tmp_path / "model.gguf", kind, tokens=WORDS)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logit_bias={END: -100.0})
    with LLM(file, max_model_len=128, budget="full", progress=False, executor="eager", activations="dtype") as llm:
        ours = [output.token_ids for output in llm.generate(PROMPTS, params)]
    theirs = llama_cpp(file, 8)
    shown = [[token for token in tokens if token > END] for tokens in ours]  # the others have no text
    wrong = [at for at in range(len(PROMPTS)) if theirs[at] != shown[at]]
    assert len(wrong) <= 1
    for at in wrong:
        place = next(i for i, pair in enumerate(zip(theirs[at], shown[at], strict=False)) if pair[0] != pair[1])
        before = ours[at][: ours[at].index(shown[at][place])]
        with torch.no_grad():
            scores = model(torch.tensor([PROMPTS[at] + before])).logits[0, -1]
        assert abs(scores[theirs[at][place]] - scores[shown[at][place]]) < 0.1
