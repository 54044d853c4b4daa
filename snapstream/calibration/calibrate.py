"""A checkpoint and texts in, a profile of its kv heads out.

A head's share of the slots grows with the root of what the model loses without it: in proportion to the loss itself,
heads that matter a little would get nothing, and what needs them fails first (docs/accuracy.md has both).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from snapstream.calibration.ablation import damage
from snapstream.calibration.texts import CONTINUATION, FAMILIES, Text, generated, windows
from snapstream.config import DEFAULT_SINK, DType, as_count
from snapstream.config.heads import HeadProfile, Shares
from snapstream.llm import LLM
from snapstream.models.fingerprint import fingerprint
from snapstream.runner.model_runner import ModelRunner

RING_PART = 16  # of a prompt stays as the ring of a head that forgets: that of a row of a quarter
LEAST_PROMPT = 256  # tokens: in less there is nothing to forget
_LEAST_DAMAGE = 1e-6  # nats; so that no share is nothing


def calibrate(
    model: Path,
    *,
    text: str | None = None,
    prompt_len: int = 2048,
    num_texts: int = 20,
    dtype: DType = "float32",
    device: str = "cpu",
    progress: bool = True,
) -> HeadProfile:
    """Measure on ``num_texts`` generated documents, or windows of ``text``, of ``prompt_len`` tokens.

    ValueError for a model whose heads cannot be told apart, and for texts that are too short.
    """
    as_count("prompt_len", prompt_len, LEAST_PROMPT)
    as_count("num_texts", num_texts, len(FAMILIES) if text is None else 1)
    with LLM(
        model, budget="full", max_rows=1, max_model_len=prompt_len + 2 * CONTINUATION, dtype=dtype, device=device,
        executor="eager", progress=False,
    ) as llm:  # fmt: skip
        if llm.model_config.latent is not None:
            raise ValueError("this model keeps latents, one for all heads of a layer; it needs no profile")
        if llm.tokenizer is None:
            raise ValueError(f"{model} has no tokenizer, and what is calibrated on is text")
        runner = cast(ModelRunner, llm.engine.runner)
        found: Iterable[Text] = (
            generated(llm.tokenizer, prompt_len, num_texts)
            if text is None
            else windows(llm.tokenizer, text, prompt_len, num_texts)
        )
        losses, num_tokens = _measure(runner, found, num_texts, prompt_len, progress)
    what = "generated documents" if text is None else "windows of a text"
    return HeadProfile(
        shares=shares_of(losses),
        model=fingerprint(model),
        made_by=f"up to {num_texts} {what} of {prompt_len} tokens, {num_tokens} tokens of answers, dtype {dtype}",
    )


def _measure(
    runner: ModelRunner, texts: Iterable[Text], num_texts: int, prompt_len: int, progress: bool
) -> tuple[Tensor, int]:
    from tqdm import tqdm

    config = runner.decoder.config
    losses, count = torch.zeros(config.num_layers, config.num_kv_heads), 0
    for prompt, answer in tqdm(texts, total=num_texts, desc="Calibrating", disable=not progress, file=sys.stderr):
        own, num = damage(runner, prompt, answer, DEFAULT_SINK, prompt_len // RING_PART)
        losses, count = losses + own, count + num
    return losses / count, count


def shares_of(losses: Tensor) -> Shares:
    """Shares by layer and kv head of losses ``[L, G]``; ValueError for losses that are not finite."""
    if not losses.isfinite().all():
        raise ValueError("the model's log-probabilities are not finite; it cannot be calibrated in this dtype")
    roots = losses.double().clamp(min=_LEAST_DAMAGE).sqrt()
    return tuple(tuple(layer) for layer in (roots / roots.sum()).tolist())
