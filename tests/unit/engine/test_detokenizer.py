"""Streaming text: whole characters, stop strings over token borders, text that only grows."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from snapstream.engine.detokenizer import (
    MAX_HELD_TOKENS,
    MOST_REMEMBERED,
    Detokenizer,
    RememberingTokenizer,
    StopMatcher,
    TextStream,
)

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
    return TextStream(tokenizer, stop=stop, include_stop=include_stop, skip_special_tokens=True)


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
    remembering = RememberingTokenizer(tokenizer)
    first, second = (TextStream(remembering, stop=(), include_stop=False, skip_special_tokens=True) for _ in range(2))
    assert "".join(first.push(token)[0] for token in [1, 2] * 8) == "ab" * 8
    asked = tokenizer.num_asked
    assert asked == 4  # a, b, ab, ba
    assert "".join(second.push(token)[0] for token in [1, 2] * 8) == "ab" * 8 and tokenizer.num_asked == asked
    texts = [remembering.decode([SPECIAL, 1], skip_special_tokens=skips) for skips in (True, False)]
    assert texts == ["a", "<s>a"], "what is skipped is part of the question"


def test_what_is_remembered_is_bounded() -> None:
    tokenizer = Asked([b"a"] * (MOST_REMEMBERED + 1))
    remembering = RememberingTokenizer(tokenizer)
    for token in range(1, MOST_REMEMBERED + 2):
        remembering.decode([token], skip_special_tokens=True)
    for token in (MOST_REMEMBERED + 1, 1):  # the last is there, the first has left
        remembering.decode([token], skip_special_tokens=True)
    assert tokenizer.num_asked == MOST_REMEMBERED + 2
