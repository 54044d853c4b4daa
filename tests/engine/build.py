"""Small engines over the strict fake runner, for tests that script every token."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from snapstream.config import Chunking, EngineConfig, KVBudget
from snapstream.engine.core import Engine
from snapstream.engine.request_state import Tokenizer
from snapstream.step import PrefillEntry, Runner
from snapstream.types import Request, RequestOutput, SamplingParams
from tests.engine.alone import EOS, VOCAB_SIZE, LetterTokenizer
from tests.engine.fake_runner import FakeRunner

NUM_LAYERS = 2
LETTERS = LetterTokenizer()


def config_of(**fields: Any) -> EngineConfig:
    """Chunks of 4 tokens, short prompts up to 4, a window of 100, room in staging for one long prompt."""
    cut = {"chunk_len": 4, "short_len": 4}
    cut |= {name: fields.pop(name) for name in list(fields) if name in Chunking.__dataclass_fields__}
    sizes = {"budget": KVBudget.full(100), "max_model_len": 100, "max_rows": 4, "short_reserve": 8}
    return EngineConfig(chunking=Chunking(**cut), **(sizes | fields))


def request_of(request_id: str, size: int = 3, **sampling: Any) -> Request:
    sampling = {"max_tokens": 3, "seed": 0, **sampling}
    return Request(request_id=request_id, prompt_token_ids=(1,) * size, sampling=SamplingParams(**sampling))


def engine_of(
    config: EngineConfig | None = None,
    scripts: dict[str, Sequence[int]] | None = None,
    *,
    tokenizer: Tokenizer | None = LETTERS,
    random: Random | None = None,
    clock: Callable[[], float] | None = None,
    around: Callable[[FakeRunner], Runner] = lambda runner: runner,
) -> tuple[Engine, FakeRunner]:
    """``scripts`` gives, by request id, the tokens to be drawn; past its end, and by default, it is 1 ("a").

    For the strict runner a script is the whole of a sample: it ends with the last scripted token. ``around`` puts
    another runner between it and the engine.
    """
    config, scripts = config or config_of(), scripts or {}

    def draw(entry: PrefillEntry, index: int, count: int) -> int:
        script = scripts.get(entry.request_id, ())
        return script[count] if count < len(script) else 1

    def length_of(entry: PrefillEntry, index: int) -> int:
        return len(scripts.get(entry.request_id, ())) or entry.sampling.max_tokens

    runner = FakeRunner(config, NUM_LAYERS, draw, length_of)
    engine = Engine(
        around(runner),
        config,
        vocab_size=VOCAB_SIZE,
        num_layers=NUM_LAYERS,
        eos_token_ids=(EOS,),
        tokenizer=tokenizer,
        random=random,
        **({} if clock is None else {"clock": clock}),
    )
    return engine, runner


def abort(engine: Engine, runner: FakeRunner, request_id: str) -> bool:
    """Abort, and let the strict runner know."""
    runner.aborted.add(request_id)
    return engine.abort(request_id)


def drain(engine: Engine, max_steps: int = 1000) -> dict[str, RequestOutput]:
    """Step until nothing is left; the finished outputs by request id."""
    finished: dict[str, RequestOutput] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return finished
        finished.update({output.request_id: output for output in engine.step() if output.is_finished})
    raise AssertionError(f"not done after {max_steps} steps")
