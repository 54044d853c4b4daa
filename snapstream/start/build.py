"""The parts of an engine that come from a checkpoint folder: grammars, runner. ``llm.py`` joins them.

torch and transformers are imported by the functions that need them, so that importing this costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from snapstream.config import DType, EngineConfig, EngineOptions, ModelConfig
from snapstream.grammar import GrammarCompiler
from snapstream.models.fingerprint import fingerprint
from snapstream.plan.draft_memory import DraftMemory, draft_memory
from snapstream.start.measure import latent_attention
from snapstream.step import Runner

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from snapstream.distributed.group import Group
    from snapstream.kernels.bound import Kernels
    from snapstream.models.narrow import MakeWeight
    from snapstream.runner.decode_step import MakeDecode
    from snapstream.runner.model_runner import MakeTier, ModelRunner
    from snapstream.spec_prefill.text_trimmer import TextTrimmer

# From a checkpoint folder, its model and the engine's config, the compiler of grammars, and whether progress is shown.
MakeRunner = Callable[[Path, ModelConfig, EngineConfig, GrammarCompiler | None, bool], Runner]


def grammar_compiler(tokenizer: PreTrainedTokenizerBase | None, model: ModelConfig) -> GrammarCompiler | None:
    """For grammars over this model's vocabulary; None without a tokenizer."""
    if tokenizer is None:
        return None
    return GrammarCompiler(lambda: tokenizer_json(tokenizer), model.vocab_size, model.eos_token_ids)


def tokenizer_json(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the tokenizer's tokenizer.json would be; ValueError for one that is written in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"grammar: it needs a fast tokenizer, and this checkpoint has {type(tokenizer).__name__}")
    return str(backend.to_str())


def load_trimmer(draft: TextTrimmer | str | Path, options: EngineOptions) -> TextTrimmer:
    """A draft that is loaded already, or one from its folder, in the engine's numbers and on its device."""
    from snapstream.spec_prefill.text_trimmer import TextTrimmer

    if isinstance(draft, TextTrimmer):
        return draft
    return TextTrimmer(draft, dtype=options.dtype, device=options.device)


def memory_of(trimmer: TextTrimmer, device: str) -> DraftMemory | None:
    """Bytes of a draft that is loaded; None where it is on another device."""
    decoder = trimmer.draft.decoder
    if decoder.device.type != device.split(":")[0]:
        return None
    dtype = cast(DType, str(decoder.dtype).removeprefix("torch."))
    return draft_memory(decoder.config, trimmer.scoring, dtype=dtype, device=decoder.device.type)


def build_runner(
    folder: Path,
    model: ModelConfig,
    config: EngineConfig,
    grammars: GrammarCompiler | None,
    progress: bool,
    *,
    kernels: Kernels | None = None,
    make_decode: MakeDecode | None = None,
    on_unit: Callable[[], None] = lambda: None,
) -> ModelRunner:
    """Load the weights and put a runner around them; a ``MakeRunner``.

    ``kernels`` are the device's, tuned for these weights, unless given; for ``make_decode`` and ``on_unit`` see
    ``ModelRunner``.
    """
    from snapstream.kernels.latents.choice import with_latents
    from snapstream.models.decoder import Decoder
    from snapstream.runner.model_runner import ModelRunner

    if config.parallel.size > 1:
        raise ValueError(f"this runner is made for one device, and tensor_parallel is {config.parallel.size}")
    _check_heads(folder, config)
    make_tier = _disk_tier(folder, config, 0)
    decoder = Decoder.load(
        folder,
        model,
        config.dtype,
        config.device,
        max_tokens=config.max_rows,
        progress=progress,
        forms=config.weights,
        make=_make_weight(config, make_decode),
    )
    if kernels is not None:
        decoder = decoder.with_kernels(kernels)
    elif (latents := latent_attention(model, config)) is not None and not latents.is_ours:
        decoder = decoder.with_kernels(with_latents(decoder.kernels, latents))
    return ModelRunner(
        decoder,
        config,
        grammars,
        make_decode=make_decode,
        make_tier=make_tier,
        on_unit=on_unit,
        progress=progress,
    )


def build_rank(
    folder: Path,
    model: ModelConfig,
    config: EngineConfig,
    grammars: GrammarCompiler | None,
    progress: bool,
    group: Group,
    on_unit: Callable[[], None] = lambda: None,
) -> ModelRunner:
    """Load one rank's share of the weights and put a runner around it, at the same time as all other ranks."""
    import torch

    from snapstream.kernels.latents.choice import with_latents
    from snapstream.models.cuts import Share
    from snapstream.models.decoder import Decoder
    from snapstream.models.loader import load_weights
    from snapstream.runner.model_runner import ModelRunner

    make_tier = _disk_tier(folder, config, group.rank)
    share = Share.of(model, config.parallel, group.rank)
    dtype = getattr(torch, config.dtype)
    make = _make_weight(config, None)
    weights = load_weights(folder, model, dtype, config.device, progress, config.weights, make, share)
    latents = latent_attention(model, config)
    adapt = None if latents is None or latents.is_ours else partial(with_latents, attention=latents)
    decoder = Decoder.tuned(model, weights, config.max_rows, group, adapt)
    return ModelRunner(decoder, config, grammars, make_tier=make_tier, on_unit=on_unit, progress=progress)


def _check_heads(folder: Path, config: EngineConfig) -> None:
    """ValueError if the profile of heads is of another checkpoint, before anything large is read."""
    if config.heads is not None and config.heads.model != (own := fingerprint(folder)):
        raise ValueError(
            f"heads: the profile is of another checkpoint ({config.heads.model}); {folder} is {own}. Make one with "
            "snapstream calibrate"
        )


def _disk_tier(folder: Path, config: EngineConfig, rank: int) -> MakeTier | None:
    """Opens the folder of a rank's prefix store, before anything large is read; ValueError if it cannot be used."""
    if not config.prefix_dir:
        return None
    from snapstream.cache.prefix_files import PrefixFiles, model_fingerprint
    from snapstream.cache.prefix_folder import PrefixFolder, rank_part

    model = model_fingerprint(folder, f"{config.dtype} {config.weights}")
    opened = PrefixFolder(Path(config.prefix_dir), rank_part(config.parallel, rank))
    max_bytes = config.prefix_disk // config.parallel.size
    return lambda blocks: PrefixFiles(blocks, opened, model, max_bytes, _settle(config.device, rank))


def _settle(device: str, rank: int) -> Callable[[], None]:
    """What a follower's files wait for: its device may be behind the leader's, whose steps are read."""
    if rank == 0 or not device.startswith("cuda"):
        return lambda: None
    import torch

    return lambda: torch.cuda.synchronize(device)


def _make_weight(config: EngineConfig, make_decode: MakeDecode | None) -> MakeWeight:
    """Makes the storage that the executor reads; one from outside reads the plain one."""
    from snapstream.models.narrow import make_weight

    if config.executor != "looped" or config.device.startswith("cuda") or make_decode is not None:
        return make_weight
    from snapstream.kernels.cpu.looped.library import load
    from snapstream.models.panels import make_panels

    rounds_prefill = config.weights is not None and config.weights.rounds_prefill
    return make_panels(load(), rounds_prefill=rounds_prefill)
