"""A browser and pages in it, and the shipped model to talk to.

Their tests are skipped, with the reason, where no Chromium is installed or it does not start; ``.ci/run`` installs
Debian's. Not for a whole session: while Playwright's synchronous interface is open, the thread has a running event
loop, and tests that make one of their own fail.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.tiny_server import TinyServer, tiny_server
from tests.waiting import HANG_S

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


# Slow enough that people can stop an answer.
SLOW = {"budget": 8192, "max_rows": 2, "max_model_len": 16384, "executor": "eager"}


@pytest.fixture(scope="module")
def tiny() -> Iterator[TinyServer]:
    with tiny_server(SLOW) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        try:
            chromium = playwright.chromium.launch(executable_path=path, args=OPTIONS, timeout=1e3 * HANG_S)
        except sync_api.Error as error:  # a stub that would fetch the browser, or half of an installation
            pytest.skip(f"{path} does not start: {str(error).splitlines()[0]}")
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page of a server; whatever it asks of other hosts, and every error of its scripts, fails the test."""
    contexts, faults = [], []

    def open_at(url: str, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(1e3 * HANG_S)
        page.on("request", lambda asked: asked.url.startswith(url) or faults.append(asked.url))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda line: "Content Security" in line.text and faults.append(line.text))
        page.goto(url)
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert not faults
