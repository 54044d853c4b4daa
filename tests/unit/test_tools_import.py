"""Every module beside the package can be imported: the type checker looks at the package only."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for folder in ("evals", "benchmarks", "recipes")
    for path in (ROOT / folder).rglob("*.py")
    if path.name != "__main__.py"
)


@pytest.mark.parametrize("name", MODULES)
def test_it_imports(name: str) -> None:
    import_module(name)
