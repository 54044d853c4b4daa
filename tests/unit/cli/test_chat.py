"""``snapstream chat``: a conversation with a fake engine, through a pipe, and at a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

import snapstream
from snapstream.assets import TINY_MODEL
from snapstream.cli import main
from snapstream.cli.chat import Conversation, converse, joined, printable
from snapstream.cli.demo import kept_shares
from snapstream.config import EngineConfig, KVBudget
from snapstream.llm import LLM
from snapstream.types import FinishReason, KeptBitmap, RequestOutput, SampleOutput, SamplingParams
from tests.waiting import HANG_S

SOURCE = Path(snapstream.__file__).parents[1]
SLOTS = 256


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class FakeTokenizer:
    """Its template names the tags of reasoning, which are ordinary text."""

    chat_template = "{{ messages }} <think>"
    all_special_tokens = ["<eos>"]

    def __init__(self, ending: str) -> None:
        self.ending = ending

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return self.ending


class FakeLLM:
    """Answers ``pieces`` one by one; an exception among them is raised in its place."""

    def __init__(self, *pieces: str | BaseException, ending: str = "assistant:") -> None:
        self.pieces = pieces
        self.tokenizer = FakeTokenizer(ending)
        self.messages: list[dict[str, str]] = []
        self.config = EngineConfig(budget=KVBudget.of(512), max_model_len=1024)
        self.params = SamplingParams()

    def chat_token_ids(self, messages: list[dict[str, str]]) -> list[int]:
        self.messages = messages
        return list(range(sum(len(message["content"]) for message in messages)))

    def stream(
        self, prompt: list[int], params: SamplingParams, *, budget: int | None, lora: str
    ) -> Generator[RequestOutput, None, None]:
        self.params = params
        sample = SampleOutput(index=0)
        output = RequestOutput(request_id="r", prompt_token_ids=tuple(prompt), samples=[sample])
        for number, piece in enumerate(self.pieces):
            if isinstance(piece, BaseException):
                raise piece
            sample.add_text(piece)
            sample.token_ids.append(number)
            if number == len(self.pieces) - 1:
                sample.finish_reason = FinishReason.STOP
            yield output


def talk(llm: Any, *lines: str, out: io.StringIO | None = None, **options: Any) -> tuple[Conversation, str, str]:
    out, err = out or io.StringIO(), io.StringIO()
    hides = options.pop("hides_reasoning", False)
    conversation = Conversation(llm, SamplingParams(), out=out, err=err, **options)
    conversation.hides_reasoning = hides
    converse(conversation, iter(lines))
    return conversation, out.getvalue(), err.getvalue()


def test_every_message_is_sent_with_those_before_it() -> None:
    llm = FakeLLM("Yes", ".")
    conversation, out, err = talk(llm, "One?", "", "Two?", system="Be brief.")
    assert (out, err) == ("Yes.\nYes.\n", "")
    assert [message["content"] for message in llm.messages] == ["Be brief.", "One?", "Yes.", "Two?"]
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"] + [
        "user", "assistant",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pieces", "ending"),
    [(("<thi", "nk>\nwell", " now</think>", "\n\nYes"), "assistant:"), (("well now</thi", "nk>Yes"), "<think>\n")],
)
def test_reasoning_is_dim_on_a_terminal_and_in_no_pipe(pieces: tuple[str, ...], ending: str) -> None:
    conversation, out, _ = talk(FakeLLM(*pieces, ending=ending), "Hi", out=Terminal())
    assert out == "\x1b[2mwell now\x1b[0m\n\nYes\n"
    assert conversation.messages[-1]["content"] == "Yes"
    assert talk(FakeLLM(*pieces, ending=ending), "Hi")[1] == "Yes\n"
    assert talk(FakeLLM(*pieces, ending=ending), "Hi", out=Terminal(), hides_reasoning=True)[1] == "Yes\n"


def test_channels_of_harmony_are_reasoning_and_answer() -> None:
    pieces = (
        "<|channel|>analysis<|mess",
        "age|>well now<|end|><|start|>assistant",
        "<|channel|>final<|message|>Yes",
        ".",
    )
    llm = FakeLLM(*pieces)
    llm.tokenizer.chat_template = "<|start|>{{ messages }}<|channel|><|message|>"
    llm.tokenizer.all_special_tokens = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
    conversation, out, _ = talk(llm, "Hi", out=Terminal())
    assert out == "\x1b[2mwell now\x1b[0m\n\nYes.\n"
    assert conversation.messages[-1]["content"] == "Yes."
    assert not llm.params.skip_special_tokens, "the text must have the tags"


def test_ctrl_c_stops_the_answer_and_not_the_conversation() -> None:
    conversation, out, _ = talk(FakeLLM("one", " two", KeyboardInterrupt()), "Hi", "More")
    assert out == "one two\none two\n"
    assert [message["content"] for message in conversation.messages] == ["Hi", "one two", "More", "one two"]
    conversation, out, _ = talk(FakeLLM(KeyboardInterrupt()), "Hi")
    assert conversation.messages == [], "what had no answer is not in the conversation"


def test_an_answer_gets_the_tokens_that_are_left() -> None:
    llm = FakeLLM("x")
    talk(llm, "y" * 1000)
    assert llm.params.max_tokens == 24
    talk(llm, "y" * 1000, max_tokens=7)
    assert llm.params.max_tokens == 7
    conversation, _, err = talk(llm, "y" * 1024)
    assert "error: the conversation has 1,024 tokens; the limit is 1,024: use /clear" in err
    assert conversation.messages == [] and conversation.has_failed


def test_a_model_that_fails_is_an_error() -> None:
    class Failing(FakeLLM):
        def stream(self, *args: Any, **options: Any) -> Generator[RequestOutput, None, None]:
            for output in super().stream(*args, **options):
                output.samples[0].finish_reason = FinishReason.ERROR
                output.samples[0].stop_reason = "logits are not finite"
                yield output

    conversation, _, err = talk(Failing("x"), "Hi")
    assert conversation.has_failed and err == "error: logits are not finite\n"


def test_commands(tmp_path: Path) -> None:
    llm = FakeLLM("Yes")
    file = tmp_path / "chat.json"
    conversation, out, err = talk(llm, "/system Be brief.", "Hi", f"/save {file}", "/clear", "/system", "/exit", "Hi")
    assert json.loads(file.read_text()) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes"},
    ]
    assert conversation.messages == [{"role": "system", "content": "Be brief."}] and out == "Yes\n"
    assert err == f"system: Be brief.\n3 messages in {file}\nsystem: Be brief.\n"
    _, _, err = talk(llm, "/nonsense", "/save", "/kept", "/help")
    assert err.splitlines()[:3] == [
        "error: /nonsense is not a command; /help lists them",
        "error: /save needs the name of a file",
        "error: there is no answer yet",
    ]
    for command in ("/budget", "/kept", "/system", "/clear", "/save", "/help", "/exit"):
        assert f"\n{command} " in err


def test_a_path_is_a_message() -> None:
    llm = FakeLLM("Yes")
    assert talk(llm, "/etc/hosts is what?")[1:] == ("Yes\n", "")


def test_lines_between_quotes_are_one_message() -> None:
    lines = iter(['"""', "a", "", 'b"""', "c", '"""d"""', '"""e', "f"])
    assert list(joined(lambda is_continued: next(lines, None))) == ["a\n\nb", "c", "d", "e\nf"]


