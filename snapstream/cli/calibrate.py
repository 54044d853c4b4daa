"""``snapstream calibrate``: options to ``snapstream/calibration``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from snapstream.cli.flags import whole_option
from snapstream.cli.text import decode_text
from snapstream.config.values import DType

HELP = """Measure which kv heads of a model need slots, once, and write a profile for --heads.

Every head in turn forgets the middle of a prompt, and what the model's answers lose says how many slots the head
gets. Rows keep their size. It reads generated documents with questions, or windows of a text of yours.

\b
Examples:
  snapstream calibrate Qwen3-0.6B/ -o heads.json
  snapstream calibrate Qwen3-0.6B/ -o heads.json --text manual.txt --prompt-len 8192
  snapstream serve Qwen3-0.6B/ --heads heads.json --budget 2048
"""


def calibrate(
    model: Annotated[Path, typer.Argument(help="Checkpoint folder.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.", show_default=False)],
    text: Annotated[Path | None, typer.Option(help="Text to calibrate on. Default: generated documents.")] = None,
    prompt_len: Annotated[int, whole_option("Tokens of a prompt; as long as yours are.")] = 2048,
    texts: Annotated[int, whole_option("Documents or windows to read.")] = 20,
    dtype: Annotated[DType, typer.Option(help="Of the computation.")] = "float32",
    device: Annotated[str, typer.Option(help="Where it runs.", metavar="cpu|cuda")] = "cpu",
) -> None:
    from snapstream.calibration.calibrate import calibrate as measure

    if output.is_dir() or not output.parent.is_dir():  # said before minutes of work
        raise ValueError(f"--output is {output}; it must be a file in a folder that exists")
    own = None if text is None else decode_text(text.read_bytes(), str(text))
    profile = measure(
        model, text=own, prompt_len=prompt_len, num_texts=texts, dtype=dtype, device=device,
        progress=sys.stderr.isatty(),
    )  # fmt: skip
    profile.write(output)
    largest = sorted((share for layer in profile.shares for share in layer), reverse=True)
    half = next(n for n in range(1, len(largest) + 1) if sum(largest[:n]) >= 0.5)
    typer.echo(f"{output}: {half} of {len(largest)} kv heads get half of the slots")
