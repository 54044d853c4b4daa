"""The compiler of grammars: masks against a program that tries every token, refusals, limits, kinds of tokenizers; and
the process that compiles grammars first, which is killed when it takes too long, and started again.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from snapstream import grammar as module
from snapstream.assets import TINY_MODEL
from snapstream.grammar import GrammarChecker, GrammarCompiler, Matcher
from snapstream.types import MAX_GRAMMAR_CHARS, Grammar, QueueFull, SamplingParams
from tests.waiting import HANG_S, until_async

END = 2
TINY = (TINY_MODEL / "tokenizer.json").read_text(encoding="utf-8")


def sentencepiece() -> str:
    """Like Llama 2's: a mark for spaces, single bytes for what is not in the vocabulary."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": END}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in [
        "\u2581",
        *'{}[]",:0123456789abcdefghijklmnopqrstuvwxyz',
        "\u2581{",
        '{"',
        '":',
        '"}',
        "\u2581\u2581",
    ]:
        vocab[piece] = len(vocab)
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Replace(" ", "\u2581")
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    core.add_special_tokens(["<s>", "</s>"])
    return str(core.to_str())


def byte_level(missing: str = "") -> str:
    letters = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(missing))
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(["<pad>", "<bos>", "<eos>", *letters])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    return str(core.to_str())


def compiler_of(text: str = TINY, vocab_size: int | None = None, end_ids: tuple[int, ...] = (END,)) -> GrammarCompiler:
    size = vocab_size or Tokenizer.from_str(text).get_vocab_size()
    return GrammarCompiler(lambda: text, size, end_ids)


def allowed(matcher: Matcher, compiler: GrammarCompiler) -> set[int] | None:
    """Tokens that may follow; None if nothing may."""
    words = np.zeros(compiler.num_words, dtype=np.int32)
    if not matcher.fill(words):
        return None
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def write(compiler: GrammarCompiler, grammar: Grammar, seed: int, limit: int = 400) -> tuple[list[int], str | None]:
    """Random allowed tokens to the end of the grammar, and its fault; None if the limit came first."""
    matcher, draw, out = compiler.matcher(grammar), random.Random(seed), []
    for _ in range(limit):
        tokens = allowed(matcher, compiler)
        if tokens is None:
            return out, matcher.fault
        out.append(draw.choice(sorted(tokens)))
        matcher.take(out[-1])
    return out, None


@pytest.mark.parametrize("text", [TINY, byte_level(), sentencepiece()], ids=["tiny", "bytes", "sentencepiece"])
def test_random_walks_give_what_the_grammar_says(text: str) -> None:
    compiler, core = compiler_of(text), Tokenizer.from_str(text)
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99, "minimum": -99},
                                                  "b": {"type": "string", "maxLength": 4}},
              "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
    num_whole = 0
    for seed in range(10):
        ids, fault = write(compiler, Grammar.regex("[a-f]{2,5}-[0-9]{3}"), seed)
        assert fault == ""
        assert re.fullmatch("[a-f]{2,5}-[0-9]{3}", core.decode(ids))
        ids, fault = write(compiler, Grammar.json_schema(schema), seed)
        if fault is not None:  # an integer may be long
            assert fault == ""
            value = json.loads(core.decode(ids))
            assert isinstance(value["a"], int) and isinstance(value["b"], str) and len(value) == 2
            num_whole += 1
    assert num_whole >= 5


def test_masks_are_those_of_trying_every_token() -> None:
    compiler, core = compiler_of(), Tokenizer.from_str(TINY)
    options = ["yes", "no", "n0", "maybe so"]
    matcher = compiler.matcher(Grammar.regex("yes|no|n0|maybe so"))
    written, draw = "", random.Random(3)
    while (tokens := allowed(matcher, compiler)) is not None:
        fits = {token for token in range(6, 4608) if any(o.startswith(written + core.decode([token])) for o in options)}
        assert tokens == fits | ({END} if written in options else set())
        token = draw.choice(sorted(fits))
        written += core.decode([token])
        matcher.take(token)
    assert written in options and matcher.fault == ""


