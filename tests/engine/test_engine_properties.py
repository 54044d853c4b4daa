"""Whatever arrives, is aborted or packed: each sample is what it is alone, and everything is freed."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from snapstream.config import Chunking, EngineConfig, KVBudget
from snapstream.engine.core import Engine
from snapstream.step import PrefillEntry
from snapstream.types import FinishReason, Request, RequestOutput, SamplingParams
from tests.engine.alone import EOS, VOCAB_SIZE, LetterTokenizer, run_alone
from tests.engine.fake_runner import FakeRunner, draw_by_hash

MAX_MODEL_LEN = 40
BUDGETS = [None, KVBudget.full(3), KVBudget.streaming(6)]


@dataclass
class Session:
    """An engine, its strict runner, and what was seen of every request."""

    engine: Engine
    runner: FakeRunner
    requests: dict[str, Request]
    seen: dict[str, list[tuple[str, list[int]]]] = field(default_factory=dict)  # last text and ids per sample
    finished: dict[str, RequestOutput] = field(default_factory=dict)

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.engine.add_request(request)

    def abort(self, request_id: str) -> None:
        was_aborted = self.engine.abort(request_id)
        assert was_aborted == (request_id not in self.finished and request_id not in self.runner.aborted)
        if was_aborted:
            self.runner.aborted.add(request_id)

    def step(self) -> None:
        outputs = self.engine.step()
        assert len({output.request_id for output in outputs}) == len(outputs)
        for output in outputs:
            assert output.request_id not in self.finished, "a finished output is returned once"
            self._check_growth(output)
            if output.is_finished:
                self.finished[output.request_id] = output

    def drain(self) -> None:
        """While there is work, each step runs a unit, decodes a row or drops a job: so the end is near."""
        chunk_len, num_layers = self.runner.config.chunking.chunk_len, self.runner.num_layers
        most = 3 + sum(
            -(-len(request.prompt_token_ids) // chunk_len) * num_layers + request.sampling.max_tokens + 1
            for request in self.requests.values()
        )
        for _ in range(most):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {most} steps")

    def _check_growth(self, output: RequestOutput) -> None:
        now = [(sample.text, list(sample.token_ids)) for sample in output.samples]
        for (old_text, old_ids), (text, ids) in zip(self.seen.get(output.request_id, []), now, strict=False):
            assert text.startswith(old_text) and ids[: len(old_ids)] == old_ids
        self.seen[output.request_id] = now


@st.composite
def sampling_params(draw: st.DrawFn, max_samples: int) -> SamplingParams:
    max_tokens = draw(st.integers(1, 12))
    return SamplingParams(
        n=draw(st.one_of(st.just(1), st.integers(1, max_samples))),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        seed=draw(st.integers(0, 5)),
        stop=draw(st.lists(st.text("abc", min_size=1, max_size=2), max_size=2)),
        stop_token_ids=draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=1)),
        ignore_eos=draw(st.booleans()),
        include_stop=draw(st.booleans()),
        skip_special_tokens=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 0])),
    )


@st.composite
def scripts(draw: st.DrawFn) -> tuple[EngineConfig, int, list[tuple[str, Any]]]:
    """A configuration, a number of layers, and events: add requests, abort the i-th last, run some steps."""
    reserve = draw(st.integers(0, 12))
    extra = draw(st.integers(-1, 20))  # -1: the default pool
    config = EngineConfig(
        budget=KVBudget.full(MAX_MODEL_LEN),
        max_model_len=MAX_MODEL_LEN,
        max_rows=draw(st.integers(1, 6)),
        chunking=Chunking(
            chunk_len=draw(st.integers(1, 12)),
            short_len=draw(st.integers(1, 12)),
            prefill_quantum=draw(st.integers(0, 5)),
        ),
        staging_tokens=0 if extra < 0 else MAX_MODEL_LEN + reserve + extra,
        short_reserve=reserve,
    )
    size = st.one_of(st.integers(1, 5), st.integers(1, MAX_MODEL_LEN - 12))
    request = st.tuples(size, sampling_params(config.max_rows), st.sampled_from(BUDGETS))
    event = st.one_of(
        st.tuples(st.just("add"), st.lists(request, min_size=1, max_size=4)),
        st.tuples(st.just("abort"), st.integers(0, 4)),
        st.tuples(st.just("step"), st.integers(1, 4)),
    )
    return config, draw(st.integers(1, 3)), draw(st.lists(event, min_size=6, max_size=20))


def session_of(config: EngineConfig, num_layers: int) -> Session:
    requests: dict[str, Request] = {}

    def length_of(entry: PrefillEntry, index: int) -> int:
        return len(run_alone(requests[entry.request_id], index).token_ids)

    runner = FakeRunner(config, num_layers, draw_by_hash(VOCAB_SIZE), length_of)
    engine = Engine(
        runner,
        config,
        vocab_size=VOCAB_SIZE,
        num_layers=num_layers,
        eos_token_ids=(EOS,),
        tokenizer=LetterTokenizer(),
    )
    return Session(engine, runner, requests)


def play(session: Session, events: list[tuple[str, Any]]) -> None:
    for kind, argument in events:
        if kind == "add":
            for size, sampling, budget in argument:
                number = len(session.requests)
                prompt = tuple((number + place) % VOCAB_SIZE for place in range(size))
                session.add(
                    Request(
                        request_id=f"r{number}",
                        prompt_token_ids=prompt,
                        sampling=sampling,
                        budget=budget,
                    )
                )
        elif kind == "abort" and argument < len(session.requests):
            session.abort(f"r{len(session.requests) - 1 - argument}")
        elif kind == "step":
            for _ in range(argument):
                session.step()


@settings(max_examples=150, deadline=None)
@given(script=scripts())
def test_every_request_ends_as_it_would_alone_and_everything_is_freed(
    script: tuple[EngineConfig, int, list[tuple[str, Any]]],
) -> None:
    config, num_layers, events = script
    session = session_of(config, num_layers)
    play(session, events)
    session.drain()

    assert session.finished.keys() == session.requests.keys()
    for request_id, output in session.finished.items():
        for sample in output.samples:
            alone = run_alone(session.requests[request_id], sample.index)
            assert (sample.logprobs is None) == (session.requests[request_id].sampling.logprobs is None)
            if sample.logprobs is not None:
                assert [entry.token_id for entry in sample.logprobs] == sample.token_ids
            if sample.finish_reason is FinishReason.ABORT:
                assert request_id in session.runner.aborted
                assert len(sample.token_ids) < len(alone.token_ids)
                assert alone.token_ids[: len(sample.token_ids)] == sample.token_ids
            else:
                sample.logprobs = None
                assert sample == alone

    engine = session.engine
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    assert (engine.rows_free, engine.staging_free) == (config.max_rows, config.pool_tokens)
    assert not session.runner.jobs and not session.runner.unread
