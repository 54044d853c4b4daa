"""docs/cli.md: every flag of every command, read off the commands themselves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

from typer.main import get_command

from figures.markdown import table
from snapstream.cli.app import app
from snapstream.cli.flags import OTHER_FLAGS

DOCUMENT = Path(__file__).parents[1] / "docs" / "cli.md"
INTRO = """# Command line

Generated from the commands by `python -m figures`; a test fails when this page is out of date.
`snapstream COMMAND --help` prints the same with examples. Wrong input ends in one line `error: ...` and exit code 2.

"""
OTHERS = """
### Flags of vLLM and llama.cpp

Where a flag of theirs means the same it is an alias, listed above. Every command whose first argument is MODEL
also takes it as `--model` or `-m`. The others are refused, with what to use:

"""


def render() -> str:
    """The whole page."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    index = table(["command", "purpose"], [[f"[`{name}`](#{name})", commands[name].short_help] for name in commands])
    return INTRO + index + "\n" + "".join(_section(name, commands[name]) for name in commands) + _others()


def _others() -> str:
    """What to use in place of flags of other engines."""
    remedies: dict[str, list[str]] = {}
    for flag, remedy in OTHER_FLAGS.items():
        remedies.setdefault(remedy, []).append(_code(flag))
    rows = [[", ".join(flags), _line(remedy)] for remedy, flags in remedies.items()]
    return OTHERS + table(["flag", "here"], rows) + "\n"


def _section(name: str, command: Any) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option"]
    usage = " ".join(["snapstream", name, *(_argument(one) for one in arguments), "[OPTIONS]"])
    about = command.help.split("\n\n")[0] if command.help else command.short_help
    text = f"\n## {name}\n\n{_line(about)}\n\n    {usage}\n"
    rows = [[_flag(one), _default(one), _help(one)] for one in options]
    return text + ("\n" + table(["flag", "default", ""], rows) + "\n" if rows else "")


def _argument(argument: Any) -> str:
    name = (argument.metavar or argument.name).strip("[]").upper()
    return name if argument.required else f"[{name}]"


def _flag(option: Any) -> str:
    """The flag, and what it takes."""
    names = ", ".join(_code(name) for name in [*option.opts, *option.secondary_opts])
    if option.is_flag:
        return names
    return f"{names} {_code(option.metavar or _kind(option.type_descriptor.annotation))}" + " ..." * option.multiple


def _kind(annotation: Any) -> str:
    """What a flag without a metavar takes, by its type."""
    choices = get_args(annotation)
    if choices and all(isinstance(choice, str) for choice in choices):
        return "|".join(choices)
    return "PATH" if annotation is Path else "TEXT"


def _default(option: Any) -> str:
    value = option.default
    if option.is_flag or value is None or value == "" or callable(value) or (option.multiple and not value):
        return ""
    return _code(str(value))


def _help(option: Any) -> str:
    variables = [option.envvar] if isinstance(option.envvar, str) else option.envvar or []
    return " ".join([_line(option.help or ""), *(f"Variable: {_code(name)}." for name in variables)])


def _code(text: str) -> str:
    return f"`{text}`"


def _line(text: str) -> str:
    """One line; angle brackets would be HTML."""
    return re.sub(r"\s+", " ", text.replace("\b", "")).strip().replace("<", "&lt;")
