"""The proxy between real sockets: what reaches the upstream and the client, byte by byte, what it must not change or
let through, and what happens when one of them disconnects.
"""

from __future__ import annotations

import http.client
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from starlette.types import Receive, Scope, Send

from snapstream.proxy import run_proxy
from snapstream.server.http.lifecycle import listen
from snapstream.server.options import ProxyOptions
from tests.proxy.upstream import CUT, Chain, FakeDraft, Seen, chain, make_upstream
from tests.server.app_server import on_socket
from tests.waiting import HANG_S, HTTP, until

LONG = " ".join(f"word{i}" for i in range(40))
HEADER = "x-snapstream-prompt-compression"


@pytest.fixture(scope="module")
def links() -> Iterator[Chain]:
    with chain() as made:
        yield made


@pytest.fixture(autouse=True)
def _fresh(links: Chain) -> None:
    links.draft.gate.set()
    links.draft.error = None
    links.seen.bodies.clear()
    links.seen.headers.clear()
    links.seen.targets.clear()


def chat(text: str, **more: object) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


def post(links: Chain, body: object, path: str = "/v1/chat/completions", **options: object) -> httpx.Response:
    return HTTP.post(links.url + path, json=body, timeout=HANG_S, **options)  # type: ignore[arg-type]


def test_a_long_prompt_is_compressed_and_the_rest_of_the_body_is_kept(links: Chain) -> None:
    answer = post(links, chat(LONG, temperature=0.25, tools=[{"type": "function"}], strange={"a": [1]}))
    assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == 5
    (body,) = links.seen.bodies
    assert body["messages"][0]["content"] == " ".join([*LONG.split()[:20], CUT])
    assert body["temperature"] == 0.25 and body["strange"] == {"a": [1]} and body["tools"] == [{"type": "function"}]
    report = json.loads(answer.headers[HEADER])
    assert report == {"applied": True, "tokens_before": 40, "tokens_after": 20, "draft_ms": 1.5, "num_cached": 0}


def test_a_request_says_how_much_to_keep_and_the_field_stays_here(links: Chain) -> None:
    post(links, chat(LONG, prompt_compression={"max_tokens": 7}))
    post(links, chat(LONG, prompt_compression={"keep": 0.25}))
    assert [len(body["messages"][0]["content"].split()) - 1 for body in links.seen.bodies] == [7, 10]
    assert all("prompt_compression" not in body for body in links.seen.bodies)


def test_off_does_not_ask_the_draft(links: Chain) -> None:
    before = links.draft.num_calls
    answer = post(links, chat(LONG, prompt_compression="off"))
    assert links.seen.bodies[0]["messages"][0]["content"] == LONG and links.draft.num_calls == before
    assert json.loads(answer.headers[HEADER]) == {"applied": False, "reason": "off"}


@pytest.mark.parametrize(
    "value", [{"keep": 0}, {"keep": 1.5}, {"keep": "a"}, {"max_tokens": 0}, {"keep": 0.5, "max_tokens": 3}, {}, 3, "on",
              {"ratio": 1}],
)  # fmt: skip
def test_a_senseless_wish_is_refused_with_its_name(links: Chain, value: object) -> None:
    answer = post(links, chat(LONG, prompt_compression=value))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt_compression"
    assert not links.seen.bodies


def test_completions_take_one_text_or_several_and_leave_ids_alone(links: Chain) -> None:
    path = "/v1/completions"
    post(links, {"prompt": LONG}, path)
    post(links, {"prompt": [LONG, "short one"]}, path)
    answer = post(links, {"prompt": [1, 2, 3]}, path)
    one, two, ids = (body["prompt"] for body in links.seen.bodies)
    assert one.endswith(CUT) and two[0].endswith(CUT) and two[1] == "short one" and ids == [1, 2, 3]
    assert json.loads(answer.headers[HEADER])["reason"] == "the prompt is not text"


def test_streams_pass_through_frame_by_frame(links: Chain) -> None:
    client = openai.OpenAI(base_url=links.url + "/v1", api_key="mine", max_retries=0)
    raw = client.chat.completions.with_raw_response.create(
        model="m", messages=[{"role": "user", "content": LONG}], stream=True
    )
    assert json.loads(raw.headers[HEADER])["applied"] is True
    assert [chunk.choices[0].delta.content for chunk in raw.parse()] == ["t0 ", "t1 ", "t2 "]
    assert links.seen.headers[0]["authorization"] == "Bearer mine"


