"""Real text of the machine: what is collected, how facts are planted in it, and what rows make of it."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from random import Random
from typing import cast

import pytest
import torch

from evals.chat import Chat
from evals.prose import losses, make_rules, perplexities, planted_items, retrieval, truncated, windows
from recipes.chat import CHATS
from recipes.corpus import Corpus, Piece, collect, provenance
from recipes.data import Encoder, make_sequence
from recipes.planted import FAMILIES, make_planted
from recipes.tokenizer import TokenizerConfig, build_tokenizer
from snapstream.assets import TINY_MODEL
from snapstream.assets.documents import Style
from snapstream.exec.runner import ModelRunner
from snapstream.llm import LLM
from snapstream.types import SamplingParams

RECIPE = Path(__file__).parents[3] / "recipes" / "prose" / "recipe.toml"


def piece(index: int) -> Piece:
    if index % 2:
        return Piece(package="a", kind="code", text=f"def f{index}(x):\n    return x + {index}\n\n\n" * 150)
    return Piece(package="b", kind="prose", text=f"Rain falls on hill {index} today.\nIt is quiet there.\n\n" * 150)


PIECES = [piece(index) for index in range(300)]


@pytest.fixture(scope="module")
def heldout() -> Corpus:
    return Corpus(PIECES, "heldout")


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(TINY_MODEL)


def test_splits_share_nothing_and_lose_nothing() -> None:
    train, held = Corpus(PIECES, "train"), Corpus(PIECES, "heldout")
    assert len(train.pieces) + len(held.pieces) == 300 and 2 <= len(held.pieces) <= 30
    assert not {own.text for own in train.pieces} & {own.text for own in held.pieces}
    with pytest.raises(ValueError, match="no pieces of the split 'heldout'"):
        Corpus(train.pieces, "heldout")


def test_files_become_pieces(tmp_path: Path) -> None:
    texts = {"a.py": "x = 1\n" * 200, "copy.py": "x = 1\n" * 200, "LICENSE": "You may. " * 100, "short.md": "no",
             "table.txt": "1 " * 300_000, "read.rst": "Words here.\n" * 100, "image.png": "x" * 900}  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.txt").write_bytes(b"\xff" * 900)
    found = list(collect(("own", path) for path in sorted(tmp_path.iterdir())))
    assert [(own.kind, own.text) for own in found] == [
        ("prose", texts["LICENSE"]), ("code", texts["a.py"]), ("prose", texts["read.rst"])
    ]  # fmt: skip
    record = {"package": "own", "files": 3, "characters": sum(len(own.text) for own in found)}
    assert record.items() <= provenance(found)[0].items()
    (about,) = provenance([Piece(package="torch", kind="code", text="x")])
    assert about["version"] and "BSD" in str(about["licence"])
    with (tmp_path / "pieces.jsonl").open("w") as file:
        for own in PIECES:
            file.write(json.dumps({"package": own.package, "kind": own.kind, "text": own.text}) + "\n")
    assert Corpus.load(tmp_path, "train").pieces == Corpus(PIECES, "train").pieces


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_stand_among_real_lines(heldout: Corpus, chat: Chat, family: str) -> None:
    for seed in range(3):
        document = make_planted(
            heldout, family=family, seed=str(seed), count_tokens=chat.count_tokens, target_tokens=900, num_facts=6
        )
        assert chat.count_tokens(document.text) <= 960
        real = {line.strip() for own in heldout.pieces for line in own.text.split("\n")}
        planted = [line for line in document.text.split("\n") if line.strip() not in real]
        for question in document.questions:
            for start, stop in question.spans:
                assert any(document.text[start:stop] in line for line in planted)
            assert all(any(answer in line for line in planted) for answer in question.answers)
        assert len(planted) < 30 < len(document.text.split("\n"))
    with pytest.raises(ValueError, match="family must be one of"):
        make_planted(heldout, family="json", seed="0", count_tokens=len, target_tokens=900)


def test_the_recipe_makes_sequences_of_every_task() -> None:
    values, corpus = tomllib.loads(RECIPE.read_text()), Corpus(PIECES, "train")
    settings = TokenizerConfig(**values["tokenizer"] | {"vocab_size": 4608, "corpus_chars": 20_000})
    with pytest.raises(ValueError, match="give --corpus"):
        build_tokenizer(settings)
    tokenizer = build_tokenizer(settings, corpus)
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer))), "every id has a row of the embedding"
    encoder = Encoder(tokenizer, CHATS[values["tokenizer"]["chat"]], corpus)
    for stage in values["stages"]:
        length = min(min(shape[0] for shape in stage["shapes"]), 512)
        for task in stage["tasks"]:
            style = Style(**stage.get("style", {}))
            ids, answers = make_sequence(encoder, Random(1), "test/1", length, task, style)
            assert 0 < len(ids) <= length and (task["family"] == "text" or answers or length == 512), (stage, task)


@pytest.mark.slow
def test_rows_over_real_text(heldout: Corpus, chat: Chat) -> None:
    """Small: every arm gives a number, and that of full attention is the engine's own."""
    with LLM(TINY_MODEL, budget="full", max_rows=1, max_model_len=700, executor="eager", progress=False) as llm:
        runner = cast(ModelRunner, llm.engine.runner)
        rules = make_rules(runner, 512, 9)
        assert {rule.name for rule in rules} >= {"full/1", "snapstream/2", "streaming/4", "diverse/8"}
        texts = list(windows(chat, heldout, "prose", 1, 521))
        found = perplexities(runner, texts, 512, rules)
        assert set(found) >= {"truncation/2", "snapstream/8"} and min(found.values()) > 1
        with torch.inference_mode():
            (nats,) = losses(runner, texts[0][:512], texts[0][512:], rules[:1])
        told = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0))[0].prompt_logprobs
        assert told is not None
        assert nats == pytest.approx(-sum(one.logprob for one in told[513:] if one is not None), rel=1e-4)
        assert found["full/1"] == pytest.approx(math.exp(nats / 8), rel=1e-4)
        items = planted_items(chat, heldout, "multi_number", 1, 512)
        assert len(items[0].prompt_ids) <= 560
        scores = retrieval(runner, chat, items, rules[:2], set(llm.model_config.eos_token_ids))
        assert set(scores) >= {"full/1", "truncation/4"} and all(0 <= score <= 100 for score in scores.values())
    assert truncated(list(range(100)), 40, 10) == [*range(15), *range(85, 100)]
    with pytest.raises(ValueError, match="no code of 5000 tokens"):
        list(windows(chat, Corpus([piece(1)], piece(1).split), "code", 1, 5000))
