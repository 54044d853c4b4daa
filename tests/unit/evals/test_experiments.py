"""The oracle of one selection per head: the same model over keys and values per head."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from evals import prose, store
from evals.by_head import by_head_runner
from evals.chat import Chat
from evals.divergence import FORMATS, diverge, make_rules
from evals.lighteval_suites import write_local_task
from evals.prose import perplexity_table, retrieval_table
from evals.reconstruction import NUM_BEFORE, Repeated, Repeating, requests_to_repeat
from evals.rounded import WIDTHS, Width
from evals.tasks import Item
from evals.uneven import HeadRows
from snapstream.assets import TINY_LATENT_MODEL, TINY_MODEL
from snapstream.config import DEFAULT_SINK, EngineConfig, EngineOptions, KVBudget
from snapstream.exec.runner import ModelRunner
from snapstream.kernels.interface import bind
from snapstream.llm import LLM
from snapstream.models.prefill import LayerPass, PassTokens
from snapstream.models.registry import FAMILIES, read_model_config
from snapstream.plan.fit import weight_formats
from snapstream.startup.build import MakeRunner, build_runner
from snapstream.types import SamplingParams
from tests.parity.checkpoints import make_model, save

GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, return_kept=True)
PROMPTS = [[5 + 7 * i % 190 for i in range(70)], [3 + 11 * i % 170 for i in range(33)]]
MAKE_RUNNERS: list[MakeRunner] = [build_runner, by_head_runner]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before = set(FAMILIES.names)
    yield save(make_model("deepseek-v3"), tmp_path_factory.mktemp("deepseek"))
    for name in set(FAMILIES.names) - before:  # pages of the documentation list them all
        FAMILIES.remove(name)


def answers(folder: Path, budget: KVBudget, make_runner: MakeRunner) -> list[tuple[list[int], list[list[list[int]]]]]:
    """Tokens of every prompt, and the positions that each layer's heads kept."""
    with LLM(
        folder, budget=budget, max_model_len=96, executor="eager", chunk_len=16, progress=False, make_runner=make_runner
    ) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    found: list[tuple[list[int], list[list[list[int]]]]] = []
    for output in outputs:
        kept = output.compression.kept_positions if output.compression is not None else None
        found.append((output.token_ids, kept or []))
    return found


def test_with_room_for_every_token_it_is_the_same_model(folder: Path) -> None:
    latents, by_head = (answers(folder, KVBudget.full(96), make) for make in MAKE_RUNNERS)
    assert [tokens for tokens, _ in latents] == [tokens for tokens, _ in by_head]


def test_heads_of_a_layer_keep_tokens_of_their_own(folder: Path) -> None:
    budget = KVBudget(num_sink=2, num_topk=8, num_recent=34)
    latents, by_head = (answers(folder, budget, make)[0][1] for make in MAKE_RUNNERS)
    assert all(len(layer) == 1 for layer in latents)
    assert any(len({tuple(head) for head in layer}) > 1 for layer in by_head)


def test_it_needs_latents() -> None:
    with pytest.raises(ValueError, match="only models of latents have one selection per layer"):
        LLM(TINY_MODEL, executor="eager", progress=False, make_runner=by_head_runner)


# A stored cell says of every model how its engine rounds: a width whose name does not fit is refused.

NEVER = ("auto", "bfloat16", "int8", "int4", "int4-everywhere")  # rounds decode, in any model


def config_of(folder: Path, width: Width) -> EngineConfig:
    """What an engine of such a width is decided to be, on a processor that multiplies bf16."""
    options = EngineOptions(weights=width.weights, activations=width.activations, dtype="float32", device="cpu")
    formats = weight_formats(read_model_config(folder), options, device="cpu")
    return EngineConfig(
        budget=KVBudget.full(64), max_model_len=64, weights=replace(formats, prefill_inputs=width.prefill_inputs)
    )


@pytest.mark.parametrize("folder", [TINY_MODEL, TINY_LATENT_MODEL])
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_decode_over_integers_rounds_by_itself(bits: str, folder: Path) -> None:
    fits = WIDTHS[f"{bits}-auto"]
    fits.check(config_of(folder, fits))
    assert fits.settings["activations"] == "int8" and fits.settings["prefill_inputs"] == "bfloat16"


def test_decode_over_bf16_rounds_in_dense_models_alone() -> None:
    rounds, other = WIDTHS["bfloat16-auto"], WIDTHS["bfloat16-prefill"]
    latents, dense = config_of(TINY_LATENT_MODEL, other), config_of(TINY_MODEL, rounds)
    assert dense.weights is not None
    dense = replace(dense, weights=dense.weights.rounding_to_bf16())
    other.check(latents)
    rounds.check(dense)
    assert "activations" not in other.settings and other.settings["prefill_inputs"] == "bfloat16"
    with pytest.raises(ValueError, match="this width is for the former: 'bfloat16-auto'"):
        rounds.check(latents)
    with pytest.raises(ValueError, match="this width is for the latter: 'bfloat16-prefill'"):
        other.check(dense)


