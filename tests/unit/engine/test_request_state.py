"""Deltas put together are the answer, however the answer grew; what is sent once is sent once."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import fields

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from snapstream.engine.request_state import (
    MAX_CACHED_RUNS,
    MAX_HELD_TOKENS,
    CachingTokenizer,
    DeltaTracker,
    Detokenizer,
    RequestDelta,
    SampleDelta,
    StopMatcher,
    TextStream,
    sample_seed,
)
from snapstream.engine.worker import Deltas
from snapstream.types import (
    Compression,
    FinishReason,
    Logprob,
    PrefixUse,
    RequestOutput,
    SampleOutput,
    SamplingParams,
    Timings,
)

COMPRESSION = Compression(
    prompt_tokens=9, kept_tokens=5, evicted_tokens=4, row_bytes=10, full_bytes=18, compress_ms=1.5, ring_tokens=3
)


def make_output(request_id: str = "a", n: int = 1, *, logprobs: bool = False) -> RequestOutput:
    samples = [SampleOutput(index=i, logprobs=[] if logprobs else None) for i in range(n)]
    return RequestOutput(request_id=request_id, prompt_token_ids=(1, 2), samples=samples)


def grow(sample: SampleOutput, token: int, text: str) -> None:
    sample.token_ids.append(token)
    sample.add_text(text)
    if sample.logprobs is not None:
        sample.logprobs.append(Logprob(token, -float(token)))


def join(deltas: list[RequestDelta], n: int) -> list[SampleOutput]:
    whole = [SampleOutput(index=i) for i in range(n)]
    for delta in deltas:
        for part in delta.samples:
            sample = whole[part.index]
            assert sample.finish_reason is None, "nothing comes after the end"
            sample.text += part.text
            sample.token_ids.extend(part.token_ids)
            if part.logprobs is not None:
                assert [entry.token_id for entry in part.logprobs] == list(part.token_ids)
                sample.logprobs = [*(sample.logprobs or []), *part.logprobs]
            sample.finish_reason, sample.stop_reason = part.finish_reason, part.stop_reason
    return whole


# per step: (which sample grows, by how much text) in any number; the step's output is taken after them
STEPS = st.lists(st.lists(st.tuples(st.integers(0, 2), st.text("ab", max_size=3)), max_size=4), max_size=8)


@given(STEPS)
def test_deltas_put_together_are_the_answer(steps: list[list[tuple[int, str]]]) -> None:
    tracker, output = DeltaTracker(), make_output(n=3, logprobs=True)
    deltas = []
    for number, step in enumerate(steps):
        for index, text in step:
            grow(output.samples[index], number, text)
        deltas.append(tracker.take(output))
        assert {part.index for part in deltas[-1].samples} == {index for index, _ in step}
    for sample in output.samples:
        sample.finish_reason, sample.stop_reason = FinishReason.STOP, 7
    deltas.append(tracker.take(output))
    whole = join(deltas, 3)
    for sample in whole:
        sample.logprobs = sample.logprobs or []
    assert whole == output.samples
    assert [delta.is_finished for delta in deltas] == [False] * len(steps) + [True]


def test_a_sample_that_ended_is_not_told_again() -> None:
    tracker, output = DeltaTracker(), make_output(n=2)
    grow(output.samples[0], 1, "x")
    output.samples[0].finish_reason = FinishReason.LENGTH
    first = tracker.take(output)
    assert [part.finish_reason for part in first.samples] == [FinishReason.LENGTH] and not first.is_finished
    grow(output.samples[1], 2, "y")
    assert [part.index for part in tracker.take(output).samples] == [1]


def test_text_that_is_held_back_comes_with_the_end() -> None:
    tracker, output = DeltaTracker(), make_output()
    grow(output.samples[0], 1, "")
    assert tracker.take(output).samples[0].text == ""
    output.samples[0].text += "held"
    output.samples[0].finish_reason = FinishReason.LENGTH
    last = tracker.take(output).samples[0]
    assert (last.text, last.token_ids) == ("held", ())


def test_facts_of_the_prompt_come_with_the_first_token_only_and_timings_with_the_end() -> None:
    tracker, output = DeltaTracker(), make_output()
    output.prompt_logprobs = [None, Logprob(2, -0.5)]
    output.compression = COMPRESSION
    grow(output.samples[0], 1, "x")
    first = tracker.take(output)
    assert first.compression == COMPRESSION and first.prompt_logprobs == (None, Logprob(2, -0.5))
    assert first.timings is None
    grow(output.samples[0], 1, "y")
    output.timings.total_ms = 5.0
    output.samples[0].finish_reason = FinishReason.STOP
    last = tracker.take(output)
    assert last.compression is None and last.prompt_logprobs is None
    output.timings.total_ms = 6.0
    assert last.timings is not None and last.timings.total_ms == 5.0, "a delta does not change after it was sent"


def test_an_abort_before_the_first_token_has_an_end_and_nothing_else() -> None:
    tracker, output = DeltaTracker(), make_output()
    output.samples[0].finish_reason = FinishReason.ABORT
    delta = tracker.take(output)
    assert delta.is_finished and delta.compression is None
    assert [(part.token_ids, part.finish_reason) for part in delta.samples] == [((), FinishReason.ABORT)]


def test_every_field_crosses_the_border() -> None:
    part = SampleDelta(
        index=2,
        text="x",
        token_ids=(4, 5),
        logprobs=(Logprob(4, -1.0, ((4, -1.0),)), Logprob(5, -2.0)),
        finish_reason=FinishReason.STOP,
        stop_reason="end",
    )
    delta = RequestDelta(
        request_id="a",
        samples=(part, SampleDelta(index=0)),
        is_finished=True,
        prompt_logprobs=(None, Logprob(2, -0.5)),
        compression=COMPRESSION,
        timings=Timings(total_ms=4.0),
        prefix=PrefixUse(cached_tokens=256, diverged_at=300),
    )
    for whole in (part, delta):
        defaults = {f.name: f.default for f in fields(whole)}
        assert all(getattr(whole, name) != default for name, default in defaults.items()), "a field is not tried here"
    message = Deltas((delta, RequestDelta(request_id="b", samples=())))
    back = pickle.loads(pickle.dumps(message))
    assert back == message and type(back.deltas[0].samples[0].finish_reason) is FinishReason


def test_requests_are_kept_apart_and_a_finished_one_is_forgotten() -> None:
    tracker = DeltaTracker()
    one, two = make_output("one"), make_output("two")
    grow(one.samples[0], 1, "x")
    one.samples[0].finish_reason = FinishReason.STOP
    tracker.take(one)
    grow(two.samples[0], 2, "y")
    assert tracker.take(two).samples[0].token_ids == (2,)
    again = make_output("one")  # the id is free again
    grow(again.samples[0], 3, "z")
    assert tracker.take(again).samples[0].token_ids == (3,)


def test_a_token_joins_only_its_own_text() -> None:
    """Copying the answer once per token made long answers quadratic."""

    class Counted(str):
        def __add__(self, other: str) -> str:
            raise AssertionError("the whole text was copied")

    tracker, output = DeltaTracker(), make_output()
    sample = output.samples[0]
    sample.text = Counted("a long answer")
    tracker.take(output)
    for token in range(3):
        grow(sample, token, f" {token}")
        assert tracker.take(output).samples[0].text == f" {token}"
    sample.text = sample.text_since(0)
    assert sample.text == "a long answer 0 1 2"


# Streaming text: whole characters, stop strings over token borders, text that only grows.

SPECIAL = 0  # id of the toy tokenizer's special token


class PieceTokenizer:
    """Byte-level toy: token ``i`` is the ``i``-th given piece of bytes, which may cut characters anywhere."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = [b"", *pieces]

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        special = b"" if skip_special_tokens else b"<s>"
        return b"".join(special if i == SPECIAL else self.pieces[i] for i in ids).decode(errors="replace")


