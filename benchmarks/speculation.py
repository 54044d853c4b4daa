"""Speculative decoding beside plain decode: prompt lookup in text that repeats and in text that does not, draft models.

Weights are random, of the real shape, and answers are sampled. ``edit`` is given its own answer as a predicted output,
with one token in twenty changed, as when a file is written again with small edits; ``fresh`` has nothing to repeat.
Both must be the tokens of plain decode. Engines are alive together and take turns, so that a drifting machine favors
none; those over several ranks, of which a process can have one, start anew for each turn. ``speedup`` is the median
over turns of tokens/s over those of plain decode.

With ``--draft-model`` the target has layers of which only the first two change anything, at full cost: those two alone
are a draft model that is nearly always right, and two other random layers one that is rarely right. Answers are greedy,
and prompt lookup is off.

With ``--schema`` answers are JSON under a schema, sampled: ``long`` has objects whose names a grammar forces, ``free``
mostly strings that may be anything.

With ``--prediction`` the model is a Qwen3.5 of 4B whose layers cost the usual time and change nothing, so that its
prediction layer (MTP) is always right; then drafted tokens are replaced, so that each is right with a probability.

    python -m benchmarks.speculation --save
    python -m benchmarks.speculation --schema --rows 1 8 --save
    python -m benchmarks.speculation --draft-model --prompt-len 256 --max-tokens 384 --save
    python -m benchmarks.speculation --prediction --rows 1 --weights int8 int4 --prompt-len 256 --save    # 9 GB of disk
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

from benchmarks.machine import ceilings, report
from benchmarks.shapes import llama_folder, random_prompt
from snapstream.assets import TINY_MODEL
from snapstream.config.engine import SPECULATIVE_TOKENS
from snapstream.exec.draft_model import Wanted
from snapstream.exec.prediction import PredictionDrafter
from snapstream.exec.speculation import History
from snapstream.llm import LLM
from snapstream.models.tokenizer import load_tokenizer
from snapstream.types import Grammar, RequestOutput, SamplingParams

ONE_IN = 20  # tokens of a prediction that are changed


def tokens_per_s(outputs: list[RequestOutput]) -> float:
    """Of all rows together, after the first token."""
    slowest = max(output.timings.decode_ms for output in outputs)
    return 1e3 * sum(len(output.token_ids) - 1 for output in outputs) / slowest


def edited(token_ids: list[int], vocab: int) -> tuple[int, ...]:
    random = Random(len(token_ids))
    return tuple(random.randrange(vocab) if random.randrange(ONE_IN) == 0 else token for token in token_ids)


def measure(width: str, rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of one width and batch."""
    with ExitStack() as stack:
        folder = stack.enter_context(llama_folder())
        kept: dict[int, LLM] = {}

        def engine(count: int) -> AbstractContextManager[LLM]:
            if count in kept:
                return nullcontext(kept[count])
            llm = LLM(folder, budget="full", max_rows=rows, max_model_len=args.prompt_len + args.max_tokens,
                      weights=width, num_speculative_tokens=count, tensor_parallel=args.ranks,
                      progress=False)  # fmt: skip
            if args.ranks > 1:
                return llm
            kept[count] = stack.enter_context(llm)
            return nullcontext(llm)

        with engine(0) as plain:
            vocab = plain.model_config.vocab_size
            prompts = [random_prompt(args.prompt_len, vocab, seed=row) for row in range(rows)]
            fresh = [SamplingParams(max_tokens=args.max_tokens, seed=row, ignore_eos=True) for row in range(rows)]
            want = [output.token_ids for output in plain.generate(prompts, fresh)]
        edit = [replace(own, prediction=edited(ids, vocab)) for own, ids in zip(fresh, want, strict=True)]
        speeds: dict[str, list[float]] = {"plain": [], "fresh": [], "edit": []}
        drafted = accepted = 0
        for _ in range(args.repeats):
            for count, arms in ((0, {"plain": fresh}), (SPECULATIVE_TOKENS, {"fresh": fresh, "edit": edit})):
                with engine(count) as llm:
                    for arm, params in arms.items():
                        outputs = llm.generate(prompts, params)
                        assert [output.token_ids for output in outputs] == want, f"{arm} changed an answer"
                        speeds[arm].append(tokens_per_s(outputs))
                        if arm == "edit":
                            drafted += sum(output.timings.drafted_tokens for output in outputs)
                            accepted += sum(output.timings.accepted_tokens for output in outputs)
    figure: dict[str, Any] = {"weights": width, "rows": rows, "plain_tokens_per_s": median(speeds["plain"])}
    for arm in ("fresh", "edit"):
        figure[f"{arm}_speedup"] = median(own / base for own, base in zip(speeds[arm], speeds["plain"], strict=True))
    return figure | {"edit_accepted_share": accepted / drafted if drafted else 0.0}