@pytest.mark.parametrize("name", NEVER)
@pytest.mark.parametrize("folder", [TINY_MODEL, TINY_LATENT_MODEL])
def test_widths_that_round_nothing_fit_every_model(name: str, folder: Path) -> None:
    WIDTHS[name].check(config_of(folder, WIDTHS[name]))


def test_every_width_has_cells_of_its_own() -> None:
    assert len({tuple(sorted(width.settings.items())) for width in WIDTHS.values()}) == len(WIDTHS)


# Scores of repeating, against attention weights that a plain pass over the whole text has.

CHUNK = 32
TEXT = "Let oak = 3921253. The mill kept a stone in a box under the stairs. Let plum = oak. Nobody came. " * 3


@torch.inference_mode()
def test_scores_are_the_largest_weights_of_who_repeats() -> None:
    chat = Chat(TINY_MODEL)
    ids = chat.chat_token_ids([{"role": "user", "content": TEXT}])
    chunks = list(requests_to_repeat(chat, ids, CHUNK))
    assert [token for _, chunk in chunks for token in chunk] == list(range(len(ids)))
    assert len(chunks) > 2
    for asked, chunk in chunks[1:]:
        before = ids[chunk.start - NUM_BEFORE : chunk.start]
        assert any(asked[i : i + NUM_BEFORE] == before for i in range(len(asked)))
    with LLM(TINY_MODEL, budget="full", max_rows=1, max_model_len=512, executor="eager", progress=False) as llm:
        runner = cast(ModelRunner, llm.engine.runner)
        got = Repeating(runner, ids).scores(chat, CHUNK)
        for asked, chunk in chunks:
            for layer, wanted in enumerate(_weights(runner, [*ids, *asked, *(ids[i] for i in chunk)], len(ids), chunk)):
                start = max(chunk.start, DEFAULT_SINK)
                torch.testing.assert_close(got[layer][:, start : chunk.stop], wanted, atol=1e-5, rtol=1e-4)