class RunTokenizer(PieceTokenizer):
    """Byte fallback as sentencepiece does it: a run of bytes that is not valid as a whole is all U+FFFD."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        data = b"".join(self.pieces[i] for i in ids)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(data)


class SpaceTokenizer:
    """Words with their space in front; the first of a list loses it, as in Llama 2's tokenizer."""

    words = (" the", " cat", "s", " sat")

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        return "".join(self.words[i] for i in ids).removeprefix(" ")


def stream_of(tokenizer: PieceTokenizer, stop: Sequence[str] = (), include_stop: bool = False) -> TextStream:
    return TextStream(tokenizer, SamplingParams(stop=stop, include_stop=include_stop))


def run(
    pieces: Sequence[bytes],
    stop: Sequence[str] = (),
    include_stop: bool = False,
) -> tuple[list[str], str | None]:
    """Pieces of text shown after each token (and by the end), and the stop string."""
    stream, shown = stream_of(PieceTokenizer(pieces), stop, include_stop), []
    for token in range(1, len(pieces) + 1):
        text, found = stream.push(token)
        shown.append(text)
        if found is not None:
            return shown, found
    text, found = stream.finish()
    return [*shown, text], found


def test_a_character_is_shown_when_its_last_byte_has_come() -> None:
    euro = "€".encode()
    assert run([b"a", euro[:1], euro[1:2], euro[2:], b"b"])[0] == ["a", "", "", "€", "b", ""]


