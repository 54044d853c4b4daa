"""What goes beside a row, as JSON and back; and JSON that no engine of ours writes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from snapstream.cache.selectors.snapkv import SnapKV
from snapstream.config import KVBudget, make_selector
from snapstream.request import (
    Compression,
    Grammar,
    KeptBitmap,
    Logprob,
    PrefixUse,
    Request,
    RowTicket,
    SamplingParams,
)
from snapstream.step import PrefillReport
from snapstream.transfer.asking import read_for, request_from_bytes, request_to_bytes
from snapstream.transfer.report import max_report_bytes, report_from_bytes, report_to_bytes
from snapstream.transfer.wire import WireError

TICKET = RowTicket(host="127.0.0.1", port=7, key="ab" * 16, uses_tls=True)
BUDGET = KVBudget(num_sink=1, num_topk=2, num_recent=3)
COMPRESSION = Compression(
    prompt_tokens=9, kept_tokens=6, evicted_tokens=3, row_bytes=10, full_bytes=20, compress_ms=1.25, ring_tokens=3
)
REPORT = PrefillReport(
    compression=replace(
        COMPRESSION,
        kept_positions=(((1, 2), (3, 4)),),
        kept_bitmap=KeptBitmap(num_layers=1, num_kv_heads=2, num_tokens=9, bits=b"\x01\xff"),
    ),
    prompt_logprobs=[None, Logprob(3, -0.1, ((3, -0.1), (4, float("-inf"))))],
    prefix=PrefixUse(cached_tokens=4, diverged_at=None),
)
REQUEST = Request(
    request_id="a",
    prompt_token_ids=(1, 2, 3),
    sampling=SamplingParams(n=3, temperature=0.7, stop=["x"], grammar=Grammar.regex("a"), return_kept=True, seed=1),
    positions=(0, 4, 9),
    prompt="the text",
    priority=-2,
    namespace="n/m",
)


def test_reports_come_back_as_they_went() -> None:
    assert report_from_bytes(report_to_bytes(REPORT)) == REPORT
    bare = PrefillReport(compression=COMPRESSION)
    assert report_from_bytes(report_to_bytes(bare)) == bare


@pytest.mark.parametrize(
    "sampling",
    [{}, {"return_kept": True}, {"return_kept": "bitmap"}, {"prompt_logprobs": 20}],
    ids=str,
)
def test_no_report_is_longer_than_its_request_allows(sampling: dict[str, Any]) -> None:
    size, layers, heads = 3_000, 3, 2
    request = Request(request_id="a", prompt_token_ids=(1,) * size, sampling=SamplingParams(**sampling))
    budget = KVBudget(num_sink=4, num_topk=200, num_recent=64)
    least = -1234.567890123456789
    row = tuple(range(10**6, 10**6 + budget.num_topk))
    report = PrefillReport(
        compression=replace(
            COMPRESSION,
            kept_positions=((row,) * heads,) * layers if request.sampling.return_kept is True else None,
            kept_bitmap=KeptBitmap(num_layers=layers, num_kv_heads=heads, num_tokens=size, bits=bytes(6 * 375))
            if request.sampling.return_kept == "bitmap"
            else None,
        ),
        prompt_logprobs=[None, *[Logprob(10**6, least, ((10**6, least),) * 20)] * (size - 1)]
        if request.sampling.prompt_logprobs is not None
        else None,
        prefix=PrefixUse(cached_tokens=10**6, diverged_at=10**6),
    )
    assert len(report_to_bytes(report)) <= max_report_bytes(request, budget, layers, heads)


def test_a_request_is_asked_without_what_concerns_its_tokens() -> None:
    asked = read_for(REQUEST, TICKET)
    data = request_to_bytes(asked, BUDGET, make_selector())
    assert request_from_bytes(data) == replace(asked, budget=BUDGET, selector=SnapKV())
    assert asked.sampling == SamplingParams(max_tokens=1, temperature=0.0, return_kept=True)
    assert b"the text" not in data and b"regex" not in data
    own = replace(asked, selector=SnapKV(observation_len=7), budget=KVBudget.full(8))
    assert request_from_bytes(request_to_bytes(own, BUDGET, make_selector())) == own


def test_a_selector_that_only_this_process_knows_is_refused() -> None:
    @dataclass(frozen=True)
    class Own(SnapKV):
        name = "own"

    with pytest.raises(ValueError, match="'own' is not in SELECTORS"):
        request_to_bytes(read_for(REQUEST, TICKET), BUDGET, Own())


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ASKED = json.loads(request_to_bytes(read_for(REQUEST, TICKET), BUDGET, make_selector()))
TOLD = json.loads(report_to_bytes(PrefillReport(compression=COMPRESSION, prefix=PrefixUse())))


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from([*ASKED, "ticket", "selector", "budget"]), value=_json, inner=st.booleans())
def test_a_request_is_read_or_refused(name: str, value: Any, inner: bool) -> None:
    told = {**ASKED, name: {**ASKED[name], "more": value} if inner and isinstance(ASKED[name], dict) else value}
    try:
        request_from_bytes(json.dumps(told).encode())
    except WireError as error:
        assert len(str(error)) < 400


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from([*TOLD["compression"], "kept_positions", "kept_bitmap"]), value=_json)
@example(name="compress_ms", value=10**400)
@example(name="kept_bitmap", value=[])
def test_a_report_is_read_or_refused(name: str, value: Any) -> None:
    changes = {"compression": {**TOLD["compression"], name: value}}, *({key: value} for key in TOLD)
    for change in (*changes, {"prompt_logprobs": [value]}):
        try:
            report_from_bytes(json.dumps({**TOLD, **change}).encode())
        except WireError as error:
            assert len(str(error)) < 400
