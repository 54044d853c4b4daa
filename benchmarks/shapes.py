"""Random-weight checkpoints of stated shapes, written with transformers so that every engine loads the same files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# About 100M parameters: the shape of a small Llama with grouped heads and a tied 32k vocabulary.
LLAMA_100M: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 40960,
    "rope_theta": 500000.0, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

# The same for Qwen3, whose heads are normed; and one on which a benchmark can be tried.
QWEN3_100M: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 40960,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "use_sliding_window": False,
}  # fmt: skip
QWEN3_TINY = QWEN3_100M | {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
                           "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip

# As wide and deep, but one layer in four has attention: short convolutions between (LFM2), or gated DeltaNet (Qwen3.5),
# whose heads are as many per hidden size as in the models published.
LFM2_100M: dict[str, Any] = {
    "model_type": "lfm2", "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048,
    "block_auto_adjust_ff_dim": False, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4,
    "full_attn_idxs": [2, 6, 10], "max_position_embeddings": 40960, "bos_token_id": 1, "eos_token_id": 2,
    "conv_dim": 768, "block_dim": 768, "block_ff_dim": 2048,  # older names of sizes, which vLLM reads
}  # fmt: skip
LFM2_TINY = LFM2_100M | {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "full_attn_idxs": [1], "conv_dim": 128,
                         "block_dim": 128, "block_ff_dim": 256}  # fmt: skip
QWEN35_100M: dict[str, Any] = {
    "model_type": "qwen3_5_text", "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048,
    "num_hidden_layers": 12, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128,
    "linear_num_key_heads": 12, "linear_num_value_heads": 12, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "max_position_embeddings": 40960, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
QWEN35_TINY = QWEN35_100M | {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
                             "num_attention_heads": 4, "head_dim": 32, "linear_num_key_heads": 2,
                             "linear_num_value_heads": 6, "linear_key_head_dim": 32,
                             "linear_value_head_dim": 32}  # fmt: skip
GRANITE_H_100M: dict[str, Any] = {
    "model_type": "granitemoehybrid", "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048,
    "shared_intermediate_size": 2048, "num_local_experts": 0, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_key_value_heads": 4, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
    "layer_types": ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(12)],
    "max_position_embeddings": 40960, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GRANITE_H_TINY = GRANITE_H_100M | {"vocab_size": 1024, "hidden_size": 128, "shared_intermediate_size": 256,
                                   "num_hidden_layers": 4, "layer_types": GRANITE_H_100M["layer_types"][:4],
                                   "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 8,
                                   "mamba_d_head": 32, "mamba_d_state": 64, "mamba_n_groups": 2}  # fmt: skip


def random_checkpoint(folder: Path, shape: dict[str, Any]) -> None:
    """Write a checkpoint of that shape with random weights in fp32, the same every time; without a type, a Qwen3."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**{"model_type": "qwen3"} | shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


# Latents and experts of DeepSeek's kind, about 100M parameters per token: as wide and deep as the above.
DEEPSEEK_100M: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "moe_intermediate_size": 384,
    "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 12, "q_lora_rank": 384,
    "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "n_routed_experts": 32,
    "num_experts_per_tok": 4, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    "max_position_embeddings": 40960, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DEEPSEEK_TINY = DEEPSEEK_100M | {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96,
                                 "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                                 "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32}  # fmt: skip


@contextmanager
def deepseek_folder(shape: dict[str, Any]) -> Iterator[Path]:
    """A checkpoint folder of a DeepSeek-V3 of that shape, fp32; deleted at the end."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        DeepseekV3ForCausalLM(DeepseekV3Config(**shape)).save_pretrained(folder)
        yield Path(folder)


@contextmanager
def llama_folder(**changes: Any) -> Iterator[Path]:
    """A checkpoint folder of ``LLAMA_100M`` with ``changes``; deleted at the end."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**{**LLAMA_100M, **changes})).save_pretrained(folder)
        yield Path(folder)


def random_prompt(length: int, vocab_size: int = LLAMA_100M["vocab_size"], seed: int = 0) -> list[int]:
    """Token ids without the special ones."""
    from random import Random

    rng = Random(seed)
    return [rng.randrange(3, vocab_size) for _ in range(length)]
