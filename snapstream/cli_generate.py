"""What ``snapstream generate`` does between options and engine: prompt in, streamed text and summary out."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from snapstream.request import RequestOutput, SamplingParams
from snapstream.sizes import format_bytes

if TYPE_CHECKING:
    from snapstream.llm import LLM, Prompt
    from snapstream.startup import Budget


def parse_budget(text: str | None) -> Budget:
    """``"full"`` or a number of slots; whether a row can be that small is the engine's to say."""
    from snapstream.startup import DEFAULT_BUDGET

    if text is None:
        return DEFAULT_BUDGET
    if text == "full":
        return "full"
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"budget is {text!r}; it must be a number of slots or 'full'") from None


def read_prompt(prompt: str | None, file: str | None, stdin: TextIO) -> str:
    """The prompt from the argument, the file (``-`` is stdin) or stdin, without one final newline."""
    if prompt is not None and file is not None:
        raise ValueError("two prompts: give the argument or --file, not both")
    if prompt is not None:
        return prompt
    if file is None and stdin.isatty():
        raise ValueError("no prompt: give it as an argument, with --file, or on stdin")
    text = stdin.read() if file in (None, "-") else Path(str(file)).read_text(encoding="utf-8")
    return text.removesuffix("\n")


def encode_prompt(llm: LLM, text: str, *, chat: bool | None, system: str | None) -> Prompt:
    """The text itself, or the ids of a conversation; ``chat=None``: if the checkpoint has a template."""
    if chat is None:
        chat = llm.tokenizer is not None and llm.tokenizer.chat_template is not None
    if chat:
        head = [{"role": "system", "content": system}] if system is not None else []
        return llm.chat_token_ids([*head, {"role": "user", "content": text}])
    if system is not None:
        raise ValueError("--system needs a chat template; this prompt is sent raw")
    return text


def summary(output: RequestOutput) -> str:
    """One line: what went in, what the row kept, how fast it went."""
    parts = [f"prompt {len(output.prompt_token_ids):,} tokens"]
    kept = output.compression
    if kept is not None:
        parts.append(f"kept {kept.kept_tokens:,}, evicted {kept.evicted_tokens:,}")
        parts.append(f"row {format_bytes(kept.row_bytes)} (full cache of the prompt {format_bytes(kept.full_bytes)})")
    timings = output.timings
    if timings.first_token_ms:
        parts.append(f"first token after {timings.first_token_ms / 1e3:.2f} s")
    speed = f", {1e3 / timings.per_token_ms:,.1f} tokens/s" if timings.per_token_ms else ""
    parts.append(f"output {len(output.token_ids):,} tokens{speed}")
    if output.finish_reason is not None:
        parts.append(output.finish_reason.value)
    return " | ".join(parts)


def as_dict(output: RequestOutput) -> dict[str, Any]:
    """What ``--json`` prints; ``compression`` and ``timings`` have the fields of ``request.py``."""
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason.value if output.finish_reason else None,
        "prompt_tokens": len(output.prompt_token_ids),
        "output_tokens": len(output.token_ids),
        "compression": asdict(output.compression) if output.compression else None,
        "timings": asdict(output.timings),
    }


def stream_answer(
    llm: LLM,
    prompt: Prompt,
    params: SamplingParams,
    *,
    out: TextIO,
    err: TextIO,
    as_json: bool,
) -> int:
    """Stream the answer; returns the exit code. Ctrl-C keeps what was finished, and its summary."""
    output: RequestOutput | None = None
    num_printed, code = 0, 0
    try:
        for output in llm.stream(prompt, params):
            if not as_json:
                out.write(output.text[num_printed:])
                out.flush()
                num_printed = len(output.text)
    except KeyboardInterrupt:
        code = 130
    if output is not None:
        out.write(json.dumps(as_dict(output)) + "\n" if as_json else output.text[num_printed:] + "\n")
        out.flush()
        err.write(summary(output) + "\n")
    if code:
        err.write("interrupted\n")
    return code
