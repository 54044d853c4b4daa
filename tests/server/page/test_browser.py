"""The chat page in a real browser: with the shipped model where answers matter, with the fake engine for faults."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from snapstream.types import QueueFull
from tests.server import app_server
from tests.server.app_server import Running, running_server
from tests.server.fake_engine import template_tokenizer, tokenizer
from tests.server.page.driver import figure, load_example, send
from tests.server.tiny_server import TinyServer
from tests.waiting import HANG_S, HTTP, until

LONG_TEXT = "word " * 600
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script> & <b>bold</b>"


@pytest.fixture
def fake() -> Iterator[Running]:
    with running_server() as running:
        yield running


def test_further_turns_editing_and_clearing(tiny: TinyServer, open_page: Callable[..., Any]) -> None:
    page = open_page(tiny.url)
    page.locator("#example-field").wait_for()
    load_example(page, 1024)
    page.get_by_role("radio", name="full", exact=True).check()
    page.get_by_label("Message", exact=True).press("Enter")
    page.locator(".answer .figures").wait_for()
    assert figure(page, "evicted") == "0" and page.get_by_text("nothing was evicted").is_visible()
    first = figure(page, "prompt")
    page.get_by_role("radio", name="1/4", exact=True).check()
    send(page, "And the next one?")
    page.locator(".answer .figures").nth(1).wait_for()
    assert int(figure(page, "prompt").replace(",", "")) > int(first.replace(",", "")) + 5  # the whole conversation
    page.get_by_role("button", name="Edit").nth(1).click()
    assert page.locator(".answer").count() == 1
    assert page.get_by_label("Message", exact=True).input_value() == "And the next one?"
    page.get_by_role("button", name="Clear").click()
    assert page.locator(".turn").count() == 0 and page.get_by_label("Message", exact=True).input_value() == ""
    assert page.locator("#welcome").is_visible()


def test_stopping_frees_the_row(tiny: TinyServer, open_page: Callable[..., Any]) -> None:
    page = open_page(tiny.url)

    def endless(route: Any) -> None:
        route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True}))

    page.route("**/v1/chat/completions", endless)
    page.get_by_label("Most tokens").fill("12000")
    page.get_by_role("radio", name="slots", exact=True).check()
    send(page, "hi")
    page.locator(".state", has_text=re.compile(r"\d\d tokens")).wait_for()  # it streams
    until(lambda: tiny.gauges() == (1, 0, 1))
    page.get_by_role("button", name="Stop").click()
    page.locator(".state", has_text="stopped").wait_for()
    until(lambda: tiny.gauges() == (0, 0, 0))
    page.unroute("**/v1/chat/completions")
    page.get_by_label("Most tokens").fill("5")
    send(page, "go on")  # what was stopped stays part of the conversation
    page.locator(".answer .figures").wait_for()


BREAK = """() => {
  const real = window.fetch;
  const broken = () => new ReadableStream({ start: (to) => to.error(new TypeError("network error")) });
  const isAnswer = (path) => String(path).includes("completions");
  window.fetch = (path, how) => isAnswer(path) ? Promise.resolve(new Response(broken())) : real(path, how);
}"""


def test_a_server_that_dies_amid_an_answer_is_named(fake: Running, open_page: Callable[..., Any]) -> None:
    page = open_page(fake.url.removesuffix("/v1"))
    page.evaluate(BREAK)
    send(page, "hi")
    page.locator("#notice", has_text="The server ended, or the connection to it broke").wait_for()


def test_what_is_short_is_kept_whole(fake: Running, open_page: Callable[..., Any]) -> None:
    """A share of a few tokens would gain nothing, and an answer would soon outgrow such a row."""
    page = open_page(fake.url.removesuffix("/v1"))
    page.get_by_label("Most tokens").fill("60")
    page.get_by_role("radio", name="1/8", exact=True).check()
    send(page, "hi")
    page.locator(".answer .figures").wait_for()
    (request,) = fake.engine.requests
    assert request.budget is not None
    assert request.budget.capacity >= len(request.prompt_token_ids) + 60
    row = page.locator(".answer [data-figure='row']").inner_text()
    assert re.search(r"all of a full cache, .* and .* of room", row) and "%" not in row


DROP = """text => {
  const data = new DataTransfer();
  data.items.add(new File([text], "a.txt", { type: "text/plain" }));
  document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
}"""


def test_a_file_can_be_opened_or_dropped(fake: Running, open_page: Callable[..., Any]) -> None:
    page = open_page(fake.url.removesuffix("/v1"))
    text = page.get_by_role("textbox", name="Long text")
    page.get_by_label("Open file").set_input_files(
        {"name": "a.txt", "mimeType": "text/plain", "buffer": b"from a file"}
    )
    text.wait_for()  # what has a text is open
    assert text.input_value() == "from a file"
    page.evaluate(DROP, "dropped")
    until(lambda: text.input_value() == "dropped")
    send(page, "and a question")
    page.locator(".answer .figures").wait_for()
    prompt = tokenizer().decode(fake.engine.requests[0].prompt_token_ids)
    assert "dropped\n\nand a question" in prompt and "from a file" not in prompt


def test_text_is_never_html(fake: Running, open_page: Callable[..., Any]) -> None:
    fake.engine.answer = EVIL
    page = open_page(fake.url.removesuffix("/v1"))
    page.locator("#attachment summary").click()
    page.get_by_role("textbox", name="Long text").fill(EVIL)
    send(page, EVIL)
    page.locator(".answer .figures").wait_for()
    assert page.locator(".answer .words").inner_text() == EVIL
    assert page.locator(".question .words").all_inner_texts() == [EVIL, EVIL]
    assert page.locator(".turn img, .turn script, .turn b b").count() == 0 and page.title() == "snapstream"


def test_a_checkpoint_without_a_chat_template(open_page: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_server, "tokenizer", lambda: template_tokenizer(None))
    with running_server() as running:
        page = open_page(running.url.removesuffix("/v1"))
        send(page, "Once upon a time")
        page.locator(".answer .figures").wait_for()
        assert page.locator(".answer .words").inner_text() == running.engine.answer
        (request,) = running.engine.requests
        assert tokenizer().decode(request.prompt_token_ids).endswith("Once upon a time")


def test_a_missing_key_is_asked_for(browser: Any, open_page: Callable[..., Any]) -> None:
    with running_server("secret") as running:
        page = open_page(running.url.removesuffix("/v1"))
        notice = page.get_by_role("alert")
        notice.wait_for()
        assert "asks for an API key" in notice.inner_text() and "401" not in notice.inner_text()
        key = page.get_by_label("API key")
        assert key.evaluate("node => node === document.activeElement") and key.get_attribute("type") == "password"
        key.fill("schlüssel")
        key.press("Tab")
        page.get_by_text("beyond ASCII").wait_for()
        key.fill("wrong")
        key.press("Tab")
        page.get_by_text("missing or wrong").wait_for()
        held: list[Any] = []

        def hold(route: Any) -> None:
            if route.request.headers.get("authorization") == "Bearer wrong-too":
                held.append(route)
            else:
                route.continue_()

        page.route("**/v1/models", hold)
        key.fill("wrong-too")
        key.press("Tab")
        until(lambda: page.evaluate("true") and held)
        key.fill("secret")
        key.press("Tab")
        page.get_by_text("tiny ·").wait_for()
        assert notice.is_hidden()
        held[0].fulfill(status=401, json={"error": {"message": "late"}})
        page.wait_for_timeout(200)  # an answer to a key that was replaced is no news
        assert notice.is_hidden()
        send(page, "hi")
        page.locator(".answer .figures").wait_for()
        assert page.context.cookies() == []
        page.reload()
        notice.wait_for()  # a reload forgets the key


@pytest.mark.parametrize(
    ("fault", "words"),
    [("queue", "busy.*Try again in 1 s"), ("gone", "takes no requests now"), ("long", "too long.*limit is 512"),
     ("late", "broke off"), ("full", "larger rows")],
)  # fmt: skip
def test_faults_are_told_in_words_and_nothing_is_lost(
    fault: str, words: str, fake: Running, open_page: Callable[..., Any]
) -> None:
    page = open_page(fake.url.removesuffix("/v1"))
    page.get_by_text("tiny ·").wait_for()
    text = {"long": LONG_TEXT, "full": "word " * 60}.get(fault, "hello there")
    if fault == "queue":
        fake.engine.refuse = QueueFull("the queue is full")
    elif fault == "gone":
        fake.engine.is_ready = False
    elif fault == "late":
        fake.engine.fail_after = 4
    elif fault == "full":
        page.get_by_role("radio", name="full", exact=True).check()
    send(page, text)
    notice = page.get_by_role("alert")
    notice.wait_for()
    assert re.search(words, notice.inner_text(), re.DOTALL), notice.inner_text()
    if fault == "late":
        assert page.locator(".answer .words").inner_text().startswith("Hello")
    else:
        assert page.get_by_label("Message", exact=True).input_value() == text and page.locator(".turn").count() == 0


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_it_fits_the_screen_and_can_be_read(
    width: int, scheme: str, fake: Running, open_page: Callable[..., Any]
) -> None:
    page = open_page(fake.url.removesuffix("/v1"), viewport={"width": width, "height": 800}, color_scheme=scheme)
    send(page, "word " * 20 + "w" * 400)
    page.locator(".answer .figures").wait_for()
    body = page.locator("body")
    assert body.evaluate("node => node.scrollWidth") <= width  # nothing to scroll sideways
    colours = body.evaluate("node => [getComputedStyle(node).color, getComputedStyle(node).backgroundColor]")
    text, back = (sum(map(int, re.findall(r"\d+", colour)[:3])) / 3 for colour in colours)
    assert abs(text - back) > 150 and (text < back) == (scheme == "light")


# The row of an answer on the chat page: what is drawn of it, and where the reader is led.

MARKED = "wanted => Math.abs(Number(document.querySelector('.text .marked')?.dataset.token) - wanted) < 20"

FRAMES = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50))))"
OFF_CENTRE = """() => {
  const [text, marked] = [".text", ".text .marked"].map((name) => document.querySelector(name).getBoundingClientRect());
  return marked.top - text.top - text.height / 2;
}"""


def test_an_example_is_answered_and_its_row_is_what_the_api_tells(
    tiny: TinyServer, open_page: Callable[..., Any]
) -> None:
    page = open_page(tiny.url)
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda asked: asked.url.endswith("/completions") and bodies.append(asked.post_data_json))
    page.locator("#example-field").wait_for()
    page.get_by_role("radio", name="1/8", exact=True).check()
    load_example(page)
    assert re.search(r"^5\d\d slots for 4,0\d\d tokens$", page.locator("#budget-note").inner_text())
    page.get_by_role("button", name="Send").click()
    page.locator(".verdict.right").wait_for()

    (body,) = bodies
    assert body["kv_cache"] == {"budget": body["kv_cache"]["budget"], "return_kept": "bitmap"} and body["stream"]
    body["kv_cache"]["return_kept"] = True
    whole = {**body, "stream": False, "stream_options": None}
    answer = HTTP.post(f"{tiny.url}/v1/chat/completions", json=whole, timeout=HANG_S).json()
    report, cache = answer["snapstream"]["prompts"][0]["compression"], answer["snapstream"]["kv_cache"]
    assert page.locator(".answer .words").inner_text() == answer["choices"][0]["message"]["content"].strip()
    assert (
        figure(page, "prompt") == f"{report['prompt_tokens']:,}"
        and figure(page, "kept") == f"{report['kept_tokens']:,}"
    )
    assert figure(page, "evicted") == f"{report['evicted_tokens']:,}" and report["evicted_tokens"] > 3000
    assert figure(page, "row") == f"{round(report['row_bytes'] / 1024)} KiB" and figure(page, "end") == "stop"

    count = report["prompt_tokens"]
    ends = {*range(cache["num_sink"]), *range(count - cache["num_recent"], count)}
    heads = [ends | set(head) for layer in report["kept_positions"] for head in layer]
    page.locator(".text .fact").first.wait_for()  # blocks are filled a moment later
    shown = page.locator(".text span").evaluate_all("nodes => nodes.map(n => [Number(n.dataset.token), n.className])")
    assert 200 < len(shown) < count  # as many as are near the view
    for token, classes in shown:
        level = int(re.search(r"kept-(\d)", classes)[1])
        assert level == sum(token in head for head in heads), token  # eight heads, eight levels

    strip, line = page.get_by_role("slider"), page.locator(".told")
    strip.focus()
    page.keyboard.press("Home")
    assert line.inner_text() == "token 0 <|begin|> sink, kept by 8 of 8 heads in all layers"
    page.keyboard.press("End")
    assert f"token {count - 1:,} <|assistant|> recent ring, kept by 8 of 8 heads in all layers" == line.inner_text()
    page.get_by_role("button", name="Show the sentence that answers").click()
    fact = int(line.inner_text().split()[1].replace(",", ""))
    assert f"kept by {sum(fact in head for head in heads)} of 8 heads" in line.inner_text()
    page.get_by_label("Layer").select_option("2")
    assert f"kept by {sum(fact in head for head in heads[4:6])} of 2 heads" in line.inner_text()
    page.get_by_label("Head", exact=True).select_option("1")
    assert f"kept by {int(fact in heads[5])} of 1 heads" in line.inner_text()
    # To a block that was not filled yet. The locator's click waits until a scrolling page stands still; a click at
    # coordinates read a moment before can land beside the strip.
    wanted = 0.75 * count
    strip.click(position={"x": strip.bounding_box()["width"] * 0.75, "y": 10})
    page.wait_for_function(MARKED, arg=wanted)
    page.evaluate(FRAMES)  # its neighbours are filled meanwhile
    assert abs(page.evaluate(OFF_CENTRE)) < 30
    page.get_by_label("Layer").select_option("1")  # shaded anew
    page.wait_for_function(MARKED, arg=wanted)
    text = page.locator(".text")
    place = text.evaluate("node => { const place = node.scrollTop; node.scrollTop = 0; return place; }")
    page.locator(".text .marked").wait_for(state="detached")  # its block was emptied
    text.evaluate("(node, place) => { node.scrollTop = place; }", place)
    page.wait_for_function(MARKED, arg=wanted)


def test_a_long_prompt_is_drawn_from_a_part_of_its_elements(tiny: TinyServer, open_page: Callable[..., Any]) -> None:
    page = open_page(tiny.url)
    page.locator("#attachment summary").click()
    page.get_by_role("textbox", name="Long text").fill("The road to the mill was long. " * 1250)
    page.get_by_role("radio", name="1/16", exact=True).check()
    page.get_by_label("Most tokens").fill("4")
    send(page, "What is the code for amber falcon?")
    page.locator(".row-view canvas").wait_for()
    assert int(figure(page, "prompt").replace(",", "")) > 8_700
    page.locator(".text span").first.wait_for()
    assert page.locator(".text span").count() < 2500
    tools = page.context.new_cdp_session(page)
    tools.send("Performance.enable", {"timeDomain": "threadTicks"})
    before = busy_s(tools)
    page.get_by_role("slider").press("End")
    page.get_by_role("slider").press("Enter")
    page.locator(".text span.recent.marked").wait_for()
    assert 0 < busy_s(tools) - before < 2  # of the processor; generous: it takes some 50 ms
    assert page.locator(".text span").count() < 2500


def busy_s(tools: Any) -> float:
    """Processor time that the page's thread has spent on tasks."""
    found = {one["name"]: one["value"] for one in tools.send("Performance.getMetrics")["metrics"]}
    return float(found["TaskDuration"])