@pytest.mark.parametrize("text", [TINY, byte_level(), sentencepiece()], ids=["tiny", "bytes", "sentencepiece"])
def test_forced_tokens_and_drafts_are_those_of_masks(text: str) -> None:
    """Looking ahead changes no mask."""
    compiler, draw, num_forced = compiler_of(text), random.Random(5), 0
    schema = {"type": "object", "properties": {"name_of_it": {"enum": ["abc", "abd"]}, "ok": {"type": "boolean"}},
              "required": ["name_of_it", "ok"], "additionalProperties": False}  # fmt: skip
    for grammar in (Grammar.json_schema(schema), Grammar.regex("[ab]{1,3}cd(ef)?-[0-9]")):
        for seed in range(4):
            ids, fault = write(compiler, grammar, seed)
            assert fault == ""
            one, other = compiler.matcher(grammar), compiler.matcher(grammar)
            for place, token in enumerate(ids):
                forced, ahead = one.forced(), one.copy()
                for own in forced:
                    assert allowed(ahead, compiler) == {own}
                    ahead.take(own)
                assert forced == ids[place : place + len(forced)]
                num_forced += len(forced)
                wrong = draw.randrange(3, Tokenizer.from_str(text).get_vocab_size())
                right = ids[place : place + 4]
                assert one.num_allowed(right) == len(right) and one.num_allowed([]) == 0
                if wrong not in (allowed(other.copy(), compiler) or ()) and not forced:
                    assert one.num_allowed([wrong, *right]) == 0
                assert allowed(one, compiler) == allowed(other, compiler)
                one.take(token)
                other.take(token)
            assert allowed(one, compiler) is None and one.forced() == []
    assert num_forced > 40


def test_an_end_token_only_where_the_text_is_complete() -> None:
    compiler = compiler_of()
    matcher = compiler.matcher(Grammar.regex("7+"))
    seven = Tokenizer.from_str(TINY).token_to_id("7")
    tokens = allowed(matcher, compiler)
    assert tokens is not None and END not in tokens
    matcher.take(seven)
    tokens = allowed(matcher, compiler)
    assert tokens is not None and {END, seven} <= tokens
    matcher.take(END)
    assert allowed(matcher, compiler) is None and matcher.fault == ""


def test_a_dead_end_is_a_fault() -> None:
    """The vocabulary cannot spell what the grammar wants."""
    compiler = compiler_of(byte_level(missing="z"))
    matcher = compiler.matcher(Grammar.regex("az"))
    tokens = allowed(matcher, compiler)
    assert tokens is not None and len(tokens) == 1
    matcher.take(tokens.pop())
    assert allowed(matcher, compiler) is None
    assert matcher.fault.startswith("grammar: ")
    with pytest.raises(ValueError, match="no text"):
        compiler.matcher(Grammar.regex("z"))


def test_copies_go_their_own_ways() -> None:
    compiler = compiler_of()
    core = Tokenizer.from_str(TINY)
    one, other = (compiler.matcher(Grammar.regex("ab|cd")) for _ in range(2))
    one.take(core.token_to_id("a"))
    assert allowed(one, compiler) == {core.token_to_id("b")}
    tokens = allowed(other, compiler)
    assert tokens is not None and core.token_to_id("c") in tokens


def test_a_token_that_was_not_allowed_is_a_fault_and_no_crash() -> None:
    compiler = compiler_of()
    matcher = compiler.matcher(Grammar.regex("ab"))
    matcher.take(Tokenizer.from_str(TINY).token_to_id("x"))
    assert allowed(matcher, compiler) is None
    assert matcher.fault.startswith("grammar: ")


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.json_schema({"type": "nope"}), "nope"),
        (Grammar.json_schema("[1"), "plain JSON"),
        (Grammar.json_schema({"not": {}}), "not"),
        (Grammar.json_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
        (Grammar.json_schema({"$ref": "https://example.com/x"}), "retriev"),
        (Grammar.json_schema({"$ref": "#"}), "no text"),
        (Grammar.json_schema({"type": "object", "properties": {"a": False}, "required": ["a"]}), "Unsatisfiable"),
        (Grammar.regex("("), "unclosed"),
        (Grammar.regex(r"(a)\1"), "backreference"),
        (Grammar.lark("begin: x"), "start"),
        (Grammar.lark("start: <|unknown|>"), "unknown special token"),
        (Grammar.lark("root ::= ("), "GBNF"),
    ],
)
def test_refusals_name_the_reason(grammar: Grammar, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        compiler_of().matcher(grammar)
    assert str(caught.value).startswith("grammar: ") and len(str(caught.value)) < 400


def test_not_strict_ignores_what_cannot_be_enforced() -> None:
    schema = {"oneOf": [{"const": "a"}, {"const": "b"}], "not": {}}
    with pytest.raises(ValueError, match="grammar: "):
        compiler_of().matcher(Grammar.json_schema(schema))
    ids, fault = write(compiler_of(), Grammar.json_schema(schema, strict=False), 0)
    assert fault == "" and Tokenizer.from_str(TINY).decode(ids) in ('"a"', '"b"')


def test_json_is_compact() -> None:
    """A model that is unsure has no white space to write."""
    compiler = compiler_of(byte_level())
    core = Tokenizer.from_str(byte_level())
    matcher = compiler.matcher(Grammar.json_object())
    space = {core.token_to_id(char) for char in ("\u0120", "\u010a", "\u0109")}
    for place, char in enumerate('{"a":[1,'):
        tokens = allowed(matcher, compiler)
        assert tokens is not None and (place in (2, 3) or not tokens & space)  # in a string it is content
        matcher.take(core.token_to_id(char))


def test_padded_and_short_vocabularies() -> None:
    """A model may have more rows of logits than the tokenizer has tokens, or fewer."""
    for size in (4608, 4700, 4600):
        compiler = compiler_of(vocab_size=size)
        tokens = allowed(compiler.matcher(Grammar.regex("[a-z]+")), compiler)
        assert tokens and max(tokens) < 4608 and compiler.num_words * 32 >= size


def test_end_ids_are_needed_and_those_outside_the_vocabulary_ignored() -> None:
    with pytest.raises(ValueError, match="end token"):
        compiler_of(end_ids=(99999,)).matcher(Grammar.regex("a"))
    compiler = compiler_of(end_ids=(END, 5, 99999))
    matcher = compiler.matcher(Grammar.regex("a+"))
    matcher.take(Tokenizer.from_str(TINY).token_to_id("a"))
    tokens = allowed(matcher, compiler)
    assert tokens is not None and {END, 5} <= tokens


def test_compiled_grammars_are_kept_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_COMPILED", 2)
    compiler = compiler_of()
    first = compiler.prepare(Grammar.regex("a"))
    assert compiler.prepare(Grammar.regex("a")) is first
    for pattern in "bc":
        compiler.matcher(Grammar.regex(pattern))
    assert compiler.prepare(Grammar.regex("a")) is not first


def test_without_the_library_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match="llguidance is not installed"):
        compiler_of().matcher(Grammar.regex("a"))


