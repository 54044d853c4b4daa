"""The command ``snapstream``: all commands, and their exit codes.

Torch is imported inside the commands that need it, so ``--version``, ``--help`` and ``plan`` start at once. Invariant:
invalid input ends in one line ``error: ...`` on stderr and exit code 2, Ctrl-C in exit code 130, never in a traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from snapstream.cli import bench, chat, checkpoints, compress, generate, plan, serve
from snapstream.cli.flags import AliasedCommand, Command, as_command
from snapstream.version import __version__

app = typer.Typer(
    name="snapstream",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="LLM inference in rows of constant size: a prompt of any length, a cache of fixed budget.",
)


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


def _add(function: Command, help_text: str | None, short_help: str) -> None:
    app.command(cls=AliasedCommand, help=help_text, short_help=short_help)(as_command(function))


def demo() -> None:
    """Answer questions about a document longer than the cache, on the model that ships with the package."""
    from snapstream.cli.demo import run_demo

    run_demo()


_add(plan.plan, plan.HELP, "What a model costs, from its config.json alone.")
_add(generate.generate, generate.HELP, "Answer one prompt with a checkpoint on disk.")
_add(chat.chat, chat.HELP, "Chat with a model in the terminal.")
_add(bench.bench, bench.HELP, "Measure tokens per second of prefill and decode.")
_add(serve.serve, serve.HELP, "Serve a model over HTTP with the APIs of OpenAI and Anthropic.")
_add(serve.deploy, serve.DEPLOY_HELP, "Serve replicas of a model on Ray Serve.")
_add(serve.worker, serve.WORKER_HELP, "Run worker ranks of an engine on another machine.")
_add(compress.compress, compress.HELP, "Shorten a long text with a small draft model.")
_add(compress.proxy, compress.PROXY_HELP, "Compress long prompts in front of any OpenAI-compatible server.")
_add(checkpoints.quantize, checkpoints.QUANTIZE_HELP, "Write a checkpoint whose layers are int8 or int4.")
_add(checkpoints.calibrate, checkpoints.CALIBRATE_HELP, "Measure which kv heads of a model need slots.")
_add(demo, None, "Watch a small model answer from a fraction of its cache.")


def _fail(message: str) -> int:
    print("error:", " ".join(message.split()), file=sys.stderr)
    return 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        code = app(args=argv, prog_name="snapstream", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of stdout exited, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        return _fail(str(error))
    except Exception as error:
        if not hasattr(error, "format_message"):  # not one of click's: typer may bundle its own click
            raise
        return _fail(error.format_message())
