"""An answer whose prompt another engine read is the answer of one engine, whatever was asked for."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snapstream.config import ROW_FORMATS, KVBudget, PrefixStoreConfig
from snapstream.config.kv import HeadProfile
from snapstream.kv.selectors.snapkv import SnapKV
from snapstream.models.config_json import fingerprint as checkpoint_fingerprint
from snapstream.plan.memory import row_sizes
from snapstream.step import KVTransferFailed
from snapstream.types import FinishReason, Grammar, Request, RequestOutput, SamplingParams
from snapstream.wire import HEAD, Connection, Kind
from tests.disaggregation.pair import Pair, joined
from tests.llm.conftest import write_checkpoint
from tests.parity.checkpoints import make_model, save

BUDGET = KVBudget(num_sink=2, num_topk=14, num_window=0, num_recent=16)
SETTINGS: dict[str, Any] = {
    "budget": BUDGET, "selector": SnapKV(observation_len=8), "max_rows": 4, "max_model_len": 256, "chunk_len": 32,
    "executor": "eager", "progress": False,
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PARAMS = {
    "greedy": GREEDY,
    "seeded, three samples": SamplingParams(max_tokens=20, temperature=0.9, top_p=0.9, seed=5, n=3, ignore_eos=True),
    "logprobs": replace(GREEDY, logprobs=3, prompt_logprobs=2),
    "kept positions": replace(GREEDY, return_kept=True),
    "kept bitmap": replace(GREEDY, return_kept="bitmap"),
    "penalties and bias": replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={7: 2.0}),
    "one token": replace(GREEDY, max_tokens=1),
}
SCALED = [
    pytest.param({"kv_dtype": name}, marks=[pytest.mark.slow] * (name != "fp8"))
    for name, form in ROW_FORMATS.items()
    if form.scales
]
TEXTS = {
    "grammar": SamplingParams(max_tokens=40, temperature=0.0, grammar=Grammar.regex("(ab|cd){3,6}")),
    "stop string": SamplingParams(max_tokens=40, temperature=0.8, seed=3, stop=["e", "t"], ignore_eos=True),
}


def prompt(size: int) -> tuple[int, ...]:
    rng = random.Random(size)
    return tuple(rng.randrange(3, 90) for _ in range(size))


def requests_of(params: dict[str, SamplingParams], sizes: tuple[int, ...] = (5, 33, 120)) -> list[Request]:
    return [
        Request(request_id=f"{name} {size}", prompt_token_ids=prompt(size), sampling=own)
        for name, own in params.items()
        for size in sizes
    ]


def reported(output: RequestOutput) -> Any:
    compression = output.compression
    assert compression is not None
    samples = [(s.text, s.token_ids, s.finish_reason, s.stop_reason) for s in output.samples]
    return samples, replace(compression, compress_ms=0.0)


def logprobs(output: RequestOutput) -> list[float]:
    """All numbers, of tokens and of the likeliest ones. They round differently with the size of a batch."""
    lists = [output.prompt_logprobs, *(sample.logprobs for sample in output.samples)]
    listed = [one for own in lists for one in own or () if one is not None]
    return [number for one in listed for number in (one.logprob, *(value for _, value in one.top))]


def check(pair: Pair, requests: list[Request]) -> None:
    """Answers to prompts that the other engine read are those of one engine; every row has the planned bytes."""
    alone = pair.answerer.answer([replace(request, request_id=f"alone {request.request_id}") for request in requests])
    num_before = pair.answerer.engine.transfer_stats.num_bytes
    for own, apart in zip(alone, pair.run(requests), strict=True):
        is_equal = reported(apart) == reported(own)  # the texts of a difference would take minutes
        assert is_equal, apart.request_id
        assert logprobs(apart) == pytest.approx(logprobs(own), abs=1e-4)
    config = pair.answerer.config
    sizes = row_sizes(pair.answerer.model_config, config)
    rows = [(len(one.prompt_token_ids), one.budget or config.budget) for one in requests]
    planned = sum(sizes.row_bytes(*row) - sizes.hidden_bytes for row in rows)
    assert pair.answerer.engine.transfer_stats.num_bytes - num_before == planned


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("letters"))


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("deepseek-v3"), tmp_path_factory.mktemp("latents"))


def test_every_kind_of_request(letters: Path) -> None:
    with joined(letters, **SETTINGS) as pair:
        check(pair, requests_of({**PARAMS, **TEXTS}))
        small = [replace(one, budget=KVBudget.streaming(12)) for one in requests_of({"streaming": GREEDY})]
        check(pair, small)
        assert pair.answerer.engine.transfer_stats.num_received == len(requests_of({**PARAMS, **TEXTS})) + 3


@pytest.mark.parametrize(
    "more",
    [
        *SCALED,
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow),
        {"budget": KVBudget(num_sink=2, num_topk=10, num_window=6, num_recent=14)},
        pytest.param({"budget": "full"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_kind_of_row(letters: Path, more: dict[str, Any]) -> None:
    with joined(letters, **{**SETTINGS, **more}) as pair:
        requests = requests_of({"greedy": replace(GREEDY, max_tokens=40), "n": PARAMS["seeded, three samples"]})
        check(pair, requests)


def shares(folder: Path, *, turned: bool = False) -> HeadProfile:
    """One head holds sinks and ring, one a prompt of 33 tokens whole."""
    own = (0.1, 0.0), (0.4, 0.2), (0.05, 0.25)
    return HeadProfile(shares=own[::-1] if turned else own, model=checkpoint_fingerprint(folder))


@pytest.mark.parametrize(
    "more",
    [pytest.param({}, marks=pytest.mark.slow), *SCALED],
    ids=str,
)
def test_rows_whose_heads_have_slots_of_their_own(letters: Path, more: dict[str, Any]) -> None:
    with joined(letters, heads=shares(letters), **SETTINGS, **more) as pair:
        config = pair.answerer.config
        assert config.heads is not None and len({num for layer in config.heads.topk for num in layer}) == 6
        requests = requests_of({"greedy": replace(GREEDY, max_tokens=40), "n": PARAMS["seeded, three samples"]})
        check(pair, requests)
        sizes = row_sizes(pair.answerer.model_config, config)
        unlike = sizes.layer_bytes(120, BUDGET)
        equal = row_sizes(pair.answerer.model_config, replace(config, heads=None)).layer_bytes(120, BUDGET)
        assert len(set(unlike)) == 3 and sum(unlike) == sum(equal)


@pytest.mark.parametrize("kv_dtype", [pytest.param("int4", marks=pytest.mark.slow), "int8/int4"])
def test_rows_in_groups(kv_dtype: str, tmp_path: Path) -> None:
    """Scales among the codes, and scales of keys alone."""
    folder = save(make_model("qwen3", head_dim=32), tmp_path)
    with joined(folder, **SETTINGS, kv_dtype=kv_dtype) as pair:
        requests = requests_of({"greedy": replace(GREEDY, max_tokens=40), "n": PARAMS["seeded, three samples"]})
        check(pair, requests)


@pytest.mark.parametrize("name", ["qwen2-windows", "llama4"])
def test_rows_with_windows(name: str, tmp_path: Path) -> None:
    """Layers of unlike size; a prompt shorter than the windows or chunks, and longer ones."""
    folder = save(make_model(name), tmp_path)
    with joined(folder, **SETTINGS) as pair:
        requests = requests_of({"greedy": replace(GREEDY, max_tokens=40), "n": PARAMS["seeded, three samples"]})
        requests.append(Request(request_id="short", prompt_token_ids=prompt(20), sampling=GREEDY))
        check(pair, requests)
        sizes = row_sizes(pair.answerer.model_config, pair.answerer.config)
        if name == "qwen2-windows":
            full, window, _ = sizes.layer_bytes(120, BUDGET)
            assert full * 33 == window * BUDGET.capacity


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [("gemma4", "auto"), ("gemma4", "int8"), ("gemma4-shared", "fp8"), ("gemma3n", "int8")],
)
def test_rows_of_unlike_layers(name: str, kv_dtype: str, tmp_path: Path) -> None:
    """Heads of two sizes, and layers that keep nothing."""
    folder = save(make_model(name), tmp_path)
    with joined(folder, **SETTINGS, kv_dtype=kv_dtype) as pair:
        params = {name: PARAMS[name] for name in ("greedy", "seeded, three samples", "kept positions")}
        requests = requests_of(params, (5, 33, 120))
        check(pair, requests)
        sizes = row_sizes(pair.answerer.model_config, pair.answerer.config)
        assert (0 in sizes.layer_bytes(120, BUDGET)) == (name in ("gemma4-shared", "gemma3n"))


@pytest.mark.parametrize(
    "name",
    [
        "lfm2",
        "lfm3",
        "nemotron-3",
        "kimi-linear",
        *(pytest.param(own, marks=pytest.mark.slow) for own in ("qwen3.5", "granite-hybrid")),
    ],
)
def test_rows_with_states(name: str, tmp_path: Path) -> None:
    """Recurrent layers first and last, prompts packed and alone, states copied to each sample, rows used again."""
    folder = save(make_model(name), tmp_path)
    with joined(folder, **SETTINGS) as pair:
        params = {name: PARAMS[name] for name in ("greedy", "seeded, three samples", "kept positions", "one token")}
        requests = requests_of(params, (1, 5, 33, 120))
        check(pair, requests)
        spec, config = pair.answerer.engine.runner.cache.spec, pair.answerer.config
        sizes = row_sizes(pair.answerer.model_config, config)
        assert sum(sizes.layer_bytes(120, BUDGET)) == spec.row_bytes(32)


def test_layers_with_slots_and_a_state_are_refused(tmp_path: Path) -> None:
    folder = save(make_model("falcon-h1"), tmp_path)
    refused = pytest.raises(ValueError, match="attention and recurrence side by side in a layer, which KV transfer")
    with refused, joined(folder, budget="full", max_model_len=160):
        pass


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8", "int4"])
def test_quantized_rows_with_states(kv_dtype: str, tmp_path: Path) -> None:
    """The states are not quantized; a layer of slots has scales and a recurrent one has none."""
    folder = save(make_model("lfm2", hidden_size=128), tmp_path)
    with joined(folder, kv_dtype=kv_dtype, **SETTINGS) as pair:
        check(pair, requests_of({"greedy": GREEDY}))


def test_rows_of_latents(latents: Path) -> None:
    with joined(latents, **SETTINGS) as pair:
        check(pair, requests_of({name: PARAMS[name] for name in ("greedy", "seeded, three samples", "kept positions")}))


def test_the_prefix_store_is_that_of_the_engine_that_reads(letters: Path) -> None:
    store = {"prefix_store": PrefixStoreConfig(num_bytes=2**22, block_len=16, min_tokens=32)}
    with joined(letters, reading=store, **SETTINGS) as pair:
        first, again = (Request(request_id=name, prompt_token_ids=prompt(120), sampling=GREEDY) for name in "ab")
        outputs = [*pair.run([first]), *pair.run([again])]
        assert outputs[0].token_ids == outputs[1].token_ids
        assert [output.cached_tokens for output in outputs] == [0, 112]


def test_a_layer_that_is_zeroed_on_its_way_is_refused_and_asked_for_again(
    letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, parts = Connection.write, list[bytes]()

    def damaging(self: Connection, data: Any) -> None:
        head = bytes(data[: HEAD.size])
        if not parts and len(head) == HEAD.size and head[0] == Kind.LAYER:
            parts.append(head)
            assert len(data) > HEAD.size, "head and body in one write"
            data = head + bytes(len(data) - HEAD.size)
        write(self, data)

    monkeypatch.setattr(Connection, "write", damaging)
    with joined(letters, **SETTINGS) as pair:
        request = Request(request_id="a", prompt_token_ids=prompt(9), sampling=GREEDY)
        [alone] = pair.answerer.answer([replace(request, request_id="alone")])
        [apart] = pair.run([request], num_lost=1)
        assert parts and "LAYER 0 are damaged" in pair.missed[0].reason
        assert apart.token_ids == alone.token_ids


def test_an_abort_while_the_row_is_on_its_way_frees_both_engines(letters: Path) -> None:
    with joined(letters, **SETTINGS) as pair:
        request = Request(request_id="a", prompt_token_ids=prompt(200), sampling=GREEDY)
        pair.requests = {"a": request}
        output = pair.answerer.engine.add_request(replace(request, is_prefilled_remotely=True))
        pair.until(lambda: pair.reader.engine.rows_free < SETTINGS["max_rows"])
        pair.answerer.engine.abort("a")
        pair.until(lambda: output.is_finished and pair.reader.engine.rows_free == SETTINGS["max_rows"])
        assert pair.answerer.engine.rows_free == SETTINGS["max_rows"]
        assert output.finish_reason is FinishReason.ABORT
        check(pair, requests_of({"after": GREEDY}))


@pytest.mark.parametrize(
    ("reading", "reason"),
    [
        ({"dtype": "bfloat16"}, "dtype is float32 here and bfloat16 at the sender"),
        ({"kv_dtype": "fp8"}, "kv_dtype is auto here and fp8 at the sender"),
    ],
    ids=str,
)
def test_engines_that_differ_refuse_each_other(letters: Path, reading: dict[str, Any], reason: str) -> None:
    with joined(letters, reading=reading, **SETTINGS) as pair:
        assert reason in refusal(pair)


def test_engines_with_other_profiles_refuse_each_other(letters: Path) -> None:
    """Also one that has none; the bytes of all layers together are the same."""
    for heads in (None, shares(letters, turned=True)):
        with joined(letters, reading={"heads": heads}, answering={"heads": shares(letters)}, **SETTINGS) as pair:
            assert "heads is" in refusal(pair)


def test_another_checkpoint_is_refused(letters: Path, tmp_path: Path) -> None:
    """The same shapes, one number of the weights changed: a fine-tune."""
    other = write_checkpoint(tmp_path)
    file = next(other.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with joined(letters, other, **SETTINGS) as pair:
        assert "checkpoint is" in refusal(pair)


def refusal(pair: Pair) -> str:
    """Why a row is not taken: what both sides are told."""
    request = Request(request_id="a", prompt_token_ids=prompt(9), sampling=GREEDY)
    pair.requests = {"a": request}
    engine = pair.answerer.engine
    engine.add_request(replace(request, is_prefilled_remotely=True))
    while not (notices := engine.take_notices()):
        engine.step()
    pair.ask(notices[0])  # type: ignore[arg-type]
    read = None
    while read is None or not read.is_finished:
        if pair.reader.engine.has_work:
            read = next(iter(pair.reader.engine.step()), read)
    pair.until_news(engine)
    missed = engine.take_notices()
    assert [type(one) for one in missed] == [KVTransferFailed]
    reason = missed[0].reason  # type: ignore[union-attr]
    assert read.finish_reason is FinishReason.ERROR and reason in str(read.samples[0].stop_reason)
    engine.abort("a")
    engine.step()
    assert engine.rows_free == SETTINGS["max_rows"] == pair.reader.engine.rows_free
    return reason
