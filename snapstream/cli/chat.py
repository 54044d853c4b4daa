"""``snapstream chat``: a conversation in the terminal, through the model's chat template.

Lines of stdin are messages, or commands that begin with a slash. Answers go to stdout, everything else to stderr, so a
pipe receives answers alone. Control characters of an answer never reach a terminal: a model may not move its cursor.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from snapstream.assets import TINY_MODEL
from snapstream.cli.flags import ONE_SEQUENCE_ALIASES, SAMPLING_ALIASES, Flags, ModelOrTiny
from snapstream.cli.generate import summary
from snapstream.config import EngineOptions
from snapstream.config.engine import setting
from snapstream.config.values import as_count
from snapstream.types import FinishReason, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from snapstream.llm import LLM
    from snapstream.server.openai.answer_reader import HarmonySplitter, ReasoningSplitter

HELP = """Chat with a model in the terminal; the conversation so far is sent with every message.

MODEL is a checkpoint folder with a chat template; without it the tiny model that ships with the package answers. Lines
of a pipe are messages, too. /help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves.

\b
Examples:
  snapstream chat
  snapstream chat Qwen3-0.6B/ --budget 4096 --hide-reasoning
  echo "Why is the sky blue?" | snapstream chat Llama-3.2-1B-Instruct/
"""

COMMANDS = """\
/budget [N|full]  slots of a row for the next answers; alone: show them
/kept             what the row of the last answer kept of the conversation
/system [TEXT]    set the system message; alone: show it
/clear            forget the conversation, and keep the system message
/save FILE        write the conversation as JSON
/help             this list
/exit             leave, as Ctrl-D does
\"\"\"               begins and ends a message of several lines"""

ENGINE = Flags(
    defaults={"max_rows": 1, "prefix_store": "auto"},
    words={
        "budget": "Slots of the row, or 'full'; /budget sets less. At most max_model_len.",
        "max_rows": "Rows to allocate; auto: as many as fit. A conversation uses one.",
        "loras": "LoRA adapter of PEFT that answers: folder or hub id.",
        "prefix_store": "Host memory for the conversation so far, so that a message computes only what is new; auto: a "
        "part of what is free, 0: none.",
    },
    without=("max_waiting",),
    aliases=ONE_SEQUENCE_ALIASES,
)
SAMPLING = Flags(aliases=SAMPLING_ALIASES)
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
QUOTES = '"""'
ENDING_TOKENS = 8  # of a prompt, in which its template may open or close reasoning
HISTORY_LINES = 1000


@dataclass(frozen=True, kw_only=True)
class ChatFlags:
    """How answers are sampled and shown."""

    system: str | None = setting(None, "System message.")
    max_tokens: int = setting(0, "Maximum tokens of an answer. 0: what max_model_len leaves.")
    temperature: float = setting(0.7, "Sampling temperature; 0 is greedy.")
    top_p: float = setting(1.0, "Sample among the likeliest tokens of this probability.")
    seed: int | None = setting(None, "Same seed, same answers.")
    hides_reasoning: bool = setting(
        False, "Do not show the model's reasoning, which a terminal shows dim and a pipe never.",
        flag="--hide-reasoning",
    )  # fmt: skip

    def sampling(self) -> SamplingParams:
        """ValueError for values out of range."""
        as_count("max_tokens", self.max_tokens, 0)
        return SamplingParams(
            max_tokens=self.max_tokens or 1,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            return_kept="bitmap",
        )


def chat(
    flags: Annotated[ChatFlags, SAMPLING],
    engine: Annotated[EngineOptions, ENGINE],
    model: ModelOrTiny = None,
) -> None:
    params = flags.sampling()
    from snapstream.llm import LLM

    with LLM(TINY_MODEL if model is None else model, engine, progress=sys.stderr.isatty()) as llm:
        talk = Conversation(llm, params, max_tokens=flags.max_tokens, system=flags.system)
        talk.hides_reasoning = flags.hides_reasoning
        if sys.stdin.isatty():
            raise typer.Exit(converse(talk, typed_lines(history_file())))
        raise typer.Exit(converse(talk, piped_lines(sys.stdin)))


def converse(talk: Conversation, lines: Iterator[str]) -> int:
    """Answer every message; the exit code is 1 if the last answer failed."""
    for line in lines:
        try:
            if talk.take(line):
                break
        except (ValueError, OSError) as error:
            talk.note(f"error: {' '.join(str(error).split())}")
            talk.has_failed = True
    return int(talk.has_failed)


