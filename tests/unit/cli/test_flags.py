"""Flags are read off the settings classes: a new field is a new flag, and nothing else has to know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from snapstream.cli import main
from snapstream.cli.flags import Flags, as_command
from snapstream.config import ReselectionConfig
from snapstream.config.engine import setting


@dataclass(frozen=True, kw_only=True)
class Settings:
    width: int = setting(3, "How wide.")
    kind: Literal["a", "b"] = setting("a", "Which kind.")
    every: ReselectionConfig | None = setting(
        None, "How often.", metavar="N", flag="--how-often", parse=lambda text: ReselectionConfig(every=int(text))
    )
    hidden: int = 5


def run(*arguments: str, shown: Flags | None = None) -> tuple[Any, str]:
    """What a command with these flags was given, and what it printed."""
    seen: list[Any] = []
    given = shown or Flags()

    def command(name: str, settings: Annotated[Settings, given]) -> None:
        seen.append((name, settings))

    command.__annotations__ = {"name": str, "settings": Annotated[Settings, given], "return": type(None)}
    app = typer.Typer(rich_markup_mode=None)
    app.command()(as_command(command))
    result = CliRunner().invoke(app, arguments)
    return (seen[0] if seen else None), result.output


def test_defaults_are_the_classes() -> None:
    assert run("x")[0] == ("x", Settings())


def test_every_field_with_words_has_a_flag() -> None:
    given, _ = run("x", "--width", "7", "--kind", "b", "--how-often", "9")
    assert given == ("x", Settings(width=7, kind="b", every=ReselectionConfig(every=9)))
    _, text = run("--help")
    for words in ("--width N", "How wide.  [default: 3]", "--kind <a|b>", "--how-often N"):
        assert words in text
    assert "--hidden" not in text


def test_a_command_may_have_defaults_and_words_of_its_own() -> None:
    shown = Flags(defaults={"width": 4}, words={"width": "Rather wide."}, without=("kind",))
    assert run("x", shown=shown)[0] == ("x", Settings(width=4))
    _, text = run("--help", shown=shown)
    assert "Rather wide.  [default: 4]" in text and "--kind" not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--width", "wide"), "'wide' is not a whole number"),
        (("--kind", "c"), "'c' is not one of 'a', 'b'"),
        (("--how-often", "0"), "every is 0; it must be a whole number >= 1"),
    ],
)
def test_a_wrong_value_is_named(arguments: tuple[str, ...], words: str) -> None:
    given, text = run("x", *arguments)
    assert given is None and words in " ".join(text.split())


@pytest.mark.parametrize("command", ["generate", "serve", "plan"])
def test_a_selector_is_chosen_by_name(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert "--selector snapkv|hops|diverse" in capsys.readouterr().out
    assert main([command, "--selector", "best", "somewhere"]) == 2
    assert "selector is 'best'; it must be one of snapkv, hops, diverse" in capsys.readouterr().err