def test_upstream_errors_arrive_as_they_are(links: Chain) -> None:
    answer = post(links, chat("hi", model="missing"))
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
    assert answer.headers["retry-after"] == "7"


def test_other_paths_and_their_queries_are_passed_on(links: Chain) -> None:
    assert HTTP.get(links.url + "/v1/models", timeout=HANG_S).json()["data"][0]["id"] == "m"
    HTTP.post(
        links.url + "/v1/embeddings?a=%2Fb&c=d",
        content=b"anything",
        headers={"content-type": "text/plain"},
        timeout=HANG_S,
    )
    assert links.seen.bodies[-1] == {"raw": "anything"} and links.seen.targets[-1] == "v1/embeddings?a=%2Fb&c=d"


def test_headers_of_the_connection_stay_on_it(links: Chain) -> None:
    post(links, chat("hi"), headers={"connection": "x-private", "x-private": "1", "x-other": "2", "te": "trailers"})
    seen = links.seen.headers[0]
    assert "x-private" not in seen and "te" not in seen and seen["x-other"] == "2"
    assert seen["host"] != links.url.removeprefix("http://")


def test_a_draft_that_fails_lets_the_prompt_pass_whole_and_says_so(links: Chain) -> None:
    links.draft.error = RuntimeError("secret detail")
    answer = post(links, chat(LONG, prompt_compression={"keep": 0.1}))
    assert answer.status_code == 200 and json.loads(answer.headers[HEADER]) == {
        "applied": False,
        "reason": "the draft failed",
    }
    (body,) = links.seen.bodies
    assert body["messages"][0]["content"] == LONG and "prompt_compression" not in body


def test_a_wish_that_the_draft_cannot_grant_is_the_callers_fault(links: Chain) -> None:
    links.draft.error = ValueError("the protected text has 900 tokens, the ceiling is 10")
    answer = post(links, chat(LONG, prompt_compression={"max_tokens": 10}))
    assert answer.status_code == 400 and "900" in answer.json()["error"]["message"]


def test_what_only_the_proxy_wished_lets_the_prompt_pass_whole_and_says_so(links: Chain) -> None:
    """An agent whose protected text is beyond the proxy's own ceiling must go on working."""
    links.draft.error = ValueError("max_tokens is 10; what must stay takes 900 tokens on its own")
    for more in ({}, {"prompt_compression": None}):
        answer = post(links, chat(LONG, **more))
        assert answer.status_code == 200
        assert json.loads(answer.headers[HEADER]) == {"applied": False, "reason": str(links.draft.error)}
        body = links.seen.bodies.pop()
        assert body["messages"][0]["content"] == LONG and "prompt_compression" not in body
    with chain(is_strict=True) as strict:
        strict.draft.error = links.draft.error
        assert post(strict, chat(LONG)).status_code == 400 and not strict.seen.bodies


def test_bad_bodies_are_refused_here(links: Chain) -> None:
    assert post(links, [1]).status_code == 400
    assert post(links, {"messages": "no"}).json()["error"]["param"] == "messages"
    plain = HTTP.post(
        links.url + "/v1/chat/completions", content=b"{}", headers={"content-type": "text/plain"}, timeout=HANG_S
    )
    assert plain.status_code == 400 and not links.seen.bodies


def test_a_reader_that_leaves_closes_the_upstream_stream(links: Chain) -> None:
    left = links.seen.num_left
    body = chat("hi", stream=True, max_tokens=2000)
    with HTTP.stream("POST", links.url + "/v1/chat/completions", json=body, timeout=HANG_S) as stream:
        next(stream.iter_raw())
    until(lambda: links.seen.num_left == left + 1 and links.app.state.proxy.open_requests.num_open == 0)


def test_a_stream_that_breaks_ends_with_an_error_frame(links: Chain) -> None:
    with HTTP.stream(
        "POST", links.url + "/v1/chat/completions", json=chat("hi", stream=True, user="breaks"), timeout=HANG_S
    ) as got:
        frames = [line for line in got.iter_lines() if line]
    assert len(frames) == 4 and frames[-1] == "data: [DONE]"
    assert json.loads(frames[-2].removeprefix("data: "))["error"]["code"] == "upstream_unavailable"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/messages/count_tokens"])
