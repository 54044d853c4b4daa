"""Time to the first token with a draft in front: an 8B target and a 0.6B draft, 128k tokens cut to 16k.

Weights and tokens are random, so only times mean anything; tokenizing and cutting text, milliseconds on the host, are
not in them (``benchmarks/spec_prefill.py`` has both). The draft reads in windows of 8,192 tokens, and at once.
"""

from __future__ import annotations

from time import perf_counter

from benchmarks.gpu_suite.models import decoder_of, make_runner
from benchmarks.gpu_suite.prompts import prefill_once
from benchmarks.gpu_suite.suite import Bench, Figures, Section
from benchmarks.shapes import random_prompt
from snapstream.models.decoder import Decoder
from snapstream.spec_prefill.draft import windows_of
from snapstream.spec_prefill.lookahead import token_scores
from snapstream.spec_prefill.settings import ScoringSettings

TARGET, DRAFT = "llama_8b", "qwen3_06b"
CHUNK_LEN = 2048


def first_token(bench: Bench) -> Figures:
    """Draft first, then the target on the whole prompt and on what would be left of it."""
    prompt_len, kept, windows = (300, 60, (64, 0)) if bench.is_smoke else (131_072 - 8, 16_384, (8192, 0))
    draft = decoder_of(bench, DRAFT)
    read_s(bench, draft, min(prompt_len, 2 * CHUNK_LEN), 0)  # unmeasured: kernels are compiled
    draft_s = {window: read_s(bench, draft, prompt_len, window) for window in windows}
    target = decoder_of(bench, TARGET)  # frees the draft
    target_s = {}
    for length in (kept, prompt_len):
        runner = make_runner(bench, target, min(8192, length), 1, length + 8, CHUNK_LEN)
        if length == kept:
            prefill_once(bench, runner, length)
        target_s[length], _ = prefill_once(bench, runner, length)
        del runner
        bench.device.free()
    for window in windows:
        total = draft_s[window] + target_s[kept]
        yield {
            "target": TARGET, "draft": DRAFT, "prompt_len": prompt_len, "kept_tokens": kept, "window_len": window,
            "full_s": target_s[prompt_len], "draft_s": draft_s[window], "prefill_s": target_s[kept],
            "first_token_s": total, "speedup": target_s[prompt_len] / total,
        }  # fmt: skip


def read_s(bench: Bench, draft: Decoder, prompt_len: int, window: int) -> float:
    """Seconds that the draft needs to score ``prompt_len`` tokens, ``window`` at a time (0: all at once)."""
    ids = random_prompt(prompt_len, draft.config.vocab_size)
    settings = ScoringSettings(ignore_eos=True, prefill_len=CHUNK_LEN)
    parts = windows_of(prompt_len, window, min(settings.overlap, window // 4)) if window else [(0, prompt_len)]
    bench.device.sync()
    began = perf_counter()
    for start, stop in parts:
        token_scores(draft, ids[start:stop], settings)
    bench.device.sync()
    return perf_counter() - began


sections = [Section("spec_prefill", first_token, 90)]
