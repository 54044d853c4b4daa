"""Trains a tiny model through the stages of a recipe.toml. Run `python -m recipes.train --help`.

Every batch is new (drawn by seed, stage and step), so the logged accuracies are on unseen documents; keys and
values of the held-out split never occur. A checkpoint is written every few minutes and the run resumes from it.
"""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from recipes.build import build_config, build_model
from recipes.chat import CHATS
from recipes.corpus import Corpus
from recipes.data import Batch, Encoder, make_batch
from recipes.export import export
from recipes.model import TrainedModel
from recipes.tokenizer import TokenizerConfig, build_tokenizer
from snapstream.assets.documents import Style


def answer_loss(
    model: TrainedModel, batch: Batch, lm_share: float, lm_weight: float, generator: torch.Generator
) -> tuple[torch.Tensor, dict[str, tuple[int, int]]]:
    """Loss of a batch and, per family, (answers with every token right, answers)."""
    hidden = model.hidden(batch.ids)[:, :-1]
    targets, answer = batch.ids[:, 1:], batch.answer[:, :-1]
    at_answer = answer > 0
    logits = model.logits(hidden[at_answer]).float()  # [answer tokens, V]
    gold = targets[at_answer]
    loss = F.cross_entropy(logits, gold) if len(gold) else logits.sum()  # a lone question that did not fit: 0
    if lm_share > 0:
        sampled = (torch.rand(answer.shape, generator=generator) < lm_share) & ~at_answer & (targets > 0)
        loss = loss + lm_weight * F.cross_entropy(model.logits(hidden[sampled]).float(), targets[sampled])

    numbers = answer[at_answer]
    wrong = torch.zeros(len(batch.families) + 1, dtype=torch.bool)
    wrong[numbers[logits.argmax(-1) != gold]] = True
    counts: dict[str, tuple[int, int]] = {}
    for family, is_wrong in zip(batch.families, wrong[1:].tolist(), strict=True):
        right, total = counts.get(family, (0, 0))
        counts[family] = (right + (not is_wrong), total + 1)
    return loss, counts


