"""A scripted ``AsyncEngine``: answers every request with the same tokens, fails or hangs where it is told to.

Text goes through the engine's own ``TextStream``, so characters and stop strings behave as in the real one.
Log-probabilities are made up by ``logprob_of``, so that tests can tell one from the next.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from snapstream.assets import TINY_MODEL
from snapstream.config import EngineConfig, KVBudget
from snapstream.engine.request_state import TextStream
from snapstream.models.registry import read_model_config
from snapstream.models.tokenizer import load_tokenizer
from snapstream.server.engine.api import EngineDead, EngineStats, ModelMetadata, RequestDelta, SampleDelta
from snapstream.types import NOT_FINITE, Compression, FinishReason, Logprob, Request, Timings

ANSWER = "Hello wörld 😀, goodbye."
METADATA = ModelMetadata(
    model="tiny",
    names=("tiny", "alias"),
    architecture=read_model_config(TINY_MODEL),
    pid=1,
    engine=EngineConfig(budget=KVBudget.of(128), max_model_len=512, max_rows=4),
    created=1_700_000_000,
)


@cache
def tokenizer() -> Any:
    return load_tokenizer(TINY_MODEL)


def template_tokenizer(template: str | None) -> Any:
    """The same with another chat template."""
    own = copy.deepcopy(tokenizer())
    own.chat_template = template
    return own


def token_ids(text: str) -> list[int]:
    return list(tokenizer()(text, add_special_tokens=False)["input_ids"])


def logprob_of(token: int, num_top: int) -> Logprob:
    top = tuple((rank + 100, -0.5 - rank) for rank in range(num_top))
    return Logprob(token_id=token, logprob=-1.0 - token / 1000, top=top)


@dataclass
class FakeEngine:
    answer: str = ANSWER
    fail_after: int | None = None  # tokens, then EngineDead
    noise_after: int | None = None  # tokens, then logits that are not finite
    hang_after: int | None = None  # tokens, then nothing until ``released``
    refuse: Exception | None = None
    is_ready: bool = True
    ring_tokens: int = 1000
    requests: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    num_running: int = 0
    generated: int = 0
    released: asyncio.Event = field(default_factory=asyncio.Event)
    hanging: asyncio.Event = field(default_factory=asyncio.Event)
    is_shut: bool = False
    num_in_store: int = 0  # what every prompt is told to have stored
    resets: list[str | None] = field(default_factory=list)
    prefill_problem: Exception | None = None

    async def generate(self, request: Request) -> AsyncIterator[RequestDelta]:
        if self.refuse is not None:
            raise self.refuse
        self.requests.append(request)
        self.num_running += 1
        is_finished = False
        try:
            async for delta in self._script(request):
                is_finished = delta.is_finished
                yield delta
        finally:
            self.num_running -= 1
            if not is_finished:
                self.aborted.append(request.request_id)

    async def _script(self, request: Request) -> AsyncIterator[RequestDelta]:
        sampling = request.sampling
        ids = token_ids(self.answer)
        stream = TextStream(tokenizer(), replace(sampling, skip_special_tokens=True))
        for step in range(len(ids) + 1):
            await asyncio.sleep(0)
            if step == self.fail_after:
                raise EngineDead("the engine process ended")
            if step == self.noise_after:
                yield self._noise(request)
                return
            if step == self.hang_after:
                self.hanging.set()
                await self.released.wait()
                if self.is_shut:
                    raise EngineDead("the server was shut down before the answer was complete")
            token = ids[step] if step < len(ids) else 2  # the end token
            text, stop = stream.push(token) if step < len(ids) else ("", None)
            reason = FinishReason.STOP if stop is not None or step == len(ids) else None
            if reason is None and step + 1 == sampling.max_tokens:
                reason = FinishReason.LENGTH
            if reason is not None and stop is None:
                text += stream.finish()[0]
            self.generated += sampling.n
            yield self._delta(request, step, token, text, reason, stop)
            if reason is not None:
                return

    def _noise(self, request: Request) -> RequestDelta:
        sample = SampleDelta(
            index=0, text="", token_ids=(), logprobs=None, finish_reason=FinishReason.ERROR, stop_reason=NOT_FINITE
        )
        return RequestDelta(request_id=request.request_id, samples=(sample,), is_finished=True, timings=Timings())

    def _delta(
        self, request: Request, step: int, token: int, text: str, reason: FinishReason | None, stop: str | None
    ) -> RequestDelta:
        sampling, num_prompt = request.sampling, len(request.prompt_token_ids)
        logprobs = None if sampling.logprobs is None else (logprob_of(token, sampling.logprobs),)
        is_first, prompt_logprobs = step == 0, None
        if is_first and sampling.prompt_logprobs is not None:
            rest = [logprob_of(prompt, sampling.prompt_logprobs) for prompt in request.prompt_token_ids[1:]]
            prompt_logprobs = (None, *rest)
        capacity = (request.budget or METADATA.engine.budget).capacity
        kept = min(num_prompt, capacity)
        compression = Compression(
            prompt_tokens=num_prompt,
            kept_tokens=kept,
            evicted_tokens=num_prompt - kept,
            row_bytes=capacity * 8,
            full_bytes=num_prompt * 8,
            compress_ms=1.0,
            ring_tokens=self.ring_tokens,
        )
        return RequestDelta(
            request_id=request.request_id,
            samples=tuple(
                SampleDelta(
                    index=index,
                    text=text,
                    token_ids=(token,),
                    logprobs=logprobs,
                    finish_reason=reason,
                    stop_reason=stop,
                )
                for index in range(sampling.n)
            ),
            is_finished=reason is not None,
            prompt_logprobs=prompt_logprobs,
            compression=compression if is_first else None,
            timings=Timings(queue_ms=1.0, prefill_ms=2.0, decode_ms=3.0) if reason is not None else None,
        )

    @property
    def unavailable(self) -> EngineDead | None:
        return None if self.is_ready else EngineDead("the engine is loading")

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=self.num_running, rows_free=4 - self.num_running, rows_total=4,
            generation_tokens_total=self.generated,
        )  # fmt: skip

    async def check_prefill(self) -> None:
        if self.prefill_problem is not None:
            raise self.prefill_problem

    async def num_stored(self, token_ids: tuple[int, ...], namespace: str) -> int:
        return self.num_in_store

    def reset_prefixes(self, namespace: str | None) -> None:
        self.resets.append(namespace)

    async def shutdown(self, drain_s: float) -> None:
        self.is_ready = False
        end = asyncio.get_running_loop().time() + drain_s
        while self.num_running and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.01)
        self.is_shut = True
        self.released.set()