def test_control_characters_do_not_reach_a_terminal() -> None:
    assert printable("a\x1b[31m\tb\n\x9b2J\x07ä\x7f\r") == "a[31m\tb\n2Jä"


def test_the_bitmap_of_a_row_as_shares() -> None:
    bitmap = KeptBitmap(num_layers=2, num_kv_heads=1, num_tokens=10, bits=bytes([0b11, 0b10, 0b1, 0b10]))
    assert kept_shares(bitmap) == [1.0, 0.5, 0, 0, 0, 0, 0, 0, 0, 1.0]


def test_a_model_without_a_template_is_refused() -> None:
    llm = FakeLLM("x")
    llm.tokenizer.chat_template = None  # type: ignore[assignment]
    with pytest.raises(ValueError, match="no chat template; snapstream generate --raw"):
        talk(llm, "Hi")


@pytest.fixture(scope="module")
def tiny() -> Iterator[LLM]:
    with LLM(TINY_MODEL, budget=SLOTS, max_rows=1, max_model_len=1024, prefix_store="auto", progress=False) as llm:
        yield llm


def test_the_row_of_an_answer_is_shown(tiny: LLM) -> None:
    params = SamplingParams(temperature=0, return_kept="bitmap")
    err = io.StringIO()
    conversation = Conversation(tiny, params, max_tokens=8, out=io.StringIO(), err=err)
    long = "The grass is green and the sky is blue. " * 20
    converse(conversation, iter(["Hi", "/kept", long, "/kept", "/budget 128", long, "/kept"]))
    lines = [line for line in err.getvalue().splitlines() if not line.startswith("(the answer ends")]
    short, whole, *rest = lines
    assert "evicted 0" in short and whole == "the row holds the whole prompt"
    shown = [line for line in rest if line.startswith("prompt ")]
    assert [f"kept {slots}, evicted" in line for slots, line in zip((SLOTS, 128), shown, strict=True)] == [True] * 2
    assert sum(line.startswith("  |") for line in rest) == 8 and "budget: 128 of 256 slots" in rest