def run_stage(
    model: TrainedModel,
    optimizers: list[torch.optim.Optimizer],
    encoder: Encoder,
    recipe: dict[str, Any],
    stage: dict[str, Any],
    progress: dict[str, Any],
    workdir: Path,
) -> None:
    """Runs one stage from progress['step'] until its steps are done or its target accuracy is reached."""
    style = Style(**stage.get("style", {}))
    generator, lm_weight = torch.Generator(), stage.get("lm_weight", recipe["lm_weight"])
    window: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    by_length: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    losses: list[float] = []
    last_save = last_log = time.time()
    window_tokens = 0
    while progress["step"] < stage["steps"]:
        step = progress["step"]
        seed = f"{recipe['seed']}/{stage['name']}/{step}"
        generator.manual_seed(step)
        rng = Random(seed)
        length, size, _ = rng.choices(stage["shapes"], [shape[2] for shape in stage["shapes"]])[0]
        batch = make_batch(encoder, seed, size, length, stage["tasks"], style)

        done = step / stage["steps"]
        warmup = min(1.0, (step + 1) / stage.get("warmup", 1))
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = warmup * (stage["lr"] + (stage.get("lr_end", stage["lr"]) - stage["lr"]) * done)
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe.get("bfloat16", False)):
            loss, counts = answer_loss(model, batch, stage.get("lm_share", 0.0), lm_weight, generator)
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.balance()

        progress["step"] += 1
        progress["tokens"] += batch.ids.numel()
        window_tokens += batch.ids.numel()
        losses.append(loss.item())
        for family, (right, total) in counts.items():
            window[family][0] += right
            window[family][1] += total
            by_length[length][0] += right
            by_length[length][1] += total
        if progress["step"] % stage.get("log_every", 25) == 0 or progress["step"] == stage["steps"]:
            now = time.time()
            right, total = (sum(pair[i] for pair in window.values()) for i in (0, 1))
            progress["seconds"] += now - last_log
            record = {
                "stage": stage["name"],
                "step": progress["step"],
                "tokens": progress["tokens"],
                "seconds": round(progress["seconds"]),
                "tokens_per_s": round(window_tokens / (now - last_log)),
                "loss": round(sum(losses) / len(losses), 4),
                "accuracy": round(right / max(total, 1), 4),
                "by_family": {name: round(r / n, 3) for name, (r, n) in sorted(window.items())},
                "by_length": {str(name): round(r / n, 3) for name, (r, n) in sorted(by_length.items())},
            }
            with (workdir / "curve.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(json.dumps(record), flush=True)
            window.clear()
            by_length.clear()
            losses.clear()
            last_log, window_tokens = now, 0
            if right / max(total, 1) >= stage.get("target", 2.0):
                break
            if now - last_save > recipe["save_every_s"]:
                save(model, optimizers, progress, workdir)
                last_save = now


def save(model: TrainedModel, optimizers: list[torch.optim.Optimizer], progress: dict[str, Any], workdir: Path) -> None:
    """Writes the checkpoint that a later run resumes from."""
    state = {
        "model": model.state_dict(),
        "optimizers": [o.state_dict() for o in optimizers],
        "progress": dict(progress),
    }
    torch.save(state, workdir / "checkpoint.tmp")
    (workdir / "checkpoint.tmp").replace(workdir / "checkpoint.pt")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path, help="a recipe.toml")
    parser.add_argument("--workdir", type=Path, required=True, help="checkpoints and curve")
    parser.add_argument("--output", type=Path, default=None, help="export the checkpoint here at the end")
    parser.add_argument("--weights", type=Path, default=None, help="start from an exported checkpoint, at --stage")
    parser.add_argument("--stage", default=None, help="the stage that --weights starts with")
    parser.add_argument("--threads", type=int, default=None, help="instead of the recipe's")
    parser.add_argument(
        "--corpus", type=Path, default=None, help="folder of recipes.corpus, for recipes with real text"
    )
    parser.add_argument("--until", default=None, help="stop after the stage of this name")
    args = parser.parse_args()
    args.workdir.mkdir(parents=True, exist_ok=True)

    recipe = tomllib.loads(args.recipe.read_text())
    torch.set_num_threads(args.threads or recipe["threads"])
    torch.manual_seed(recipe["seed"])
    corpus = None if args.corpus is None else Corpus.load(args.corpus, "train")
    tokenizer = build_tokenizer(TokenizerConfig(**recipe["tokenizer"]), corpus)
    config = build_config(recipe["model"], len(tokenizer))
    model = build_model(config)
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2] + [model.model.embed_tokens.weight]
    optimizers = [
        torch.optim.Muon(matrices, weight_decay=recipe["weight_decay"], adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, weight_decay=0.0, betas=(0.9, recipe["beta2"]), fused=True),
    ]
    progress: dict[str, Any] = {"stage": recipe["stages"][0]["name"], "step": 0, "tokens": 0, "seconds": 0.0}
    if (args.workdir / "checkpoint.pt").exists():
        state = torch.load(args.workdir / "checkpoint.pt", weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        progress = state["progress"]
    elif args.weights is not None:
        if args.stage is None:
            raise ValueError("--weights needs --stage, the stage to start with")
        model.load_state_dict(load_file(args.weights / "model.safetensors"))
        progress["stage"] = args.stage
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, starting at {progress}", flush=True)

    encoder = Encoder(tokenizer, CHATS[recipe["tokenizer"]["chat"]], corpus)
    names = [stage["name"] for stage in recipe["stages"]]
    for stage in recipe["stages"][names.index(progress["stage"]) :]:
        if progress["stage"] != stage["name"]:
            progress.update(stage=stage["name"], step=0)
        run_stage(model, optimizers, encoder, recipe, stage, progress, args.workdir)
        progress["step"] = stage["steps"]
        save(model, optimizers, progress, args.workdir)
        torch.save(model.state_dict(), args.workdir / f"after-{stage['name']}.pt")
        if stage["name"] == args.until:
            break
    if args.output is not None:
        export(model.state_dict(), config, tokenizer, args.output)


if __name__ == "__main__":
    main()
