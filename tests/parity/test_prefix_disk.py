"""The prefix store's disk tier: a restart finds yesterday's documents, and whatever is wrong with a file is a miss."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from snapstream.cache.prefix_folder import MARKER, PrefixFolder, folder_secret
from snapstream.config import PrefixStoreConfig
from snapstream.llm import LLM
from snapstream.request import Request
from tests.parity.checkpoints import make_model, save
from tests.parity.test_prefix_store import BUDGET, GREEDY, LONGEST, SELECTOR, answer, engine, ids, same, small
from tests.waiting import until

DOCUMENT = ids(80)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama-gqa-tied"), tmp_path_factory.mktemp("model"))


@contextmanager
def disk(model: Path, folder: Path, **settings: Any) -> Iterator[LLM]:
    with engine(model, prefix_dir=str(folder), **settings) as llm:
        yield llm


def blocks(folder: Path) -> list[Path]:
    """In the order in which they were written, a prompt's first block first."""
    return sorted(folder.rglob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)


def test_a_restart_finds_yesterdays_documents(model: Path, tmp_path: Path) -> None:
    question = DOCUMENT + ids(20, seed=8)
    with engine(model, prefix_store=None) as llm:
        cold = answer(llm, question)
    with disk(model, tmp_path / "store") as llm:
        answer(llm, DOCUMENT)
    assert len(blocks(tmp_path / "store")) == 10, "they are written when the engine ends"
    with disk(model, tmp_path / "store") as llm:
        warm = answer(llm, question)
        assert answer(llm, question).cached_tokens == 96, "from memory now"
    assert warm.cached_tokens == 80
    same(cold, warm, exact=True)
    for path in (tmp_path / "store").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, "others may read it"
        assert not any(str(list(range(3))) in part for part in path.parts)


def test_the_disk_gives_back_what_memory_forgot(model: Path, tmp_path: Path) -> None:
    """Memory for two documents, disk for three: each comes back, from the one or from the other."""
    store = small(model, 16)
    for seed in (1, 2, 3):
        with disk(model, tmp_path / "store", prefix_store=store) as llm:
            answer(llm, ids(60, seed=seed))
    found = []
    with disk(model, tmp_path / "store", prefix_store=store) as llm:
        for seed, num_stored in ((3, 22), (2, 23), (1, 24), (3, 24)):
            found.append(answer(llm, ids(60, seed=seed) + ids(9)).cached_tokens)
            # A block that is not written yet stays in memory, and what is before it: there may be no room for others.
            until(lambda wanted=num_stored: len(blocks(tmp_path / "store")) == wanted)  # type: ignore[misc]
    assert found[:2] == [56, 56] and min(found) > 0


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def nonsense(path: Path) -> None:
    path.write_bytes(b"\x80\x04nothing of this is unpickled")


def another(path: Path) -> None:
    other = next(other for other in blocks(path.parents[1]) if other != path)
    path.write_bytes(other.read_bytes())


def huge_header(path: Path) -> None:
    path.write_bytes((2**62).to_bytes(8, "little") + path.read_bytes()[8:])


def other_shape(path: Path) -> None:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])
    head["kv"]["shape"] = list(reversed(head["kv"]["shape"]))
    written = json.dumps(head).encode().ljust(size)
    path.write_bytes(len(written).to_bytes(8, "little") + written + data[8 + size :])


