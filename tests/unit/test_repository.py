"""Links between documents lead to a file, and to a heading in it."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer

from benchmarks.server_process import served
from figures import commands
from figures.documents import NAMES, README, SECTION, render
from figures.site import inside
from snapstream.assets import TINY_MODEL
from snapstream.cli.app import app
from snapstream.cli.flags import MODEL_FLAGS, OTHER_FLAGS

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")])
READERS = sorted(path for path in ROOT.glob("docs/*.md"))
MAX_WORDS = 35_000  # of the readers' pages together
# Records of former days: they name files as they were called then.
RECORDS = {ROOT / "CHANGELOG.md", ROOT / "docs" / "research" / "log.md"}


def headings(text: str) -> set[str]:
    """As they are linked to: small letters, hyphens for spaces, nothing else."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    found = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in found)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_a_file_and_its_heading(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, heading = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), link
        assert not heading or target.suffix != ".md" or heading in headings(target.read_text()), link


NAMED = re.compile(
    r"(?<![\w./-])((?:snapstream|tests|benchmarks|evals|figures|recipes|deploy|examples|docs)/[\w./-]*[\w/])"
)


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if path not in RECORDS], ids=lambda path: path.name)
def test_every_path_that_is_named_exists(document: Path) -> None:
    """From the root, or from the package where it is a Python file or a folder in backticks."""
    text = document.read_text()
    code = re.findall(r"`([^`\n]+)`", text)
    found = {name for part in code for name in NAMED.findall(part)}
    if document in READERS:
        inside = (part for part in code if re.fullmatch(r"[a-z_]+/[\w/]*(\.py)?", part) and is_package(part))
        found |= {f"snapstream/{part}" for part in inside}
    missing = [name for name in sorted(found) if not (ROOT / name).exists() and not re.search(r"/(NAME|\*)", name)]
    assert missing == [], document


def test_documents_that_code_names_exist() -> None:
    sources = [*ROOT.glob("snapstream/**/*.py"), *ROOT.glob("deploy/**/*.*"), *ROOT.glob("[be]*/**/*.py")]
    found = {(path, name) for path in sources for name in re.findall(r"docs/[\w/-]+\.md", path.read_text())}
    missing = [(path.name, name) for path, name in sorted(found) if not (ROOT / name).exists()]
    assert [one for one in missing if one[1] != "docs/research/gpu-results.md"] == []  # written by a GPU's results


def is_package(part: str) -> bool:
    """Whether it begins with a package of ours: not a unit such as GB/s, nor a folder of the root."""
    return (ROOT / "snapstream" / part.split("/")[0]).is_dir()


def test_readers_pages_are_short() -> None:
    assert sum(len(page.read_text().split()) for page in READERS) <= MAX_WORDS


def test_every_page_is_in_the_navigation_and_in_the_index() -> None:
    pages = {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")}
    assert set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())) == pages
    for folder in (ROOT / "docs", ROOT / "docs" / "research"):
        index = (folder / "index.md").read_text()
        for page in folder.glob("*.md"):
            assert page.name == "index.md" or f"]({page.name}" in index, page


def test_the_page_of_commands_is_current() -> None:
    assert commands.DOCUMENT.read_text() == commands.render(), "run python -m figures"


def test_links_that_leave_the_site_become_plain_paths() -> None:
    text = "[code](../snapstream/llm.py), [page](python.md#llm) and [up](../models.md); ![plot](../figures/a.svg)"
    shown = inside(text, "research/log.md")
    assert (
        shown == "[code](../snapstream/llm.py), [page](python.md#llm) and [up](../models.md); ![plot](../figures/a.svg)"
    )
    shown = inside(
        "[`llm.py`](../snapstream/llm.py), [record](../benchmarks/a.json), [page](python.md#llm)", "index.md"
    )
    assert shown == "`llm.py`, record (`benchmarks/a.json`), [page](python.md#llm)"
    assert inside("[x](../../evals/README.md#a)", "research/log.md") == "x (`evals/README.md`)"


# What the README and the pages for readers say is run: Python blocks, commands, the request to the server, and figures.

TEXT = README.read_text()
FOREIGN_FLAGS = {"--apply_chat_template", "--tokenizer", "--use-server-token-count", "--help"}  # other programs' flags
PYTHON = (README.parent / "docs" / "python.md").read_text()


def blocks(language: str, text: str = TEXT) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_it_is_short_and_says_first_what_has_hardly_run() -> None:
    lines = TEXT.splitlines()
    assert len(lines) <= 130
    assert "**GPU**: two have run it, for minutes" in "\n".join(lines[:30])