def test_a_character_in_pieces_that_overlap_other_text() -> None:
    first, second = "é".encode(), "漢".encode()
    assert run([b"x" + first[:1], first[1:] + second[:2], second[2:] + b"!"])[0] == ["", "", "xé漢!", ""]


def test_a_character_cut_short_is_dropped_but_not_the_text_before_it() -> None:
    assert run([b"ab\xe4"])[0] == ["", "ab"]
    assert run([b"ab", b"\xf0\x9f"])[0] == ["ab", "", ""]


def test_bytes_that_never_become_a_character_are_not_waited_for_without_end() -> None:
    shown, _ = run([b"\xff"] * (MAX_HELD_TOKENS + 1) + [b"a"])
    assert shown.index("\ufffd" * MAX_HELD_TOKENS) == MAX_HELD_TOKENS - 1
    assert "".join(shown).endswith("a")


def test_a_long_run_of_skipped_special_tokens_neither_shows_nor_piles_up() -> None:
    longest = 0

    class Counting(PieceTokenizer):
        def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return super().decode(ids, skip_special_tokens=skip_special_tokens)

    detokenizer = Detokenizer(Counting([b"a", b"b"]), skip_special_tokens=True)
    shown = [detokenizer.push(token) for token in [1, *[SPECIAL] * 100, 2]]
    assert "".join(shown) == "ab"
    assert longest <= 3 * MAX_HELD_TOKENS


def test_special_tokens_are_shown_if_asked_for() -> None:
    detokenizer = Detokenizer(PieceTokenizer([b"a"]), skip_special_tokens=False)
    assert [detokenizer.push(token) for token in (1, SPECIAL, 1)] == ["a", "<s>", "a"]


def test_spaces_between_words_survive() -> None:
    detokenizer = Detokenizer(SpaceTokenizer(), skip_special_tokens=True)
    assert [detokenizer.push(token) for token in (0, 1, 2, 3)] == ["the", " cat", "s", " sat"]


def test_byte_fallback_runs() -> None:
    text = "你好".encode()
    detokenizer = Detokenizer(RunTokenizer([bytes([byte]) for byte in text]), skip_special_tokens=True)
    assert [detokenizer.push(token) for token in range(1, 7)] == ["", "", "你", "", "", "好"]


@pytest.mark.parametrize(
    ("pieces", "stop", "shown", "found"),
    [
        ([b"say E", b"N", b"D now"], ["END"], ["say ", "", ""], "END"),  # over three tokens
        ([b"E", b"N", b"T", b"!"], ["END"], ["", "", "ENT", "!", ""], None),  # a prefix that came to nothing
        ([b"EEN", b"D"], ["END"], ["E", ""], "END"),  # the prefix starts anew inside itself
        ([b"aab", b"aac"], ["aabaac", "baad"], ["", ""], "aabaac"),  # held for one stop, ended by another
        ([b"x\n", b"\n", b"y"], ["\n\n"], ["x", ""], "\n\n"),
        ([b"12EN"], ["END"], ["12", "EN"], None),  # held to the end, then shown
        ([b"abcd"], ["abcd", "bc"], ["a"], "bc"),  # the first to be complete
        ([b"a", b"bc"], ["bc", "abc"], ["", ""], "abc"),  # complete together: the longer
        ([b"EN\xe4"], ["EN"], ["", ""], "EN"),  # only seen at the end, in a token that also began a character
    ],
)
def test_stop_strings(pieces: list[bytes], stop: list[str], shown: list[str], found: str | None) -> None:
    assert run(pieces, stop) == (shown, found)


