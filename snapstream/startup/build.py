"""From a checkpoint folder and an engine's config to its parts: grammars, draft, runner, KV transfer, and worker ranks.

``build_ranks`` is the ``MakeRunner`` that ``LLM`` uses unless it is given another; for one rank it is ``build_runner``.
With several, from workers started to workers ready:

    spawn workers -> hellos -> tasks -> joined -> the group is made -> every rank loads its shard -> ready -> plans

Invariants: whatever goes wrong on the way, no worker is left behind. A worker ends with the channel to rank 0 even in
the middle of a collective; one that cannot go on says why (``Failed``) and ends, and so ends the engine. torch and
transformers are imported by the functions that need them.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue
from time import monotonic, sleep
from typing import TYPE_CHECKING, cast

from snapstream.config import DType, EngineConfig, ModelConfig
from snapstream.config.engine import Speculator, launched
from snapstream.config.values import split_address
from snapstream.disaggregation.connector import TcpConnector
from snapstream.disaggregation.protocol import TransferSettings
from snapstream.distributed.control import (
    TO_RANK_0,
    TO_WORKER,
    ControlChannel,
    Failed,
    Hello,
    Joined,
    Ready,
    Refused,
    Task,
    accept_workers,
    connect,
    inherited,
    listen,
    shared_key,
)
from snapstream.exec.executors import Executor, executor_of
from snapstream.grammar import GrammarCompiler
from snapstream.models.config_json import fingerprint
from snapstream.plan.memory import DraftMemory, draft_memory, row_sizes, speculator_config
from snapstream.startup.measure import measure_machine, visible_gpus
from snapstream.step import Runner, StepPlan
from snapstream.version import __version__
from snapstream.wire import ConnectionFailed

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]
    from transformers import PreTrainedTokenizerBase

    from snapstream.distributed.control import WorkerRanks
    from snapstream.distributed.group import Group
    from snapstream.exec.eager import DecodeStep, MakeDecode
    from snapstream.exec.runner import MakeDiskCache, ModelRunner
    from snapstream.kernels.interface import Kernels
    from snapstream.models.checkpoint import LoadProgress
    from snapstream.models.decoder import Decoder
    from snapstream.spec_prefill.compressor import PromptCompressor


# Checkpoint folder, its model, config, grammars, whether to show progress.
MakeRunner = Callable[[Path, ModelConfig, EngineConfig, GrammarCompiler | None, bool], Runner]


def grammar_compiler(tokenizer: PreTrainedTokenizerBase | None, model: ModelConfig) -> GrammarCompiler | None:
    """Compiler of grammars over this model's vocabulary; None without a tokenizer."""
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

    ``kernels`` are the device's unless given; for ``make_decode``, also of a draft model, and ``on_unit`` see
    ``ModelRunner``.
    """
    from snapstream.exec.runner import ModelRunner

    if config.parallel.size > 1:
        raise ValueError(f"this runner is made for one device, and tensor_parallel is {config.parallel.size}")
    _check_heads(folder, config)
    _check_vocabulary(folder, model, config.speculator)
    with _open_disk_cache(folder, config, 0) as make_disk_cache:
        decoder = _load(folder, model, config, progress, kernels, make_decode)
        runner = ModelRunner(
            decoder,
            config,
            grammars,
            make_decode=make_decode,
            make_disk_cache=make_disk_cache,
            on_unit=on_unit,
            progress=progress is True,
        )
        load_draft_model(runner, progress, kernels, make_decode)
    return runner


def _load(
    folder: Path,
    model: ModelConfig,
    config: EngineConfig,
    progress: LoadProgress,
    kernels: Kernels | None = None,
    make_decode: MakeDecode | None = None,
    group: Group | None = None,
) -> Decoder:
    """A model, or the shard of a rank of ``group``."""
    import torch

    from snapstream.models.checkpoint import load_weights
    from snapstream.models.decoder import Decoder
    from snapstream.models.lora import load_adapters
    from snapstream.models.sharding import Share

    executor = executor_of(config.executor) if make_decode is None else Executor(make=make_decode)
    dtype, make = getattr(torch, config.dtype), executor.storage(config)
    share = None if group is None else Share.of(model, config.parallel, group.rank, config.weights)
    weights = load_weights(folder, model, dtype, config.device, progress, config.weights, make, share)
    adapters = load_adapters(config.loras, model, dtype, config.device, make) if config.loras else None
    return Decoder(model, weights, kernels, group, adapters)


def load_draft_model(
    runner: ModelRunner,
    progress: LoadProgress,
    kernels: Kernels | None = None,
    make_decode: MakeDecode | None = None,
) -> None:
    """The engine's, if it has one; of several ranks on rank 0 alone."""
    from snapstream.exec.draft_model import DraftModel
    from snapstream.exec.prediction import PredictionDecoder, PredictionDrafter

    config = runner.config
    if (draft := config.speculator) is None or runner.speculation is None:
        return
    own = speculator_config(draft, config.max_rows)
    make = make_decode or _decode_of_draft(own, runner.decode)
    if draft.is_own:
        prediction = PredictionDecoder.of(draft, own, runner.decoder, progress)
        drafter: DraftModel = PredictionDrafter(prediction, own, make, runner.decoder)
    else:
        decoder = _load(Path(draft.folder), draft.model, own, progress, kernels, make_decode)
        drafter = DraftModel(decoder, own, make)
    drafter.warm_up(progress is True)
    runner.speculation.drafter = drafter


