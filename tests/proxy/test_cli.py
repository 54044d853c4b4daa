"""``snapstream proxy`` as a process: the shipped draft, a real engine behind it, and what it refuses at start."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from snapstream.assets import TINY_DRAFT_MODEL, TINY_MODEL
from snapstream.assets.documents import make_document
from snapstream.cli import main
from snapstream.proxy import make_proxy
from snapstream.server.options import ProxyOptions
from snapstream.spec_prefill.compressor import PromptCompressor
from snapstream.spec_prefill.draft import Draft
from tests.proxy.agent import AGAIN, SYSTEM, TASK, TOOLS, output, transcript
from tests.proxy.upstream import Seen, make_upstream
from tests.server.app_server import on_socket
from tests.waiting import HANG_S, HTTP


@contextmanager
def process(*args: str, log: list[str] | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running command and its base URL, read off its log, whose lines so far go to ``log``."""
    command = [sys.executable, "-m", "snapstream.cli", *args, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        try:
            url = None
            while url is None:
                line = running.stderr.readline()
                if log is not None:
                    log.append(line)
                assert line, "the process ended before it served"
                found = re.search(r"at (http://\S+)/v1", line)
                url = found and found[1]
            yield running, url
        finally:
            running.kill()


def test_a_long_document_is_answered_through_the_proxy_from_a_part_of_it() -> None:
    document = make_document(
        family="multi_number", seed="proxy/0", count_tokens=lambda text: len(text) // 3, target_tokens=1500,
        num_questions=1,
    )  # fmt: skip
    (question,) = document.questions
    with (
        process("serve") as (_, upstream),
        process("proxy", "--upstream", upstream, "--target", str(TINY_MODEL)) as (running, url),
    ):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=HANG_S)
        assert client.models.list().data[0].id == "tiny"
        raw = client.chat.completions.with_raw_response.create(
            model="tiny",
            messages=[{"role": "user", "content": document.prompt(question)}],
            max_tokens=16,
            temperature=0.0,
            extra_body={"prompt_compression": {"keep": 0.5}},
        )
        report = json.loads(raw.headers["x-snapstream-prompt-compression"])
        usage = raw.parse().usage
        assert report["applied"] is True and usage is not None
        assert usage.prompt_tokens == report["tokens_after"] < 0.75 * report["tokens_before"]
        running.send_signal(signal.SIGTERM)
        assert running.wait(HANG_S) == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--upstream", "localhost:8000"), "upstream"),
        (("--upstream", "http://a", "--keep", "0"), "keep"),
        (("--upstream", "http://a", "--keep", "0.5", "--max-tokens", "9"), "give exactly one"),
        (("--upstream", "http://a", "--port", "70000"), "port"),
        (("--upstream", "http://a", "--draft", "/nowhere", "--port", "0"), "/nowhere"),
        (("--upstream", "http://a", "--context-len", "99999", "--port", "0"), "the draft reads at most"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(
    args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["proxy", *args]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize("variable", ["SNAPSTREAM_API_KEY", "SNAPSTREAM_UPSTREAM_KEY"])
def test_a_blank_key_in_the_environment_does_not_open_the_proxy(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, " ")
    assert main(["proxy", "--upstream", "http://a", "--draft", "/nowhere", "--port", "0"]) == 2
    assert f"{variable} is set but blank" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [{"api_keys": ("",)}, {"api_keys": (" a",)}, {"upstream_key": ""}, {"upstream_key": "a\nb"},
     {"allowed_hosts": ("a:8000",)}, {"allowed_hosts": ("*",)}, {"max_open_body_bytes": 5}, {"body_timeout_s": 0}],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"key|host|body"):
        ProxyOptions(upstream="http://a", **wrong)


def test_the_log_has_no_secret_of_an_address() -> None:
    with on_socket(make_upstream(Seen())) as upstream:
        given = upstream.replace("http://", "http://user:passw0rd@")
        lines: list[str] = []
        with process("proxy", "--upstream", given, log=lines) as (running, url):
            assert HTTP.get(f"{url}/v1/models?api_key=s3cret", timeout=HANG_S).status_code == 200
            running.send_signal(signal.SIGTERM)
            _, rest = running.communicate(timeout=HANG_S)
            log = "".join(lines) + rest
    assert upstream in log and "path=/v1/models status=200" in log
    assert "passw0rd" not in log and "s3cret" not in log


# Real use: an agent's long transcript with tools, openai-python as the client, the shipped draft.
# First against an upstream that records what reaches it, then ``snapstream proxy`` in front of ``snapstream serve``.

HEADER = "x-snapstream-prompt-compression"
FIRST = 6  # tool outputs of the first request; the last of them stays as it is


@pytest.fixture(scope="module")
def draft() -> Draft:
    return Draft.load(TINY_DRAFT_MODEL)


@pytest.fixture
def recorded(draft: Draft) -> Iterator[tuple[openai.OpenAI, Seen]]:
    """A proxy whose draft remembers nothing yet, and what reached its upstream."""
    seen = Seen()
    with on_socket(make_upstream(seen)) as upstream:
        options = ProxyOptions(upstream=upstream, keep=0.25)
        with on_socket(make_proxy(PromptCompressor(draft), None, options)) as url:
            yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=HANG_S), seen


def ask(client: openai.OpenAI, messages: list[Any], **more: Any) -> tuple[Any, dict[str, Any]]:
    """The answer, and what the header says."""
    raw = client.chat.completions.with_raw_response.create(
        messages=messages, **{"model": "tiny", "tools": TOOLS, "temperature": 0.0, "max_tokens": 8, **more}
    )
    return raw.parse(), json.loads(raw.headers[HEADER]) if HEADER in raw.headers else {}


