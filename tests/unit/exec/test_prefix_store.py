"""The GPU's mover on a stand-in for streams, which runs a copy as late as it may: it leaves what plain copies do."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from snapstream.config import EngineConfig, KVBudget, PrefixStoreConfig, make_selector
from snapstream.exec.prefix_store import DeviceMover, Mark, PrefixMover, num_places
from snapstream.exec.runner import ModelRunner
from snapstream.kv.prefix_store import PrefixBlocks
from snapstream.kv.spec import Full, KVSpec, Latent
from snapstream.models.registry import kv_spec_of, read_model_config
from snapstream.plan.memory import engine_memory
from snapstream.step import JobSpec, PrefillEntry, PrefixMoves
from snapstream.types import SamplingParams
from tests.parity.checkpoints import make_model, save
from tests.parity.test_prefix_store import GREEDY, answer, engine, ids, same


class LateStream:
    """Queued work runs when somebody waits for it, and otherwise when ``luck`` says so at a look; a ``SideStream``.

    The compute stream is the host, so what it was given so far is done.
    """

    def __init__(self, luck: random.Random) -> None:
        self._luck = luck
        self._queue: list[Callable[[], None]] = []
        self._num_run = 0
        self.num_holds = self.num_asked = 0

    @property
    def num_left(self) -> int:
        """Copies that have not run."""
        return len(self._queue)

    def now(self) -> Mark:
        return 0

    def run(self, work: Callable[[], None], after: Mark) -> Mark:
        assert after == 0
        self._queue.append(work)
        return self._num_run + len(self._queue)

    def hold(self, mark: Mark) -> None:
        self.num_holds += self._num_run < mark
        self.wait(mark)

    def is_done(self, mark: Mark) -> bool:
        self.num_asked += 1
        if self._queue and self._luck.random() < 0.5:
            self._step()
        return self._num_run >= mark

    def wait(self, mark: Mark) -> None:
        while self._num_run < mark:
            self._step()

    def _step(self) -> None:
        with torch.inference_mode():
            self._queue.pop(0)()
        self._num_run += 1


@pytest.mark.parametrize("seed", range(6))
def test_answers_are_those_of_plain_copies(seed: int, tmp_path: Path) -> None:
    """Through the engine, several jobs at once and some given up: tokens and probabilities equal a cold prefill's."""
    folder = save(make_model("llama-gqa-tied"), tmp_path)
    document = ids(100)
    prompts = [document[: 40 + 16 * i] + ids(20, seed=50 + i) for i in range(4)]
    with engine(folder, prefix_store=None) as llm:
        cold = [answer(llm, prompt) for prompt in prompts]
    with engine(folder) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, ModelRunner) and runner.prefix_blocks is not None
        side = LateStream(random.Random(seed))
        runner.mover = DeviceMover(runner.prefix_blocks, llm.config.pool_tokens, "cpu", side)
        answer(llm, document)
        warm = [answer(llm, prompt) for prompt in prompts]
        stream = llm.stream(document + ids(30, seed=7), GREEDY)
        next(stream)
        stream.close()
        together = llm.generate(prompts, GREEDY)
        llm.reset_prefix_store()
        assert llm.engine.prefix_stats is not None and llm.engine.prefix_stats.used_blocks == 0
    assert [output.cached_tokens for output in warm] == [40, 56, 72, 88]
    assert side.num_holds > 0
    for one, other, third in zip(cold, warm, together, strict=True):
        same(one, other, exact=True)
        same(one, third, exact=False)