def _decode_of_draft(config: EngineConfig, target: DecodeStep) -> MakeDecode:
    """Decode of the draft model's executor, on the threads of ``target`` where both are looped."""
    from snapstream.exec.looped_cpu import LoopedDecode

    if config.executor == "looped" and isinstance(target, LoopedDecode):
        return partial(LoopedDecode, pool=target.pool)
    return executor_of(config.executor).decode_step


def _check_vocabulary(folder: Path, model: ModelConfig, speculator: Speculator | None) -> None:
    """ValueError unless the token ids of both models mean the same; without tokenizers, unless they are as many."""
    from snapstream.models.tokenizer import find_tokenizer

    if speculator is None or speculator.is_own:
        return
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
        from snapstream.models.decoder import Decoder
        from snapstream.models.weights import DecoderWeights

        make = executor_of(config.executor).storage(config)
        weights = DecoderWeights.empty(model, getattr(torch, config.dtype), config.device, config.weights, make)
        weights.fill_randomly(seed)
        return ModelRunner(Decoder(model, weights), config, grammars, progress=progress)

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
    from snapstream.exec.runner import ModelRunner

    with _open_disk_cache(folder, config, group.rank) as make_disk_cache:
        decoder = _load(folder, model, config, progress, group=group)
        return ModelRunner(
            decoder, config, grammars, make_disk_cache=make_disk_cache, on_unit=on_unit, progress=progress is True
        )


def _check_heads(folder: Path, config: EngineConfig) -> None:
    """ValueError if the head profile is of another checkpoint, before anything large is read."""
    if config.heads is not None and config.heads.model != (own := fingerprint(folder)):
        raise ValueError(
            f"heads: the profile is of another checkpoint ({config.heads.model}); {folder} is {own}. Make one with "
            "snapstream calibrate"
        )