def test_python_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("python")
    assert "path/to/Llama-3.2-1B-Instruct" in block and "report.txt" in block
    (tmp_path / "report.txt").write_text("The report was signed by Marta Quill. " * 20)
    monkeypatch.chdir(tmp_path)
    exec(block.replace("path/to/Llama-3.2-1B-Instruct", str(TINY_MODEL)), {})
    assert "Compression(prompt_tokens=" in capsys.readouterr().out


def test_python_block_of_the_reference_runs(capsys: pytest.CaptureFixture[str]) -> None:
    block = blocks("python", PYTHON)[0]
    exec(block.replace("path/to/Llama-3.2-1B-Instruct", str(TINY_MODEL)), {})
    assert capsys.readouterr().out.count("\n") >= 2


@pytest.mark.parametrize(
    ("page", "shown"), [("quickstart.md", "4821907"), ("compression.md", "4821907"), ("performance.md", "CPU")]
)
def test_python_blocks_of_other_pages_run(page: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("python", (ROOT / "docs" / page).read_text())
    exec(block, {})
    assert shown in capsys.readouterr().out


@pytest.mark.slow
def test_commands_of_the_quickstart_run() -> None:
    bash = blocks("bash", (ROOT / "docs" / "quickstart.md").read_text())
    assert bash[1:3] == blocks("bash")  # the server and its request, which run below
    for line in (bash[0], *bash[3:]):
        assert line.count("snapstream ") == 1
        command = line.replace("snapstream ", f"{shlex.quote(sys.executable)} -m snapstream.cli ")
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.mark.slow
def test_the_server_answers_the_request_as_they_stand_here(tmp_path: Path) -> None:
    serve, request = blocks("bash")
    program, command, *options = shlex.split(serve, comments=True)
    assert (program, command) == ("snapstream", "serve") and options[-2:] == ["--port", "8000"]
    with served(options[:-2], tmp_path / "log") as server:
        address = "http://127.0.0.1:8000"
        assert address in request
        done = subprocess.run(["bash", "-c", request.replace(address, server.url)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "4821907" in done.stdout.partition('"message"')[2], done.stdout


def test_named_commands_are_there() -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    named = set(re.findall(r"`snapstream\s(\w+)", TEXT)) | {shlex.split(blocks("bash")[0])[1]}
    assert {"serve", "generate", "plan", "compress", "proxy"} <= named <= set(known)
    sections = set(re.findall(r"^## (\w+)$", commands.DOCUMENT.read_text(), re.MULTILINE))
    assert sections == set(known)


def test_flags_that_pages_name_exist() -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    flags = {flag for command in known.values() for parameter in command.params for flag in parameter.opts}
    flags |= {flag for command in known.values() for parameter in command.params for flag in parameter.secondary_opts}
    for page in READERS:
        for line in re.findall(r"^ *(?:\$ )?(?:\.venv/bin/)?snapstream .*", page.read_text(), re.MULTILINE):
            words = line.split("#")[0].split()
            assert words[1] in known, line
            own = {name for p in known[words[1]].params for name in (*p.opts, *p.secondary_opts)}
            assert {word for word in words if word.startswith("--")} <= own, line
        for flag in re.findall(r"`(--[a-z][a-z_-]+)", page.read_text()):
            assert flag in flags | FOREIGN_FLAGS | {*OTHER_FLAGS, *MODEL_FLAGS}, (page.name, flag)


def test_figures_are_those_of_the_stored_results() -> None:
    names = [match[2] for match in SECTION.finditer(TEXT)]
    assert len(names) == TEXT.count("<!-- figures: ") == TEXT.count("<!-- end -->") > 0
    assert set(names) <= NAMES
    assert render(TEXT, README) == TEXT, "run python -m figures"


def test_a_changed_figure_is_noticed() -> None:
    (match, *_) = (match for match in SECTION.finditer(TEXT) if match[2] == "accuracy_short")
    digit = next(i for i in range(match.start(3), match.end(3)) if TEXT[i].isdigit())
    forged = TEXT[:digit] + str((int(TEXT[digit]) + 1) % 10) + TEXT[digit + 1 :]
    assert render(forged, README) == TEXT != forged


# Every module beside the package can be imported (the type checker looks at the package only), and by whom.

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


@pytest.mark.slow
def test_nothing_needs_matplotlib_before_it_draws() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; import figures.documents, evals.run, benchmarks.decode"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