def test_include_stop_keeps_the_stop_string_and_nothing_after_it() -> None:
    assert run([b"say E", b"N", b"D now"], ["END"], include_stop=True) == (["say ", "", "END"], "END")


def first_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Independent rule: character by character; the first stop that the text ends with, longest first."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


# U+FFFD itself is left out: a decoder's output does not tell it from a broken character.
ANY_CHARACTER = st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")
TEXT = st.text(st.one_of(st.sampled_from("abE€漢🦀\n"), ANY_CHARACTER))
STOPS = st.lists(st.text(st.sampled_from("abE€\n"), min_size=1, max_size=4), max_size=3, unique=True)


@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 200), max_size=30))
@example(text="ab🦀aba", stops=["aba", "🦀a"], cuts=[1, 3, 4, 5])
def test_streamed_text_is_the_text_up_to_the_first_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    data = text.encode()
    borders = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[start:end] for start, end in zip(borders, borders[1:], strict=False)]
    shown, found = run(pieces, stops)
    assert ("".join(shown), found) == first_stop(text, stops)


@given(text=TEXT, stops=STOPS.filter(len))
def test_no_more_is_held_back_than_a_stop_string_could_need(text: str, stops: list[str]) -> None:
    matcher, shown = StopMatcher(stops, include_stop=False), ""
    for end, character in enumerate(text, 1):
        piece, found = matcher.push(character)
        if found is not None:
            break
        shown += piece
        held = text[len(shown) : end]
        assert text[:end] == shown + held
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


class Asked(PieceTokenizer):
    """Counts what it is asked."""

    num_asked = 0

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        self.num_asked += 1
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


def test_text_that_repeats_itself_is_decoded_once() -> None:
    tokenizer = Asked([b"a", b"b"])
    remembering = CachingTokenizer(tokenizer)
    first, second = (TextStream(remembering, SamplingParams()) for _ in range(2))
    assert "".join(first.push(token)[0] for token in [1, 2] * 8) == "ab" * 8
    asked = tokenizer.num_asked
    assert asked == 4  # a, b, ab, ba
    assert "".join(second.push(token)[0] for token in [1, 2] * 8) == "ab" * 8 and tokenizer.num_asked == asked
    texts = [remembering.decode([SPECIAL, 1], skip_special_tokens=skips) for skips in (True, False)]
    assert texts == ["a", "<s>a"], "what is skipped is part of the question"


def test_what_is_remembered_is_bounded() -> None:
    tokenizer = Asked([b"a"] * (MAX_CACHED_RUNS + 1))
    remembering = CachingTokenizer(tokenizer)
    for token in range(1, MAX_CACHED_RUNS + 2):
        remembering.decode([token], skip_special_tokens=True)
    for token in (MAX_CACHED_RUNS + 1, 1):  # the last is there, the first has left
        remembering.decode([token], skip_special_tokens=True)
    assert tokenizer.num_asked == MAX_CACHED_RUNS + 2


# Seeds of samples: stable, 63 bits, and no two the same by construction.

ALL_BITS, GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15


def split_mix(state: int) -> int:
    """The first number of SplitMix64 (Steele, Lea, Flood 2014), as published."""
    z = (state + GOLDEN) & ALL_BITS
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & ALL_BITS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & ALL_BITS
    return z ^ (z >> 31)


@given(seed=st.integers(-(2**63), 2**63 - 1), index=st.integers(0, 127))
def test_fits_a_signed_64_bit_integer(seed: int, index: int) -> None:
    assert 0 <= sample_seed(seed, index) < 2**63
    assert sample_seed(seed, index) == sample_seed(seed, index)


def test_neighbouring_seeds_and_samples_do_not_collide() -> None:
    seeds = {sample_seed(seed, index) for seed in range(-50, 50) for index in range(100)}
    assert len(seeds) == 100 * 100


def test_the_mapping_is_frozen() -> None:
    """A stored seed must give the same output in a later version."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # SplitMix64 started at 0
    assert [split_mix(step * GOLDEN) for step in range(3)] == published
    assert sample_seed(0, 0) == split_mix(published[0]) >> 1
    assert sample_seed(0, 5) == split_mix(published[0] + 5) >> 1
    assert sample_seed(-7, 3) == split_mix((split_mix(2**64 - 7) + 3) & ALL_BITS) >> 1