@contextmanager
def _open_disk_cache(folder: Path, config: EngineConfig, rank: int) -> Iterator[MakeDiskCache | None]:
    """Opens the folder of a rank's prefix store, before anything large is read; ValueError if it cannot be used. An
    error in the block closes it.
    """
    if not config.prefix_dir:
        yield None
        return
    from snapstream.kv.prefix_folder import PrefixFolder, rank_part
    from snapstream.kv.prefix_store import PrefixFiles

    facts = __version__, fingerprint(folder, with_mtime=True), config.dtype, config.weights, config.prefill_attention
    model = sha256(f"{facts}".encode()).digest()  # each of them gives other keys and values
    opened = PrefixFolder(Path(config.prefix_dir), rank_part(config.parallel, rank))
    max_bytes = config.prefix_disk // config.parallel.size
    try:
        yield lambda blocks: PrefixFiles(blocks, opened, model, max_bytes, _settle(config.device, rank))
    except BaseException:
        opened.close()
        raise


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
    wake: Callable[[], None],
) -> TcpConnector:
    """ValueError for an engine whose rows cannot be transferred, or that cannot listen at the address."""
    if config.loras:
        raise ValueError(f"loras: {len(config.loras)} adapters are given; engines that transfer KV have none")
    if config.heads is not None and config.parallel.size > 1:
        raise ValueError(
            f"heads: KV transfer with per-head budgets needs engines of one device; this one has {config.parallel.size}"
        )
    if config.heads is not None and not all(config.heads.topk):
        raise ValueError(
            f"heads: KV transfer with per-head budgets is not supported for {model.architecture}, whose layers are of "
            "several kinds"
        )
    if model.has_parallel_recurrence:
        raise ValueError(
            f"{model.architecture} has attention and recurrence side by side in a layer, which KV transfer does not "
            "support"
        )
    if model.recurrent_layers and config.parallel.size > 1:
        raise ValueError(
            f"{model.architecture} has recurrent layers, whose states are transferred between engines of one device; "
            f"this one has {config.parallel.size}"
        )
    return TcpConnector(settings, row_sizes(model, config), engine_fingerprint(folder, config), wake)


def engine_fingerprint(folder: Path, config: EngineConfig) -> dict[str, str]:
    """What rows depend on, entry by entry, so that a refusal names the entry that differs."""
    heads = "" if config.heads is None else repr((config.heads.shares, config.heads.budget))  # they divide the slots
    return {
        "version": __version__,
        "checkpoint": fingerprint(folder),
        "dtype": config.dtype,
        "kv_dtype": config.kv_dtype,
        "weights": "dtype" if config.weights is None else config.weights.describe(),
        "heads": sha256(heads.encode()).hexdigest()[:16] if heads else "none",
    }


CHECK_VARIABLE = "SNAPSTREAM_CHECK_RANKS"  # 1: compare the drawn tokens of all ranks after every step
CONTROL = "snapstream-control"  # key of the store: where workers connect
HELLO_S = 300.0  # for a process to start and import torch
JOIN_S = 120.0  # for all ranks to join the group
LOAD_S = 1800.0  # large checkpoints on slow disks
RETRY_S = 0.5  # between two attempts to reach a rank 0 that is not there yet
ENTRY = "snapstream.startup.build:spawned_worker"

Inbox = SimpleQueue[object]


