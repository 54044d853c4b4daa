"""Named things that a user chooses from: selectors, executors, model families.

A registry maps a name to a class, or to the text ``"module:attribute"`` of one that is imported when it is first asked
for: so settings can check a name without importing torch. Anyone may add an entry; nothing in the package enumerates
the names anywhere else.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Generic, TypeVar, cast

from snapstream.config.values import InvalidValue

T = TypeVar("T")


class Registry(Generic[T]):
    """Entries of one kind by name, in the order in which they were added."""

    def __init__(self, kind: str, entries: dict[str, T | str]) -> None:
        """``kind`` names the entries in errors: the setting that holds their names."""
        self.kind = kind
        self._entries = dict(entries)
        self._shipped = frozenset(entries)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def is_shipped(self, name: str) -> bool:
        """Whether the package brings it, so that every process knows it."""
        return name in self._shipped

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._entries

    def check(self, name: Any) -> str:
        """``name`` itself; ValueError with the known names for any other value."""
        if name not in self:
            raise InvalidValue(f"{self.kind} is {name!r}; it must be one of {', '.join(self._entries)}", self.kind)
        return cast(str, name)

    def get(self, name: str) -> T:
        """The entry of that name; ValueError where there is none."""
        entry = self._entries[self.check(name)]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = self._entries[name] = cast(T, getattr(import_module(module), attribute))
        return entry

    def add(self, name: str, entry: T | str) -> None:
        """Register an entry; ValueError for a name that is taken."""
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is there already")
        self._entries[name] = entry

    def remove(self, name: str) -> None:
        """Take an entry out again; for tests that add one."""
        del self._entries[name]