def test_the_other_apis_pass_untouched(path: str, links: Chain) -> None:
    body = {"input": LONG, "messages": [{"role": "user", "content": LONG}], "prompt_compression": "theirs"}
    response = HTTP.post(links.url + path, json=body, headers={"x-api-key": "k"}, timeout=HANG_S)
    assert response.status_code == 200 and HEADER not in response.headers
    assert (links.seen.bodies[-1], links.seen.headers[-1]["x-api-key"]) == (body, "k")
    with HTTP.stream("POST", links.url + path, json={"stream": True, "user": "breaks"}, timeout=HANG_S) as broken:
        last = b"".join(broken.iter_raw()).decode().strip().split("\n\n")[-1]
    name, data = last.split("\n")
    event = json.loads(data.removeprefix("data: "))
    assert name == "event: error" and event["type"] == "error" and event["error"]["message"]


def test_an_answer_that_breaks_off_is_cut_and_leaves_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def upstream(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"1000")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"half":', "more_body": True})
        # and no more: uvicorn closes the connection

    caplog.set_level(logging.WARNING)
    with chain(upstream_app=upstream) as links:
        with pytest.raises(httpx.RemoteProtocolError):
            post(links, chat("hi"))
        until(lambda: links.app.state.proxy.open_requests.num_open == 0)
    said = [record.getMessage() for record in caplog.records]
    own = [line for line in said if "without completing" not in line]  # that one is the upstream's
    assert len(own) == 1 and own[0].startswith("the upstream server broke off an answer")
    assert len(said) == 2 and not any(record.exc_info for record in caplog.records)


def test_metrics_count_dropped_tokens() -> None:
    with chain() as links:
        post(links, chat(LONG))
        post(links, chat("short"))
        text = HTTP.get(links.url + "/metrics", timeout=HANG_S).text
    assert 'prompts_total{applied="true"} 1.0' in text and 'prompts_total{applied="false"} 1.0' in text
    assert "prompt_tokens_dropped_total 20.0" in text and "requests_open 0.0" in text


def test_keys_of_the_proxy_stay_here() -> None:
    with chain(api_keys=("ours",), upstream_key="theirs") as links:
        assert post(links, chat("hi")).status_code == 401
        assert post(links, chat("hi"), headers={"authorization": "Bearer ours"}).status_code == 200
        assert links.seen.headers[0]["authorization"] == "Bearer theirs"
    with chain(api_keys=("ours",)) as links:
        for ours in ({"authorization": "Bearer ours"}, {"x-api-key": "ours"}):
            assert post(links, chat("hi"), headers=ours).status_code == 200
            assert not {"authorization", "x-api-key"} & set(links.seen.headers[-1])


def test_waiting_for_the_draft_is_bounded() -> None:
    with chain(max_waiting=2) as links:
        links.draft.gate.clear()
        threads = [threading.Thread(target=post, args=(links, chat(LONG))) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: links.app.state.proxy.draft.num_waiting == 2)
        answer = post(links, chat(LONG))
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        links.draft.gate.set()
        for thread in threads:
            thread.join(HANG_S)
        assert post(links, chat(LONG)).status_code == 200


def test_an_upstream_that_is_not_there_is_a_502() -> None:
    with socket.socket() as taken:  # its port is nobody else's, and it does not listen
        taken.bind(("127.0.0.1", 0))
        with chain(upstream=f"http://127.0.0.1:{taken.getsockname()[1]}/v1") as links:
            answer = post(links, chat("hi"))
    assert answer.status_code == 502 and answer.json()["error"]["code"] == "upstream_unavailable"


def test_a_strict_proxy_does_not_hide_a_failing_draft() -> None:
    with chain(is_strict=True) as links:
        links.draft.error = RuntimeError("secret detail")
        answer = post(links, chat(LONG))
        assert answer.status_code == 500 and "secret" not in answer.text and not links.seen.bodies


def test_draining_refuses_new_requests() -> None:
    with chain() as links:
        links.app.state.proxy.is_draining = True
        assert (
            post(links, chat("hi")).status_code == 503
            and HTTP.get(links.url + "/health", timeout=HANG_S).status_code == 503
        )


