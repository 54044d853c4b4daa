"""``snapstream deploy``: a config file to replicas on Ray Serve (``integrations/ray/run.py``)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HELP = """Serve replicas of a model on Ray Serve, as a TOML or YAML file says. Needs the extra: snapstream-llm[ray].

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
    from snapstream.integrations.ray.environment import prepare

    prepare(address or None)
    try:
        from snapstream.integrations.ray import run
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; in a checkout run: pip install '.[ray]'") from None
    from snapstream.integrations.ray.config import read_config
    from snapstream.server import logs
    from snapstream.server.run import CannotLoad

    logs.set_up("text")
    try:
        run.deploy(read_config(config), address or None)
    except (run.CannotDeploy, CannotLoad) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from None
