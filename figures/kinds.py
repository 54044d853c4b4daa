"""The table of docs/models.md that says from which kinds of files an architecture is read, and what was checked."""

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
    """A row for each architecture that has them: names of its GGUF files, quantized checkpoints that tests load."""
    rows = [
        [f"`{name}`", _gguf(name), *("checked" if name in names else "" for names in _QUANTIZED.values())]
        for name in FAMILIES.names
    ]
    rows = [row for row in rows if any(row[1:])]
    return table(["architecture", "GGUF", *_QUANTIZED], rows) + "\n"


def _gguf(name: str) -> str:
    """The architecture of its files: that of its text part; of Granite 4.0 without recurrent layers Granite 3's, of
    Nemotron-H without experts another.
    """
    found = ARCHITECTURES.get(_TEXT_PARTS.get(name, name), "")
    more = {"granitehybrid": "granite", "nemotron_h_moe": "nemotron_h"}
    return ", ".join(f"`{own}`" for own in (found, more.get(found)) if own)
