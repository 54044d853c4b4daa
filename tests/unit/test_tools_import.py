"""Every module beside the package can be imported (the type checker looks at the package only), and by whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("evals", "benchmarks", "recipes", "figures")
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.name != "__main__.py"
}
# Below evals and benchmarks; the rest of figures lies above them.
SHARED = {"figures", "figures.machine", "figures.markdown", "figures.chart"}


@pytest.mark.parametrize("name", MODULES)
def test_it_imports(name: str) -> None:
    import_module(name)


def imported(path: Path) -> set[str]:
    """Modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)} & {node.module, *MODULES}
    return found


@pytest.mark.parametrize(("one", "other"), [("evals", "benchmarks"), ("benchmarks", "evals"), ("recipes", "evals")])
def test_tools_know_figures_and_not_each_other(one: str, other: str) -> None:
    every = {name: imported(path) for name, path in MODULES.items() if name.split(".")[0] == one}
    assert len(every) > 3
    for name, modules in every.items():
        assert not [module for module in modules if module.split(".")[0] == other], name
        assert {module for module in modules if module.split(".")[0] == "figures"} <= SHARED, name
    for name in SHARED:
        assert not {module.split(".")[0] for module in imported(MODULES[name])} & {"evals", "benchmarks"}, name


def test_nothing_needs_matplotlib_before_it_draws() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; import figures.documents, evals.run, benchmarks.decode"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