def piped_lines(stdin: TextIO) -> Iterator[str]:
    """Messages of a pipe or a file."""
    lines = (line.rstrip("\r\n") for line in stdin)
    return joined(lambda more: next(lines, None))


def typed_lines(history: Path | None) -> Iterator[str]:
    """Messages typed at a terminal, with line editing; ``history`` keeps them for the next time."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError):  # Python may be built without it
            import readline

            readline.set_history_length(HISTORY_LINES)
            if history is not None:
                with contextlib.suppress(OSError):
                    history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    history.touch(mode=0o600)
                    readline.read_history_file(history)
                    stack.callback(readline.write_history_file, history)
        yield from joined(_typed)


def _typed(is_continued: bool) -> str | None:
    """A line; None at Ctrl-D, an empty one at Ctrl-C."""
    try:
        return input("... " if is_continued else ">>> ")
    except EOFError:
        print(file=sys.stderr)
        return None
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return ""


def joined(read: Callable[[bool], str | None]) -> Iterator[str]:
    """Messages of lines; those between a line of three quotes and the next are one message."""
    while (line := read(False)) is not None:
        if not line.lstrip().startswith(QUOTES):
            yield line
            continue
        parts = [line.lstrip()[len(QUOTES) :]]
        while not parts[-1].rstrip().endswith(QUOTES) and (more := read(True)) is not None:
            parts.append(more)
        yield "\n".join(parts).rstrip().removesuffix(QUOTES).strip("\n")


def history_file() -> Path | None:
    """Under $XDG_STATE_HOME; None where there is no home folder."""
    own = os.environ.get("XDG_STATE_HOME")
    try:
        return Path(own or Path.home() / ".local/state") / "snapstream" / "chat_history"
    except RuntimeError:
        return None


class Conversation:
    """The messages of a chat, and the commands on them."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        *,
        max_tokens: int = 0,
        system: str | None = None,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ) -> None:
        """``max_tokens`` of an answer, 0: what the length limit leaves. ValueError without a chat template."""
        if llm.tokenizer is None or llm.tokenizer.chat_template is None:
            raise ValueError("this checkpoint has no chat template; snapstream generate --raw continues a text")
        # A package with optional dependencies: only these modules of it need none.
        from snapstream.server.openai.answer_reader import choose_reasoning, has_special_tags

        self._llm, self._params, self._max_tokens = llm, params, max_tokens
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self._parser = choose_reasoning("auto", str(llm.tokenizer.chat_template))
        if has_special_tags(self._parser, llm.tokenizer.all_special_tokens):  # which answers must keep
            self._params = replace(params, skip_special_tokens=False)
        self.system = system
        self.turns: list[dict[str, str]] = []
        self.budget: int | None = None  # of the next answers; None: the engine's
        self.last: RequestOutput | None = None
        self.hides_reasoning = False
        self.has_failed = False
        self._commands: dict[str, Callable[[str], Any]] = {
            "/budget": self._set_budget, "/kept": self._show_kept, "/system": self._set_system,
            "/clear": self._clear, "/save": self._save, "/help": lambda _: self.note(COMMANDS),
        }  # fmt: skip

    @property
    def messages(self) -> list[dict[str, str]]:
        """All messages, the system's first."""
        return [*([] if self.system is None else [{"role": "system", "content": self.system}]), *self.turns]

    def note(self, text: str) -> None:
        """A line that is not part of an answer."""
        self._err.write(text + "\n")
        self._err.flush()

    def take(self, line: str) -> bool:
        """Run a command or answer a message; whether the user wants to leave. ValueError for what cannot be done."""
        name, _, rest = line.strip().partition(" ")
        if name in ("/exit", "/quit", "/bye"):
            return True
        if name in self._commands:
            self._commands[name](rest.strip())
        elif name.startswith("/") and "\n" not in line and "/" not in name[1:]:
            raise ValueError(f"{name} is not a command; /help lists them")
        elif line.strip():
            self.answer(line)
        return False

    def answer(self, text: str) -> None:
        """Stream the answer to a message. What Ctrl-C cuts short stays in the conversation.

        ValueError, with the conversation as it was, for one that is too long.
        """
        self.has_failed = False
        turns = [*self.turns, {"role": "user", "content": text}]
        system = self.messages[: len(self.messages) - len(self.turns)]
        ids = self._llm.chat_token_ids([*system, *turns])
        most = self._llm.config.max_model_len
        left = most - len(ids)
        if left < 1:
            raise ValueError(f"the conversation has {len(ids):,} tokens; the limit is {most:,}: use /clear")
        params = replace(self._params, max_tokens=min(self._max_tokens or left, left))
        shown = _Shown(self._splitter(ids), self._out, hides_reasoning=self.hides_reasoning)
        stream = self._llm.stream(ids, params, budget=self.budget, lora=self._llm.config.only_lora)
        output: RequestOutput | None = None
        try:
            for output in stream:
                shown.show(output.text)
        except KeyboardInterrupt:
            self.note("")
        finally:
            stream.close()  # type: ignore[attr-defined]  # a generator
        shown.finish()
        if output is None:
            return
        self.last = output
        self.turns = [*turns, {"role": "assistant", "content": shown.answer.strip()}]
        if output.finish_reason is FinishReason.ERROR:
            self.has_failed = True
            raise ValueError(str(output.samples[0].stop_reason))
        if output.finish_reason is FinishReason.LENGTH:
            self.note(f"(the answer ends here: {params.max_tokens:,} tokens)")

    def _splitter(self, ids: list[int]) -> ReasoningSplitter | HarmonySplitter:
        from snapstream.server.openai.answer_reader import TAGS, find_answer_start, splitter_of

        assert self._llm.tokenizer is not None
        ending = str(self._llm.tokenizer.decode(ids[-ENDING_TOKENS:], skip_special_tokens=False))
        return splitter_of(find_answer_start(self._parser, ending), TAGS[self._parser])

    def _set_budget(self, text: str) -> None:
        most = self._llm.config.budget.capacity
        if text == "full" or (text.isdecimal() and int(text) == most):
            self.budget = None
        elif text:
            budget = as_count("budget", int(text) if text.isdecimal() else text, 1)
            self._llm.requests([0], budget=budget)  # refuses one that no row can have
            self.budget = budget
        self.note(f"budget: {self.budget or most:,} of {most:,} slots")

    def _set_system(self, text: str) -> None:
        if text:
            self.system = text
        self.note(f"system: {self.system or '(none)'}")

    def _clear(self, _: str) -> None:
        self.turns, self.last = [], None

    def _save(self, text: str) -> None:
        if not text:
            raise ValueError("/save needs the name of a file")
        Path(text).expanduser().write_text(json.dumps(self.messages, indent=1, ensure_ascii=False) + "\n", "utf-8")
        self.note(f"{len(self.messages)} messages in {text}")

    def _show_kept(self, _: str) -> None:
        if self.last is None or self.last.compression is None:
            raise ValueError("there is no answer yet")
        slots = self._llm.config.budget.capacity if self.budget is None else self.budget
        self.note(summary(self.last, slots))
        bitmap = self.last.compression.kept_bitmap
        if bitmap is None:
            self.note("the row holds the whole prompt")
            return
        from snapstream.cli.demo import kept_shares, strip

        self.note("the prompt from its first token to its last; darker: kept by more layers and heads")
        for line in strip(kept_shares(bitmap), range(0)):
            self.note(line)