VOCAB = 8192  # of --draft-model: so small that the layers are most of the weights, as in large models


@contextmanager
def draft_folders() -> Iterator[tuple[Path, Path, Path]]:
    """Checkpoints of a target, a draft model that is right, and one that is wrong."""
    from transformers import LlamaForCausalLM

    with ExitStack() as stack:
        folder = stack.enter_context(llama_folder(vocab_size=VOCAB))
        wrong = stack.enter_context(llama_folder(vocab_size=VOCAB, num_hidden_layers=2, rope_theta=1000.0))
        right = Path(stack.enter_context(TemporaryDirectory()))
        model = LlamaForCausalLM.from_pretrained(folder, trust_remote_code=False)
        with torch.no_grad():
            for layer in model.model.layers[2:]:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
        model.save_pretrained(folder)
        model.model.layers = model.model.layers[:2]
        model.config.num_hidden_layers = 2
        model.save_pretrained(right)
        yield folder, right, wrong


def measure_draft_models(width: str, rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of one width and batch."""
    with ExitStack() as stack:
        folder, right, wrong = stack.enter_context(draft_folders())
        llms = {
            arm: stack.enter_context(
                LLM(folder, budget="full", max_rows=rows, max_model_len=args.prompt_len + args.max_tokens,
                    weights=width, speculative_model=draft, num_speculative_tokens=SPECULATIVE_TOKENS if draft else 0,
                    progress=False)
            )
            for arm, draft in (("plain", None), ("right", right), ("wrong", wrong))
        }  # fmt: skip
        prompts = [random_prompt(args.prompt_len, VOCAB, seed=row) for row in range(rows)]
        params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0, ignore_eos=True)
        # Greedy answers of random weights repeat themselves, and lookup would draft them.
        stack.enter_context(mock.patch.object(History, "draft", lambda history, most: []))
        want = [output.token_ids for output in llms["plain"].generate(prompts, params)]
        speeds: dict[str, list[float]] = {arm: [] for arm in llms}
        counts = {arm: [0, 0] for arm in llms}
        for _ in range(args.repeats):
            for arm, llm in llms.items():
                outputs = llm.generate(prompts, params)
                assert [output.token_ids for output in outputs] == want, f"{arm} changed an answer"
                speeds[arm].append(tokens_per_s(outputs))
                counts[arm][0] += sum(output.timings.drafted_tokens for output in outputs)
                counts[arm][1] += sum(output.timings.accepted_tokens for output in outputs)
    figure: dict[str, Any] = {"weights": width, "rows": rows, "plain_tokens_per_s": median(speeds["plain"])}
    for arm in ("right", "wrong"):
        figure[f"{arm}_speedup"] = median(own / base for own, base in zip(speeds[arm], speeds["plain"], strict=True))
        figure[f"{arm}_accepted_share"] = counts[arm][1] / counts[arm][0] if counts[arm][0] else 0.0
    return figure


# Qwen3.5-4B, but for the output embedding, which is the embedding there.
QWEN35_4B: dict[str, Any] = {
    "vocab_size": 248320, "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "max_position_embeddings": 32768, "tie_word_embeddings": False,
    "architectures": ["Qwen3_5ForCausalLM"], "dtype": "bfloat16",
}  # fmt: skip
RIGHT = (1.0, 0.8, 0.6)  # how probably a drafted token is right


@contextmanager
def prediction_folder() -> Iterator[Path]:
    """A checkpoint with a prediction layer that knows what the model says: the token follows from the last one."""
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    config, generator = Qwen3_5TextConfig(**QWEN35_4B), torch.Generator().manual_seed(1)
    with torch.device("meta"):
        shapes = {name: own.shape for name, own in AutoModelForCausalLM.from_config(config).state_dict().items()}
    attention = f"model.layers.{(config.layer_types or []).index('full_attention')}."
    shapes |= {name.replace(attention, "mtp.layers.0."): own for name, own in shapes.items() if attention in name}
    tensors = {}
    for name, shape in shapes.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")):
            tensors[name] = torch.zeros(shape, dtype=torch.bfloat16)
        elif len(shape) > 1:
            tensors[name] = torch.randn(shape, generator=generator).mul_(0.02).bfloat16()
        else:  # norms but that of gated DeltaNet add 1
            fill = 0.0 if "norm" in name and "linear_attn" not in name else 1.0
            tensors[name] = torch.full(shape, fill, dtype=torch.bfloat16)
    # What follows a token is sure, as it mostly is of real models: some other one.
    order = torch.randperm(len(tensors["lm_head.weight"]), generator=generator)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][order]
    size = config.hidden_size
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = torch.zeros(size, dtype=torch.bfloat16)
    tensors["mtp.fc.weight"] = torch.cat((torch.eye(size), torch.zeros(size, size)), 1).bfloat16()
    with TemporaryDirectory() as folder:
        save_file(tensors, Path(folder, "model.safetensors"), {"format": "pt"})
        tensors.clear()
        config.save_pretrained(folder)
        yield Path(folder)


def measure_predictions(width: str, rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of one width and batch."""
    random, right, vocab = Random(1), [1.0], QWEN35_4B["vocab_size"]
    draft = PredictionDrafter.draft

    def spoiled(own: PredictionDrafter, wanted: Sequence[Wanted]) -> list[list[int]]:
        return [
            [token if random.random() < right[0] else (token + 1) % vocab for token in found]
            for found in draft(own, wanted)
        ]

    with ExitStack() as stack:
        plain, own = (
            stack.enter_context(
                LLM(args.folder, budget="full", max_rows=rows, max_model_len=args.prompt_len + args.max_tokens,
                    weights=width, progress=False, **settings)
            )
            for settings in ({"num_speculative_tokens": 0}, {"speculative_model": "mtp"})
        )  # fmt: skip
        prompts = [random_prompt(args.prompt_len, vocab, seed=row) for row in range(rows)]
        params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0, ignore_eos=True)
        stack.enter_context(mock.patch.object(History, "draft", lambda history, most: []))
        stack.enter_context(mock.patch.object(PredictionDrafter, "draft", spoiled))
        want = [output.token_ids for output in plain.generate(prompts, params)]
        own.generate(prompts, params)
        figure: dict[str, Any] = {"weights": width, "rows": rows, "right": {}}
        speeds: list[float] = []
        for share in RIGHT:
            right[0], ratios, counts = share, [], [0, 0]
            for _ in range(args.repeats):
                speeds.append(tokens_per_s(plain.generate(prompts, params)))
                outputs = own.generate(prompts, params)
                assert [output.token_ids for output in outputs] == want, "a prediction layer changed an answer"
                ratios.append(tokens_per_s(outputs) / speeds[-1])
                counts[0] += sum(output.timings.drafted_tokens for output in outputs)
                counts[1] += sum(output.timings.accepted_tokens for output in outputs)
            accepted = counts[1] / counts[0] if counts[0] else 0.0
            figure["right"][str(share)] = {"speedup": median(ratios), "accepted_share": accepted}
    return figure | {"plain_tokens_per_s": median(speeds)}


