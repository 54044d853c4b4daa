"""The tables of docs/models.md that say which GGUF files are read, and which quantized checkpoints tests load."""

from __future__ import annotations

from collections.abc import Mapping

from figures.markdown import table
from snapstream.models.registry import FAMILIES
from tests.gguf_files import ARCHITECTURES

NAME = "file_kinds"
# Text parts of checkpoints with a vision tower: their GGUF files are those of the part.
_TEXT_PARTS = {
    "Mistral3ForConditionalGeneration": "Ministral3ForCausalLM",
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma3nForConditionalGeneration": "Gemma3nForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Gemma4UnifiedForCausalLM": "Gemma4ForCausalLM",
    "Gemma4UnifiedForConditionalGeneration": "Gemma4ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
    "Step3p5ForCausalLM": "Step3p7ForConditionalGeneration",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "Kimi_K25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "Exaone4_5_ForConditionalGeneration": "Exaone4ForCausalLM",
    "Lfm2VlForConditionalGeneration": "Lfm2ForCausalLM",
}
# What tests load of the kinds that hold for every architecture: tests/parity/test_packings.py, test_latents.py,
# test_mxfp4.py and tests/clients/test_compressed_tensors.py.
_QUANTIZED: Mapping[str, tuple[str, ...]] = {
    "GPTQ": ("Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    "AWQ": ("LlamaForCausalLM", "Qwen3ForCausalLM"),
    "compressed-tensors": (
        "LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM",
        "Glm4MoeForCausalLM",
    ),
    "FP8": (
        "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM",
        "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration",
        "Ministral3ForCausalLM",
    ),
    "MXFP4": ("GptOssForCausalLM",),
}  # fmt: skip


def section() -> str:
    """Which architectures the files of a GGUF name are read as, and what tests load of quantized checkpoints."""
    by_name: dict[str, list[str]] = {}
    for name in FAMILIES.names:
        for own in _gguf(name):
            by_name.setdefault(own, []).append(f"`{name}`")
    rows = [
        [f"`{name}`", *("checked" if name in names else "" for names in _QUANTIZED.values())] for name in FAMILIES.names
    ]
    files = table(["GGUF", "architecture"], [[f"`{own}`", ", ".join(names)] for own, names in by_name.items()])
    return f"{files}\n\n{table(['architecture', *_QUANTIZED], [row for row in rows if any(row[1:])])}\n"


def _gguf(name: str) -> list[str]:
    """The architectures of its files: that of its text part; of Granite 4.0 without recurrent layers Granite 3's, of
    Nemotron-H without experts another.
    """
    found = ARCHITECTURES.get(_TEXT_PARTS.get(name, name), "")
    more = {"granitehybrid": "granite", "nemotron_h_moe": "nemotron_h"}
    return [own for own in (found, more.get(found)) if own]