@pytest.mark.parametrize("fault", [damaged, cut, nonsense, another, huge_header, other_shape, Path.unlink])
def test_any_fault_is_a_miss(
    model: Path, tmp_path: Path, fault: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    with engine(model, prefix_store=None) as llm:
        cold = answer(llm, DOCUMENT)
    with disk(model, tmp_path / "store") as llm:
        answer(llm, DOCUMENT)
    with disk(model, tmp_path / "store") as llm, caplog.at_level(logging.WARNING):
        fault(blocks(tmp_path / "store")[3])
        warm = answer(llm, DOCUMENT)
    same(cold, warm, exact=True)
    assert warm.cached_tokens < 72, "a block that is wrong was used"
    assert "a stored block cannot be used" in caplog.text
    with disk(model, tmp_path / "store") as llm:
        assert answer(llm, DOCUMENT).cached_tokens == 72, "what was wrong is written anew"


def test_other_models_and_namespaces_find_nothing(model: Path, tmp_path: Path) -> None:
    def cached(llm: LLM, name: str, namespace: str) -> int:
        asked = Request(request_id=name, prompt_token_ids=tuple(DOCUMENT), sampling=GREEDY, namespace=namespace)
        return llm.answer([asked])[0].cached_tokens

    with disk(model, tmp_path / "store") as llm:
        assert cached(llm, "1", "a/b") == 0
    with disk(model, tmp_path / "store") as llm:
        assert [cached(llm, "2", "a"), cached(llm, "3", ""), cached(llm, "4", "a/b")] == [0, 0, 72]
    other = save(make_model("llama-mha"), tmp_path / "other")
    with disk(other, tmp_path / "store") as llm:
        assert cached(llm, "1", "a/b") == 0
    with disk(model, tmp_path / "store", dtype="bfloat16") as llm:
        assert cached(llm, "1", "a/b") == 0
    with disk(model, tmp_path / "store") as llm:
        llm.reset_prefix_store("a")
    with disk(model, tmp_path / "store") as llm:
        assert [cached(llm, "1", "a/b"), cached(llm, "2", "")] == [0, 72], "a reset reaches the disk, and no other"


def test_the_disk_keeps_to_its_bytes(model: Path, tmp_path: Path) -> None:
    with disk(model, tmp_path / "store") as llm:
        answer(llm, ids(40))
    (size,) = {path.stat().st_size for path in blocks(tmp_path / "store")}
    with disk(model, tmp_path / "store", prefix_disk=4 * size) as llm:
        for seed in range(4):
            answer(llm, ids(60, seed=seed))
    assert 0 < sum(path.stat().st_size for path in blocks(tmp_path / "store")) <= 4 * size


def test_a_crash_leaves_no_half_block(model: Path, tmp_path: Path) -> None:
    with disk(model, tmp_path / "store") as llm:
        answer(llm, DOCUMENT)
    half = blocks(tmp_path / "store")[0].with_suffix(".partial")
    half.write_bytes(b"half")
    with disk(model, tmp_path / "store") as llm:
        assert answer(llm, DOCUMENT).cached_tokens == 72
    assert not half.exists()


def start(model: Path, folder: Path, **settings: Any) -> None:
    given = {"budget": BUDGET, "selector": SELECTOR, "max_model_len": LONGEST, "prefix_store": "1MiB"}
    store = PrefixStoreConfig(num_bytes=2**20, block_len=8, min_tokens=8)
    with LLM(model, **(given | {"prefix_store": store, "prefix_dir": str(folder), "progress": False} | settings)):
        pass


def test_bad_folders_are_refused_at_the_start(model: Path, tmp_path: Path) -> None:
    public = tmp_path / "public"
    public.mkdir(mode=0o755)
    with pytest.raises(ValueError, match=r"has mode 755; prompts lie in it, so it must be private"):
        start(model, public)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match="prefix_dir .* cannot be used|is not a folder"):
        start(model, file)
    link = tmp_path / "link"
    (tmp_path / "aim").mkdir(mode=0o700)
    link.symlink_to(tmp_path / "aim")
    with pytest.raises(ValueError, match="is not a folder"):
        start(model, link)
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o700)
    (foreign / "thesis.tex").touch()
    with pytest.raises(ValueError, match="is not ours: it holds 'thesis.tex'"):
        start(model, foreign)
    assert (foreign / "thesis.tex").exists()
    ours = tmp_path / "ours"
    held = PrefixFolder(ours)
    with pytest.raises(ValueError, match="in use by another engine"):
        start(model, ours)
    held.close()
    start(model, ours)
    (ours / "secret").write_bytes(b"short")
    with pytest.raises(ValueError, match="secret has 5 bytes, not 32"):
        start(model, ours)
    with pytest.raises(ValueError, match="prefix_dir .* needs a prefix_store"):
        start(model, ours, prefix_store=None)
    with pytest.raises(ValueError, match="prefix_disk"):
        start(model, ours, prefix_disk="lots")


def test_the_secret_is_made_once(tmp_path: Path) -> None:
    first = folder_secret(tmp_path / "a")
    assert first == folder_secret(tmp_path / "a") != folder_secret(tmp_path / "b")
    assert (tmp_path / "a" / "secret").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "a" / MARKER).exists() and not list(tmp_path.glob("a/secret.*"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    PrefixFolder(tmp_path / "a").close()
    (tmp_path / "a").chmod(0o500)
    with pytest.raises(ValueError, match="cannot be"):
        PrefixFolder(tmp_path / "a")