def _weights(runner: ModelRunner, text: list[int], num_prompt: int, chunk: range) -> list[torch.Tensor]:
    """By layer, one query at a time: the largest weight of the chunk's tokens ``[G, n]``."""
    found: list[torch.Tensor] = []
    places = [*range(DEFAULT_SINK), *range(max(chunk.start, DEFAULT_SINK), chunk.stop)]

    def layer_done(
        prompt: int, layer: int, queries: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        assert queries is not None
        group = queries.shape[1] // keys.shape[0]
        best = torch.zeros(keys.shape[0], len(places))
        for token in range(num_prompt, len(text)):
            seen = keys[:, places + list(range(num_prompt, token + 1))]
            for head, query in enumerate(queries[token - num_prompt]):
                logits = seen[head // group] @ query * query.shape[-1] ** -0.5
                weights = logits.softmax(-1)[: len(places)]
                best[head // group] = torch.maximum(best[head // group], weights)
        found.append(best[:, DEFAULT_SINK:])

    tokens = PassTokens(
        token_ids=torch.tensor(text),
        positions=torch.arange(len(text)),
        seq_lens=torch.full((len(text),), len(text)),
        prompt_lens=[len(text)],
        num_queries=[len(text) - num_prompt],
    )
    LayerPass(runner.decoder, runner.buffers, tokens, CHUNK, runner.prefill_attention, layer_done).run()
    return found


def test_snapkv_fills_its_share_first() -> None:
    torch.manual_seed(0)
    queries, keys, scores = torch.randn(4, 2, 8), torch.randn(1, 40, 8), torch.rand(1, 40)
    kernels, candidates = bind(torch.device("cpu")), range(4, 36)
    mine = Repeated(share=0.5, repeat_scores=(scores,))
    votes = mine.pool(mine.scores(queries, keys, candidates, kernels))[0]
    first = {4 + int(i) for i in votes.topk(4).indices}
    rest = [i for i in (4 + scores[0, 4:36].argsort(descending=True)).tolist() if i not in first][:4]
    chosen = mine.select(queries, keys, 0, candidates, 8, kernels)
    assert chosen[0].tolist() == sorted([*first, *rest])


# Tables of rows over real text: each arm at each part of the slots in its place, runs side by side.


def stored(continuation: int, result: dict[str, dict[str, float]]) -> store.Record:
    settings = {"prompt_len": 8192, "num_prompts": 3, "continuation": continuation}
    return {"settings": settings, "device": "a device", "torch": "2", "commit": "abc", "result": result}


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ")]


def test_tables_hold_every_cell_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prose, "FILE", tmp_path / "prose.jsonl")
    with pytest.raises(ValueError, match="not measured"):
        retrieval_table()
    cells = {"full/1": 90.0, "snapstream/2": 80.0, "snapstream/4": 60.0, "truncation/4": 10.0}
    more = cells | {"full/1": 70.0}
    text = {"full/1": 3.0, "snapstream/2": 4.0}
    store.append(prose.FILE, stored(1025, {"perplexity, code": text}))
    store.append(prose.FILE, stored(129, {"variable": cells, "paraphrase": more, "perplexity, prose": text}))
    assert lines(retrieval_table()) == [
        "| slots | cache | variable | paraphrase | mean |",
        "| all | full attention | 90.0 | 70.0 | 80.0 |",
        "| 1/2 | SnapStream | 80.0 | 80.0 | 80.0 |",
        "| 1/4 | SnapStream | 60.0 | 60.0 | 60.0 |",
        "| 1/4 | both ends of the prompt | 10.0 | 10.0 | 10.0 |",
    ]
    assert lines(perplexity_table()) == [
        "| slots | cache | prose, 128 tokens | code, 1,024 tokens |",
        "| all | full attention | 3.00 | 3.00 |",
        "| 1/2 | SnapStream | 4.00 | 4.00 |",
    ]


# What is written for lighteval, without lighteval; ``tests/clients/test_lighteval.py`` runs it through the harness.


@dataclass
class Config:
    """The fields of lighteval's task configuration that say where rows come from, and one that does not."""

    name: str = "lcb:codegeneration"
    hf_repo: str = "somewhere/else"
    hf_subset: str = "v4_v5"
    hf_revision: str | None = "main"
    hf_avail_splits: list[str] = field(default_factory=list)
    evaluation_splits: list[str] = field(default_factory=lambda: ["validation"])
    few_shots_split: str | None = None
    generation_size: int = 32768


def test_only_name_and_source_of_the_rows_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "rows of me.jsonl"
    data.write_text('{"question_content": "?"}\n')
    name = write_local_task("lcb:codegeneration", data, tmp_path / "it's here")
    assert name == "lcb_codegeneration_local"
    registry: Any = ModuleType("lighteval.tasks.registry")
    registry.Registry = SimpleNamespace(load_all_task_configs=lambda: {"lcb:codegeneration": Config()})
    for module in ("lighteval", "lighteval.tasks"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.setitem(sys.modules, "lighteval.tasks.registry", registry)
    scope: dict[str, Any] = {}
    exec((tmp_path / "it's here" / f"{name}.py").read_text(), scope)
    [config] = scope["TASKS_TABLE"]
    rows = Path(config.hf_repo)
    assert (rows / "test.jsonl").read_text() == data.read_text()
    assert config == Config(name, str(rows), "default", None, ["test"], ["test"])


def test_rows_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rows.txt"):
        write_local_task("aime24", tmp_path / "rows.txt", tmp_path)


def test_what_rows_lose_is_measured_against_full_attention() -> None:
    """Nothing with every token in fp32, and as by torch's own divergence with a rule at a time."""
    prompt = [5 + 7 * i % 190 for i in range(400)]
    with LLM(TINY_MODEL, budget="full", max_rows=1, max_model_len=500, executor="eager", progress=False) as llm:
        runner = cast(ModelRunner, llm.engine.runner)
        (full,) = llm.generate([prompt], SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True))
        rules = make_rules(runner, len(prompt), 32)
        names = [rule.name for rule in rules]
        nats, same, count = diverge(runner, Item(prompt_ids=prompt, references=[]), rules, 7, set())
        assert count == 6 and names[0] == "float32/1" and (nats[0], same[0]) == (0.0, 6.0)
        for name in ("int4 keys/1", "int8/4"):
            rule, want, equal = rules[names.index(name)], 0.0, 0
            form = FORMATS[name.partition("/")[0]]
            alone, exact = HeadRows(runner, prompt, [rule], roundings=[form]), HeadRows(runner, prompt, rules[:1])
            for token in full.token_ids[:-1]:
                own, other = (rows.feed(torch.tensor([token])).log_softmax(-1) for rows in (alone, exact))
                want += float(torch.nn.functional.kl_div(own, other, reduction="sum", log_target=True))
                equal += int(own.argmax() == other.argmax())
            assert want > 0 and float(nats[names.index(name)]) == pytest.approx(want, rel=1e-3, abs=1e-6)
            assert same[names.index(name)] == equal