@pytest.mark.parametrize(
    "upstream",
    [
        "",
        "localhost:8000",
        "ftp://a",
        "http://a?b=c",
        "http://a:b",
        "http://a:99999",
        "http://:80",
        "http://a b",
        "http://[::1",
    ],
)
def test_an_upstream_must_be_a_url(upstream: str) -> None:
    with pytest.raises(ValueError, match="upstream"):
        ProxyOptions(upstream=upstream)


def test_the_upstream_may_end_in_v1() -> None:
    for given in ("http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"):
        assert ProxyOptions(upstream=given).root == "http://a:1"
    assert ProxyOptions(upstream="https://a/x/v1").root == "https://a/x"


# While the draft is read: everyone gets a 503 at once, and a signal ends the proxy in order.

SLOW = """
import sys
from snapstream.proxy import run_proxy
from snapstream.server.options import ProxyOptions
from snapstream.server.http.lifecycle import listen
from snapstream.server.http.lifecycle import set_up_log

def load():
    sys.stdin.read()
    raise ValueError("the draft is broken")

set_up_log("text")
with listen("127.0.0.1", 0) as listener:
    run_proxy(load, ProxyOptions(upstream="http://a"), listener)
"""


def started(load: Callable[[], Any], upstream: str) -> tuple[str, threading.Thread, list[str]]:
    """A proxy in a thread: its URL, the thread, and what ended it."""
    options, ended = ProxyOptions(upstream=upstream, retry_after_s=7), []
    listener = listen("127.0.0.1", 0)

    def run() -> None:
        with listener:
            try:
                run_proxy(load, options, listener)
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
        assert HTTP.get(f"{url}/health/live", timeout=HANG_S).status_code == 200
        assert HTTP.get(f"{url}/health/ready", timeout=HANG_S).status_code == 503
        may_go.set()
        until(lambda: HTTP.get(f"{url}/health", timeout=HANG_S).status_code == 200)
        for path in ("/health", "/health/live", "/health/ready", "/metrics"):  # health checks ask so
            assert httpx.head(url + path, timeout=HANG_S).status_code == 200
        assert HTTP.get(f"{url}/v1/models", timeout=HANG_S).status_code == 200


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
            until(lambda: HTTP.get(f"{found[1]}/health", timeout=HANG_S).status_code == 503)
            running.send_signal(signal.SIGTERM)
            until(lambda: not is_open(found[1]))
            _, log = running.communicate("", timeout=HANG_S)  # what is being read is read to its end
        finally:
            running.kill()
    assert running.returncode == 0
    assert "draining" in log and "Traceback" not in log and "broken" not in log


def is_open(url: str) -> bool:
    try:
        HTTP.get(f"{url}/health", timeout=HANG_S)
    except httpx.TransportError:
        return False
    return True


NOTE = "schön ✓".encode()  # UTF-8, and no Latin-1


