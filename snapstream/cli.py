"""The command ``snapstream``: options and their help; the work is done elsewhere.

Torch is imported inside the commands that need it, so ``--version``, ``--help`` and ``plan`` start at once.
The invariant: wrong input ends in one line ``error: ...`` on stderr and exit code 2, Ctrl-C in exit code 130,
never in a traceback. ``plan`` goes on in ``planning.py`` and ``plan_report.py``, ``generate`` in
``cli_generate.py``, ``compress`` in ``cli_compress.py``, ``serve`` in ``server/run.py``, ``proxy`` in ``cli_proxy.py``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from snapstream.cli_options import number_option, whole_option
from snapstream.cli_proxy import PROXY_HELP, proxy
from snapstream.config import DType, Executor
from snapstream.spec_prefill.settings import Mode, Snap
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
  snapstream serve Llama-3.1-8B-Instruct/ --draft Qwen3-0.6B/ --prompt-keep 0.25
  SNAPSTREAM_API_KEY=secret snapstream serve Llama-3.2-1B-Instruct/ --host 0.0.0.0
"""


_COMPRESS_HELP = """Shorten a long text with a small draft model; the text goes to stdout, one summary line to stderr.

The draft reads the text (and what will be asked, with --query) and keeps the parts that it looks at: verbatim pieces,
in order, with a mark where something is missing. The result is text for any model behind any API.

\b
Examples:
  snapstream compress report.txt --query "What did it cost?" --keep 0.1
  snapstream compress --draft Qwen3-0.6B/ --target Llama-3.1-8B-Instruct/ --max-tokens 8192 < book.txt
  snapstream compress chat.json --messages --max-tokens 4096 --html cut.html
"""


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
        whole_option("Slots of a row; repeatable. Default: 1/2, 1/4, 1/8, 1/16 of the prompt."),
    ] = None,
    prompt_len: Annotated[
        int | None, whole_option("Prompt tokens. Default: the model's window, at most 131072.")
    ] = None,
    max_model_len: Annotated[
        int | None, whole_option("Prompt and output tokens: slots of a full row. Default: the prompt.")
    ] = None,
    chunk_len: Annotated[int, whole_option("Tokens of one prefill unit.")] = 512,
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
    max_tokens: Annotated[int, whole_option("Most tokens to generate.")] = 256,
    temperature: Annotated[float, number_option("0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int | None, whole_option("Same seed, same output.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Use the chat template or not. Default: if there is one."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message; needs the chat template.")] = None,
    dtype: Annotated[DType, typer.Option(help="Of weights and rows.")] = "float32",
    max_model_len: Annotated[int | None, whole_option("Prompt and output tokens. Default: the model's window.")] = None,
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
    executor: Annotated[
        Executor | None, typer.Option(help="Decode as plain calls, or compiled/captured. Default: graph on a GPU only.")
    ] = None,
    max_rows: Annotated[int, whole_option("Rows to allocate; one prompt uses one.")] = 1,
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
        executor=executor,
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
    port: Annotated[int, whole_option("Port; 0 takes a free one.")] = 8000,
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
    max_rows: Annotated[int, whole_option("Rows: samples decoded together.")] = 8,
    max_model_len: Annotated[int | None, whole_option("Prompt and output tokens. Default: the model's window.")] = None,
    dtype: Annotated[DType, typer.Option(help="Of weights and rows.")] = "float32",
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
    executor: Annotated[
        Executor | None, typer.Option(help="Decode as plain calls, or compiled/captured. Default: graph on a GPU only.")
    ] = None,
    max_waiting: Annotated[int, whole_option("Requests that may wait; more get 429. 0: no bound.")] = 128,
    allowed_host: Annotated[list[str] | None, typer.Option(help="Host to answer to, beside localhost.")] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may call this server; repeatable.")
    ] = None,
    tool_parser: Annotated[
        Literal["auto", "llama3_json", "hermes", "none"],
        typer.Option(help="How the model writes tool calls; auto goes by its chat template."),
    ] = "auto",
    draft: Annotated[
        Path | None,
        typer.Option(help="Draft's checkpoint folder: requests may have it shorten their prompts. Default: none."),
    ] = None,
    prompt_keep: Annotated[
        float | None, number_option("With --draft: share that stays of long prompts whose request does not say.")
    ] = None,
    prompt_max_tokens: Annotated[
        int | None, whole_option("With --draft: ceiling of a prompt in tokens, instead of --prompt-keep.")
    ] = None,
    prompt_threshold: Annotated[
        int | None, whole_option("With --draft: leave prompts of fewer tokens alone. Default: 1024.")
    ] = None,
    drain_timeout: Annotated[float, number_option("Seconds that running requests get after SIGTERM.")] = 30.0,
    no_page: Annotated[bool, typer.Option("--no-page", help="Do not serve the chat page at /.")] = False,
    no_restart: Annotated[bool, typer.Option("--no-restart", help="Do not restart an engine that died.")] = False,
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="Of the log on stderr: a line for each request, never its text.")
    ] = "text",
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate file (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Key file (PEM).")] = None,
) -> None:
    try:
        from snapstream.server import run
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; in a checkout run: pip install '.[serve]'") from None
    from snapstream.assets import TINY_MODEL
    from snapstream.cli_generate import parse_budget
    from snapstream.server import logs
    from snapstream.server.engine_api import EngineDead
    from snapstream.server.messages import EngineSpec

    logs.set_up(log_format)
    spec = EngineSpec(
        model=str(model or TINY_MODEL),
        budget=parse_budget(budget),
        dtype=dtype,
        device=device,
        executor=executor,
        max_rows=max_rows,
        max_model_len=max_model_len,
        max_waiting=max_waiting,
    )
    settings = run.make_settings(
        spec,
        host,
        api_key or (),
        cors_origin or (),
        allowed_host or (),
        has_page=not no_page,
        tool_parser=tool_parser,
        prompt_compression=run.default_compression(draft, prompt_keep, prompt_max_tokens, prompt_threshold),
    )
    options = run.ServeOptions(
        host=host,
        port=port,
        names=tuple(served_model_name or ()),
        drain_timeout_s=drain_timeout,
        restart=not no_restart,
        tls_cert=tls_cert,
        tls_key=tls_key,
        draft=draft,
        draft_threshold=prompt_threshold,
    )
    try:
        run.serve(spec, settings, options)
    except EngineDead as error:
        raise typer.Exit(_fail(str(error), 1)) from None