class _Shown:
    """One answer on its way to ``out``: reasoning dim on a terminal and nowhere else."""

    def __init__(self, splitter: ReasoningSplitter | HarmonySplitter, out: TextIO, *, hides_reasoning: bool) -> None:
        self._splitter, self._out = splitter, out
        self._is_terminal = out.isatty()
        self._shows_reasoning = self._is_terminal and not hides_reasoning
        self._num_read = 0
        self._is_dim = False
        self.answer = ""

    def show(self, text: str) -> None:
        """``text``: of the whole answer so far."""
        piece, self._num_read = text[self._num_read :], len(text)
        self._write(*self._splitter.push(piece))

    def finish(self) -> None:
        self._write(*self._splitter.finish())
        self._put((PLAIN if self._is_dim else "") + "\n")

    def _write(self, reasoning: str, answer: str) -> None:
        if reasoning and self._shows_reasoning:
            self._put(("" if self._is_dim else DIM) + printable(reasoning))
            self._is_dim = True
        if answer:
            self._put((PLAIN + "\n\n" if self._is_dim else "") + (printable(answer) if self._is_terminal else answer))
            self._is_dim = False
            self.answer += answer

    def _put(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def printable(text: str) -> str:
    """Without control characters but newline and tab."""
    return "".join(char for char in text if char in "\n\t" or not (char < " " or "\x7f" <= char < "\xa0"))
