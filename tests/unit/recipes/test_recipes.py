"""The recipes make what ships: tokenizers byte for byte, chats as templates render them, transformers' sums."""

from __future__ import annotations

import tomllib
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from recipes.build import build_config, build_model
from recipes.chat import CHATS
from recipes.data import Encoder, make_sequence
from recipes.documents import COMMON_QUESTIONS, FREQUENT_QUESTIONS, SEVERAL_QUESTIONS
from recipes.export import export
from recipes.latent_model import Experts, TinyLatentModel
from recipes.tokenizer import TokenizerConfig, build_tokenizer
from snapstream.assets import TINY_DRAFT_MODEL, TINY_MODEL
from snapstream.assets.documents import Style

RECIPES = Path(__file__).parents[3] / "recipes"
SHIPPED = {"tiny": TINY_MODEL, "tiny_draft": TINY_DRAFT_MODEL}


@pytest.fixture(scope="module", params=sorted(SHIPPED))
def recipe(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any], PreTrainedTokenizerFast]:
    values = tomllib.loads((RECIPES / request.param / "recipe.toml").read_text())
    return request.param, values, build_tokenizer(TokenizerConfig(**values["tokenizer"]))


def test_the_shipped_tokenizer_is_the_recipes(recipe: Any, tmp_path: Path) -> None:
    name, _, tokenizer = recipe
    tokenizer.save_pretrained(tmp_path, save_jinja_files=False)
    assert (tmp_path / "tokenizer.json").read_bytes() == (SHIPPED[name] / "tokenizer.json").read_bytes()


def test_training_chats_are_what_the_template_renders(recipe: Any) -> None:
    _, values, tokenizer = recipe
    chat = CHATS[values["tokenizer"]["chat"]]
    turns = [("system", "Be brief."), ("user", "A 4821907.\n\nWhat?"), ("assistant", "4821907"), ("user", "And?")]
    text = chat.begin + chat.system_turn(turns[0][1]) + chat.question_turn(turns[1][1])
    parts = [text, chat.answer_turn(turns[2][1]), chat.question_turn(turns[3][1])]
    trained = [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False)]
    messages = [{"role": role, "content": content} for role, content in turns]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert rendered == trained
    header = tokenizer.encode(chat.assistant, add_special_tokens=False)
    assert len(header) == 1 and rendered[-1] == header[0]  # the distance from a question to its answer


def test_text_round_trips_and_numbers_split_into_groups(recipe: Any) -> None:
    _, values, tokenizer = recipe
    text = "Grüße, 世界 🙂 \\ {} 4821907, amber falcon\n\tx"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    digits = values["tokenizer"]["number_digits"]
    assert len(tokenizer.encode(" 4821907", add_special_tokens=False)) == -(-7 // digits)


def test_the_drafts_tokenizer_knows_the_words_of_every_question() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_DRAFT_MODEL)
    for template in (*COMMON_QUESTIONS, *FREQUENT_QUESTIONS, *SEVERAL_QUESTIONS):
        words = [word.strip("?.") for word in template.split() if "{" not in word]
        assert all(len(tokenizer.encode(f" {word}", add_special_tokens=False)) == 1 for word in words)


def test_stages_make_sequences_with_answers(recipe: Any) -> None:
    """Every task of every stage fits its stage's lengths, most of the time at least."""
    _, values, tokenizer = recipe
    encoder = Encoder(tokenizer, CHATS[values["tokenizer"]["chat"]])
    for stage in values["stages"]:
        length = min(shape[0] for shape in stage["shapes"])
        for task in stage["tasks"]:
            style = Style(**stage.get("style", {}))
            made = [make_sequence(encoder, Random(i), f"test/{i}", length, task, style) for i in range(3)]
            assert all(len(ids) <= length for ids, _ in made), (stage["name"], task)
            assert any(answers for _, answers in made), (stage["name"], task)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "deepseek_v3", "lfm2"])
def test_the_exported_model_is_the_trained_one(architecture: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = {"deepseek_v3": "tiny_latent", "lfm2": "tiny_hybrid"}.get(architecture, "tiny")
    values = tomllib.loads((RECIPES / folder / "recipe.toml").read_text())
    tokenizer = build_tokenizer(TokenizerConfig(**values["tokenizer"]))
    config = build_config({**values["model"], "architecture": architecture}, len(tokenizer))
    model = build_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)  # so that gains are no ones
    export(model.state_dict(), config, tokenizer, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert loaded.config.model_type == architecture
    ids = torch.randint(len(tokenizer), (2, 40))  # [B, T]
    with torch.no_grad():
        torch.testing.assert_close(model.logits(model.hidden(ids)), loaded(ids).logits, rtol=2e-4, atol=2e-4)


def test_corrections_move_against_the_loads() -> None:
    """An expert that many tokens chose is chosen less; the correction is no weight, and gradients do not reach it."""
    torch.manual_seed(0)
    values = tomllib.loads((RECIPES / "tiny_latent" / "recipe.toml").read_text())
    model = build_model(build_config({**values["model"], "num_layers": 2}, 100))
    assert isinstance(model, TinyLatentModel)
    (experts,) = (layer.mlp for layer in model.model.layers if isinstance(layer.mlp, Experts))  # the first is dense
    model.hidden(torch.randint(100, (2, 40)))
    assert int(experts.loads.sum()) == 2 * 80  # of two experts per token
    model.balance()
    moved = experts.gate.e_score_correction_bias
    assert torch.equal(moved, 0.001 * (20.0 - experts.loads).sign())
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in model.state_dict()
    assert not moved.requires_grad and moved.unique().numel() > 1
