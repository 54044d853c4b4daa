"""Time to the first token with a draft in front: an 8B target and a 0.6B draft, 128k tokens cut to 16k.

Floor: operations, ``target(N) / (draft(N) + target(kept))`` at one rate for both; ``predicted`` beside each speed-up.
Weights and tokens are random, so only times mean anything; tokenizing and cutting text, milliseconds on the host, are
not in them (``benchmarks/spec_prefill.py`` has both). The draft reads in passages of 8,192 tokens with the published
look-ahead and without any, and at once; each figure is yielded as soon as it is known.
"""

from __future__ import annotations

from time import perf_counter

from benchmarks.gpu_suite.models import decoder_of, make_runner
from benchmarks.gpu_suite.prompts import prefill_once
from benchmarks.gpu_suite.suite import Bench, Figures, Section
from benchmarks.prefill import prefill_flop
from benchmarks.shapes import random_prompt
from snapstream.models.decoder import Decoder
from snapstream.spec_prefill.draft import passages_of, scores_of_passages
from snapstream.spec_prefill.settings import ScoringSettings

TARGET, DRAFT = "llama_8b", "qwen3_06b"
CHUNK_LEN = 2048
WAYS = ((8192, 8), (8192, 0), (0, 8))  # context of the draft (0: all at once) and look-ahead, the most useful first


def first_token(bench: Bench) -> Figures:
    """The target on what would be left and on the whole prompt, then the draft in every way.

    In this order both models are built once: the sections before this one use the target, those after it the draft.
    """
    prompt_len, kept = (300, 60) if bench.is_smoke else (131_072 - 8, 16_384)
    target = decoder_of(bench, TARGET)
    target_s, target_flop = {}, {}
    for length in (kept, prompt_len):
        runner = make_runner(bench, target, min(8192, length), 1, length + 8, CHUNK_LEN)
        if length == kept:
            prefill_once(bench, runner, length)  # unmeasured: kernels are compiled
        target_s[length], _ = prefill_once(bench, runner, length)
        target_flop[length] = prefill_flop(target.config, length)
        del runner
        bench.device.free()
        yield {"model": TARGET, "prompt_len": length, "seconds": target_s[length]}
    del target
    draft = decoder_of(bench, DRAFT)
    for full_len, look_ahead in WAYS:
        context_len = min(64, full_len) if bench.is_smoke else full_len
        parts = passages_of(prompt_len, context_len, min(256, context_len // 4)) if context_len else [(0, prompt_len)]
        first = parts[:1] if context_len else [(0, min(prompt_len, 2 * CHUNK_LEN))]
        read_s(bench, draft, first, look_ahead)  # unmeasured
        allocated = bench.device.reset_peak()
        seconds = read_s(bench, draft, parts, look_ahead)
        flop = sum(prefill_flop(draft.config, stop - start) for start, stop in parts) + target_flop[kept]
        total = seconds + target_s[kept]
        yield {
            "target": TARGET, "draft": DRAFT, "prompt_len": prompt_len, "kept_tokens": kept, "context_len": context_len,
            "look_ahead": look_ahead, "full_s": target_s[prompt_len], "draft_s": seconds, "prefill_s": target_s[kept],
            "draft_peak_gib": (bench.device.peak_bytes() - allocated) / 2**30,
            "first_token_s": total, "speedup": target_s[prompt_len] / total,
            "predicted": target_flop[prompt_len] / flop,
        }  # fmt: skip


def read_s(bench: Bench, draft: Decoder, parts: list[tuple[int, int]], look_ahead: int) -> float:
    """Seconds that the draft needs to score random tokens, one part after the other."""
    ids = random_prompt(parts[-1][1], draft.config.vocab_size)
    settings = ScoringSettings(look_ahead=look_ahead, ignore_eos=True)
    bench.device.sync()
    began = perf_counter()
    for _ in scores_of_passages(draft, [ids[start:stop] for start, stop in parts], settings):
        pass
    bench.device.sync()
    return perf_counter() - began


ABOUT = "time to the first token of 128k tokens that a draft cuts to 16k; full_s: without it; predicted: by operations"

sections = [Section("spec_prefill", first_token, 90, ABOUT)]
