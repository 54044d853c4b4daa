"""A checkpoint that brings Python code is refused by whoever reads it; it leaves no trace, whatever stdin says."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from snapstream.assets import TINY_DRAFT_MODEL, TINY_MODEL
from snapstream.cli import main
from snapstream.llm import LLM
from snapstream.models.chat_template import render_chat
from snapstream.models.registry import read_model_config
from snapstream.models.tokenizer import load_tokenizer
from snapstream.types import SamplingParams

ROOT = Path(__file__).parents[2]
CODE = """
from pathlib import Path
Path({trace!r}).write_text("the code of the checkpoint ran")
from transformers import LlamaConfig as OwnConfig
from transformers import PreTrainedTokenizerFast as OwnTokenizer
"""
# What the field names: a tokenizer in both spellings, and a config.
FIELDS = {
    "tokenizer_config.json": {"AutoTokenizer": [None, "own.OwnTokenizer"]},
    "config.json": {"AutoConfig": "own.OwnConfig"},
    "generation_config.json": {"AutoConfig": "own.OwnConfig"},
}
LLM_CODE = "import sys; from snapstream import LLM; LLM(sys.argv[1], progress=False)"


def edit(file: Path, **settings: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def with_code(folder: Path, trace: Path, file: str, *, source: Path = TINY_MODEL) -> Path:
    """A copy of a shipped checkpoint whose ``file`` names code that would write ``trace``."""
    shutil.copytree(source, folder)
    edit(folder / "config.json", model_type="own")  # a stock type, or class, and transformers would not even ask
    edit(folder / "tokenizer_config.json", tokenizer_class=None)
    edit(folder / file, auto_map=FIELDS[file])
    (folder / "own.py").write_text(CODE.format(trace=str(trace)))
    return folder


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def run(*command: str, **more: str) -> subprocess.CompletedProcess[str]:
    """The command, with a yes to whatever it asks."""
    return subprocess.run(
        [sys.executable, *command],
        input="y\n" * 9,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | more,
    )


def commands(folder: Path) -> dict[str, tuple[str, ...]]:
    """Every command that a user may start with a checkpoint folder."""
    name = str(folder)
    return {
        "generate": ("generate", name, "hello", "--max-tokens", "1"),
        "serve": ("serve", name, "--port", "0"),
        "serve --draft": ("serve", str(TINY_MODEL), "--port", "0", "--draft", name),
        "compress --draft": ("compress", "--draft", name, "--keep", "0.5"),
        "compress --target": ("compress", "--target", name, "--keep", "0.5"),
        "proxy --draft": ("proxy", "--upstream", "http://127.0.0.1:9", "--port", "0", "--draft", name),
        "plan": ("plan", name),
        "plan, the file": ("plan", str(folder / "config.json")),
    }


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("who", list(commands(Path())))
def test_refused_without_a_trace(
    who: str, file: str, tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    is_draft = "--draft" in who
    folder = with_code(tmp_path / "given", trace, file, source=TINY_DRAFT_MODEL if is_draft else TINY_MODEL)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"y\n" * 9)))  # a yes to whatever it asks
    assert main(commands(folder)[who]) != 0
    assert not trace.exists()
    assert f"{folder / file}: auto_map names Python code of the checkpoint" in capfd.readouterr().err


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("who", ["LLM", "serve"])
def test_a_process_ends_with_the_refusal(who: str, file: str, tmp_path: Path, trace: Path) -> None:
    folder = with_code(tmp_path / "given", trace, file)
    done = run(*(("-c", LLM_CODE, str(folder)) if who == "LLM" else ("-m", "snapstream.cli", *commands(folder)[who])))
    assert not trace.exists()
    assert done.returncode not in (0, -11), done.stdout
    assert f"{folder / file}: auto_map names Python code of the checkpoint" in done.stderr
    if who != "LLM":
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_transformers_would_have_run_it(file: str, tmp_path: Path, trace: Path) -> None:
    """The folder of these tests is one that runs where nobody forbids it."""
    folder = with_code(tmp_path / "given", trace, file)
    code = "import sys, transformers; transformers.AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True)"
    done = run("-c", code, str(folder), HF_MODULES_CACHE=str(tmp_path / "modules"))
    assert trace.exists(), done.stderr


@pytest.mark.parametrize("file", list(FIELDS))
def test_whoever_reads_a_folder_refuses(file: str, tmp_path: Path, trace: Path) -> None:
    folder = with_code(tmp_path / "given", trace, file)
    for read in (read_model_config, load_tokenizer):
        with pytest.raises(ValueError, match=re.escape(f"{folder / file}: auto_map names Python code")):
            read(folder)
    assert not trace.exists()


def test_code_that_is_named_like_the_stock_class_is_not_needed(
    tmp_path: Path, trace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of Phi-4-mini: its architecture is transformers' own by now. Code of another name is refused."""
    folder = shutil.copytree(TINY_MODEL, tmp_path / "given")
    (folder / "own.py").write_text(CODE.format(trace=str(trace)) + "from transformers import LlamaForCausalLM")
    given = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.LlamaForCausalLM", "AutoTokenizer": "a/b"}
    edit(folder / "config.json", auto_map=given)
    answers = []
    for path in (folder, TINY_MODEL):
        with LLM(path, progress=False, max_model_len=64) as llm:
            outputs = llm.generate("The code", SamplingParams(max_tokens=8, temperature=0.0))
            answers.append(outputs[0].token_ids)
    assert answers[0] == answers[1]
    assert "names code of the checkpoint, which is not run" in caplog.text
    assert not trace.exists()
    for other in (
        {"model_type": "own"},
        {"model_type": "mistral"},
        {"architectures": ["MistralForCausalLM"]},
        {"auto_map": given | {"AutoModelForCausalLM": "own.OwnForCausalLM"}},
        {"auto_map": {"AutoModel": "own.LlamaForCausalLM"}},
        {"auto_map": ["own.LlamaForCausalLM"]},
    ):
        right = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "auto_map": given}
        edit(folder / "config.json", **(right | other))
        for read in (read_model_config, load_tokenizer):
            with pytest.raises(ValueError, match="auto_map names Python code"):
                read(folder)
    assert not trace.exists()


