"""``snapstream generate``: options to an engine; prompt in, streamed text and summary out."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from snapstream.cli.flags import ONE_SEQUENCE_ALIASES, SAMPLING_ALIASES, Flags, Model, read_input
from snapstream.config import EngineOptions
from snapstream.config.engine import setting
from snapstream.config.values import format_bytes
from snapstream.types import FinishReason, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from snapstream.llm import LLM, Prompt

HELP = """Answer one prompt; text streams to stdout, one summary line goes to stderr.

MODEL is a checkpoint folder (config.json, safetensors, tokenizer.json), a GGUF file or a hub id.

\b
Examples:
  snapstream generate Qwen3-0.6B/ "Why is the sky blue?"
  snapstream generate Llama-3.2-1B-Instruct/ --file report.txt --budget 4096
  cat question.txt | snapstream generate Qwen2.5-0.5B/ --raw --temperature 0.7 --seed 1
"""


INTERRUPTED = 130  # exit code


@dataclass(frozen=True, kw_only=True)
class GenerateFlags:
    """The prompt, how its answer is sampled, and how it is shown."""

    file: str | None = setting(None, "Read the prompt from this file; - is stdin.")
    max_tokens: int = setting(256, "Maximum tokens to generate.")
    temperature: float = setting(0.0, "Sampling temperature; 0 is greedy.")
    seed: int | None = setting(None, "Same seed, same output.")
    chat: bool | None = setting(None, "Use the chat template or not. Default: if there is one.", flag="--chat/--raw")
    system: str | None = setting(None, "System message; needs the chat template.")
    as_json: bool = setting(False, "Print one JSON object at the end.", flag="--json")


ENGINE = Flags(
    defaults={"max_rows": 1},
    words={
        "budget": "Slots of the row, or 'full'. At most max_model_len.",
        "max_rows": "Rows to allocate; auto: as many as fit. One prompt uses one.",
        "loras": "LoRA adapter of PEFT that answers: folder or hub id.",
    },
    without=("max_waiting",),
    aliases=ONE_SEQUENCE_ALIASES,
)
REQUEST = Flags(aliases=SAMPLING_ALIASES | {"file": ("-f",)})


def generate(
    model: Model,
    flags: Annotated[GenerateFlags, REQUEST],
    engine: Annotated[EngineOptions, ENGINE],
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; without it or --file: stdin.", show_default=False)
    ] = None,
) -> None:
    from snapstream.llm import LLM
    from snapstream.startup.notes import describe_decode

    params = SamplingParams(max_tokens=flags.max_tokens, temperature=flags.temperature, seed=flags.seed)
    text = read_prompt(prompt, flags.file, sys.stdin)
    progress = sys.stderr.isatty()
    with LLM(model, engine, progress=progress) as llm:
        if not progress and (reason := describe_decode(llm.model_config, engine, llm.config)):  # else it was printed
            print(reason, file=sys.stderr)
        encoded = encode_prompt(llm, text, chat=flags.chat, system=flags.system)
        raise typer.Exit(stream_answer(llm, encoded, params, out=sys.stdout, err=sys.stderr, as_json=flags.as_json))


def read_prompt(prompt: str | None, file: str | None, stdin: TextIO) -> str:
    """The prompt from the argument, the file (``-`` is stdin) or stdin, without byte-order mark and final newline."""
    if prompt is not None and file is not None:
        raise ValueError("two prompts: give the argument or --file, not both")
    if prompt is not None:
        return prompt
    text = read_input(file, stdin, "no prompt: give it as an argument, with --file, or on stdin")
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n")


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


def summary(output: RequestOutput, slots: int) -> str:
    """One line: what went in, what a row of ``slots`` kept, how fast it went."""
    parts = [f"prompt {len(output.prompt_token_ids):,} tokens"]
    kept = output.compression
    if kept is not None:
        parts.append(f"kept {kept.kept_tokens:,}, evicted {kept.evicted_tokens:,}")
        row, full = format_bytes(kept.row_bytes), format_bytes(kept.full_bytes)
        if kept.row_bytes > kept.full_bytes:
            parts.append(f"row {row}, allocated for prompts of any length, {slots:,} slots; the prompt fills {full}")
        else:
            parts.append(f"row {row} (full cache of the prompt {full})")
    timings = output.timings
    if timings.first_token_ms:
        parts.append(f"first token after {timings.first_token_ms / 1e3:.2f} s")
    speed = f", {1e3 / timings.per_token_ms:,.1f} tokens/s" if timings.per_token_ms else ""
    parts.append(f"output {len(output.token_ids):,} tokens{speed}")
    if kept is not None and output.has_outgrown_ring:
        parts.append(f"outgrew the ring of {kept.ring_tokens:,} recent tokens")
    if output.finish_reason is not None:
        parts.append(output.finish_reason.value)
    return " | ".join(parts)


def as_dict(output: RequestOutput) -> dict[str, Any]:
    """What ``--json`` prints; ``compression`` and ``timings`` have the fields of ``types.py``."""
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason.value if output.finish_reason else None,
        "stop_reason": output.samples[0].stop_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "output_tokens": len(output.token_ids),
        "has_outgrown_ring": output.has_outgrown_ring,
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
    """Stream the answer; the exit code is 1 if the model fails. Ctrl-C keeps what was finished, and its summary."""
    output: RequestOutput | None = None
    num_printed, code = 0, 0
    try:
        for output in llm.stream(prompt, params, lora=llm.config.only_lora):
            if not as_json:
                out.write(output.text[num_printed:])
                out.flush()
                num_printed = len(output.text)
    except KeyboardInterrupt:
        code = INTERRUPTED
    if output is not None:
        out.write(json.dumps(as_dict(output)) + "\n" if as_json else output.text[num_printed:] + "\n")
        out.flush()
        err.write(summary(output, llm.config.budget.capacity) + "\n")
        if output.finish_reason is FinishReason.ERROR:
            err.write(f"error: {output.samples[0].stop_reason}\n")
            code = code or 1
    if code == INTERRUPTED:
        err.write("interrupted\n")
    return code
