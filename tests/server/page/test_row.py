"""The row of an answer on the chat page: what is drawn of it, and where the reader is led."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx

from tests.server.page.driver import figure, load_example, send
from tests.server.page.tiny_server import TinyServer
from tests.waiting import HANG_S

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
    answer = httpx.post(f"{tiny.url}/v1/chat/completions", json=whole, timeout=HANG_S).json()
    told, cache = answer["snapstream"]["prompts"][0]["compression"], answer["snapstream"]["kv_cache"]
    assert page.locator(".answer .words").inner_text() == answer["choices"][0]["message"]["content"].strip()
    assert figure(page, "prompt") == f"{told['prompt_tokens']:,}" and figure(page, "kept") == f"{told['kept_tokens']:,}"
    assert figure(page, "evicted") == f"{told['evicted_tokens']:,}" and told["evicted_tokens"] > 3000
    assert figure(page, "row") == f"{round(told['row_bytes'] / 1024)} KiB" and figure(page, "end") == "stop"

    count = told["prompt_tokens"]
    ends = {*range(cache["num_sink"]), *range(count - cache["num_recent"], count)}
    heads = [ends | set(head) for layer in told["kept_positions"] for head in layer]
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