def build_ranks(
    folder: Path,
    model: ModelConfig,
    config: EngineConfig,
    grammars: GrammarCompiler | None,
    progress: LoadProgress,
    *,
    on_unit: Callable[[], None] = lambda: None,
    on_lost: Callable[[str], None] = lambda why: None,
    stall_timeout_s: float = 0.0,
) -> Runner:
    """Load the weights on every rank and put runners around them; a ``MakeRunner``.

    ``on_lost`` is called, on a thread, when a rank is lost: the engine is useless then, and a step of it may hang.
    ``stall_timeout_s``: a step that takes longer ends the engine with RankLost; 0: never. ValueError for what a rank
    cannot serve; RankLost if one is lost.
    """
    if config.parallel.size == 1:
        return build_runner(folder, model, config, grammars, progress, on_unit=on_unit)
    import torch

    from snapstream.distributed.control import WorkerRanks
    from snapstream.distributed.group import Ranks
    from snapstream.exec.parallel import ParallelRunner, RankRunner

    if Ranks.is_joined():
        raise ValueError("this process has an engine over several ranks already; close it first")
    if config.parallel.address == "env":
        raise ValueError("RANK is not 0; rank 0 makes the engine, and the others run `snapstream worker env MODEL`")
    _check_heads(folder, config)
    _check_vocabulary(folder, model, config.speculator)
    expected, before = fingerprint(folder), torch.get_num_threads()
    of_workers = replace(config, speculator=None)
    if config.parallel.address:
        shared_key()  # or its ValueError, before waiting for other ranks

    def refuses(hello: Hello) -> str:
        return "" if hello.fingerprint == expected else "its checkpoint is not rank 0's; copy it there, all files"

    workers = WorkerRanks(config.parallel.size - 1, on_lost, stall_timeout_s, refuses)
    num_threads = threads_of_rank(config.parallel.ranks_here)
    checks = os.environ.get(CHECK_VARIABLE) == "1"
    try:
        with _rendezvous(config.parallel.address) as (rendezvous, store):
            for rank in range(1, config.parallel.ranks_here):
                workers.spawn(rank, ENTRY, _environment(rank, config.device, num_threads))
            with _waiting_for_others(workers, config, store):
                workers.wait("here", LOAD_S if config.parallel.address else HELLO_S)
            check_versions(workers.hellos(), torch.__version__)
            workers.hand_out([
                Task(
                    rank=rank, model=str(folder.resolve()), fingerprint=expected, config=of_workers,
                    rendezvous=rendezvous, checks_ranks=checks,
                    num_threads=num_threads if rank < config.parallel.ranks_here else 0,
                )
                for rank in range(1, config.parallel.size)
            ])  # fmt: skip
            workers.wait("joined", HELLO_S)
            torch.set_num_threads(num_threads)
            with on_network_of(rendezvous):
                group = Ranks.join(0, config.parallel.size, rendezvous, config.device, JOIN_S, store)
            group.set_timeout(LOAD_S)  # a rank may load longer than it takes to join
            workers.when_lost(group.abandon)
            with ExitStack() as undo:
                undo.callback(group.close)
                runner = build_rank(folder, model, config, grammars, progress, group, on_unit)
                if runner.disk_cache is not None:
                    undo.callback(runner.disk_cache.close)
                load_draft_model(runner, progress)
                workers.wait("ready", LOAD_S)  # until then they may look for the rendezvous
                if stall_timeout_s:  # where a rank of another machine was stopped, which cannot be killed from here
                    group.set_timeout(2 * stall_timeout_s)
                undo.pop_all()
    except BaseException as error:
        torch.set_num_threads(before)
        try:
            if isinstance(error, RuntimeError):  # perhaps of a collective: report the lost rank
                workers.check_lost()
        finally:
            workers.close()
        raise

    def leave() -> None:
        torch.set_num_threads(before)
        runner.close()  # graphs first: leaving waits for those that hold collectives
        group.close()

    return ParallelRunner(RankRunner(runner, group, checks=checks), workers, leave)


@contextmanager
def _rendezvous(address: str) -> Iterator[tuple[str, Store | None]]:
    """Where the ranks' group is made: a private file, or with ranks on other machines torch's TCPStore
    at rank 0's ``address``, under a prefix of this engine's.
    """
    if address:
        host, port = split_address(address)
        yield f"tcp://{host}:{port}/{secrets.token_hex(8)}", _own_store(host, port)
        return
    folder = tempfile.mkdtemp(prefix="snapstream-ranks-")
    try:
        yield f"file://{folder}/group", None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _own_store(host: str, port: int) -> Store:
    """The TCPStore of the ranks' rendezvous; under torchrun its agent has it already."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return store_at(host, port, JOIN_S)
    listener = listen(host, port)  # by the address: TCPStore itself would listen at all of them
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=JOIN_S),
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def store_at(host: str, port: int, timeout_s: float) -> Store:
    """The store of rank 0 on another machine; torch's DistNetworkError where there is none."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