@pytest.mark.parametrize(
    ("command", "words"),
    [("/budget 12", "budget of 12"), ("/budget 999", "larger than a row"), ("/budget half", "budget is 'half'")],
)
def test_budgets_that_no_row_can_have_are_refused(tiny: LLM, command: str, words: str) -> None:
    conversation, _, err = talk(tiny, command)
    assert words in err and conversation.budget is None


@pytest.mark.parametrize(
    ("options", "words"), [(["--temperature", "-1"], "temperature is -1"), (["--max-tokens", "-1"], "max_tokens is -1")]
)
def test_wrong_options_are_refused_before_the_model_is_read(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "no-such-folder", *options]) == 2
    assert words in capsys.readouterr().err


COMMAND = [sys.executable, "-m", "snapstream.cli", "chat", "--temperature", "0", "--max-model-len", "512"]
QUESTION = "The key of the box is 4711. What is the key of the box?"


@pytest.mark.slow
def test_a_pipe_gets_answers_alone() -> None:
    done = subprocess.run(
        [*COMMAND, "--max-tokens", "8"], input=f"{QUESTION}\n/kept\n", capture_output=True, text=True, timeout=HANG_S,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "4711"), done.stderr
    assert "the row holds the whole prompt" in done.stderr and ">>>" not in done.stdout + done.stderr


@pytest.mark.slow
def test_at_a_terminal_it_prompts_stops_and_leaves(tmp_path: Path) -> None:
    """Ctrl-C while it waits starts a new line, Ctrl-D ends the command; typed lines are there the next time."""
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "XDG_STATE_HOME": str(tmp_path), "TERM": "dumb"}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(COMMAND, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True,
                               preexec_fn=lambda: take_terminal())  # fmt: skip
    os.close(theirs)
    try:
        wait_for(ours, ">>> ")
        os.write(ours, f"{QUESTION}\n".encode())
        assert "4711" in wait_for(ours, ">>> ").partition("\n")[2]
        os.write(ours, b"half a line")
        wait_for(ours, "half a line")
        wait_for(ours, ">>> ", again=b"\x03")  # Python may miss one just before it waits for a key
        os.write(ours, b"\x04")
        assert process.wait(HANG_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    history = tmp_path / "snapstream" / "chat_history"
    assert QUESTION in history.read_text().replace("\\040", " ")
    assert history.stat().st_mode & 0o077 == 0


def take_terminal() -> None:
    """Make the terminal at stdin the controlling one of this session, so that its Ctrl-C is a signal, also where the
    tests run in the background of a shell that ignores it there.
    """
    import fcntl
    import signal
    import termios

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def wait_for(terminal: int, text: str, again: bytes = b"") -> str:
    """What a terminal showed until ``text``; AssertionError where it does not come.

    ``again`` is typed, and once more after every silence.
    """
    shown, end = "", time.monotonic() + HANG_S
    os.write(terminal, again)
    while time.monotonic() < end:
        if not select.select([terminal], [], [], 10.0)[0]:
            os.write(terminal, again)
        else:
            shown += re.sub(r"\x1b\[\?2004[hl]", "", os.read(terminal, 4096).decode(errors="replace"))
            if text in shown:
                return shown
    raise AssertionError(f"{text!r} did not come; there was {shown!r}")
