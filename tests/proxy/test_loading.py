"""While the draft is read: everyone gets a 503 at once, and a signal ends the proxy in order."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import httpx

from snapstream.proxy.run import ProxyOptions, bind, run_proxy
from snapstream.proxy.settings import ProxySettings
from snapstream.spec_prefill.settings import PromptCompression
from tests.proxy.upstream import FakeDraft, Seen, make_upstream, on_socket
from tests.waiting import HANG_S, until

SLOW = """
import sys
from snapstream.proxy.run import ProxyOptions, bind, run_proxy
from snapstream.proxy.settings import ProxySettings
from snapstream.server.logs import set_up
from snapstream.spec_prefill.settings import PromptCompression

def load():
    sys.stdin.read()
    raise ValueError("the draft is broken")

set_up("text")
options = ProxyOptions(port=0)
with bind(options) as listener:
    run_proxy(load, ProxySettings(upstream="http://a", wish=PromptCompression(keep=0.5)), options, listener)
"""


def started(load: Callable[[], Any], upstream: str) -> tuple[str, threading.Thread, list[str]]:
    """A proxy in a thread: its URL, the thread, and what ended it."""
    options, ended = ProxyOptions(port=0), []
    listener = bind(options)
    settings = ProxySettings(upstream=upstream, wish=PromptCompression(keep=0.5), retry_after_s=7)

    def run() -> None:
        with listener:
            try:
                run_proxy(load, settings, options, listener)
            except ValueError as error:
                ended.append(str(error))

    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return url, thread, ended


def all_refused(url: str) -> None:
    for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/metrics")):
        answer = httpx.request(method, url + path, timeout=HANG_S)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
        assert answer.json()["error"]["message"] == "the proxy is loading"


def test_503_until_the_draft_is_read_then_answers() -> None:
    may_go = threading.Event()

    def load() -> Any:
        assert may_go.wait(HANG_S)
        return FakeDraft(), None

    with on_socket(make_upstream(Seen())) as upstream:
        url, _, _ = started(load, upstream)
        all_refused(url)
        may_go.set()
        until(lambda: httpx.get(f"{url}/health", timeout=HANG_S).status_code == 200)
        for path in ("/health", "/metrics"):  # health checks ask so
            assert httpx.head(url + path, timeout=HANG_S).status_code == 200
        assert httpx.get(f"{url}/v1/models", timeout=HANG_S).status_code == 200


def test_a_draft_that_cannot_be_read_ends_the_proxy() -> None:
    may_go = threading.Event()

    def load() -> Any:
        assert may_go.wait(HANG_S)
        raise ValueError("the draft is broken")

    url, thread, ended = started(load, "http://a")
    all_refused(url)
    may_go.set()
    thread.join(HANG_S)
    assert ended == ["the draft is broken"]


def test_a_signal_while_the_draft_is_read_ends_in_order() -> None:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SLOW], **pipes) as running:
        try:
            found = None
            while found is None:
                line = running.stderr.readline()
                assert line, "the process ended"
                found = re.search(r"(http://\S+) answers 503", line)
            until(lambda: httpx.get(f"{found[1]}/health", timeout=HANG_S).status_code == 503)
            running.send_signal(signal.SIGTERM)
            until(lambda: not is_open(found[1]))
            _, log = running.communicate("", timeout=HANG_S)  # what is being read is read to its end
        finally:
            running.kill()
    assert running.returncode == 0
    assert "draining" in log and "Traceback" not in log and "broken" not in log


def is_open(url: str) -> bool:
    try:
        httpx.get(f"{url}/health", timeout=HANG_S)
    except httpx.TransportError:
        return False
    return True