@pytest.mark.parametrize("is_latent", [False, True])
def test_saved_blocks_are_those_of_plain_copies(is_latent: bool) -> None:
    """Every number of every layer; keys and values of unlike sizes, or values that are part of the keys."""
    layer = (Latent if is_latent else Full)(num_kv_heads=1 if is_latent else 2, key_dim=6, value_dim=4)
    spec = KVSpec(layers=(layer,) * 3, num_heads=4)

    def entry_of(moves: PrefixMoves) -> PrefillEntry:
        return PrefillEntry(
            request_id="r", token_ids=tuple(range(23)), rows=(0,), seeds=(0,), sampling=SamplingParams(),
            budget=KVBudget.full(30), selector=make_selector(), prefix=moves,
        )  # fmt: skip

    def layers(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        made = torch.Generator().manual_seed(seed)
        heads = spec.num_kv_heads
        keys = [torch.randn(heads, 23, spec.key_dim, generator=made) for _ in range(3)]
        values = [k[..., :4] if is_latent else torch.randn(heads, 23, 4, generator=made) for k in keys]
        return list(zip(keys, values, strict=True))

    left = []
    for is_device in (False, True):
        blocks = PrefixBlocks(spec, 9, 4)
        plain = PrefixMover(blocks)
        late = LateStream(random.Random(1))
        mover = DeviceMover(blocks, 40, "cpu", late) if is_device else plain
        saving = entry_of(PrefixMoves(block_len=4, saved=(7, 2, 5), first_saved=1))
        job = JobSpec(job_id=0, staging_start=3, entries=(saving,), chunk_len=512)
        mover.open(job)
        for layer, (keys, values) in enumerate(layers(1)):
            mover.save(job, saving, layer, keys.clone(), values.clone())
        mover.close(job.job_id, is_done=True)
        restoring = entry_of(PrefixMoves(block_len=4, restored=(7, 2, 5)))
        job = JobSpec(job_id=1, staging_start=17, entries=(restoring,), chunk_len=512)
        mover.open(job)
        placed = []
        for layer, (keys, values) in enumerate(layers(2)):
            own = (keys.clone(), values.clone())
            if is_latent:
                own = (own[0], own[0][..., :4])
            mover.place(job, restoring, layer, *own)
            placed.append(torch.cat([part.flatten() for part in own]))
        assert mover.is_ready(1)
        mover.close(job.job_id, is_done=False)
        left.append((torch.stack([blocks.whole(n) for n in (7, 2, 5)]), torch.stack(placed)))
    for one, other in zip(*left, strict=True):
        assert torch.equal(one, other)
    first = layers(1)[0][0]
    assert torch.equal(left[0][1][0][: first.numel()].view(first.shape)[:, :12], first[:, 4:16])


def test_a_job_that_is_not_open_is_not_ready() -> None:
    spec = KVSpec(layers=(Full(num_kv_heads=1, key_dim=2, value_dim=2),) * 1, num_heads=1)
    mover = DeviceMover(PrefixBlocks(spec, 1, 4), 8, "cpu", LateStream(random.Random(0)))
    assert not mover.is_ready(3)
    assert PrefixMover(PrefixBlocks(spec, 1, 4)).is_ready(3)


def test_the_bounce_buffer_is_what_plan_counts(tmp_path: Path) -> None:
    model = read_model_config(save(make_model("qwen3"), tmp_path))
    store = PrefixStoreConfig(num_bytes=2**20, block_len=8)
    config = EngineConfig(budget=KVBudget.full(90), max_model_len=90, short_reserve=13, device="cuda",
                          prefix_store=store, prefix_blocks=7)  # fmt: skip
    blocks = PrefixBlocks(kv_spec_of(model, "float32"), 7, 8)
    mover = DeviceMover(blocks, config.pool_tokens, "cpu", LateStream(random.Random(0)))
    memory = engine_memory(model, config)
    assert mover.bounce.nbytes == memory.bounce_bytes > 0
    without = engine_memory(model, replace(config, prefix_store=None))
    assert memory.fixed_bytes - without.fixed_bytes == memory.bounce_bytes


def test_every_block_of_the_pool_has_a_place() -> None:
    for pool in range(1, 40):
        for start in range(pool):
            for size in range(1, pool - start + 1):
                assert -(-start // 4) + size // 4 <= num_places(pool, 4)
