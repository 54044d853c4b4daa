"""What is sent beside a row: packed and unpacked, and bytes that no engine writes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from snapstream.config import KVBudget
from snapstream.disaggregation.connector import max_report_bytes, report_from_bytes
from snapstream.disaggregation.protocol import prefill_request, request_from_bytes, request_to_bytes
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.step import PrefillReport
from snapstream.types import (
    Compression,
    Grammar,
    KeptBitmap,
    Logprob,
    PrefixUse,
    Request,
    RowTicket,
    SamplingParams,
)
from snapstream.wire import WireError, pack
from tests.disaggregation.rows import JSON_VALUES, values_of, with_values

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
    prompt="the text",
    priority=-2,
    namespace="n/m",
)


def test_reports_come_back_as_they_went() -> None:
    assert report_from_bytes(pack(REPORT)) == REPORT
    bare = PrefillReport(compression=COMPRESSION)
    assert report_from_bytes(pack(bare)) == bare


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
    assert len(pack(report)) <= max_report_bytes(request, budget, layers, heads)


def test_a_request_is_asked_without_what_concerns_its_tokens() -> None:
    asked = prefill_request(REQUEST, TICKET, BUDGET, SnapKV())
    data = request_to_bytes(asked)
    assert request_from_bytes(data) == asked and (asked.budget, asked.selector) == (BUDGET, SnapKV())
    assert asked.sampling == SamplingParams(max_tokens=1, temperature=0.0, return_kept=True)
    assert b"the text" not in data and b"regex" not in data
    named = replace(REQUEST, selector=SnapKV(observation_len=7), budget=KVBudget.full(8))
    own = prefill_request(named, TICKET, BUDGET, SnapKV())
    assert (own.budget, own.selector) == (named.budget, named.selector) and own.request_id == asked.request_id
    assert TICKET.key not in asked.request_id and request_from_bytes(request_to_bytes(own)) == own


def test_a_selector_that_only_this_process_knows_is_refused() -> None:
    @dataclass(frozen=True)
    class Own(SnapKV):
        name = "own"

    with pytest.raises(ValueError, match="'own' is not in SELECTORS"):
        request_to_bytes(prefill_request(REQUEST, TICKET, BUDGET, Own()))


ASKED = request_to_bytes(prefill_request(REQUEST, TICKET, BUDGET, SnapKV()))
BARE = pack(PrefillReport(compression=COMPRESSION, prefix=PrefixUse()))


def changed(data: bytes, kind: type, name: str, value: Any, *, inner: bool = False) -> bytes:
    """A packed message with another value for a field; ``inner``: with one more item in the field's list."""
    values, _ = values_of(data)
    index = [field.name for field in fields(kind)].index(name)
    is_list = isinstance(values[index], list)
    values[index] = [*values[index], value] if inner and is_list else value
    return with_values(data, values)


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from([*(field.name for field in fields(Request)), "ticket", "selector", "budget"]),
    value=JSON_VALUES,
    inner=st.booleans(),
)
def test_a_request_is_read_or_refused(name: str, value: Any, inner: bool) -> None:
    try:
        request_from_bytes(changed(ASKED, Request, name, value, inner=inner))
    except WireError as error:
        assert len(str(error)) < 400


@pytest.mark.parametrize("name", ["ticket", "budget", "selector"])
def test_a_request_without_what_the_row_needs_is_refused(name: str) -> None:
    with pytest.raises(WireError, match="must have a ticket, a budget and a selector"):
        request_from_bytes(changed(ASKED, Request, name, None))


def test_of_sampling_only_what_concerns_the_prompt_is_read() -> None:
    asked = prefill_request(REQUEST, TICKET, BUDGET, SnapKV())
    assert request_from_bytes(pack(replace(asked, sampling=REQUEST.sampling))) == asked


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from([field.name for field in fields(Compression)]), value=JSON_VALUES)
@example(name="compress_ms", value=10**400)
@example(name="kept_tokens", value=-1)
@example(name="kept_bitmap", value=[])
def test_a_report_is_read_or_refused(name: str, value: Any) -> None:
    values, _ = values_of(BARE)
    index = [field.name for field in fields(Compression)].index(name)
    compression = [*values[0][:index], value, *values[0][index + 1 :]]
    for field, change in (
        ("compression", compression),
        *((field.name, value) for field in fields(PrefillReport)),
        ("prompt_logprobs", [value]),
    ):
        try:
            report_from_bytes(changed(BARE, PrefillReport, field, change))
        except WireError as error:
            assert len(str(error)) < 400


def test_a_report_with_a_count_below_0_is_refused() -> None:
    for report in (
        replace(REPORT, prefix=PrefixUse(cached_tokens=-1)),
        replace(REPORT, compression=replace(COMPRESSION, kept_positions=(((*range(40), -1),),))),
    ):
        with pytest.raises(WireError, match="is not a count"):
            report_from_bytes(pack(report))