@contextmanager
def _waiting_for_others(workers: WorkerRanks, config: EngineConfig, store: Store | None) -> Iterator[None]:
    """Admit the workers of other machines, if there are to be any. The store has the address to connect to."""
    if store is None:
        yield
        return
    host, _ = split_address(config.parallel.address)
    listener = accept_workers(host, shared_key(), TO_RANK_0, workers.admit)
    store.set(CONTROL, f"{host}:{listener.port}")
    try:
        yield
    finally:
        listener.close()


def threads_of_rank(num_ranks: int) -> int:
    """Threads of torch for each of the ranks that share this machine."""
    import torch

    return max(1, torch.get_num_threads() // num_ranks)


def check_versions(hellos: Sequence[Hello], torch_version: str) -> None:
    """ValueError where a worker runs other versions than rank 0: it might compute other bits."""
    for rank, hello in enumerate(hellos, start=1):
        for what, theirs, ours in (("snapstream", hello.version, __version__), ("torch", hello.torch, torch_version)):
            if theirs != ours:
                raise ValueError(f"rank {rank} on {hello.host} runs {what} {theirs}; rank 0 runs {ours}")


def _environment(rank: int, device: str, num_threads: int) -> dict[str, str]:
    """What is different for a worker: it sees one GPU, its own, which is then the first."""
    own = {"OMP_NUM_THREADS": str(num_threads)}
    if device.startswith("cuda"):
        gpus = visible_gpus()
        own["CUDA_VISIBLE_DEVICES"] = gpus[rank] if gpus else str(rank)
    return own


@contextmanager
def on_network_of(rendezvous: str) -> Iterator[None]:
    """Where all ranks are on this machine, gloo uses the loopback, which no other machine can reach."""
    name = "GLOO_SOCKET_IFNAME"
    loopback = next((own for _, own in socket.if_nameindex() if own in ("lo", "lo0")), None)
    if name in os.environ or loopback is None or not rendezvous.startswith(("file:", "tcp://127.")):
        yield
        return
    os.environ[name] = loopback
    try:
        yield
    finally:
        del os.environ[name]


# A worker rank


def spawned_worker(fileno: int) -> int:
    """Run a rank of the engine whose rank 0 started this process; the exit code. ``fileno``: the channel's end."""
    for number in (signal.SIGINT, signal.SIGTERM):  # may reach the whole group; rank 0 decides, and closes the channel
        signal.signal(number, signal.SIG_IGN)
    return _work(inherited(fileno, TO_WORKER))


def run_worker(address: str, folder: Path, patience_s: float) -> int:
    """Run a rank of the engine whose store is at ``address``; the exit code. ``folder``: the checkpoint.

    ``address`` "env" takes the rank and the address from the environment. ValueError if no rank 0 answered within
    ``patience_s`` seconds, or where the keys differ.
    """
    from torch.distributed import DistError

    key, deadline, rank = shared_key(), monotonic() + patience_s, 0
    if address == "env":
        rank, _, address = launched()
        use_own_gpu()
    host, port = split_address(address)
    while True:
        try:
            store = store_at(host, port, RETRY_S * 4)
            channel = connect(store.get(CONTROL).decode(), key, TO_WORKER)
            break
        except (OSError, DistError) as error:
            if monotonic() >= deadline:
                raise ValueError(f"no rank 0 at {address} within {patience_s:g} s: {error}") from None
            sleep(RETRY_S)
    store.set_timeout(timedelta(seconds=JOIN_S))
    return _work(channel, folder, store, rank)


def _work(channel: ControlChannel, folder: Path | None = None, store: Store | None = None, rank: int = 0) -> int:
    """Do rank 0's task until the channel closes, which ends the process; the exit code of a worker that failed.

    ``folder``: the checkpoint, if it is not where rank 0 has it; ``store``: of the rendezvous; ``rank``: this one's, if
    it is known.
    """
    inbox: Inbox = SimpleQueue()
    has_terminal = folder is not None  # that is, it is on another machine
    threading.Thread(target=_receive, args=(channel, inbox, has_terminal), name="control-channel", daemon=True).start()
    try:
        _serve(channel, inbox, folder, store, rank)
    except Exception as error:
        print("error:", f"this rank cannot go on: {error}", file=sys.stderr)
        is_value = isinstance(error, (ValueError, FileNotFoundError))
        why = str(error) if is_value else f"{type(error).__name__}: {error}"
        with suppress(ConnectionFailed):
            channel.send(Failed("value" if is_value else "error", why))
    return 1


def use_own_gpu() -> None:
    """Make only the GPU of LOCAL_RANK visible, of those that torchrun shows to all ranks of a machine. A launcher that
    shows a single one has chosen it. ValueError where there are several, and none for this rank.
    """
    local, gpus = os.environ.get("LOCAL_RANK", ""), visible_gpus()
    if not local.isdigit() or len(gpus) == 1:
        return
    if gpus and int(local) >= len(gpus):
        raise ValueError(f"LOCAL_RANK is {local}; CUDA_VISIBLE_DEVICES names {len(gpus)} GPUs")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(local)] if gpus else local


