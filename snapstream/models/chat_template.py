"""Renders chat templates with transformers, in a child process with limits on time and memory.

A template is a program of the checkpoint's author. jinja's sandbox hides files and Python's internals, but limits
neither time nor memory: nested ranges, ``'a' * 2000000000`` or ``tojson(indent=100000000)`` each kill a process.

Invariant: a process serves one caller at a time and returns JSON: a text or a reason. A process that exceeds
``RENDER_CPU_S`` is killed by its own timer, and the next conversation starts another. Idle processes are kept, and exit
when their standard input closes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RENDER_CPU_S = 5.0  # processor time, so that load on the machine does not matter
MAX_MEMORY_BYTES = 2 * 2**30  # address space of the process
MAX_CHARS = 2**26  # of a rendered conversation
MAX_IDLE = 4


class TemplateFault(ValueError):
    """A template that cannot be rendered, with the reason; ``line`` for a syntax error."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **variables: Any,
) -> str:
    """The text of a conversation, as of ``apply_chat_template(tokenize=False)``. ValueError if rendering fails."""
    if not messages:
        raise ValueError("the conversation is empty")
    template = tokenizer.get_chat_template(tools=None if tools is None else [dict(one) for one in tools])
    return _ask(
        template,
        # as transformers does with null members
        conversations=[[{name: value for name, value in one.items() if value is not None} for one in messages]],
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **{**tokenizer.special_tokens_map, **variables},
    )


def check_template(template: str) -> None:
    """TemplateFault for a template that does not compile. Also starts the process for the first request."""
    _ask(template, conversations=[])


def _ask(template: str, **arguments: Any) -> str:
    """``arguments`` as ``render_jinja_template`` takes them."""
    idle = _idle(os.getpid())
    child = None
    while idle and (child is None or not child.is_alive):
        child = idle.pop()
    if child is None or not child.is_alive:
        child = _Child()
    try:
        reply = child.ask(template, arguments)
    except BaseException:  # its answer may be incomplete
        child.close()
        raise
    if child.is_alive and not reply.get("is_spent") and len(idle) < MAX_IDLE:
        idle.append(child)
    else:
        child.close()
    if "text" not in reply:
        raise TemplateFault(reply["reason"], reply.get("line"))
    return str(reply["text"])


@functools.cache
def _idle(pid: int) -> list[_Child]:
    """By process: a fork must not share its parent's pipes."""
    return []


class _Child:
    """One process. It ignores Ctrl-C, which a terminal sends to the whole group, and exits when the pipe closes."""

    def __init__(self) -> None:
        path = os.pathsep.join(place or os.getcwd() for place in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},  # a thread reserves address space
            start_new_session=True,
        )
        self._template: str | None = None  # sent last

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, template: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        known = template == self._template
        task = {"template": None if known else template, "arguments": arguments, "cpu_s": RENDER_CPU_S}
        line = json.dumps(task, default=_plain).encode() + b"\n"
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(line)
            stdin.flush()
            answer = stdout.readline()
        except OSError:  # it has ended
            answer = b""
        if not answer.endswith(b"\n"):
            status = self._process.wait()
            if status == -signal.SIGPROF:
                return {"reason": f"it takes more than {RENDER_CPU_S:g} s of processor time"}
            return {"reason": f"the process that renders it ended with status {status}"}
        self._template = template
        reply: dict[str, Any] = json.loads(answer)
        return reply

    def close(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # something unsent
                    pipe.close()
        self._process.wait()


def _plain(value: Any) -> Any:
    """A placeholder for values that JSON does not have."""
    return dict(value) if isinstance(value, Mapping) else f"<{type(value).__name__}>"


def child_main() -> None:
    """Main function of the process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a draining server still renders
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # other output goes to stderr
    from transformers.utils.chat_template_utils import render_jinja_template

    if sys.platform == "linux":  # other systems count differently
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    template = ""
    for line in sys.stdin.buffer:
        try:
            task = json.loads(line)
            signal.setitimer(signal.ITIMER_PROF, task["cpu_s"])  # SIGPROF ends the process, also within a C function
            template = template if task["template"] is None else task["template"]
            answer = json.dumps(_rendered(render_jinja_template, template, task["arguments"]))
        except MemoryError:
            reason = f"it needs more than {MAX_MEMORY_BYTES} bytes of memory"
            answer = json.dumps({"reason": reason, "is_spent": True})  # the heap may not shrink
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(answer.encode() + b"\n")
        answers.flush()


def _rendered(render: Any, template: str, arguments: dict[str, Any]) -> dict[str, Any]:
    from jinja2 import TemplateSyntaxError

    try:
        texts, _ = render(chat_template=template, **arguments)
    except TemplateSyntaxError as error:
        return {"reason": error.message, "line": error.lineno}
    except RecursionError:
        return {"reason": "it is nested too deeply, or calls itself without end"}
    except MemoryError:
        raise
    except Exception as error:  # templates are arbitrary programs
        return {"reason": str(error) or type(error).__name__}
    text = "".join(texts)
    if len(text) > MAX_CHARS:
        return {"reason": f"it makes {len(text)} characters; the limit is {MAX_CHARS}"}
    return {"text": text}


if __name__ == "__main__":
    child_main()