def test_the_old_spelling_is_code_too(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY_MODEL, tmp_path / "given")
    (folder / "tokenizer_config.json").write_text('{"auto_map": ["own.OwnTokenizer", null]}')
    with pytest.raises(ValueError, match="auto_map names Python code"):
        load_tokenizer(folder)


def test_every_loader_of_transformers_forbids_code() -> None:
    """On the very line, so that nobody copies one without."""
    folders = ("snapstream", "evals", "benchmarks", "recipes")
    lines = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for folder in folders
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line in file.read_text(encoding="utf-8").splitlines()
        if ".from_pretrained(" in line
    ]
    assert lines
    assert [line for line in lines if "trust_remote_code=False" not in line] == []
    assert [line.split(":")[0] for line in lines if "Tokenizer" in line] == ["snapstream/models/tokenizer.py"]


def test_a_chat_template_includes_no_file(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY_MODEL, tmp_path / "given")
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    for template in (f"{{% include '{secret}' %}}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"):
        (folder / "chat_template.jinja").write_text(template)
        tokenizer = load_tokenizer(folder)
        with pytest.raises(ValueError, match=r"no loader|unsafe"):
            render_chat(tokenizer, [{"role": "user", "content": "x"}])


def test_a_tokenizer_file_lies_in_the_folder(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY_MODEL, tmp_path / "given")
    (folder / "tokenizer_config.json").write_text('{"fast_tokenizer_files": ["tokenizer.4.0.json/../../x.json"]}')
    with pytest.raises(ValueError, match="tokenizer_config.json: fast_tokenizer_files names"):
        load_tokenizer(folder)
