"""``snapstream generate``: its parts with a fake engine, and the whole with the model in the package."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import snapstream
from snapstream.assets import TINY_MODEL
from snapstream.cli import main
from snapstream.cli.generate import as_dict, encode_prompt, read_prompt, stream_answer, summary
from snapstream.config import EngineConfig, KVBudget
from snapstream.kernels.cpu.looped.build import FOLDER
from snapstream.types import (
    NOT_FINITE,
    Compression,
    FinishReason,
    RequestOutput,
    SampleOutput,
    SamplingParams,
    Timings,
)
from tests.unit.cli.test_cli import assert_refused
from tests.waiting import HANG_S

SOURCE = Path(snapstream.__file__).parents[1]
TINY = SOURCE / "snapstream" / "assets" / "tiny"


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "snapstream.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        pipesize=4096,  # who writes more waits until it is read
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        # A test run in the background may ignore Ctrl-C, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


class FakeTokenizer:
    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template


class FakeLLM:
    """Answers ``pieces`` one by one; an exception among them is raised in its place."""

    def __init__(self, pieces: list[str | BaseException], chat_template: str | None = None) -> None:
        self.pieces = pieces
        self.tokenizer = FakeTokenizer(chat_template)
        self.messages: list[dict[str, str]] = []
        self.config = EngineConfig(budget=KVBudget.of(512), max_model_len=1024)

    def chat_token_ids(self, messages: list[dict[str, str]]) -> list[int]:
        self.messages = messages
        return [7, 8, 9]

    def stream(self, prompt: str | list[int], params: SamplingParams, lora: str) -> Iterator[RequestOutput]:
        sample = SampleOutput(index=0)
        output = RequestOutput(request_id="r", prompt_token_ids=(1, 2, 3), samples=[sample])
        for number, piece in enumerate(self.pieces):
            if isinstance(piece, BaseException):
                raise piece
            sample.text += piece
            sample.token_ids.append(number)
            if number == len(self.pieces) - 1:
                sample.finish_reason = FinishReason.LENGTH
            yield output


def answer(llm: Any, *, as_json: bool = False) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = stream_answer(llm, "hi", SamplingParams(), out=out, err=err, as_json=as_json)
    return code, out.getvalue(), err.getvalue()


def test_answer_streams_each_piece_once() -> None:
    code, out, err = answer(FakeLLM(["one", " two", "", " three"]))
    assert (code, out) == (0, "one two three\n")
    assert err.startswith("prompt 3 tokens |") and err.endswith("output 4 tokens | length\n")


def test_answer_as_json() -> None:
    code, out, _ = answer(FakeLLM(["one", " two"]), as_json=True)
    printed = json.loads(out)
    assert code == 0
    assert printed["text"] == "one two"
    assert printed["token_ids"] == [0, 1]
    assert (printed["prompt_tokens"], printed["output_tokens"]) == (3, 2)
    assert printed["finish_reason"] == "length"
    assert printed["timings"]["total_ms"] == 0.0


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_keeps_what_was_finished(as_json: bool) -> None:
    code, out, err = answer(FakeLLM(["one", " two", KeyboardInterrupt()]), as_json=as_json)
    assert code == 130
    assert (json.loads(out)["text"] if as_json else out) == ("one two" if as_json else "one two\n")
    assert "output 2 tokens" in err and err.endswith("interrupted\n")


def test_ctrl_c_before_the_first_token() -> None:
    assert answer(FakeLLM([KeyboardInterrupt()])) == (130, "", "interrupted\n")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_model_that_fails_ends_with_an_error(as_json: bool) -> None:
    class Failing(FakeLLM):
        def stream(self, prompt: str | list[int], params: SamplingParams, lora: str) -> Iterator[RequestOutput]:
            for output in super().stream(prompt, params, lora):
                output.samples[0].finish_reason = None
                yield output
            output.samples[0].finish_reason, output.samples[0].stop_reason = FinishReason.ERROR, NOT_FINITE
            yield output

    code, out, err = answer(Failing(["one"]), as_json=as_json)
    assert code == 1 and err.endswith(" | error\nerror: logits are not finite\n")
    if as_json:
        assert (json.loads(out)["finish_reason"], json.loads(out)["stop_reason"]) == ("error", NOT_FINITE)


def test_summary_names_what_the_row_kept() -> None:
    output = RequestOutput(
        request_id="r",
        prompt_token_ids=tuple(range(1234)),
        samples=[SampleOutput(index=0, token_ids=[1] * 11, finish_reason=FinishReason.STOP)],
        compression=Compression(
            prompt_tokens=1234,
            kept_tokens=512,
            evicted_tokens=722,
            row_bytes=2**20,
            full_bytes=3 * 2**19,
            compress_ms=1.0,
            ring_tokens=11,
        ),
        timings=Timings(first_token_ms=1500.0, per_token_ms=20.0),
    )
    assert summary(output, 512) == (
        "prompt 1,234 tokens | kept 512, evicted 722 | row 1 MiB (full cache of the prompt 1.50 MiB) | "
        "first token after 1.50 s | output 11 tokens, 50.0 tokens/s | stop"
    )
    output.samples[0].token_ids.append(1)
    assert summary(output, 512).endswith("12 tokens, 50.0 tokens/s | outgrew the ring of 11 recent tokens | stop")
    assert as_dict(output)["has_outgrown_ring"]


def test_summary_of_a_short_prompt_names_the_room_of_the_row() -> None:
    compression = Compression(
        prompt_tokens=12, kept_tokens=12, evicted_tokens=0, row_bytes=2**24, full_bytes=96_000, compress_ms=1.0,
        ring_tokens=500,
    )  # fmt: skip
    output = RequestOutput(
        request_id="r", prompt_token_ids=(1,) * 12, samples=[SampleOutput(index=0)], compression=compression
    )
    assert "row 16 MiB, allocated for prompts of any length, 8,192 slots; the prompt fills 93.8 KiB" in summary(
        output, 8192
    )


@pytest.mark.slow
def test_without_a_compiler_it_says_why_decode_is_slower() -> None:
    """Also where nobody watches: the reason goes to stderr."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "CXX": "/nowhere/g++"}
    command = [sys.executable, "-m", "snapstream.cli", "generate", str(TINY_MODEL), "hi", "--max-tokens", "1"]
    done = subprocess.run([*command, "--max-model-len", "64"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if not any(FOLDER.glob("*.so")):  # libraries that came with the package need none
        assert "decode: eager, because no C++ compiler" in done.stderr


def test_prompt_from_argument_file_and_stdin(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("from ä file\n\n", encoding="utf-8")
    assert read_prompt("given", None, io.StringIO("unread")) == "given"
    assert read_prompt(None, str(file), io.StringIO("unread")) == "from ä file\n"
    file.write_bytes("a\r\nä\r\n".encode("utf-8-sig"))
    assert read_prompt(None, str(file), io.StringIO("unread")) == "a\nä", "as editors on Windows write it"
    assert read_prompt(None, "-", io.StringIO("piped\n")) == "piped"
    assert read_prompt(None, None, io.StringIO("piped")) == "piped"


def test_two_prompts_or_none_are_refused() -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="not both"):
        read_prompt("given", "file.txt", terminal)
    with pytest.raises(ValueError, match="no prompt"):
        read_prompt(None, None, terminal)


def test_chat_follows_the_checkpoint_unless_told() -> None:
    with_template: Any = FakeLLM([], chat_template="{{ messages }}")
    without: Any = FakeLLM([])
    assert encode_prompt(with_template, "hi", chat=None, system="be brief") == [7, 8, 9]
    assert with_template.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    assert encode_prompt(with_template, "hi", chat=False, system=None) == "hi"
    assert encode_prompt(without, "hi", chat=None, system=None) == "hi"
    with pytest.raises(ValueError, match="--system needs a chat template"):
        encode_prompt(without, "hi", chat=None, system="be brief")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["hi", "--max-tokens", "0"], ["max_tokens is 0", ">= 1"]),
        (["hi", "--temperature", "nan"], ["temperature is nan", "0 to 100"]),
        (["hi", "--temperature", "warm"], ["--temperature", "'warm' is not a number"]),
        (["hi", "--budget", "half"], ["--budget", "'half'", "full"]),
        (["hi", "--budget", "12"], ["budget of 12", "36"]),
        (["hi", "--max-rows", "0"], ["max_rows is 0", ">= 1"]),
        (["hi", "--max-rows", "most"], ["--max-rows", "'most'", "'auto'"]),
        (["hi", "--prefill-attention", "quick"], ["'quick'", "sdpa_flash"]),
        (["hi", "--prefill-attention", "sdpa_flash"], ["'sdpa_flash' cannot be used", "NVIDIA GPU", "cpu"]),
        (["hi", "--file", "x"], ["not both"]),
        (["--file", "no-such-file.txt"], ["no-such-file.txt"]),
    ],
)
def test_generate_refuses_in_one_line(options: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(["generate", str(TINY), *options], words, capsys)


def test_generate_end_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        ["generate", str(TINY), "The key of the box is 4711. " * 40, "--raw", "--budget", "64",
         "--max-model-len", "2048", "--max-tokens", "3", "--json"]
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert code == 0, err
    printed = json.loads(out)
    assert 1 <= printed["output_tokens"] <= 3
    compression = printed["compression"]
    assert (compression["kept_tokens"], compression["prompt_tokens"]) == (64, printed["prompt_tokens"])
    assert compression["evicted_tokens"] == printed["prompt_tokens"] - 64
    assert f"evicted {compression['evicted_tokens']:,}" in err


def test_rows_and_kernel_may_be_left_to_the_machine_or_named(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--budget", "64", "--max-model-len", "256", "--max-tokens", "4"]
    answers = []
    for options in (["--max-rows", "auto"], ["--prefill-attention", "reference"]):
        assert main(["generate", str(TINY), "hello", *small, *options]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != ""


@pytest.mark.slow
def test_ctrl_c_ends_generate_at_once() -> None:
    # Hot sampling rarely draws the end token, and so long an answer fills the pipe: it is still being written when the
    # signal comes, however fast the machine is.
    process = start(
        "generate", str(TINY), "hello", "--raw", "--temperature", "50", "--seed", "4",
        "--max-tokens", "15000",
    )  # fmt: skip
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, err
    assert first and rest.endswith("\n")
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "interrupted" and err.splitlines()[-2].startswith("prompt ")
