"""The command ``snapstream``: options and their help; the work is done elsewhere.

Torch is imported inside the commands that need it, so ``--version``, ``--help`` and ``plan`` start at once.
The invariant: wrong input ends in one line ``error: ...`` on stderr and exit code 2, Ctrl-C in exit code 130,
never in a traceback. ``plan`` goes on in ``planning.py`` and ``plan_report.py``, ``generate`` in
``cli_generate.py``, ``serve`` in ``server/run.py``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from snapstream.config import DType
from snapstream.version import __version__

app = typer.Typer(
    name="snapstream",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="LLM inference in rows of constant size: a prompt of any length, a cache of fixed budget.",
)

_PLAN_HELP = """What a model costs, from its config.json alone: bytes per row, rows that fit, prefill, speed.

Budgets are slots: tokens kept per layer and kv head. A row is the cache of one sequence.

\b
Examples:
  snapstream plan Llama-3.1-8B-Instruct/
  snapstream plan config.json --memory 24GB --bandwidth 1TB/s --budget 4096 --budget 8192
  snapstream plan config.json --prompt-len 32768 --json
"""

_GENERATE_HELP = """Answer one prompt; text streams to stdout, one summary line goes to stderr.

MODEL is a checkpoint folder: config.json, safetensors, tokenizer.json.

\b
Examples:
  snapstream generate Qwen3-0.6B/ "Why is the sky blue?"
  snapstream generate Llama-3.2-1B-Instruct/ --file report.txt --budget 4096
  cat question.txt | snapstream generate Qwen2.5-0.5B/ --raw --temperature 0.7 --seed 1
"""

_SERVE_HELP = """Serve a model over HTTP, as the OpenAI API; SIGTERM drains. Needs the extra: snapstream-llm[serve].

MODEL is a checkpoint folder; without it the tiny model that ships with the package is served.

\b
Examples:
  snapstream serve
  snapstream serve Qwen3-0.6B/ --budget 4096 --max-rows 16
  SNAPSTREAM_API_KEY=secret snapstream serve Llama-3.2-1B-Instruct/ --host 0.0.0.0
