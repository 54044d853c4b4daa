"""What a machine can count of the repository: its size, parameter lists, types, private names.

Files are those that git tracks (a walk over the folders where there is no git), read as syntax trees. A rule that is
broken lists every offender as ``file:line: what``. The numbers in capitals are limits: those of ``COUNTS`` are lowered
as the counts fall, and none is ever raised without a sentence beside it that says why.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("snapstream", "evals", "benchmarks", "recipes")
CODE_SUFFIXES = (".py", ".cpp", ".h", ".js", ".css", ".html")

MAX_FILE_LINES = 800
MAX_PARAMETERS = 8
MAX_ROOT_MODULES = 7  # wire.py is shared by ranks and KV transfer, and lies below both
MAX_RESULT_FILES = 36  # a third model, a hybrid

REGISTRIES = {"snapstream.cli.app", "snapstream.models.registry"}

# What should fall. Raised five times for features that the package did not have: first more kinds of layers, GGUF, hub
# ids, `chat` and `bench`; then GGUF of 25 more architectures (590 lines), Gemma 4 (910), Nemotron-H and Kimi Linear
# (390), ranks and disk files of recurrent states (110), automatic per-head budgets (220), while merges took 28 files
# and 320 lines; then Gemma 2 (205), Falcon-H1 (249, a file), Triton kernels of recurrent layers (229, a file), and what
# recurrent layers and per-head budgets did not combine with (210); then Q4_K in five bits (270) and drafts of eager and
# captured decode (340); then 26 architectures in files that exist (750), rows of int8 and int4 on GPUs (220) and drafts
# under grammars (80); then OLMo hybrid, Bamba and HyperCLOVA X (140) and Gemma 3n (280), while KV re-selection left
# (480); then Apertus (70), Helium and VaultGemma (16), Muse Glimmer (102), nanochat and OLMo 1 (47), Kimi K2.5 (5),
# Laguna (98), text parts of GLM-V (18), Ling 3.0 (72), prompt attention in int16 (11), `auto_map` of stock classes
# (21), Llama 4 (149), LayerNorm with biases and five families that have it (150), Phi-3.5-MoE (84), LayerNorm of heads
# (17), GGUF of 20 more architectures (233, a file), reads from disk
# that wait for steps in flight (17), rounded inputs of files that mix formats (24), MiniMax M3 and Step 3.5 with
# clamps of some layers (218), M3's tool calls (66), GGUF of seven more architectures and six tokenizers (123),
# reasoning between tags of four families (25), GGUF of 16 more families (231, a file), LoRA adapters (674, two files),
# hyper-connections of Hy V4 and GLM-5.3-Flash, and what ranks did not split (440, files of residual streams, one in
# C++, and of the shapes of recurrent layers), prediction layers as draft models (449, a file).
# A module with one importer lives in that importer, unless it is an entry point, an optional dependency or an entry of
# a registry.
COUNTS = {
    "Python files of the package": 207,
    "Python lines of the package": 55466,
    "C++ files": 28,
    "files under tests/": 229,
    "modules with one importer": 20,
    "words to learn in docs/architecture.md": 20,
}

# Private names of other people's packages, as their dotted access is written, each with why there is no public way.
FOREIGN_PRIVATES = {
    "os._exit": "its documented name; there is no other way to end a process whose threads hang",
    "torch.ops.aten._scaled_dot_product_": "attention of one backend has no other name",
    "torch.ops.aten._flash_attention_forward": "as above, and with a sliding window",
    "struct._fields_": "how ctypes names the fields of a structure",
    "config._attn_implementation": "a config has no public name for the attention that its model runs",
}
TEST_PRIVATES = FOREIGN_PRIVATES | {
    "torch.utils._python_dispatch": "where TorchDispatchMode, which is documented, lives",
    "torch.utils._pytree": "what a dispatch mode is handed may be nested, and nothing public walks it",
    "torch._subclasses.fake_tensor": "tensors that claim to be on a GPU, without one",
    "torch._dynamo": "counts what was compiled",
    "torch.ops.aten._local_scalar_dense": "the operator behind every number that is read from a device",
    "interpreter._patch_lang_tensor": "Triton's interpreter is mended from outside",
    "interpreter._convert_float": "as above",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def tracked() -> tuple[str, ...]:
    """Paths from the root, as git knows them; what lies in the folders where git does not know this tree."""
    try:
        done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
        names = done.stdout.split("\0") if done.returncode == 0 else []
    except OSError:
        names = []
    found = [name for name in names if name and (ROOT / name).is_file()]
    if not found:  # an unpacked source archive
        walked = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
        found = [str(path) for path in walked if not any(p.startswith((".", "__pycache__")) for p in path.parts)]
    return tuple(sorted(found))


def files(*folders: str, suffixes: tuple[str, ...] = (".py",)) -> list[str]:
    return [name for name in tracked() if name.endswith(suffixes) and name.startswith(tuple(f"{f}/" for f in folders))]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def functions(tree: ast.AST) -> Iterator[tuple[Function, bool]]:
    """Every function, nested ones too, and whether its first parameter is the object or the class."""
    conditional = _conditional_methods(tree)
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, FUNCTIONS):
                is_static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in child.decorator_list)
                yield child, (isinstance(node, ast.ClassDef) or child in conditional) and not is_static


def _conditional_methods(tree: ast.AST) -> list[Function]:
    """Those that stand below an ``if`` in their class, as what is there for the type checker alone."""
    branches = (node for owner in ast.walk(tree) if isinstance(owner, ast.ClassDef) for node in owner.body)
    return [
        child for node in branches if isinstance(node, ast.If) for child in node.body if isinstance(child, FUNCTIONS)
    ]


def parameters(function: Function, is_bound: bool) -> list[ast.arg]:
    """Those that a caller names or places; without self or cls, ``*args`` and ``**kwargs``."""
    placed = [*function.args.posonlyargs, *function.args.args]
    return [*placed[is_bound:], *function.args.kwonlyargs]


def long_parameter_lists(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """What a dataclass generates has no list in the source and does not count."""
    for function, is_bound in functions(tree):
        count = len(parameters(function, is_bound))
        if count > MAX_PARAMETERS:
            yield function.lineno, f"{function.name} takes {count} parameters"


def untyped_functions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for function, is_bound in functions(tree):
        rest = [arg for arg in (function.args.vararg, function.args.kwarg) if arg is not None]
        bare = [arg.arg for arg in (*parameters(function, is_bound), *rest) if arg.annotation is None]
        bare += ["what it returns"] if function.returns is None else []
        if bare:
            yield function.lineno, f"{function.name} has no types for {', '.join(bare)}"


def is_private(name: str) -> bool:
    """Neither a special name nor what every named tuple offers."""
    return name.startswith("_") and not re.fullmatch(r"_+|__\w+__|_asdict|_fields|_make|_replace", name)


def own_privates(nodes: Iterable[ast.AST]) -> set[str]:
    """Private names that these nodes define: functions, classes, variables, attributes that a method gives ``self``."""
    found = set()
    for node in nodes:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            found.add(node.attr)
    return {name for name in found if is_private(name)}


def is_self(value: ast.expr) -> bool:
    """``self``, ``cls`` or ``super()``."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def foreign_privates(tree: ast.AST, allowed: Iterable[str] = FOREIGN_PRIVATES) -> Iterator[tuple[int, str]]:
    """``x._y``, ``setattr(x, "_y", ...)`` and ``from x import _y`` where this file does not define ``_y``."""
    nodes, beginnings = list(ast.walk(tree)), tuple(allowed)
    own = own_privates(nodes)
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            if not is_self(node.value) and not ast.unparse(node).startswith(beginnings):
                yield node.lineno, ast.unparse(node)
            continue
        for how, name in reached(node):
            if any(is_private(part) for part in name.split(".")) and not name.startswith(beginnings):
                yield node.lineno, f"{how} {name}"