def _receive(channel: ControlChannel, inbox: Inbox, has_terminal: bool) -> None:
    """Thread that listens to rank 0."""
    try:
        while True:
            message = channel.receive()
            if isinstance(message, Refused):
                print("error:", f"rank 0 does not admit this rank: {message.reason}", file=sys.stderr, flush=True)
                os._exit(1)
            inbox.put(message)
    except ConnectionFailed:
        if has_terminal:
            print("rank 0 has closed its engine, or is lost: this rank ends", file=sys.stderr, flush=True)
        os._exit(0)  # whatever the other threads do
    except ValueError as error:  # a selector that this process does not know, or no message of ours
        with suppress(ConnectionFailed):
            channel.send(Failed("error", str(error)))
        os._exit(1)


def _serve(channel: ControlChannel, inbox: Inbox, folder: Path | None, store: Store | None, rank: int) -> None:
    import torch

    from snapstream.distributed.group import Ranks
    from snapstream.exec.parallel import RankRunner, answer
    from snapstream.models.registry import read_model_config
    from snapstream.startup.resolve import check_rank

    own_print = "" if folder is None else fingerprint(folder)
    channel.send(Hello(version=__version__, torch=torch.__version__, host=socket.gethostname(), pid=os.getpid(),
                    fingerprint=own_print, rank=rank))  # fmt: skip
    task = inbox.get()
    assert isinstance(task, Task), "Task is rank 0's first message"
    config, own = task.config, folder or Path(task.model)
    if (own_print or fingerprint(own)) != task.fingerprint:
        raise ValueError(f"{own} on {socket.gethostname()} is not rank 0's checkpoint; copy it there, all files")
    model = read_model_config(own)
    check_rank(model, config, measure_machine(config.device))
    if task.num_threads:
        torch.set_num_threads(task.num_threads)
    channel.send(Joined())
    with on_network_of(task.rendezvous):
        group = Ranks.join(task.rank, config.parallel.size, task.rendezvous, config.device, JOIN_S, store)
    group.set_timeout(LOAD_S)
    runner = build_rank(own, model, config, _grammars(own, model), False, group)
    runs = RankRunner(runner, group, checks=task.checks_ranks)
    channel.send(Ready())
    files = runner.disk_cache
    while True:
        message = inbox.get()
        if isinstance(message, StepPlan):
            runs.submit(message)
        else:
            assert files is not None, "without files, rank 0 sends only plans"
            answer(files, message, channel.send)


def _grammars(folder: Path, model: ModelConfig) -> GrammarCompiler:
    """The compiler of rank 0's grammars; the tokenizer is read when the first one comes."""
    from snapstream.models.tokenizer import load_tokenizer

    return GrammarCompiler(lambda: tokenizer_json(load_tokenizer(folder)), model.vocab_size, model.eos_token_ids)
