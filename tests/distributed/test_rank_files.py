"""The prefix store of two ranks on a disk: a restart finds its documents, and a share that one rank lacks is a miss for
all, never another answer.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from snapstream import LLM, KVBudget, SamplingParams
from snapstream.config import ParallelConfig, PrefixStoreConfig
from snapstream.distributed.control import BlocksDone, ForgetBlocks, RankLost, ReadBlocks, WorkerRanks, WriteBlock
from snapstream.exec.parallel import RankFiles, answer
from snapstream.kv.prefix_folder import PrefixFolder, rank_part
from snapstream.kv.prefix_store import PrefixBlocks, PrefixFiles
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.kv.spec import Full, KVSpec
from snapstream.step import StoredBlock
from snapstream.types import RequestOutput
from tests.distributed.pairs import ids
from tests.llm.conftest import write_checkpoint

SETTINGS: dict[str, Any] = {
    "budget": KVBudget(num_sink=2, num_topk=14, num_recent=16), "selector": SnapKV(observation_len=8), "max_rows": 2,
    "max_model_len": 256, "chunk_len": 16, "executor": "eager", "progress": False,
    "prefix_store": PrefixStoreConfig(num_bytes=2**22, block_len=16, min_tokens=16),
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
DOCUMENTS = [ids(80, seed) for seed in range(5)]  # of five blocks each
QUESTION = ids(20, 9)


def ask(llm: LLM, prompts: Sequence[list[int]]) -> list[RequestOutput]:
    """One after the other, so that each finds what those before it have stored."""
    return [llm.generate([prompt], GREEDY)[0] for prompt in prompts]


def share(folder: Path, rank: int) -> list[Path]:
    """A rank's files, in the order in which they were written."""
    own = folder / rank_part(ParallelConfig(size=2), rank)
    return sorted(own.rglob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_restart_finds_what_every_rank_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPSTREAM_CHECK_RANKS", "1")
    model, store = write_checkpoint(tmp_path / "model"), tmp_path / "store"
    questions = [document + QUESTION for document in DOCUMENTS]
    with LLM(model, **SETTINGS | {"prefix_store": None}) as one:
        wanted = [output.token_ids for output in ask(one, questions)]
    with LLM(model, **SETTINGS, prefix_dir=str(store), tensor_parallel=2) as two:
        ask(two, DOCUMENTS)
    shares = [share(store, rank) for rank in (0, 1)]
    assert [len(own) for own in shares] == [25, 25], "all are written when the engine has ended"
    names = [path.name for path in shares[0]]
    assert names == [path.name for path in shares[1]]
    assert all(a.read_bytes() != b.read_bytes() for a, b in zip(*shares, strict=True)), "each has its own heads"

    damage(shares[1][5 * 1 + 2])  # the second document's third block, of the worker
    shares[0][5 * 2].unlink()  # the third document's first block, of rank 0
    shutil.copyfile(shares[0][5 * 3 + 1], shares[1][5 * 3 + 1])  # the other rank's share under the right name
    shares[1][5 * 4].unlink()  # the worker's alone: only it can notice
    with LLM(model, **SETTINGS, prefix_dir=str(store), tensor_parallel=2) as two:
        found = ask(two, questions)
        assert [output.cached_tokens for output in found] == [80, 32, 0, 16, 0]
        assert [output.token_ids for output in found] == wanted
    assert [path.name for path in sorted(share(store, 1))] == [path.name for path in sorted(share(store, 0))]
    assert len(share(store, 1)) == 30, "what was lacking has been written again"

    with LLM(model, **SETTINGS, prefix_dir=str(store)) as one:
        [output] = ask(one, questions[:1])
        assert output.cached_tokens == 0 and output.token_ids == wanted[0], "one device has a layout of its own"
        one.reset_prefix_store()


def test_ranks_that_divide_a_model_otherwise_have_other_folders() -> None:
    layouts = [ParallelConfig(size=2), ParallelConfig(size=4), ParallelConfig(size=2, experts="ep")]
    parts = [rank_part(layout, rank) for layout in layouts for rank in range(layout.size)]
    assert len(set(parts)) == 8 and rank_part(ParallelConfig(), 0) == ""


def test_a_folder_belongs_to_one_engine(tmp_path: Path) -> None:
    """Ranks share the folder, one device wants all of it, and a part has one owner."""
    parts = [PrefixFolder(tmp_path, rank_part(ParallelConfig(size=2), rank)) for rank in (0, 1)]
    for part in ("", parts[0].part):
        with pytest.raises(ValueError, match="is in use by another engine"):
            PrefixFolder(tmp_path, part)
    for own in parts:
        own.close()
    with PrefixOpen(tmp_path), pytest.raises(ValueError, match="is in use by another engine"):
        PrefixFolder(tmp_path, parts[0].part)
    PrefixFolder(tmp_path, parts[1].part).close()


def test_a_start_that_fails_on_a_rank_leaves_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = WorkerRanks.wait

    def until_ready(workers: WorkerRanks, state: Any, timeout_s: float) -> None:
        if state == "ready":
            raise RankLost("rank 1 is lost")
        wait(workers, state, timeout_s)

    monkeypatch.setattr(WorkerRanks, "wait", until_ready)
    model, store = write_checkpoint(tmp_path / "model"), tmp_path / "store"
    with pytest.raises(RankLost, match="rank 1 is lost"):
        LLM(model, **SETTINGS, prefix_dir=str(store), tensor_parallel=2)
    PrefixFolder(store).close()  # of one device, which wants all of it


class PrefixOpen(PrefixFolder):
    """One device's folder, for a ``with`` block."""

    def __enter__(self) -> None:
        """It is open."""

    def __exit__(self, *error: object) -> None:
        self.close()


@pytest.fixture
def files(tmp_path: Path) -> PrefixFiles:
    spec = KVSpec(layers=(Full(num_kv_heads=1, key_dim=4, value_dim=4),) * 2, num_heads=1)
    return PrefixFiles(PrefixBlocks(spec, 4, 8), PrefixFolder(tmp_path / "store"), b"model", 2**20)


def stored(files: PrefixFiles, number: int) -> StoredBlock:
    tokens = bytes([number, 0, 0, 0]) * 8
    return StoredBlock(number, files.names("mine", [tokens])[0], tokens)


def test_what_one_rank_cannot_read_none_has_read(files: PrefixFiles) -> None:
    sent: list[object] = []
    ranks = RankFiles(files, 2, sent.append)
    blocks = [stored(files, number) for number in (0, 1)]
    writes = [ranks.save(block) for block in blocks]
    assert sent == [WriteBlock(0, blocks[0]), WriteBlock(1, blocks[1])]
    for number in (0, 1):
        ranks.note(1, BlocksDone(number, 1))
        assert not writes[number].done(), "two ranks of three"
        ranks.note(2, BlocksDone(number, 0))
    assert [write.result(10) for write in writes] == [0, 0] and ranks.has(blocks[0].name)
    read = ranks.load(blocks)
    assert sent[2] == ReadBlocks(2, tuple(blocks))
    ranks.note(1, BlocksDone(2, 2))
    ranks.note(2, BlocksDone(2, 1))
    assert read.result(10) == 1
    ranks.forget("mine")
    assert sent[3] == ForgetBlocks(3, files.place("mine")) and not ranks.has(blocks[0].name)
    for rank in (1, 2):
        ranks.note(rank, BlocksDone(3, 0))
    ranks.close()


def test_nobody_waits_for_a_rank_that_has_gone(files: PrefixFiles) -> None:
    ranks = RankFiles(files, 1, lambda message: None)
    read = ranks.load([stored(files, 0)])
    ranks.give_up()
    with pytest.raises(RankLost, match="a rank ended"):
        read.result(10)
    ranks.note(1, BlocksDone(0, 1))  # too late

    def gone(message: object) -> None:
        raise RankLost("gone")

    late = RankFiles(files, 1, gone)
    with pytest.raises(RankLost, match="gone"):
        late.load([stored(files, 0)])
    late.close()


class Interrupting(list[object]):
    """What was sent; Ctrl-C comes before the first message, or right behind it."""

    def __init__(self, *, is_after: bool) -> None:
        self.is_after, self.is_done = is_after, False

    def append(self, message: object) -> None:
        is_first, self.is_done = not self.is_done, True
        if self.is_after or not is_first:
            super().append(message)
        if is_first:
            raise KeyboardInterrupt


@pytest.mark.parametrize("is_after", [False, True])
def test_nobody_waits_for_what_ctrl_c_kept_from_the_others(files: PrefixFiles, is_after: bool) -> None:
    """Whoever is interrupted asks again, and what the ranks did of the first time is no answer to the second."""
    block, sent = stored(files, 0), Interrupting(is_after=is_after)
    ranks = RankFiles(files, 1, sent.append)
    with pytest.raises(KeyboardInterrupt):
        ranks.load([block])
    if is_after:
        ranks.note(1, BlocksDone(0, 0))
    again = ranks.load([block])
    assert sent[-1] == ReadBlocks(1, (block,)) and not again.done()
    ranks.note(1, BlocksDone(1, 0))
    assert again.result(10) == 0
    ended = Thread(target=ranks.close, daemon=True)
    ended.start()
    ended.join(10)
    assert not ended.is_alive(), "it waits for an answer to what nobody was asked"


def test_a_worker_does_what_it_is_asked_for_and_nothing_else(files: PrefixFiles) -> None:
    block = stored(files, 0)
    for number, message in enumerate(
        (WriteBlock(0, block), ReadBlocks(1, (block,)), ForgetBlocks(2, files.place("mine")), ReadBlocks(3, (block,)))
    ):
        said: Future[object] = Future()
        answer(files, message, said.set_result)
        assert said.result(10) == BlocksDone(number, (1, 1, 0, 0)[number])
    outside = StoredBlock(0, "../secret.safetensors", b"")
    for wrong in (WriteBlock(4, outside), ReadBlocks(4, (outside,)), ForgetBlocks(4, "../..")):
        with pytest.raises(ValueError, match="names no block of the prefix store"):
            answer(files, wrong, lambda said: None)