def schema(names: list[str], count: int, value: dict[str, Any]) -> Grammar:
    """An array of ``count`` objects with these properties."""
    properties = {name: value for name in names}
    item = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    return Grammar.json_schema({"type": "array", "items": item, "minItems": count, "maxItems": count})


SCHEMAS = {
    "long": schema(
        ["customer_reference_number", "estimated_delivery_date", "shipping_address_line", "is_express_delivery"], 4,
        {"enum": ["pending", "confirmed", "unknown"]},
    ),
    "free": schema(["a", "b"], 5, {"type": "string", "maxLength": 40}),
}  # fmt: skip


def measure_schemas(width: str, rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of one width and batch."""
    figure: dict[str, Any] = {"weights": width, "rows": rows}
    with ExitStack() as stack:
        tokenizer = load_tokenizer(TINY_MODEL)
        folder = stack.enter_context(llama_folder(vocab_size=len(tokenizer)))
        tokenizer.save_pretrained(folder)
        plain, drafts = (
            stack.enter_context(
                LLM(folder, budget="full", max_rows=rows, max_model_len=args.prompt_len + 1024, weights=width,
                    num_speculative_tokens=count, progress=False)
            )
            for count in (0, SPECULATIVE_TOKENS)
        )  # fmt: skip
        prompts = [random_prompt(args.prompt_len, len(tokenizer), seed=row) for row in range(rows)]
        for name, grammar in SCHEMAS.items():
            params = [SamplingParams(max_tokens=1024, seed=row, grammar=grammar) for row in range(rows)]
            ratios, speeds, drafted, accepted = [], [], 0, 0
            for _ in range(args.repeats):
                want, got = plain.generate(prompts, params), drafts.generate(prompts, params)
                assert [own.token_ids for own in got] == [own.token_ids for own in want], f"{name}: another answer"
                speeds.append(tokens_per_s(want))
                ratios.append(tokens_per_s(got) / speeds[-1])
                drafted += sum(own.timings.drafted_tokens for own in got)
                accepted += sum(own.timings.accepted_tokens for own in got)
            figure |= {
                f"{name}_tokens": len(want[0].token_ids), f"{name}_plain_tokens_per_s": median(speeds),
                f"{name}_speedup": median(ratios), f"{name}_accepted_share": accepted / drafted,
            }  # fmt: skip
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--weights", nargs="+", default=["float32", "bfloat16", "int8", "int4"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1, help="of prompt lookup; engines of several start turn by turn")
    parser.add_argument("--draft-model", action="store_true", help="draft models instead of prompt lookup")
    parser.add_argument("--prediction", action="store_true", help="a model's own prediction layer")
    parser.add_argument("--schema", action="store_true", help="answers under a JSON schema")
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results")
    args = parser.parse_args()
    ceiling = ceilings()
    figures = []
    measured = measure_draft_models if args.draft_model else measure_schemas if args.schema else measure
    measured = measure_predictions if args.prediction else measured
    with prediction_folder() if args.prediction else nullcontext() as args.folder:
        for width in args.weights:
            for rows in args.rows:
                figures.append(measured(width, rows, args))
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in figures[-1].items()}, flush=True)
    name, model = "speculation", "random Llama of 100M"
    if args.draft_model:
        name, model = "draft_model", f"random Llama of 12 layers, vocabulary of {VOCAB:,}, draft model of 2 layers"
    if args.prediction:
        name, model = "prediction", "random Qwen3.5 of 4B with a prediction layer"
    if args.schema:
        name, model = "schema_drafts", "random Llama of 100M, tokenizer of the tiny model"
    report(name, ceiling, {"model": model, "arms": figures}, save=args.save)


if __name__ == "__main__":
    main()