@app.command(help=_COMPRESS_HELP, short_help="Shorten a long text with a small draft model.")
def compress(
    file: Annotated[
        str | None, typer.Argument(help="Text file; without it or as -: stdin.", show_default=False)
    ] = None,
    draft: Annotated[
        Path | None, typer.Option(help="Checkpoint folder of the draft. Default: the shipped tiny one.")
    ] = None,
    target: Annotated[
        Path | None, typer.Option(help="Folder with the target's tokenizer; without it draft tokens are counted.")
    ] = None,
    keep: Annotated[float | None, number_option("Share to keep, in (0, 1]. Default: 0.25.")] = None,
    max_tokens: Annotated[int | None, whole_option("Keep at most so many target tokens instead.")] = None,
    query: Annotated[str | None, typer.Option(help="What will be asked about the text.")] = None,
    mode: Annotated[Mode, typer.Option(help="Chunks, borders and marks for prose or for code.")] = "auto",
    snap: Annotated[
        Snap | None, typer.Option(help="Where pieces end. Default: at words, in code at lines.", show_default=False)
    ] = None,
    delimiter: Annotated[
        str | None, typer.Option(help="Between pieces. Default: a line [...], in code a comment.", show_default=False)
    ] = None,
    look_ahead: Annotated[int, whole_option("Greedy draft tokens that vote; 0: the text's own end.")] = 8,
    threshold: Annotated[int, whole_option("Leave texts of fewer tokens alone.")] = 0,
    messages: Annotated[
        bool, typer.Option("--messages", help="The input is JSON: OpenAI messages, or an object with them.")
    ] = False,
    report: Annotated[str | None, typer.Option(help="Write the report as JSON to this file; - is stderr.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page that shows what was kept and cut.")] = None,
    dtype: Annotated[DType, typer.Option(help="Of the draft's weights.")] = "float32",
    device: Annotated[str, typer.Option(help="Torch device of the draft.")] = "cpu",
) -> None:
    from snapstream.assets import TINY_DRAFT_MODEL
    from snapstream.cli_compress import CompressOptions, read_text
    from snapstream.cli_compress import compress as run_compress

    options = CompressOptions(
        draft=draft or TINY_DRAFT_MODEL,
        target=target,
        keep=keep,
        max_tokens=max_tokens,
        query=query,
        mode=mode,
        snap=snap,
        delimiter=delimiter,
        look_ahead=look_ahead,
        threshold=threshold,
        is_messages=messages,
        report=report,
        html=html,
        dtype=dtype,
        device=device,
    )
    run_compress(read_text(file, sys.stdin), options, out=sys.stdout, err=sys.stderr)


app.command(help=PROXY_HELP, short_help="Trim long prompts in front of any OpenAI-compatible server.")(proxy)


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
