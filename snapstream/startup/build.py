"""From a checkpoint folder and an engine's config to its parts: grammars, draft, runner, KV transfer.

torch and transformers are imported by the functions that need them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, cast

from snapstream.config import DType, EngineConfig, ModelConfig
from snapstream.config.engine import Speculator
from snapstream.config.kv import HeadSlots
from snapstream.disaggregation.connector import TcpConnector
from snapstream.disaggregation.protocol import TransferSettings
from snapstream.exec.executors import Executor, executor_of
from snapstream.grammar import GrammarCompiler
from snapstream.models.config_json import fingerprint
from snapstream.plan.memory import DraftMemory, draft_memory, row_sizes, speculator_config
from snapstream.startup.measure import latent_attention
from snapstream.step import Runner
from snapstream.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from snapstream.distributed.group import Group
    from snapstream.exec.draft_model import DraftModel
    from snapstream.exec.eager import MakeDecode
    from snapstream.exec.runner import MakeTier, ModelRunner
    from snapstream.kernels.interface import Kernels
    from snapstream.models.checkpoint import LoadProgress
    from snapstream.spec_prefill.compressor import PromptCompressor


# Checkpoint folder, its model, config, grammars, whether to show progress.
MakeRunner = Callable[[Path, ModelConfig, EngineConfig, GrammarCompiler | None, bool], Runner]


def grammar_compiler(tokenizer: PreTrainedTokenizerBase | None, model: ModelConfig) -> GrammarCompiler | None:
    """For grammars over this model's vocabulary; None without a tokenizer."""
    if tokenizer is None:
        return None
    return GrammarCompiler(lambda: tokenizer_json(tokenizer), model.vocab_size, model.eos_token_ids)


def tokenizer_json(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer as a tokenizer.json; ValueError for a slow one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"grammar: it needs a fast tokenizer, and this checkpoint has {type(tokenizer).__name__}")
    return str(backend.to_str())


def memory_of(compressor: PromptCompressor, device: str) -> DraftMemory | None:
    """Bytes of a loaded draft; None where it is on another device."""
    decoder = compressor.draft.decoder
    if decoder.device.type != device.split(":")[0]:
        return None
    dtype = cast(DType, str(decoder.dtype).removeprefix("torch."))
    return draft_memory(decoder.config, compressor.scoring, dtype=dtype, device=decoder.device.type)


def build_runner(
    folder: Path,
    model: ModelConfig,
    config: EngineConfig,
    grammars: GrammarCompiler | None,
    progress: LoadProgress,
    *,
    kernels: Kernels | None = None,
    make_decode: MakeDecode | None = None,
    on_unit: Callable[[], None] = lambda: None,
) -> ModelRunner:
    """Load the weights and make a runner of them; a ``MakeRunner``.

    ``kernels`` are the device's unless given; for ``make_decode`` and ``on_unit`` see ``ModelRunner``.
    """
    from snapstream.exec.runner import ModelRunner
    from snapstream.kernels.backends.latents import with_latents
    from snapstream.models.decoder import Decoder

    if config.parallel.size > 1:
        raise ValueError(f"this runner is made for one device, and tensor_parallel is {config.parallel.size}")
    _check_heads(folder, config)
    make_tier = _disk_tier(folder, config, 0)
    if config.speculator is not None:
        _check_vocabulary(folder, model, config.speculator)
    executor = executor_of(config.executor, config.device) if make_decode is None else Executor(make=make_decode)
    decoder = Decoder.load(
        folder,
        model,
        config.dtype,
        config.device,
        progress=progress,
        formats=config.weights,
        make=executor.storage(config),
    )
    if kernels is not None:
        decoder = decoder.with_kernels(kernels)
    elif (latents := latent_attention(model, config)) is not None and not latents.is_ours:
        decoder = decoder.with_kernels(with_latents(decoder.kernels, latents))
    runner = ModelRunner(
        decoder,
        config,
        grammars,
        make_decode=make_decode,
        make_tier=make_tier,
        on_unit=on_unit,
        progress=progress is True,
    )
    if config.speculator is not None and runner.speculation is not None:
        runner.speculation.drafter = _draft_model(config.speculator, runner, progress)
    return runner


def _draft_model(speculator: Speculator, runner: ModelRunner, progress: LoadProgress) -> DraftModel:
    """The draft model, loaded, for the rows of a runner."""
    from snapstream.exec.draft_model import DraftModel
    from snapstream.models.decoder import Decoder

    own = speculator_config(speculator, runner.config.max_rows)
    decoder = Decoder.load(
        Path(speculator.folder),
        speculator.model,
        own.dtype,
        own.device,
        progress=progress,
        formats=own.weights,
        make=executor_of(own.executor, own.device).storage(own),
    )
    return DraftModel(decoder, own, runner.decode)


def _check_vocabulary(folder: Path, model: ModelConfig, speculator: Speculator) -> None:
    """ValueError unless the token ids of both models mean the same; without tokenizers, unless they are as many."""
    from snapstream.models.tokenizer import find_tokenizer

    found, other = find_tokenizer(folder), find_tokenizer(Path(speculator.folder))
    if found is None or other is None:
        sizes, num_same = (model.vocab_size, speculator.model.vocab_size), 0
        is_same = sizes[0] == sizes[1]
    else:
        words, draft_words = found.get_vocab(), other.get_vocab()  # weights may have more rows, as padding
        sizes, num_same = (len(words), len(draft_words)), len(words.items() & draft_words.items())
        is_same = words == draft_words
    if not is_same:
        raise ValueError(
            f"speculative_model is {speculator.folder!r}, with {sizes[1]} tokens, of which {num_same} are those of "
            f"{folder}, which has {sizes[0]}: a draft model needs the same vocabulary"
        )


