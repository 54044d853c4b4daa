"""Flags of a draft that shortens prompts: compress, proxy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from snapstream.assets import TINY_DRAFT_MODEL
from snapstream.cli.flags import whole_option
from snapstream.config import DType


@dataclass(frozen=True, kw_only=True)
class DraftFlags:
    """Which draft, and how it reads."""

    draft: Annotated[
        Path | None, typer.Option(help="Checkpoint folder of the draft. Default: the shipped tiny one.")
    ] = None
    chunk_len: Annotated[
        int | None, whole_option("Draft tokens that stay or go together. Default: 32, in code 128.")
    ] = None
    context_len: Annotated[
        int | None,
        whole_option("Draft tokens read at once; longer texts in overlapping passages. Default: the model's limit."),
    ] = None
    refuse_longer: Annotated[
        bool, typer.Option("--refuse-longer", help="Refuse texts that are longer than the draft's context.")
    ] = False
    dtype: Annotated[DType, typer.Option(help="Of the draft's weights.")] = "float32"
    device: Annotated[str, typer.Option(help="Torch device of the draft.")] = "cpu"

    @property
    def folder(self) -> Path:
        return self.draft or TINY_DRAFT_MODEL