def test_a_preface_comes_before_any_kind_of_grammar() -> None:
    core = Tokenizer.from_str(TINY)
    core.add_tokens([AddedToken("</t>", special=False)])  # the library takes it for one symbol
    preface = "preface: thought GAP\nGAP: /[ \\n]{0,4}/\n"
    as_text = preface + 'thought[suffix="</t>"]: /(.|\\n)*/\n'
    as_symbol = preface + "thought: TEXT </t>\nTEXT: /(.|\\n)*/\n"
    answers = (Grammar.json_schema({"const": 1}), Grammar.regex("1"), Grammar.lark('start: "1"'))
    for text, rules in ((TINY, as_text), (str(core.to_str()), as_symbol)):
        tokens, compiler = Tokenizer.from_str(text), compiler_of(text)
        for grammar in answers:
            matcher = compiler.matcher(replace(grammar, preface=rules))
            for token in tokens.encode("I </ see\n</t>\n\n1", add_special_tokens=False).ids:
                assert token in (allowed(matcher, compiler) or set())
                matcher.take(token)
            assert allowed(matcher, compiler) is None and matcher.fault == ""
            matcher = compiler.matcher(replace(grammar, preface=rules))
            for token in tokens.encode("so</t>", add_special_tokens=False).ids:
                matcher.take(token)
            starts = {tokens.decode([token]).strip() for token in allowed(matcher, compiler) or ()}
            assert starts <= {"", "1"}, "nothing but the answer may follow"


def test_what_a_grammar_may_be() -> None:
    with pytest.raises(ValueError, match="grammar text has 0 characters"):
        Grammar.regex("")
    with pytest.raises(ValueError, match=str(MAX_GRAMMAR_CHARS)):
        Grammar.lark("x" * (MAX_GRAMMAR_CHARS + 1))
    with pytest.raises(ValueError, match="kind"):
        Grammar(kind="yaml", text="a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not plain JSON"):
        Grammar.json_schema({"const": {1, 2}})
    with pytest.raises(ValueError, match="must be a Grammar"):
        SamplingParams(grammar={"type": "object"})  # type: ignore[arg-type]


def test_one_of_some_texts_and_grammars_of_llama_cpp() -> None:
    compiler, core = compiler_of(), Tokenizer.from_str(TINY)
    texts = {'a "b"', "c\n", "ü"}
    seen = {core.decode(write(compiler, Grammar.choice([*texts, "ü"]), seed)[0]) for seed in range(30)}
    assert seen == texts
    ids, fault = write(compiler, Grammar.lark('root ::= "x" rest\nrest ::= [0-9]{3}\n'), 0)
    assert fault == "" and re.fullmatch("x[0-9]{3}", core.decode(ids))
    for wrong in ((), "ab", (1,)):
        with pytest.raises(ValueError, match="choice is"):
            Grammar.choice(wrong)  # type: ignore[arg-type]