"""


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def _whole_option(help_text: str) -> Any:
    """An option that takes a whole number and says so, with the value, where it gets something else."""
    return typer.Option(help=help_text, parser=_whole_number, metavar="N")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"snapstream {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(help=_PLAN_HELP, short_help="What a model costs, from its config.json alone.")
def plan(
    config: Annotated[Path, typer.Argument(help="config.json, or the folder it is in.", show_default=False)],
    budget: Annotated[
        list[int] | None,
        _whole_option("Slots of a row; repeatable. Default: 1/2, 1/4, 1/8, 1/16 of the prompt."),
    ] = None,
    prompt_len: Annotated[
        int | None, _whole_option("Prompt tokens. Default: the model's window, at most 131072.")
    ] = None,
    max_model_len: Annotated[
        int | None, _whole_option("Prompt and output tokens: slots of a full row. Default: the prompt.")
    ] = None,
    chunk_len: Annotated[int, _whole_option("Tokens of one prefill unit.")] = 512,
    dtype: Annotated[DType, typer.Option(help="Of weights and rows.")] = "bfloat16",
    memory: Annotated[str, typer.Option(help="Device memory, e.g. 80GiB, 24GB.")] = "80GiB",
    bandwidth: Annotated[str, typer.Option(help="Memory bandwidth, e.g. 3.35TB/s, 900GB/s.")] = "3.35TB/s",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (bytes, tokens, tokens/s).")] = False,
) -> None:
    from snapstream.models.registry import read_model_config
    from snapstream.planning import make_plan
    from snapstream.sizes import parse_bandwidth, parse_bytes

    result = make_plan(
        read_model_config(config),
        dtype=dtype,
        budgets=budget or (),
        prompt_len=prompt_len,
        max_model_len=max_model_len,
        chunk_len=chunk_len,
        memory_bytes=parse_bytes(memory),
        bandwidth=parse_bandwidth(bandwidth),
    )
    if as_json:
        typer.echo(json.dumps(result.as_dict(), indent=2))
        return
    from rich.console import Console

    from snapstream.plan_report import print_plan

    print_plan(result, Console())


@app.command(help=_GENERATE_HELP, short_help="Answer one prompt with a checkpoint on disk.")
def generate(
    model: Annotated[Path, typer.Argument(help="Checkpoint folder.", show_default=False)],
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt; without it or --file: stdin.", show_default=False),
    ] = None,
    file: Annotated[str | None, typer.Option(help="Read the prompt from this file; - is stdin.")] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Slots of the row, or 'full'. Default: 8192, at most the window."),
    ] = None,
    max_tokens: Annotated[int, _whole_option("Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.", parser=_number, metavar="X")] = 0.0,
    seed: Annotated[int | None, _whole_option("Same seed, same output.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Use the chat template or not. Default: if there is one."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message; needs the chat template.")] = None,
    dtype: Annotated[DType, typer.Option(help="Of weights and rows.")] = "float32",
    max_model_len: Annotated[
        int | None, _whole_option("Prompt and output tokens. Default: the model's window.")
    ] = None,
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
    max_rows: Annotated[int, _whole_option("Rows to allocate; one prompt uses one.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    from snapstream.cli_generate import encode_prompt, parse_budget, read_prompt, stream_answer
    from snapstream.llm import LLM
    from snapstream.request import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    slots = parse_budget(budget)
    text = read_prompt(prompt, file, sys.stdin)
    with LLM(
        model,
        budget=slots,
        dtype=dtype,
        device=device,
        max_rows=max_rows,
        max_model_len=max_model_len,
        progress=sys.stderr.isatty(),
    ) as llm:
        encoded = encode_prompt(llm, text, chat=chat, system=system)
        raise typer.Exit(stream_answer(llm, encoded, params, out=sys.stdout, err=sys.stderr, as_json=as_json))


@app.command(help=_SERVE_HELP, short_help="Serve a model over HTTP, as the OpenAI API.")
def serve(
    model: Annotated[
        Path | None, typer.Argument(help="Checkpoint folder. Default: the shipped tiny one.", show_default=False)
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is every network.")] = "127.0.0.1",
    port: Annotated[int, _whole_option("Port; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="SNAPSTREAM_API_KEY", help="Bearer key for /v1/*; repeatable. Default: none, open."),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name(s) that clients use; repeatable. Default: the folder's.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Slots of a row, or 'full'; a request may ask for less. Default: 8192, at most the window."),
    ] = None,
    max_rows: Annotated[int, _whole_option("Rows: samples decoded together.")] = 8,
    max_model_len: Annotated[
        int | None, _whole_option("Prompt and output tokens. Default: the model's window.")
    ] = None,
    dtype: Annotated[DType, typer.Option(help="Of weights and rows.")] = "float32",
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
    max_waiting: Annotated[int, _whole_option("Requests that may wait; more get 429. 0: no bound.")] = 128,
    allowed_host: Annotated[list[str] | None, typer.Option(help="Host to answer to, beside localhost.")] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may call this server; repeatable.")
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests get after SIGTERM.", parser=_number, metavar="X")
    ] = 30.0,
    no_restart: Annotated[bool, typer.Option("--no-restart", help="Do not restart an engine that died.")] = False,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate file (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Key file (PEM).")] = None,
) -> None:
    try:
        from snapstream.server import run
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; in a checkout run: pip install '.[serve]'") from None
    import logging

    from snapstream.assets import TINY_MODEL
    from snapstream.cli_generate import parse_budget
    from snapstream.server.engine_api import EngineDead
    from snapstream.server.messages import EngineSpec

    logging.basicConfig(
        level=logging.INFO, format="time=%(asctime)s level=%(levelname)s %(message)s", stream=sys.stderr
    )
    spec = EngineSpec(
        model=str(model or TINY_MODEL),
        budget=parse_budget(budget),
        dtype=dtype,
        device=device,
        max_rows=max_rows,
        max_model_len=max_model_len,
        max_waiting=max_waiting,
    )
    settings = run.make_settings(spec, host, api_key or (), cors_origin or (), allowed_host or ())
    options = run.ServeOptions(
        host=host,
        port=port,
        names=tuple(served_model_name or ()),
        drain_timeout_s=drain_timeout,
        restart=not no_restart,
        tls_cert=tls_cert,
        tls_key=tls_key,
    )
    try:
        run.serve(spec, settings, options)
    except EngineDead as error:
        raise typer.Exit(_fail(str(error), 1)) from None


@app.command(short_help="Watch a small model answer from a fraction of its cache.")
def demo() -> None:
    """Answer questions about a document longer than the cache, on the model that ships with the package."""
    from snapstream.demo import run_demo

    run_demo()


def _fail(message: str, code: int = 2) -> int:
    print("error:", " ".join(message.split()), file=sys.stderr)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        code = app(args=argv, prog_name="snapstream", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our stdout left, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        return _fail(str(error))
    except Exception as error:
        if not hasattr(error, "format_message"):  # not one of click's, wherever typer keeps its click
            raise
        return _fail(error.format_message())


if __name__ == "__main__":
    sys.exit(main())
