"""``snapstream serve``, ``worker`` (ranks of an engine on another machine) and ``deploy`` (replicas on Ray Serve)."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from snapstream.assets import TINY_MODEL
from snapstream.cli.flags import ENGINE_ALIASES, Flags, Model, ModelOrTiny, needs_extra, number, whole_option
from snapstream.config import EngineOptions, as_count, as_number
from snapstream.config.values import num_cores
from snapstream.models.hub import local_folder
from snapstream.server.options import ADMIN_VARIABLE, ENGINE_DEFAULTS, ServeOptions

HELP = """Serve a model with the APIs of OpenAI and Anthropic; SIGTERM drains. Needs the extra: snapstream-llm[serve].

MODEL is a checkpoint folder or the id of a model on the Hugging Face hub; without it the tiny model that ships with
the package is served.

\b
Examples:
  snapstream serve
  snapstream serve Qwen3-0.6B/ --budget 4096 --max-rows 16
  snapstream serve Llama-3.1-8B-Instruct/ --draft Qwen3-0.6B/ --prompt-keep 0.25
  SNAPSTREAM_API_KEY=secret snapstream serve Llama-3.2-1B-Instruct/ --host 0.0.0.0
  snapstream serve Qwen3-0.6B/ --role decode --prefill http://127.0.0.1:8001 --transfer-secret-file secret
"""


ENGINE = Flags(
    defaults=ENGINE_DEFAULTS,
    words={
        "max_waiting": "Requests that may wait; more get 429. 0: unlimited.",
        "prefix_store": "Host memory for prompt prefixes, so that each is computed once; auto: a part of "
        "what is free, 0: none.",
    },
    aliases=ENGINE_ALIASES,
)

PATIENCE_S = 300.0  # for rank 0 to be there, where this process is another rank


def serve(
    engine: Annotated[EngineOptions, ENGINE],
    options: ServeOptions,
    model: ModelOrTiny = None,
) -> None:
    folder = TINY_MODEL if model is None else local_folder(model)
    if options.draft is not None:
        options = replace(options, draft=local_folder(options.draft))
    if engine.master_addr == "env":  # not rank 0: torchrun starts the same command as every rank
        from snapstream.startup.build import run_worker

        raise typer.Exit(run_worker("env", folder, PATIENCE_S))
    with needs_extra("serve"):
        from snapstream.server import run
    from snapstream.server.engine.api import EngineDead
    from snapstream.server.http.lifecycle import set_up_log
    from snapstream.server.options import refuse_blank

    refuse_blank(ADMIN_VARIABLE)
    set_up_log(options.log_format)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for every prompt that is prefilled remotely
    spec, settings = run.prepare(folder, engine, options)
    try:
        run.check_models(spec, options)
        run.serve(spec, settings, options)
    except (EngineDead, run.CannotLoad) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from None


WORKER_HELP = """Run worker ranks of an engine whose rank 0 is on another machine, with --local-ranks and --master-addr.

MODEL is this machine's copy of rank 0's checkpoint folder. The key of SNAPSTREAM_RANKS_KEY (or of the file that
SNAPSTREAM_RANKS_KEY_FILE names) must be rank 0's. The command ends with the engine.
HOST:PORT "env" takes rank and address from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

\b
Examples:
  snapstream serve DeepSeek-R1/ --device cuda --tensor-parallel 16 --local-ranks 8 --master-addr 10.0.0.1:7690
  snapstream worker 10.0.0.1:7690 DeepSeek-R1/ --ranks 8
"""

POLL_S = 0.1


def worker(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where rank 0 listens.", show_default=False)],
    model: Model,
    ranks: Annotated[
        int, whole_option("Ranks on this machine, one process each; on GPUs, one per GPU from the first.")
    ] = 1,
    patience: Annotated[
        float, typer.Option(help="Seconds to wait for rank 0 to start.", parser=number, metavar="X")
    ] = PATIENCE_S,
) -> None:
    as_count("--ranks", ranks, 1)
    as_number("--patience", patience, 0.0, 604800.0)
    if address == "env" and ranks > 1:
        raise ValueError(f"--ranks is {ranks}; RANK names one rank: start a process for each")
    model = local_folder(model)
    if ranks == 1:
        from snapstream.startup.build import run_worker

        raise typer.Exit(run_worker(address, model, patience))
    own = [sys.executable, "-m", "snapstream.cli", "worker", address, str(model), "--patience", str(patience)]
    raise typer.Exit(run_all([(own, environment(rank, ranks)) for rank in range(ranks)]))


def environment(rank: int, ranks: int) -> dict[str, str]:
    """Environment of one of several ranks: one GPU, and its share of the cores."""
    from snapstream.startup.measure import visible_gpus

    gpus = visible_gpus() or [str(gpu) for gpu in range(ranks)]
    if len(gpus) < ranks:
        raise ValueError(f"--ranks is {ranks}; CUDA_VISIBLE_DEVICES names {len(gpus)} GPUs")
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, num_cores() // ranks))
    return {**os.environ, "CUDA_VISIBLE_DEVICES": gpus[rank], "OMP_NUM_THREADS": threads}


def run_all(commands: list[tuple[list[str], dict[str, str]]]) -> int:
    """Run commands in parallel until one ends, then end the others; its exit code."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the finally block runs
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command, environ in commands:
            running.append(subprocess.Popen(command, env=environ))
        while True:
            for process in running:
                if process.poll() is not None:
                    return process.returncode
            time.sleep(POLL_S)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


DEPLOY_HELP = """Serve replicas of a model on Ray Serve, from a TOML or YAML file. Needs the extra: snapstream-llm[ray].

Without --address it starts a Ray cluster on this machine, and ends it at SIGTERM, after the drain. With it the
application goes to a cluster that runs, or replaces the one that is there without ending a stream, and the command
returns.

\b
Examples:
  snapstream deploy deploy.toml
  snapstream deploy deploy.toml --address auto
"""


def deploy(
    config: Annotated[Path, typer.Argument(help="TOML, YAML or JSON file.", show_default=False)],
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            envvar="RAY_ADDRESS",
            help="Ray cluster to deploy to; auto: the one of this machine. Default: a new one.",
        ),
    ] = None,
) -> None:
    from snapstream.integrations.ray.config import prepare

    prepare(address or None)
    with needs_extra("ray"):
        from snapstream.integrations.ray import application
    from snapstream.integrations.ray.config import read_config
    from snapstream.server.http.lifecycle import set_up_log
    from snapstream.server.run import CannotLoad

    set_up_log("text")
    try:
        application.deploy(read_config(config), address or None)
    except (application.CannotDeploy, CannotLoad) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from None
