"""``return_kept`` over HTTP, on the shipped model: bits and positions tell the same row."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.front_client import frames
from tests.server.page.tiny_server import TinyServer, tiny_server
from tests.waiting import HANG_S

PROMPT = [3 + (7 * i + i * i % 13) % 250 for i in range(203)]


@pytest.fixture(scope="module")
def server() -> Iterator[TinyServer]:
    with tiny_server(max_model_len=1024) as running:
        yield running


def ask(server: TinyServer, kept: Any, *, budget: int = 64, stream: bool = False) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "ignore_eos": True, "stream": stream}
    body["kv_cache"] = {"budget": budget} if kept is None else {"budget": budget, "return_kept": kept}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=HANG_S)


def compression(answer: dict[str, Any]) -> dict[str, Any]:
    return dict(answer["snapstream"]["prompts"][0]["compression"])


def test_bits_and_positions_tell_the_same(server: TinyServer) -> None:
    answer = ask(server, "bitmap").json()
    cache, told = answer["snapstream"]["kv_cache"], compression(answer)
    assert "kept_positions" not in told and told["kept_tokens"] == 64
    bitmap = told["kept_bitmap"]
    assert {name: bitmap[name] for name in ("num_layers", "num_kv_heads", "num_tokens")} == {
        "num_layers": 4, "num_kv_heads": 2, "num_tokens": 203,
    }  # fmt: skip
    bits, width = b64decode(bitmap["bits"]), (203 + 7) // 8
    assert len(bits) == 8 * width
    positions = compression(ask(server, True).json())["kept_positions"]
    ends = [*range(cache["num_sink"]), *range(203 - cache["num_recent"], 203)]
    for index, head in enumerate(head for layer in positions for head in layer):
        part = bits[index * width : (index + 1) * width]
        assert [t for t in range(203) if part[t // 8] >> (t % 8) & 1] == sorted([*ends, *head])


def test_a_stream_tells_it_once_at_the_end(server: TinyServer) -> None:
    chunks = frames(ask(server, "bitmap", stream=True).text)
    assert ["snapstream" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert compression(chunks[-1])["kept_bitmap"] == compression(ask(server, "bitmap").json())["kept_bitmap"]


@pytest.mark.parametrize(("kept", "budget"), [(None, 64), (False, 64), ("bitmap", 256), (True, 256)])
def test_it_is_there_only_if_asked_for_and_something_was_evicted(kept: Any, budget: int, server: TinyServer) -> None:
    assert not {"kept_bitmap", "kept_positions"} & compression(ask(server, kept, budget=budget).json()).keys()