@dataclass
class Plain:
    """An upstream that answers everything alike, and remembers what it was asked."""

    targets: list[str] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    headers: list[dict[bytes, bytes]] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            pass
        query = scope["query_string"].decode()
        self.targets.append(scope["raw_path"].decode() + (f"?{query}" if query else ""))
        self.methods.append(scope["method"])
        self.headers.append(dict(scope["headers"]))
        headers = [
            (b"content-type", b"text/plain"),
            (b"content-length", b"2"),
            (b"x-note", NOTE),
            (b"set-cookie", b"who=me"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture(scope="module")
def plain() -> Iterator[tuple[Chain, Plain]]:
    upstream = Plain()
    with chain(upstream_app=upstream, upstream_key="theirs", prefix="/tenant/v1") as links:
        yield links, upstream


def ask(
    url: str, method: str, target: str, headers: dict[str, str | bytes] | None = None
) -> tuple[http.client.HTTPResponse, bytes]:
    """A request whose target and headers are sent as they are."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=HANG_S)
    try:
        connection.putrequest(method, target, skip_accept_encoding=True)
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    "target",
    ["/v1/../../metrics", "/v1/%2e%2e/%2E%2E/metrics", "/v1/..%2f..%2fmetrics", "/v1/%252e%252e/x", "/v1/..;/x",
     "/v1/a%5C..%5Cx", "/v1/./models", "/v1/.."],
)  # fmt: skip
def test_no_path_leads_out_of_v1(plain: tuple[Chain, Plain], target: str) -> None:
    links, upstream = plain
    upstream.targets.clear()
    answer, body = ask(links.url, "GET", target)
    assert answer.status == 400 and json.loads(body)["error"]["code"] == "invalid_path"
    assert not upstream.targets


@pytest.mark.parametrize(
    "target",
    ["/v1/models/a%3Fb%2Fc", "/v1/models/a%23b?x=%2F..&y={}", "/v1/files//a..b/.c", "/v1/models/%C3%A4%25?q='"],
)
def test_paths_and_queries_travel_as_they_were_written(plain: tuple[Chain, Plain], target: str) -> None:
    links, upstream = plain
    assert ask(links.url, "GET", target)[0].status == 200
    assert upstream.targets[-1] == f"/tenant{target}"
    assert upstream.headers[-1][b"authorization"] == b"Bearer theirs"


@pytest.mark.parametrize("value", [NOTE, "schön".encode("latin-1")])
def test_header_values_are_bytes_in_both_directions(plain: tuple[Chain, Plain], value: bytes) -> None:
    links, upstream = plain
    answer, _ = ask(links.url, "GET", "/v1/models", {"x-mine": value})
    assert answer.status == 200 and upstream.headers[-1][b"x-mine"] == value
    assert answer.headers["x-note"].encode("latin-1", "surrogateescape") == NOTE


def test_the_proxy_asks_for_nothing_that_the_client_did_not(plain: tuple[Chain, Plain]) -> None:
    links, upstream = plain
    ask(links.url, "GET", "/v1/models")
    assert not {b"accept", b"accept-encoding", b"user-agent"} & set(upstream.headers[-1])
    ask(links.url, "GET", "/v1/models", {"accept-encoding": "br", "user-agent": "me"})
    assert (upstream.headers[-1][b"accept-encoding"], upstream.headers[-1][b"user-agent"]) == (b"br", b"me")


def test_cookies_of_one_client_are_not_sent_for_another(plain: tuple[Chain, Plain]) -> None:
    links, upstream = plain
    assert ask(links.url, "GET", "/v1/models")[0].headers["set-cookie"] == "who=me"
    ask(links.url, "GET", "/v1/models")
    assert b"cookie" not in upstream.headers[-1]
    ask(links.url, "GET", "/v1/models", {"cookie": "a=b"})
    assert upstream.headers[-1][b"cookie"] == b"a=b"


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS"])
def test_head_and_options_are_passed_on(plain: tuple[Chain, Plain], method: str) -> None:
    links, upstream = plain
    answer, body = ask(links.url, method, "/v1/models")
    assert answer.status == 200 and upstream.methods[-1] == method
    assert answer.headers["content-length"] == "2" and body == (b"" if method == "HEAD" else b"ok")


def test_an_answer_has_one_date(plain: tuple[Chain, Plain]) -> None:
    links, _ = plain
    assert len(ask(links.url, "GET", "/v1/models")[0].headers.get_all("date") or ()) == 1


def test_bodies_are_bounded_together() -> None:
    with chain(max_body_bytes=1000, max_open_body_bytes=1000) as links:
        links.draft.gate.clear()
        first = threading.Thread(target=post, args=(links, chat(LONG)))
        first.start()
        until(lambda: links.draft.num_calls == 1)
        for path in ("/v1/chat/completions", "/v1/embeddings"):
            answer = post(links, {"input": "x" * 900}, path)
            assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        links.draft.gate.set()
        first.join(HANG_S)
        until(lambda: links.app.state.proxy.open_requests.num_open == 0)
        assert post(links, {"input": "x" * 900}, "/v1/embeddings").status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
def test_a_body_that_does_not_come_is_not_waited_for(path: str) -> None:
    with chain(body_timeout_s=0.3) as links:
        host, _, port = urlsplit(links.url).netloc.partition(":")
        with socket.create_connection((host, int(port)), timeout=HANG_S) as trickling:
            head = (
                f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n["
            )
            trickling.sendall(head.encode())
            assert trickling.recv(4096).startswith(b"HTTP/1.1 408")
        until(lambda: links.app.state.proxy.open_requests.num_open == 0)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
def test_a_body_beyond_its_own_limit_is_refused(path: str) -> None:
    with chain(max_body_bytes=100) as links:
        assert post(links, chat("x" * 200), path).status_code == 413
        answer = HTTP.post(
            links.url + path, content=iter([b" " * 200]), headers={"content-type": "application/json"}, timeout=HANG_S
        )
        assert answer.status_code == 413 and not links.seen.bodies