def build_random(seed: int) -> MakeRunner:
    """A ``MakeRunner`` of random weights, for measurements: no checkpoint is read. One device."""

    def build(
        folder: Path, model: ModelConfig, config: EngineConfig, grammars: GrammarCompiler | None, progress: bool
    ) -> ModelRunner:
        import torch

        from snapstream.exec.runner import ModelRunner
        from snapstream.kernels.backends.latents import with_latents
        from snapstream.models.decoder import Decoder
        from snapstream.models.weights import DecoderWeights

        make = executor_of(config.executor, config.device).storage(config)
        weights = DecoderWeights.empty(model, getattr(torch, config.dtype), config.device, config.weights, make)
        weights.fill_randomly(seed)
        decoder = Decoder(model, weights)
        if (latents := latent_attention(model, config)) is not None and not latents.is_ours:
            decoder = decoder.with_kernels(with_latents(decoder.kernels, latents))
        return ModelRunner(decoder, config, grammars, progress=progress)

    return build


def release_openmp_threads() -> None:
    """End the OpenMP threads of the calling thread, which loaded the weights and leaves the steps to another.

    libgomp counts them for as long as they live. Once all threads outnumber the cores, it puts threads to sleep at the
    end of a parallel region instead of spinning, and each small operator of a prefill then waits for them to wake.
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)  # torch's OpenMP; absent before version 5
    if pause is not None:
        pause(1)  # omp_pause_soft


def build_rank(
    folder: Path,
    model: ModelConfig,
    config: EngineConfig,
    grammars: GrammarCompiler | None,
    progress: LoadProgress,
    group: Group,
    on_unit: Callable[[], None] = lambda: None,
) -> ModelRunner:
    """Load one rank's shard of the weights and make a runner of it, at the same time as all other ranks."""
    import torch

    from snapstream.exec.runner import ModelRunner
    from snapstream.kernels.backends.latents import with_latents
    from snapstream.kernels.interface import bind
    from snapstream.models.checkpoint import load_weights
    from snapstream.models.decoder import Decoder
    from snapstream.models.sharding import Share

    make_tier = _disk_tier(folder, config, group.rank)
    share = Share.of(model, config.parallel, group.rank, config.weights)
    dtype = getattr(torch, config.dtype)
    make = executor_of(config.executor, config.device).storage(config)
    weights = load_weights(folder, model, dtype, config.device, progress, config.weights, make, share)
    latents = latent_attention(model, config)
    kernels = None if latents is None or latents.is_ours else with_latents(bind(config.device), latents)
    decoder = Decoder(model, weights, kernels, group)
    return ModelRunner(decoder, config, grammars, make_tier=make_tier, on_unit=on_unit, progress=progress is True)


def _check_heads(folder: Path, config: EngineConfig) -> None:
    """ValueError if the head profile is of another checkpoint, before anything large is read."""
    if config.heads is not None and config.heads.model != (own := fingerprint(folder)):
        raise ValueError(
            f"heads: the profile is of another checkpoint ({config.heads.model}); {folder} is {own}. Make one with "
            "snapstream calibrate"
        )


def _disk_tier(folder: Path, config: EngineConfig, rank: int) -> MakeTier | None:
    """Opens the folder of a rank's prefix store, before anything large is read; ValueError if it cannot be used."""
    if not config.prefix_dir:
        return None
    from snapstream.kv.prefix_folder import PrefixFolder, rank_part
    from snapstream.kv.prefix_store import PrefixFiles

    facts = f"{fingerprint(folder, with_mtime=True)} {config.dtype} {config.weights}"
    model = sha256(facts.encode()).digest()
    opened = PrefixFolder(Path(config.prefix_dir), rank_part(config.parallel, rank))
    max_bytes = config.prefix_disk // config.parallel.size
    return lambda blocks: PrefixFiles(blocks, opened, model, max_bytes, _settle(config.device, rank))


def _settle(device: str, rank: int) -> Callable[[], None]:
    """What a worker rank's files wait for: its device may be behind rank 0's, where results are read."""
    if rank == 0 or not device.startswith("cuda"):
        return lambda: None
    import torch

    return lambda: torch.cuda.synchronize(device)


def make_connector(
    folder: Path,
    model: ModelConfig,
    config: EngineConfig,
    settings: TransferSettings,
    wake: Callable[[], None] = lambda: None,
) -> TcpConnector:
    """ValueError for an engine whose rows cannot be transferred, or that cannot listen at the address."""
    if config.heads is not None and config.parallel.size > 1:
        raise ValueError(
            f"heads: KV transfer with per-head budgets needs engines of one device; this one has {config.parallel.size}"
        )
    return TcpConnector(settings, row_sizes(model, config), engine_fingerprint(folder, config), wake)


def engine_fingerprint(folder: Path, config: EngineConfig) -> dict[str, str]:
    """What rows depend on, entry by entry, so that a refusal names the entry that differs."""
    return {
        "version": __version__,
        "checkpoint": fingerprint(folder),
        "dtype": config.dtype,
        "kv_dtype": config.kv_dtype,
        "weights": "dtype" if config.weights is None else config.weights.describe(),
        "reselection": "none" if config.reselection is None else repr(config.reselection),
        "heads": "none" if config.heads is None else _digest(config.heads),
    }


def _digest(heads: HeadSlots) -> str:
    """Of the slots of every kv head: engines are compatible if different profiles give the same slots."""
    return sha256(repr((heads.topk, heads.budget)).encode()).hexdigest()[:16]