def reached(node: ast.AST) -> Iterator[tuple[str, str]]:
    """How a node reaches for names, and for which: imports, and what is set or read by a name in quotes."""
    if isinstance(node, ast.Import):
        yield from (("import", alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (("import of", f"{node.module}.{alias.name}") for alias in node.names)
    elif isinstance(node, ast.Call) and called(node) in ("getattr", "setattr", "object"):
        texts = [a.value for a in node.args[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        yield from ((ast.unparse(node.func), text) for text in texts if re.fullmatch(r"[\w.]+", text))


def called(call: ast.Call) -> str:
    """The last part of the name of what is called."""
    func = call.func
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def over(names: Iterable[str], rule: Callable[[ast.AST], Iterable[tuple[int, str]]]) -> list[str]:
    """A line per offender, in the order of files and lines."""
    return [f"{name}:{line}: {what}" for name in names for line, what in sorted(rule(ast.parse(read(name), name)))]


def report(offenders: list[str]) -> None:
    assert not offenders, f"{len(offenders)} offenders:\n" + "\n".join(offenders)


def test_files_are_not_too_long() -> None:
    lengths = ((name, len(read(name).splitlines())) for name in files(*CODE, suffixes=CODE_SUFFIXES))
    report([f"{name}:{length}: {length} lines" for name, length in lengths if length > MAX_FILE_LINES])


def test_parameter_lists_are_short() -> None:
    """Outside kernels, whose arguments are tensors and their sizes."""
    outside = [name for name in files(*CODE) if not name.startswith("snapstream/kernels/")]
    report(over(outside, long_parameter_lists))


def test_every_function_is_typed() -> None:
    """Outside Triton's kernels, whose arguments are pointers and numbers of a language of its own."""
    outside = [name for name in files("snapstream") if not name.startswith("snapstream/kernels/triton/")]
    report(over(outside, untyped_functions))


def test_nobody_reaches_for_private_names() -> None:
    """Tests neither: what a test needs is public, or the test asks for behaviour."""
    report(over(files(*CODE, "figures"), foreign_privates))
    report(over(files("tests"), partial(foreign_privates, allowed=TEST_PRIVATES)))


def test_the_root_of_the_package_holds_few_modules() -> None:
    """Counted: every ``snapstream/*.py`` but ``__init__.py``; ``version.py`` too, packages and ``py.typed`` not."""
    roots = [name for name in files("snapstream") if name.count("/") == 1 and not name.endswith("/__init__.py")]
    report([f"{name}:1: one of {len(roots)} root modules" for name in roots] if len(roots) > MAX_ROOT_MODULES else [])


def test_files_named_in_comments_exist() -> None:
    """Modules in backticks, in docstrings, comments and pages; the log and the changelog speak of what was."""
    known = tracked()
    named = [
        (f"{name}:{line}: {found}", found)
        for name in known
        if name.endswith((".py", ".h", ".cpp", ".md")) and name not in ("CHANGELOG.md", "docs/research/log.md")
        for line, text in enumerate(read(name).splitlines(), start=1)
        for found in re.findall(r"`((?:[a-z_]\w*/)*[a-z_]\w*\.(?:py|h|cpp))`", text)
    ]
    assert len(named) > 100
    report([where for where, found in named if not any(f"/{file}".endswith(f"/{found}") for file in known)])


def test_results_are_few_files() -> None:
    count = sum(name.startswith("evals/results/") for name in tracked())
    report([f"evals/results:0: {count} tracked files"] if count > MAX_RESULT_FILES else [])


def importers() -> dict[str, set[str]]:
    """By which other modules of the package each module is imported, at any place in them.

    Entry points and entries of a registry are left out: what is run (``__main__``), what a text names
    (``"snapstream.module:attribute"``), and what a module of ``REGISTRIES`` or a package's ``__init__`` imports.
    """
    trees = {
        name[:-3].replace("/", ".").removesuffix(".__init__"): ast.parse(read(name)) for name in files("snapstream")
    }
    found: dict[str, set[str]] = {name: set() for name in trees}
    named: set[str] = set()
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                reached = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                reached = [alias.name for alias in node.names]
            elif (
                isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("snapstream.")
            ):
                named.add(node.value.partition(":")[0])
                continue
            else:
                continue
            for module in reached:
                if module in found and module != name:
                    found[module].add(name)
    packages = {
        name[: -len("/__init__.py")].replace("/", ".") for name in files("snapstream", suffixes=("/__init__.py",))
    }
    left_out = named | packages | {name for name, by in found.items() if by & (REGISTRIES | packages)}
    return {name: by for name, by in found.items() if name not in left_out and not name.endswith("__main__")}


def glossary() -> list[str]:
    """First cells of the first table of the architecture page."""
    lines = read("docs/architecture.md").partition("| word |")[2].splitlines()[2:]
    rows = [line.strip("|").split(" | ")[0] for line in takewhile(lambda line: line.startswith("|"), lines)]
    return [word.strip() for row in rows for word in row.split(",")]


def counts() -> dict[str, int]:
    package = files("snapstream")
    return {
        "Python files of the package": len(package),
        "Python lines of the package": sum(len(read(name).splitlines()) for name in package),
        "C++ files": len(files("snapstream", suffixes=(".cpp", ".h", ".hpp", ".cu", ".cuh"))),
        "files under tests/": sum(name.startswith("tests/") for name in tracked()),
        "modules with one importer": sum(len(by) == 1 for by in importers().values()),
        "words to learn in docs/architecture.md": len(glossary()),
    }


def test_what_should_fall_does_not_rise() -> None:
    found = counts()
    assert found.keys() == COUNTS.keys()
    assert all(found.values()), "something is counted nowhere"
    report([f"{what}: {found[what]}; the limit is {limit}" for what, limit in COUNTS.items() if found[what] > limit])


NINE = "a, b, c, d, /, e, f, g, *, h, i"


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_no_link_is_tracked() -> None:
    """One made on a machine leads nowhere on another."""
    done = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert [line for line in done.stdout.splitlines() if line.startswith("120000")] == []


@pytest.mark.parametrize(
    ("rule", "source", "found"),
    [
        (long_parameter_lists, f"def f({NINE}): ...", ["f takes 9 parameters"]),
        (long_parameter_lists, "def f(a, b, c, d, e, f, g, *args, h, **more): ...", []),
        (long_parameter_lists, f"class A:\n  def f(self, {NINE}): ...", ["f takes 9 parameters"]),
        (long_parameter_lists, "class A:\n  async def f(self, a, b, c, d, e, f, g, h): ...", []),
        (long_parameter_lists, f"class A:\n  @staticmethod\n  def f({NINE}): ...", ["f takes 9 parameters"]),
        (long_parameter_lists, f"def g():\n  def f({NINE}): ...", ["f takes 9 parameters"]),
        (untyped_functions, "def f(a, *b: int, **c) -> int: ...", ["f has no types for a, c"]),
        (untyped_functions, "class A:\n  def f(self): ...", ["f has no types for what it returns"]),
        (untyped_functions, "class A:\n  def f(self, a: int) -> None: ...", []),
        (foreign_privates, "x._y", ["x._y"]),
        (foreign_privates, "self.x._y\nself._z\nsuper()._z()\nx.__doc__\nnp.r_\nt._replace(a=1)", ["self.x._y"]),
        (foreign_privates, "class A:\n  def f(self, other):\n    self._y = other._y", []),
        (foreign_privates, "class A:\n  _y: int = 0\nx._y", []),
        (foreign_privates, "torch.ops.aten._scaled_dot_product_x(q)\ntorch._C.x()", ["torch._C"]),
        (foreign_privates, "from a._b import c\nfrom a import _d", ["import of a._b.c", "import of a._d"]),
        (foreign_privates, "m.setattr(a, '_b', 1)\nm.setattr('a._b', 1)", ["m.setattr _b", "m.setattr a._b"]),
        (foreign_privates, "setattr(a, 'b', '_c')\nm.setenv('_B', '1')\nm.setattr(a, name, 1)", []),
    ],
)
def test_the_rules_see_what_they_should(
    rule: Callable[[ast.AST], Iterable[tuple[int, str]]], source: str, found: list[str]
) -> None:
    assert [what for _, what in sorted(rule(ast.parse(source)))] == found
