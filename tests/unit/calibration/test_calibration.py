"""Calibration: what a model loses with a head, the heads of the tiny model that look things up, wrong input."""

from __future__ import annotations

import os
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import cast

import pytest
import torch

from evals.uneven import HeadRows, HeadRule
from snapstream.assets import TINY_MODEL
from snapstream.calibration import CONTINUATION, Ablation, calibrate, damage, generated, shares_of, windows
from snapstream.cli.app import main
from snapstream.config import KVBudget
from snapstream.config.kv import read_profile
from snapstream.exec.runner import ModelRunner
from snapstream.llm import LLM
from snapstream.models.config_json import fingerprint
from tests.parity.checkpoints import make_model, save


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(TINY_MODEL, budget="full", max_rows=1, max_model_len=400, executor="eager", progress=False) as llm:
        yield llm


@torch.inference_mode()
def test_a_copy_without_a_head_is_a_row_whose_head_keeps_no_more(llm: LLM) -> None:
    """Against rows of loops: sinks and a ring in one head, everything in the others."""
    runner, prompt = cast(ModelRunner, llm.engine.runner), [7 + 11 * i % 900 for i in range(200)]
    whole, bare = KVBudget.full(300), KVBudget(num_sink=4, num_topk=0, num_recent=32)
    every = [(layer, head) for layer in range(4) for head in range(2)]
    rules = [
        HeadRule(name="", budgets=tuple(tuple(bare if (layer, head) == one else whole for head in range(2))
                                        for layer in range(4)))
        for one in (None, *every)
    ]  # fmt: skip
    # A ring loses its oldest token with every new one: the first new token sees as many of the prompt as it has left.
    rows, copies = HeadRows(runner, prompt, rules), Ablation(runner, prompt, 4, 31)
    expected = rows.feed(torch.full((9,), 5)).log_softmax(-1)
    torch.testing.assert_close(copies.feed(5), expected, atol=1e-5, rtol=1e-5)
    assert (expected[1:] - expected[0]).abs().amax(-1).min() > 1e-4, "every head does something"


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "num_layers"),
    [
        ("gpt-oss-full", 3),
        ("gpt-oss", 2),
        ("gemma2", 2),
        ("lfm2", 2),
        ("lfm3", 1),
        ("granite-hybrid", 2),
        ("llama4", 1),
    ],
)
def test_a_whole_copy_has_the_models_probabilities(name: str, num_layers: int, tmp_path: Path) -> None:
    """Of models with learned attention sinks, with a cap of scores, with windows and with recurrent states."""
    model, prompt = make_model(name), [7 + 11 * i % 180 for i in range(60)]
    with LLM(save(model, tmp_path), budget="full", max_model_len=80, executor="eager", progress=False) as llm:
        copies = Ablation(cast(ModelRunner, llm.engine.runner), prompt, 4, 16)
        found = [copies.feed(token) for token in (5, 6, 7)]
        assert copies.num_copies == 1 + num_layers * llm.model_config.num_kv_heads
    expected = model(torch.tensor([[*prompt, 5, 6, 7]])).logits[0, -3:].log_softmax(-1)
    torch.testing.assert_close(torch.stack(found)[:, 0], expected, atol=1e-4, rtol=0)
    assert (found[0][1:] - found[0][0]).abs().amax(-1).min() > 1e-4, "every head does something"


def test_losses_are_of_the_tokens_after_the_first(llm: LLM) -> None:
    runner = cast(ModelRunner, llm.engine.runner)
    losses, count = damage(runner, list(range(10, 200)), [11, 12, 13, 14], 4, 16)
    assert losses.shape == (4, 2) and count == 3 and losses.min() >= -1e-6
    nothing, _ = damage(runner, list(range(10, 40)), [11, 12], 4, 40)  # all of it is recent
    assert nothing.abs().max() < 1e-6
    with pytest.raises(ValueError, match="an answer of 1 tokens"):
        damage(runner, [5, 6], [7], 4, 16)


