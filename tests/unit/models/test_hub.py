"""Models by id, downloaded by huggingface_hub's own client from a small hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from snapstream.assets import TINY_MODEL
from snapstream.models.hub import local_folder, model_name

REVISIONS = {"main": "a" * 40, "v1": "b" * 40}
GGUF_FILES = ("a-Q4_0", "b-00001-of-00002", "b-00002-of-00002", "sub/c")
ERRORS = {"closed/model": (403, "GatedRepo"), "absent/model": (404, "RepoNotFound")}


class Hub(BaseHTTPRequestHandler):
    """The paths of the hub that a download of a snapshot asks for."""

    files: dict[str, dict[str, bytes]]
    asked: list[str]

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def log_message(self, *args: Any) -> None: ...

    def _answer(self, *, has_body: bool) -> None:
        path = self.path.partition("?")[0].strip("/").split("/")
        if path[:2] == ["api", "models"]:
            return self._send(*self._listing("/".join(path[2:4]), path[4:]), has_body=has_body)
        repo, name = "/".join(path[:2]), "/".join(path[4:])
        body = self.files.get(repo, {}).get(name)
        if body is None or path[2:3] != ["resolve"]:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, has_body=has_body)
        self.asked.append(name)
        return self._send(200, body, {"ETag": f'"{sha1(body).hexdigest()}"', "X-Repo-Commit": path[3]},
                          has_body=has_body)  # fmt: skip

    def _listing(self, repo: str, rest: list[str]) -> tuple[int, bytes, dict[str, str]]:
        if repo in ERRORS:
            status, code = ERRORS[repo]
            return status, b"{}", {"X-Error-Code": code}
        revision = REVISIONS.get(rest[-1], rest[-1] if rest[-1] in REVISIONS.values() else None)
        if repo not in self.files or revision is None:
            return 404, b"{}", {"X-Error-Code": "RevisionNotFound" if repo in self.files else "RepoNotFound"}
        own = self.files[repo]
        if rest[0] == "tree":
            tree = [
                {"type": "file", "path": name, "size": len(body), "oid": sha1(body).hexdigest()}
                for name, body in own.items()
            ]
            return 200, json.dumps(tree).encode(), {}
        siblings = [{"rfilename": name} for name in own]
        return 200, json.dumps({"id": repo, "sha": revision, "siblings": siblings}).encode(), {}

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, has_body: bool) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a process whose hub has the tiny model, and files that must not be fetched."""
    tiny = {file.name: file.read_bytes() for file in TINY_MODEL.iterdir() if file.is_file()}
    others = {"pytorch_model.bin": b"x", "modeling_own.py": b"x", "consolidated.safetensors": b"x",
              "original/model.safetensors": b"x", "README.md": b"x"}  # fmt: skip
    Hub.files = {"org/tiny": tiny | others, "org/bin": {"config.json": b"{}", "pytorch_model.bin": b"x"},
                 "org/none": {"README.md": b"x"},
                 "org/lora": {f"adapter_{name}": b"x" for name in ("config.json", "model.safetensors", "model.bin")},
                 "org/gguf": {"README.md": b"x", **{f"{name}.gguf": b"GGUF" for name in GGUF_FILES}}}  # fmt: skip
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "",
        "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1",
    }  # fmt: skip
    server.shutdown()
    server.server_close()


def folder_of(model: str, env: dict[str, str], **options: Any) -> str:
    """What ``local_folder`` says in a process of that environment: a path, or its error."""
    code = (
        "import sys\nfrom snapstream.models.hub import local_folder\n"
        f"try: print(local_folder({model!r}, progress=False, **{options!r}))\n"
        "except ValueError as error: print(f'ValueError: {error}')"
    )
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return line


