"""Names that a user chooses from: known, imported when asked for, and open to additions."""

from __future__ import annotations

import sys

import pytest

from snapstream.config.registry import Registry


def test_an_entry_given_as_text_is_imported_when_asked_for() -> None:
    shelf: Registry[type] = Registry("thing", {"plain": int, "late": "wsgiref.types:InputStream"})
    sys.modules.pop("wsgiref.types", None)
    assert shelf.names == ("plain", "late") and "late" in shelf and shelf.get("plain") is int
    assert "wsgiref.types" not in sys.modules
    assert shelf.get("late").__name__ == "InputStream"
    assert shelf.get("late") is shelf.get("late")


@pytest.mark.parametrize("name", ["other", "", None, 5, ["plain"]])
def test_an_unknown_name_is_refused_with_the_known_ones(name: object) -> None:
    shelf: Registry[type] = Registry("thing", {"plain": int, "round": float})
    with pytest.raises(ValueError, match=r"thing is .*; it must be one of plain, round"):
        shelf.check(name)
    assert name not in shelf


def test_entries_come_and_go_and_none_is_replaced() -> None:
    shelf: Registry[type] = Registry("thing", {"plain": int})
    shelf.add("own", str)
    assert shelf.get("own") is str and shelf.names == ("plain", "own")
    with pytest.raises(ValueError, match="thing 'plain' is there already"):
        shelf.add("plain", str)
    shelf.remove("own")
    assert shelf.names == ("plain",) and shelf.get("plain") is int


def test_a_registry_does_not_share_the_dictionary_it_was_made_of() -> None:
    entries: dict[str, type | str] = {"plain": int}
    Registry("thing", entries).add("own", str)
    assert entries == {"plain": int}
