"""``snapstream quantize``: options to ``models/quantized_checkpoint.py``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from snapstream.cli.flags import whole_number
from snapstream.config.weights import DEFAULT_GROUP, CodeWidth, WeightForm, describe_layers

HELP = """Write a checkpoint whose layers are int8 or int4, which transformers and vLLM read as well.

The matrices of the layers become whole numbers in groups with scales (compressed-tensors, pack-quantized: W8A16 or
W4A16); with int4 those around attention are int8, as they are with --weights int4 of other commands, unless
--attention int4 asks for one width. Embeddings and norms stay as they are stored. It takes the memory of one shard.

\b
Examples:
  snapstream quantize Qwen3-4B/ Qwen3-4B-int4/ --weights int4
  snapstream quantize Qwen3-4B/ Qwen3-4B-int8/ --weights int8 --group 128
"""


def quantize(
    model: Annotated[Path, typer.Argument(help="Checkpoint folder.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.", show_default=False)],
    weights: Annotated[CodeWidth, typer.Option(help="Width of the layers' matrices.")] = "int8",
    attention: Annotated[CodeWidth, typer.Option(help="Width of those around attention.")] = "int8",
    group: Annotated[
        int, typer.Option(help="Numbers that share a scale: 32, 64 or 128.", parser=whole_number, metavar="N")
    ] = DEFAULT_GROUP,
) -> None:
    form = WeightForm(width=weights, group=group)
    around = WeightForm(width=attention, group=group)
    from snapstream.models.quantized_checkpoint import quantize_checkpoint

    quantize_checkpoint(model, out, form, lambda line: print(line, file=sys.stderr), attention=around)
    typer.echo(f"{out}: {describe_layers(form, around)}")
