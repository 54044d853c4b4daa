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

import httpx
import openai
import pytest

from snapstream.assets import TINY_MODEL
from snapstream.assets.documents import make_document
from snapstream.cli import main
from snapstream.proxy.settings import ProxySettings
from snapstream.spec_prefill.settings import PromptCompression
from tests.proxy.upstream import Seen, make_upstream, on_socket
from tests.waiting import HANG_S


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
        told = json.loads(raw.headers["x-snapstream-prompt-compression"])
        usage = raw.parse().usage
        assert told["applied"] is True and usage is not None
        assert usage.prompt_tokens == told["tokens_after"] < 0.75 * told["tokens_before"]
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
        ProxySettings(upstream="http://a", wish=PromptCompression(keep=0.5), **wrong)


def test_the_log_has_no_secret_of_an_address() -> None:
    with on_socket(make_upstream(Seen())) as upstream:
        given = upstream.replace("http://", "http://user:passw0rd@")
        lines: list[str] = []
        with process("proxy", "--upstream", given, log=lines) as (running, url):
            assert httpx.get(f"{url}/v1/models?api_key=s3cret", timeout=HANG_S).status_code == 200
            running.send_signal(signal.SIGTERM)
            _, rest = running.communicate(timeout=HANG_S)
            log = "".join(lines) + rest
    assert upstream in log and "path=/v1/models status=200" in log
    assert "passw0rd" not in log and "s3cret" not in log
