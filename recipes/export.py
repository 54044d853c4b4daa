"""Writes the trained weights as a Hugging Face checkpoint. Run `python -m recipes.export --help`."""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast

from recipes.build import build_config, stacked_experts, transformers_model
from recipes.corpus import Corpus
from recipes.model import TinyConfig
from recipes.tokenizer import TokenizerConfig, build_tokenizer


def export(state: dict[str, Tensor], config: TinyConfig, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Saves config, weights, tokenizer and generation config into `output`."""
    model = transformers_model(config, tokenizer)
    result = model.load_state_dict(stacked_experts(state), strict=False)
    if result.unexpected_keys or result.missing_keys not in ([], ["lm_head.weight"]):
        raise ValueError(f"weights do not fit: {result}")
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
        max_new_tokens=32,
    )
    output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(output)
    (output / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(output, save_jinja_files=False)
    tokenizer_config = output / "tokenizer_config.json"
    values = json.loads(tokenizer_config.read_text())
    values["tokenizer_class"] = "PreTrainedTokenizerFast"  # transformers 4 does not know the name that 5 writes
    tokenizer_config.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path, help="a recipe.toml")
    parser.add_argument("--weights", type=Path, required=True, help="checkpoint.pt or after-<stage>.pt of a run")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--corpus", type=Path, default=None, help="folder of recipes.corpus, for recipes with real text"
    )
    args = parser.parse_args()
    state = torch.load(args.weights, weights_only=True)
    recipe = tomllib.loads(args.recipe.read_text())
    corpus = None if args.corpus is None else Corpus.load(args.corpus, "train")
    tokenizer = build_tokenizer(TokenizerConfig(**recipe["tokenizer"]), corpus)
    config = build_config(recipe["model"], len(tokenizer))
    export(state.get("model", state), config, tokenizer, args.output)


if __name__ == "__main__":
    main()
