"""``snapstream quantize`` and ``snapstream calibrate``: what is computed once per checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from snapstream.cli.flags import Model, check_output, whole_option
from snapstream.config.values import DType, read_text
from snapstream.config.weights import DEFAULT_GROUP, QuantizedDType, WeightFormat, describe_layers
from snapstream.models.hub import local_folder

QUANTIZE_HELP = """Write a checkpoint whose layers are int8 or int4, which transformers and vLLM read as well.

The matrices of the layers become whole numbers in groups with scales (compressed-tensors, pack-quantized: W8A16 or
W4A16); with int4 those around attention are int8, as they are with --weights int4 of other commands, unless
--attention int4 asks for one width. Embeddings and norms stay as they are stored. It takes the memory of one shard.

\b
Examples:
  snapstream quantize Qwen3-4B/ Qwen3-4B-int4/ --weights int4
  snapstream quantize Qwen3-4B/ Qwen3-4B-int8/ --weights int8 --group 128
"""


def quantize(
    model: Annotated[Path, typer.Argument(help="Checkpoint folder or hub id.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.", show_default=False)],
    weights: Annotated[QuantizedDType, typer.Option(help="Format of the layers' matrices.")] = "int8",
    attention: Annotated[QuantizedDType, typer.Option(help="Format of the attention projections.")] = "int8",
    group: Annotated[int, whole_option("Numbers that share a scale: 32, 64 or 128.")] = DEFAULT_GROUP,
) -> None:
    layers = WeightFormat(dtype=weights, group=group)
    around = WeightFormat(dtype=attention, group=group)
    from snapstream.models.quantize import quantize_checkpoint

    quantize_checkpoint(local_folder(model), out, layers, lambda line: print(line, file=sys.stderr), attention=around)
    typer.echo(f"{out}: {describe_layers(layers, around)}")


CALIBRATE_HELP = """Measure which kv heads of a model need slots, once, and write a profile for --heads.

Every head in turn forgets the middle of a prompt, and what the model's answers lose says how many slots the head
gets. Rows keep their size. It reads generated documents with questions, or windows of a text of yours.

\b
Examples:
  snapstream calibrate Qwen3-0.6B/               # then: snapstream serve Qwen3-0.6B/ --heads auto
  snapstream calibrate Qwen3-0.6B/ -o heads.json --text manual.txt --prompt-len 8192
  snapstream serve Qwen3-0.6B/ --heads heads.json --budget 2048
"""


def calibrate(
    model: Model,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write. Default: in the cache folder, where --heads auto looks."),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Text to calibrate on. Default: generated documents.")] = None,
    prompt_len: Annotated[int, whole_option("Tokens of a calibration prompt; use the length of yours.")] = 2048,
    texts: Annotated[int, whole_option("Documents or windows to read.")] = 20,
    dtype: Annotated[DType, typer.Option(help="Dtype of the computation.")] = "float32",
    device: Annotated[str, typer.Option(help="Where it runs.", metavar="cpu|cuda")] = "cpu",
) -> None:
    from snapstream.calibration import calibrate as measure
    from snapstream.calibration import store_profile

    if output is not None:
        check_output("--output", output)
    own = None if text is None else read_text(text)
    profile = measure(
        local_folder(model), text=own, prompt_len=prompt_len, num_texts=texts, dtype=dtype, device=device,
        progress=sys.stderr.isatty(),
    )  # fmt: skip
    if output is None:
        output = store_profile(profile)
    else:
        profile.write(output)
    largest = sorted((share for layer in profile.shares for share in layer), reverse=True)
    half = next(n for n in range(1, len(largest) + 1) if sum(largest[:n]) >= 0.5)
    typer.echo(f"{output}: {half} of {len(largest)} kv heads get half of the slots")