HANGS = Grammar.json_schema({"allOf": [{"type": "integer", "multipleOf": n} for n in (10007, 10009, 10037)]})
SHORT_S = 0.5
TOKENIZER = (TINY_MODEL / "tokenizer.json").read_text(encoding="utf-8")


def gate_of(**options: Any) -> GrammarChecker:
    """Patient with a machine that is busy."""
    return GrammarChecker(lambda: TOKENIZER, (2,), **{"compile_s": HANG_S, **options})


async def verdict(gate: GrammarChecker, grammar: Grammar) -> str:
    try:
        await gate.check(grammar, 4608)
    except ValueError as error:
        return str(error)
    return ""


def test_verdicts_and_a_killed_process() -> None:
    async def main() -> None:
        gate = gate_of()
        assert await verdict(gate, Grammar.json_object()) == ""
        first = gate.pid
        assert "nope" in await verdict(gate, Grammar.json_schema({"type": "nope"}))
        assert first is not None and gate.pid == first
        os.kill(first, signal.SIGKILL)
        assert "ran out" in await verdict(gate, Grammar.regex("b+"))
        assert await verdict(gate, Grammar.regex("c+")) == ""
        assert gate.pid != first
        gate.close()

    asyncio.run(main())


def test_a_grammar_that_hangs_is_given_up_and_the_next_gets_a_process_of_its_own() -> None:
    async def main() -> None:
        gate = gate_of(compile_s=SHORT_S)
        hanging = asyncio.create_task(verdict(gate, HANGS))
        await until_async(lambda: gate.pid)
        first = gate.pid
        assert f"takes more than {SHORT_S:g} s" in await hanging
        assert gate.pid is None
        while "takes more than" in (said := await verdict(gate, Grammar.regex("a+"))):
            pass  # a machine that is busy may need several tries
        assert said == "" and gate.pid not in (None, first)
        gate.close()

    asyncio.run(main())


def test_the_loop_is_free_while_a_grammar_hangs_and_close_ends_it() -> None:
    async def main() -> None:
        gate = gate_of()
        hanging = asyncio.create_task(verdict(gate, HANGS))
        await until_async(lambda: gate.pid)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not hanging.done()
        gate.close()
        assert "ran out" in await hanging
        assert gate.pid is None

    asyncio.run(main())


def test_the_verdict_is_remembered() -> None:
    async def main() -> None:
        gate = gate_of()
        assert await verdict(gate, Grammar.json_object()) == ""
        assert gate.pid is not None
        os.kill(gate.pid, signal.SIGKILL)
        for _ in range(3):
            assert await verdict(gate, Grammar.json_object()) == ""
        gate.close()

    asyncio.run(main())


def test_a_tokenizer_that_cannot_be_read() -> None:
    async def main() -> None:
        gate = GrammarChecker(lambda: "{}", (2,))
        assert "cannot read this tokenizer" in await verdict(gate, Grammar.json_object())
        gate.close()

    asyncio.run(main())


def test_a_tokenizer_that_is_no_fast_one() -> None:
    def refuse() -> str:
        raise ValueError("grammar: it needs a fast tokenizer")

    async def main() -> None:
        gate = GrammarChecker(refuse, (2,))
        with pytest.raises(ValueError, match="fast tokenizer"):
            await gate.check(Grammar.json_object(), 4608)
        gate.close()

    asyncio.run(main())


def test_closed_while_its_process_starts() -> None:
    """``close`` meets a process that does not run yet; nothing may be left behind."""
    entered, closed = threading.Event(), threading.Event()

    def slow_tokenizer() -> str:
        entered.set()
        assert closed.wait(HANG_S)
        return TOKENIZER

    async def main() -> None:
        gate = GrammarChecker(slow_tokenizer, (2,))
        checking = asyncio.create_task(verdict(gate, Grammar.json_object()))
        await asyncio.to_thread(entered.wait, HANG_S)
        gate.close()
        closed.set()
        assert "closed" in await checking
        assert gate.pid is None

    asyncio.run(main())
    assert not [child for child in multiprocessing.active_children() if child.name == "snapstream-grammar"]


def test_checks_that_wait_are_bounded() -> None:
    async def main() -> None:
        gate = gate_of(max_waiting=2)
        grammars = [Grammar.regex(letter) for letter in "abc"]
        results = await asyncio.gather(*(gate.check(grammar, 4608) for grammar in grammars), return_exceptions=True)
        assert results[:2] == [None, None]
        assert isinstance(results[2], QueueFull) and "2 new grammars" in str(results[2])
        await gate.check(grammars[2], 4608)  # room again
        gate.close()

    asyncio.run(main())
