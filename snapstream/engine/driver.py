"""Steps an engine for its callers: batches to their end, and streams that are read in turn.

Invariant: whatever ends a call - its end, an error, Ctrl-C, a closed stream - its requests are gone from the engine
afterwards. After a step that failed the state of the device is unknown, and nothing more is run.

Threads take turns: a batch holds the engine from its first step to its last, a stream while it is read, so that a
reader waits for a batch of another thread, and never for the reader of another stream. Open requests share the steps,
whoever makes them. ``llm.py`` makes the requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any

from snapstream.engine.core import Engine
from snapstream.engine.validate import QueueFull
from snapstream.request import Request, RequestOutput


class Driver:
    """Owns an engine until ``close``."""

    def __init__(self, engine: Engine, *, shows_progress: bool) -> None:
        self._engine: Engine | None = engine
        self._shows_progress = shows_progress
        self._changed: dict[str, bool] = {}  # by id of every open request: has it grown since its reader looked?
        self._is_broken = False
        self._turn = RLock()  # whoever holds it may step; re-entrant only for streams that are dropped amid a step
        self._is_inside = False  # the holder of the turn is inside the engine
        self._dropped: list[Request] = []  # of streams that ended amid a step

    @property
    def engine(self) -> Engine:
        """RuntimeError once it is closed or a step has failed."""
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        if self._is_broken:
            raise RuntimeError("an earlier step of this LLM failed; make a new one")
        return self._engine

    def close(self) -> None:
        """Drop the engine, and with it weights and rows, once nobody steps it."""
        with self._turn:
            if self._engine is not None:
                self._engine.close()
            self._engine = None

    def run(self, requests: Sequence[Request]) -> list[RequestOutput]:
        """Run checked requests to their end, feeding the queue as it takes them; ValueError for an id in use."""
        with self._inside():
            for request_id, number in Counter(request.request_id for request in requests).items():
                if number > 1 or request_id in self._changed:
                    raise ValueError(f"request id {request_id!r} is in use; ids of live requests must differ")
            return self._run(requests)

    def _run(self, requests: Sequence[Request]) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        left = {request.request_id for request in requests}
        bar = _progress_bar(len(requests), self._shows_progress)
        try:
            while left:
                while len(outputs) < len(requests):
                    try:
                        outputs.append(self._open(requests[len(outputs)]))
                    except QueueFull:
                        break
                ended = left.intersection([output.request_id for output in self._step() if output.is_finished])
                if ended:
                    left -= ended
                    bar.update(len(ended))
        finally:
            bar.close()
            self._release(requests)
        return outputs

    def reset_prefix_store(self, namespace: str | None) -> int:
        """``Engine.reset_prefix_store``, between two steps."""
        with self._inside():
            return self.engine.reset_prefix_store(namespace)

    def stream(self, request: Request) -> Iterator[RequestOutput]:
        """Yield the request's output each time it has grown; closing the iterator aborts the request."""
        with self._inside():
            output = self._open(request)
        try:
            while True:
                with self._inside():
                    while not self._changed[request.request_id]:
                        self._step()
                    self._changed[request.request_id] = False
                    is_finished = output.is_finished
                yield output
                if is_finished:
                    return
        finally:
            with self._turn:
                self._dropped.append(request)
                if not self._is_inside:
                    with self._inside():
                        pass  # its end releases the request

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Take the turn; at its end release the streams that were dropped meanwhile.

        The garbage collector may close a stream anywhere, so also amid a step of the thread that it runs in; an abort
        there would step the engine inside its own step.
        """
        with self._turn:
            if self._is_inside:
                raise RuntimeError("this LLM is amid a step; nothing that a step calls may use it")
            try:
                self._is_inside = True
                try:
                    yield
                finally:
                    while self._dropped:
                        self._release([self._dropped.pop()])
            finally:
                self._is_inside = False

    def _open(self, request: Request) -> RequestOutput:
        try:
            output = self.engine.add_request(request)
            self._changed[request.request_id] = False
        except Exception:
            raise
        except BaseException:  # Ctrl-C: nobody will read it, and the engine may have it
            self._dropped.append(request)
            raise
        return output

    def _step(self) -> list[RequestOutput]:
        """One step for everybody; the outputs that have grown, which is noted too."""
        try:
            grown = self.engine.step()
        except Exception:
            self._is_broken = True
            raise
        except BaseException:  # Ctrl-C: the step's tokens are lost and its rows half done, but only theirs
            self._abort_all()
            raise
        for output in grown:
            if output.request_id in self._changed:
                self._changed[output.request_id] = True
        return grown

    def _abort_all(self) -> None:
        """End every open request; what its reader has so far is right, and there is no more of it."""
        for request_id in self._changed:
            self.engine.abort(request_id)
            self._changed[request_id] = True

    def _release(self, requests: Sequence[Request]) -> None:
        """Forget requests, whatever their state: after their end, an error, Ctrl-C, a closed stream."""
        for request in requests:
            self._changed.pop(request.request_id, None)
        if self._engine is None or self._is_broken:
            return
        if any([self._engine.abort(request.request_id) for request in requests]):
            self._step()  # takes the rows back
        while not self._changed and self._engine.has_work:  # nobody is left: read what is in flight
            self._step()


def _progress_bar(total: int, wanted: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="prompts", unit="prompt", disable=not wanted or total < 2)