def pieces(text: str) -> list[str]:
    return [piece for piece in re.split(r"\s*\[\.\.\.\]\s*", text) if piece]


def check_compressed(short: str, source: str) -> None:
    """``short`` is made of pieces of ``source``, in their order, and has less than half of it."""
    place = 0
    for piece in pieces(short):
        found = source.find(piece, place)
        assert found >= 0, piece
        place = found + len(piece)
    assert "[...]" in short and 0 < len(short) < len(source) / 2


def test_what_an_agent_needs_arrives_verbatim_and_old_outputs_shortened(
    recorded: tuple[openai.OpenAI, Seen],
) -> None:
    client, seen = recorded
    messages = transcript(FIRST)
    answer, report = ask(client, messages)
    assert answer.choices[0].message.content == "fine"
    assert report["applied"] is True and report["tokens_after"] < 0.6 * report["tokens_before"]
    assert report["num_cached"] == 0 and report["draft_ms"] > 0
    (body,) = seen.bodies
    assert body["tools"] == TOOLS and "prompt_compression" not in body
    got = body["messages"]
    assert got[0]["content"] == SYSTEM and got[1]["content"] == TASK and got[-1] == messages[-1]
    for index in range(3, 2 * FIRST, 2):
        check_compressed(got[index]["content"], messages[index]["content"])
    without = [{**message, "content": None} if message["role"] == "tool" else message for message in messages]
    assert [{**one, "content": None} if one["role"] == "tool" else one for one in got] == without


def test_the_next_turn_reads_only_what_is_new(
    recorded: tuple[openai.OpenAI, Seen], draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, seen = recorded
    read: list[str] = []
    reads = draft.read
    monkeypatch.setattr(draft, "read", lambda text, **around: (read.append(text), reads(text, **around))[1])
    _, first = ask(client, transcript(FIRST))  # scores all outputs but the last
    assert len(read) == FIRST - 1
    _, second = ask(client, transcript(FIRST + 1))  # one more has aged
    assert (first["num_cached"], second["num_cached"]) == (0, FIRST - 1) and read[FIRST - 1 :] == [
        transcript(FIRST)[-1]["content"]
    ]
    third = list(ask_stream(client, transcript(FIRST + 1)))  # the same again, as a stream
    assert "".join(third) == "".join(f"t{i} " for i in range(8))
    assert seen.bodies[-1]["messages"] == seen.bodies[-2]["messages"]
    _, last = ask(client, transcript(FIRST + 1, asks_again=True))  # another request: old outputs served the first
    assert last["num_cached"] == FIRST
    got = seen.bodies[-1]["messages"]
    assert got[-3]["content"] == AGAIN and got[-1]["content"] == output(FIRST + 1)
    assert [one["content"] for one in got[3 : 2 * FIRST + 2 : 2]] == [
        one["content"] for one in seen.bodies[-2]["messages"][3 : 2 * FIRST + 2 : 2]
    ]


def ask_stream(client: openai.OpenAI, messages: list[Any]) -> Iterator[str]:
    raw = client.chat.completions.with_raw_response.create(
        model="tiny",
        messages=messages,
        tools=TOOLS,
        max_tokens=8,
        stream=True,  # type: ignore[arg-type]
    )
    report = json.loads(raw.headers[HEADER])
    assert report["num_cached"] == FIRST and report["draft_ms"] == 0
    for chunk in raw.parse():
        yield chunk.choices[0].delta.content or ""


def test_an_agent_through_the_proxy_in_front_of_our_server() -> None:
    """The proxy's own draft first; then the server's, asked directly. Both count with the target's tokenizer."""
    options = {"extra_body": {"prompt_compression": {"keep": 0.25}}}
    with (
        process("serve", "--draft", str(TINY_DRAFT_MODEL), "--tool-parser", "hermes") as (_, server),
        process("proxy", "--upstream", server, "--target", str(TINY_MODEL)) as (_, proxy),
    ):
        client = openai.OpenAI(base_url=f"{proxy}/v1", api_key="none", max_retries=0, timeout=HANG_S)
        answer, first = ask(client, transcript(FIRST))
        assert answer.choices[0].message.role == "assistant" and answer.usage.completion_tokens > 0
        assert first["applied"] is True and answer.usage.prompt_tokens == first["tokens_after"]
        assert answer.snapstream["prompt_compression"] == "off"  # of the server: the proxy keeps the field
        answer, second = ask(client, transcript(FIRST + 1))
        assert second["num_cached"] == FIRST - 1 and answer.usage.prompt_tokens == second["tokens_after"]
        assert second["draft_ms"] > 0 and first["tokens_before"] > 2000
        chunks, third = ask(client, transcript(FIRST + 1), stream=True, stream_options={"include_usage": True})
        *parts, last = list(chunks)
        assert third["num_cached"] == FIRST and last.usage.prompt_tokens == second["tokens_after"]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in parts)
        assert text == (answer.choices[0].message.content or "")

        direct = openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=HANG_S)
        own, _ = ask(direct, transcript(FIRST + 1), **options)
        report = own.snapstream["prompts"][0]["prompt_compression"]
        assert (
            report["applied"] is True and own.usage.prompt_tokens == report["tokens_before"] == second["tokens_before"]
        )
        assert report["tokens_after"] == second["tokens_after"] and report["num_cached"] == 0
        assert own.choices[0].message.content == answer.choices[0].message.content
        again, _ = ask(direct, transcript(FIRST + 1, asks_again=True), **options)
        assert again.snapstream["prompts"][0]["prompt_compression"]["num_cached"] == FIRST
        whole, _ = ask(direct, transcript(FIRST + 1))
        assert whole.usage.prompt_tokens == second["tokens_before"]
        assert whole.snapstream["prompts"][0]["compression"]["prompt_tokens"] == second["tokens_before"]