def test_a_model_is_downloaded_once_without_what_could_be_executed(hub: dict[str, str]) -> None:
    folder = Path(folder_of("org/tiny", hub))
    names = {path.name for path in folder.rglob("*")}
    assert "model.safetensors" in names and "tokenizer.json" in names
    assert names.isdisjoint({"pytorch_model.bin", "modeling_own.py", "consolidated.safetensors", "original"})
    assert (folder / "config.json").read_bytes() == (TINY_MODEL / "config.json").read_bytes()
    assert folder.name == REVISIONS["main"] and model_name(folder) == "org/tiny"
    num_asked = len(Hub.asked)
    assert folder_of("org/tiny", hub | {"HF_HUB_OFFLINE": "1"}) == str(folder)
    assert len(Hub.asked) == num_asked
    assert Path(folder_of("org/tiny@v1", hub)).name == REVISIONS["v1"]


def test_a_file_of_a_repository(hub: dict[str, str]) -> None:
    """With the other files of its model, and nothing else."""
    one = Path(folder_of("org/gguf:a-Q4_0.gguf", hub))
    assert one.name == "a-Q4_0.gguf" and one.read_bytes() == b"GGUF" and model_name(one) == "a-Q4_0"
    assert [path.name for path in one.parent.iterdir()] == [one.name]
    split = Path(folder_of("org/gguf@main:b-00001-of-00002.gguf", hub))
    assert split.with_name("b-00002-of-00002.gguf").is_file()
    assert Path(folder_of("org/gguf:sub/c.gguf", hub)).is_file()
    assert folder_of("org/gguf:a-Q4_0.gguf", hub | {"HF_HUB_OFFLINE": "1"}) == str(one)


def test_an_adapter_is_no_model(hub: dict[str, str]) -> None:
    """It has a config of its own, and files that could be executed are left."""
    folder = Path(folder_of("org/lora", hub, wanted="adapter_config.json"))
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert folder_of("org/lora", hub).startswith("ValueError: org/lora has no config.json")
    said = folder_of("org/tiny", hub, wanted="adapter_config.json")
    assert said.startswith("ValueError: org/tiny has no adapter_config.json")


def test_a_plan_reads_the_config_alone(hub: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "snapstream.cli", "plan", "org/tiny", "--device", "cpu"],
        env=hub, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert set(Hub.asked) <= {"config.json", "generation_config.json"}


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("closed/model", "closed/model is gated: accept its terms .* HF_TOKEN"),
        ("absent/model", "absent/model is no folder here and no public model of the Hugging Face hub"),
        ("org/tiny@v9", "org/tiny has no revision 'v9' on the Hugging Face hub"),
        ("org/bin", "org/bin has no weights in safetensors"),
        ("org/none", "org/none has no config.json"),
        ("org/gguf", r"org/gguf has GGUF files; give one of them, as org/gguf:a-Q4_0.gguf \(a-Q4_0.gguf, b-00001-of"),
        ("org/gguf:d.gguf", "org/gguf has no d.gguf; its GGUF files: a-Q4_0.gguf, b-00001-of-00002.gguf, sub/c.gguf$"),
        ("org/tiny:d.gguf", "org/tiny has no d.gguf; its GGUF files: none"),
    ],
)
def test_what_the_hub_does_not_give_is_one_line(model: str, reason: str, hub: dict[str, str]) -> None:
    import re

    assert re.match(f"ValueError: {reason}", folder_of(model, hub))


def test_without_a_network_a_folder_is_asked_for(hub: dict[str, str]) -> None:
    for env in (hub | {"HF_ENDPOINT": "http://127.0.0.1:9"}, hub | {"HF_HUB_OFFLINE": "1"}):
        said = folder_of("org/tiny", env)
        assert said.startswith("ValueError: org/tiny is no folder here, and the Hugging Face hub did not answer")
        assert said.endswith("give a checkpoint folder")


def test_paths_are_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for path in ("org/tiny", "./org/other", "/absent/model", "one", "a/b/c", tmp_path):
        assert local_folder(path) == Path(path)
    assert model_name(tmp_path / "org" / "tiny") == "tiny"
