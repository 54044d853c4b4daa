"""Rows of engines of several ranks travel whole: the pieces over two ranks, and engines of unlike numbers of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from snapstream.config import KVDType, SplitAttention
from snapstream.request import Request, SamplingParams
from tests.distributed.pool import Pool
from tests.distributed.travelling import Carried, carried
from tests.llm.conftest import write_checkpoint
from tests.parity.checkpoints import make_model, save
from tests.transfer.pair import joined
from tests.transfer.test_rows_between_engines import PARAMS, SETTINGS, TEXTS, check, requests_of

RANKS: dict[str, Any] = {"tensor_parallel": 2}


def short(params: dict[str, SamplingParams]) -> list[Request]:
    """Each with a prompt below the budget and one above; a step of several ranks is many waits for each other."""
    return requests_of({name: replace(own, max_tokens=8) for name, own in params.items()}, (20, 70))


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("letters"))


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("deepseek-v3"), tmp_path_factory.mktemp("latents"))


@pytest.mark.parametrize(
    ("name", "attention", "kv_dtype"),
    [
        ("letters", "tp", "auto"), ("letters", "tp", "int8"), ("letters", "tp", "fp8"),
        ("latents", "tp", "auto"), ("latents", "dp", "auto"), ("latents", "dp", "fp8"),
    ],
)  # fmt: skip
def test_a_row_that_ranks_gather_is_that_of_one_device(
    two: Pool, name: str, attention: SplitAttention, kv_dtype: KVDType, request: pytest.FixtureRequest
) -> None:
    """Its bytes come back bit for bit from other rows of another rank; heads of several ranks stand in order."""
    folder = request.getfixturevalue(name)
    with torch.inference_mode():
        wanted = carried(None, Carried(folder, "tp", kv_dtype))
    first, second = two.run(carried, Carried(folder, attention, kv_dtype))
    assert first.sent == second.sent, "every rank has the whole row"
    for own in (wanted, first, second):
        assert own.again == own.sent
        assert tuple(map(len, own.sent)) == wanted.part_bytes
    if kv_dtype == "auto":  # narrow numbers may round to a neighbour
        for ours, theirs in zip(wanted.sent, first.sent, strict=True):
            torch.testing.assert_close(_numbers(theirs), _numbers(ours), atol=1e-4, rtol=1e-4)


def _numbers(part: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(part), dtype=torch.float32)


def test_an_engine_of_two_ranks_reads_for_one_device(letters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPSTREAM_CHECK_RANKS", "1")
    with joined(letters, reading=RANKS, **SETTINGS) as pair:
        wanted = ("seeded, three samples", "logprobs", "kept bitmap")
        check(pair, short({**{name: PARAMS[name] for name in wanted}, "grammar": TEXTS["grammar"]}))


def test_one_device_reads_for_ranks_that_have_whole_rows(latents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one request lie on both ranks."""
    monkeypatch.setenv("SNAPSTREAM_CHECK_RANKS", "1")
    with joined(latents, answering={**RANKS, "attention": "dp"}, **SETTINGS) as pair:
        check(pair, short({name: PARAMS[name] for name in ("greedy", "seeded, three samples")}))
