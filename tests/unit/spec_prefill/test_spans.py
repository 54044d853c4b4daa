"""Chunks, boundaries and joined text on any Unicode: verbatim pieces, in order, no character split."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapstream.spec_prefill.protection import (
    Cutter,
    chunk_spans,
    code_delimiter,
    grow,
    is_whole,
    looks_like_code,
    merged,
)
from snapstream.spec_prefill.settings import ChunkSettings
from tests.unit.spec_prefill.tokenizers import byte_tokenizer, word_tokenizer

# Characters that a careless cut would spoil, among ordinary ones.
PIECES = (
    "e\u0301",
    "👍🏽",
    "👩\u200d👩\u200d👧",
    "🇩🇪",
    "🇫🇷",
    "\r\n",
    "\n",
    " ",
    "한국",
    "中文",
    "नि",
    "word",
    "x",
    "1.5",
    "\t",
    "़",
    "ﷺ",
    "\u200b",
)
texts = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=60).map("".join),
    st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=120),
)
TOKENIZERS = {"bytes": byte_tokenizer(), "words": word_tokenizer()}


def starts_of(name: str, text: str) -> list[int]:
    encoded = TOKENIZERS[name](text, add_special_tokens=False, return_offsets_mapping=True)
    found, high = [], 0
    for start, _ in encoded["offset_mapping"]:
        high = max(high, start)
        found.append(high)
    return found


@settings(max_examples=150, deadline=None)
@given(text=texts, name=st.sampled_from(list(TOKENIZERS)), size=st.integers(1, 9))
def test_chunks_tile_the_text(text: str, name: str, size: int) -> None:
    starts = starts_of(name, text)
    spans = chunk_spans(starts, len(text), size)
    assert len(spans) == -(-len(starts) // size)
    assert "".join(text[a:b] for a, b in spans) == (text if starts else "")


@settings(max_examples=250, deadline=None)
@given(
    text=texts,
    name=st.sampled_from(list(TOKENIZERS)),
    size=st.integers(1, 6),
    mode=st.sampled_from(["text", "code", "auto"]),
    snap=st.sampled_from([None, "none", "word", "line"]),
    data=st.data(),
)
def test_kept_text_is_verbatim_and_in_order(text, name, size, mode, snap, data) -> None:  # type: ignore[no-untyped-def]
    cutter = Cutter(ChunkSettings(mode=mode, snap=snap, delimiter="\x00cut\x00"), text)
    chunks = chunk_spans(starts_of(name, text), len(text), size)
    kept = data.draw(st.lists(st.sampled_from(chunks), unique=True)) if chunks else []
    cuts = st.tuples(st.integers(0, len(text)), st.integers(0, len(text))).map(lambda p: (min(p), max(p)))
    forced = data.draw(st.lists(cuts, max_size=2))
    spans = cutter.spans(text, kept, forced)
    assert all(a < b for a, b in spans)
    assert all(b < c for (_, b), (c, _) in zip(spans, spans[1:], strict=False)), "neighbours were not merged"
    covered = {i for a, b in spans for i in range(a, b)}
    assert all(i in covered for a, b in [*kept, *forced] for i in range(a, b)), "a kept character is missing"
    boundaries = {i for span in spans for i in span} - {i for span in forced for i in span}
    assert all(is_whole(text, i) for i in boundaries)
    joined = cutter.join([text[a:b] for a, b in spans])
    if "\x00" not in text:
        assert joined.split("\x00cut\x00") == ([text[a:b] for a, b in spans] or [""])


def test_characters_that_no_token_covers_belong_to_a_chunk() -> None:
    assert chunk_spans([2, 4, 4, 7], 9, 2) == [(0, 4), (4, 9)]
    assert chunk_spans([], 9, 2) == []


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("ae\u0301b", [0, 1, 3, 4]),
        ("a\r\nb", [0, 1, 3, 4]),
        ("👍🏽!", [0, 2, 3]),
        ("👩\u200d👧x", [0, 3, 4]),
        ("🇩🇪🇫🇷", [0, 2, 4]),
        ("x🇩🇪🇫", [0, 1, 3, 4]),
        ("각a", [0, 3, 4]),  # three jamo
    ],
)
def test_whole_characters(text: str, whole: list[int]) -> None:
    text = unicodedata.normalize("NFD", text)
    assert [i for i in range(len(text) + 1) if is_whole(text, i)] == whole


@pytest.mark.parametrize(
    ("snap", "expected"),
    [
        ("none", "cond sen"),
        ("word", "Second sentence"),
        ("line", "First one. Second sentence here. Third.\n"),
    ],
)
def test_borders(snap: str, expected: str) -> None:
    text = "Title\nFirst one. Second sentence here. Third.\nNext line."
    start = text.index("cond sen")
    a, b = grow(text, start, start + len("cond sen"), snap)  # type: ignore[arg-type]
    assert text[a:b] == expected


def test_far_borders_give_way_to_finer_ones() -> None:
    text = "one two " + "x" * 30 + " three " + "word " * 400 + "end"
    middle = text.index("word word", 900) + 2
    assert text[slice(*grow(text, middle, middle + 5, "line"))] == "word word"
    blob = "x" * 500
    assert grow(blob, 200, 210, "word") == (200, 210)


def test_code_grows_to_the_head_of_its_definition() -> None:
    text = (
        "import os\n\n\ndef first(a):\n    return a\n\n\n@cached\n@other\ndef second(b):\n    total = 0\n"
        "    for x in b:\n        total += x\n    return total\n\n\nvalue = second([1])\n"
    )
    start = text.index("total += x")
    a, b = grow(text, start, start + 5, "line", is_code=True)
    assert text[a:b].startswith("@cached\n@other\ndef second") and text[a:b].endswith("total += x\n")
    start = text.index("value")
    assert text[slice(*grow(text, start, start + 5, "line", is_code=True))] == "value = second([1])\n"


def test_neighbours_are_merged_and_others_kept_apart() -> None:
    assert merged([(5, 8), (0, 3), (3, 5), (10, 10), (9, 12)]) == [(0, 8), (9, 12)]
    cutter = Cutter(ChunkSettings(snap="none"), "x")
    assert cutter.join(["ab\n", "cd", "ef"]) == "ab\n[...]\ncd\n[...]\nef"


PYTHON = "import os\n\ndef f(x):\n    y = os.path.join(x, 'a')\n    return y\n\nclass A:\n    z = 3\n"
C = '#include <stdio.h>\nint main(void) {\n    int x = 3;\n    printf("%d", x);\n    return 0;\n}\n'
PROSE = "It rained for days. Nobody went out.\nThe mill was closed, and the road was empty.\nWe waited.\n"


def test_code_is_recognised() -> None:
    assert looks_like_code(PYTHON) and looks_like_code(C) and not looks_like_code(PROSE)
    assert code_delimiter(PYTHON) == "\n# omitted\n" and code_delimiter(C) == "\n// omitted\n"
    assert Cutter(ChunkSettings(mode="auto"), PYTHON).chunk_len == 128
    assert Cutter(ChunkSettings(mode="auto"), PROSE).chunk_len == 32