def test_heads_that_look_things_up_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "heads.json"
    assert main(["calibrate", str(TINY_MODEL), "-o", str(path), "--prompt-len", "512", "--texts", "5"]) == 0
    profile = read_profile(path)
    flat = [share for layer in profile.shares for share in layer]
    assert (
        profile.model == fingerprint(TINY_MODEL)
        and sum(sorted(flat)[-2:]) > 0.5
        and "of 8 kv heads" in capsys.readouterr().out
    )
    assert "5 generated documents of 512 tokens" in profile.made_by
    with LLM(TINY_MODEL, heads=str(path), budget=128, max_model_len=600, executor="eager", progress=False) as llm:
        assert llm.config.heads is not None and llm.config.heads.row_slots == 8 * 128


def test_a_text_of_ones_own(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The house stands on a hill. " * 400)
    profile = calibrate(TINY_MODEL, text=text.read_text(), prompt_len=256, num_texts=2, progress=False)
    assert "windows of a text" in profile.made_by and len(profile.shares) == 4
    with pytest.raises(ValueError, match=r"the text has \d+ tokens; a window and what follows it take 320"):
        calibrate(TINY_MODEL, text="short", prompt_len=256, num_texts=2, progress=False)


def test_windows_are_apart_and_documents_fit(llm: LLM) -> None:
    assert llm.tokenizer is not None
    found = list(windows(llm.tokenizer, " ".join(map(str, range(3000))), 256, 50))
    assert 2 <= len(found) < 50
    assert all(len(prompt) == 256 and len(after) == CONTINUATION for prompt, after in found)
    for prompt, answer in generated(llm.tokenizer, 512, 5):
        assert len(prompt) <= 512 and len(answer) >= 2


def test_documents_make_room_for_a_long_chat_template(llm: LLM) -> None:
    tokenizer = deepcopy(llm.tokenizer)
    assert tokenizer is not None
    tokenizer.chat_template = "You answer. " * 30 + "{{ messages[0]['content'] }}"
    (prompt, answer), *_ = generated(tokenizer, 600, 5)
    assert 300 < len(prompt) <= 600 and len(answer) >= 2
    with pytest.raises(ValueError, match=r"prompt_len is 400; the chat template and a question take up to \d+ of"):
        next(generated(tokenizer, 400, 5))


def test_wrong_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="prompt_len is 100; it must be a whole number >= 256"):
        calibrate(TINY_MODEL, prompt_len=100)
    with pytest.raises(ValueError, match="num_texts is 2; it must be a whole number >= 5"):
        calibrate(TINY_MODEL, num_texts=2)
    with pytest.raises(ValueError, match="not finite"):
        shares_of(torch.tensor([[float("nan"), 1.0]]))
    for output in (tmp_path, tmp_path / "no" / "x.json"):
        assert main(["calibrate", str(TINY_MODEL), "-o", str(output)]) == 2
        assert "must be a file in a folder that exists" in capsys.readouterr().err
    assert main(["calibrate", str(tmp_path), "-o", str(tmp_path / "x.json")]) == 2
    assert "error:" in capsys.readouterr().err and not (tmp_path / "x.json").exists()


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        calibrate(save(make_model("qwen3"), tmp_path / "bare"), prompt_len=300, progress=False)


def test_a_fingerprint_survives_a_copy_and_no_change(tmp_path: Path) -> None:
    first = save(make_model("qwen3"), tmp_path / "a")
    again = save(make_model("qwen3"), tmp_path / "b")
    assert fingerprint(first) == fingerprint(again)
    weights = next(again.glob("*.safetensors"))
    before = fingerprint(again, with_mtime=True)
    os.utime(weights, ns=(1, 1))
    assert fingerprint(again, with_mtime=True) != before and fingerprint(first) == fingerprint(again)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert fingerprint(first) != fingerprint(again)
