"""What a reader does on the chat page, for tests in a browser; the fixtures are in ``conftest.py``."""

from __future__ import annotations

import re
from typing import Any


def figure(page: Any, name: str) -> str:
    return str(page.locator(f".answer:last-of-type [data-figure='{name}'] dd").first.inner_text())


def load_example(page: Any, size: int = 4096) -> None:
    page.locator("#example-size").select_option(str(size))
    page.get_by_role("button", name="Load an example").click()
    page.locator("#count", has_text=re.compile(r"[\d,]+ tokens$")).wait_for()


def send(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
