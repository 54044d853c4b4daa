"""Which parts of a request body a draft may trim, and the body that goes upstream.

Invariant: only prompt text changes; every other field travels as the client wrote it, and ``prompt_compression``, which
is ours, stays here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snapstream.server.http.errors import bad_value
from snapstream.server.http.trimming import FIELD, DraftThread, parse_wish
from snapstream.spec_prefill.settings import PromptCompression

if TYPE_CHECKING:
    from snapstream.spec_prefill.report import TrimReport

MAX_TEXTS = 256  # prompts of one completions request that are trimmed


@dataclass(frozen=True, kw_only=True)
class Trimmed:
    """A body ready to go, and what was done to it. ``reports`` is empty where nothing was even tried."""

    body: dict[str, Any]
    reports: tuple[TrimReport, ...] = ()
    reason: str = ""  # why nothing was tried


async def trim_chat(body: Mapping[str, Any], default: PromptCompression | None, draft: DraftThread) -> Trimmed:
    """A body of /v1/chat/completions. ApiError 400 for messages that are none: the draft would trip over them."""
    wish, rest = _wish(body, default)
    if wish is None:
        return Trimmed(body=rest, reason="off")
    messages = rest.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise bad_value("messages must be a list of objects", "messages")
    tools = rest.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise bad_value("tools must be a list of objects", "tools")
    kept, report = await draft.chat(messages, wish, tools)
    return Trimmed(body={**rest, "messages": kept}, reports=(report,))


async def trim_completion(body: Mapping[str, Any], default: PromptCompression | None, draft: DraftThread) -> Trimmed:
    """A body of /v1/completions: a text, or several. Token ids are another tokenizer's; they go on as they are."""
    wish, rest = _wish(body, default)
    if wish is None:
        return Trimmed(body=rest, reason="off")
    prompt = rest.get("prompt")
    if isinstance(prompt, str):
        text, report = await draft.text(prompt, wish)
        return Trimmed(body={**rest, "prompt": text}, reports=(report,))
    texts = _as_texts(prompt)
    if not texts:
        return Trimmed(body=rest, reason="the prompt is not text")
    if len(texts) > MAX_TEXTS:
        raise bad_value(f"prompt holds {len(texts)} texts; the limit is {MAX_TEXTS}", "prompt")
    done = [await draft.text(text, wish) for text in texts]
    return Trimmed(body={**rest, "prompt": [text for text, _ in done]}, reports=tuple(report for _, report in done))


def _wish(
    body: Mapping[str, Any], default: PromptCompression | None
) -> tuple[PromptCompression | None, dict[str, Any]]:
    return parse_wish(body.get(FIELD), default), {name: value for name, value in body.items() if name != FIELD}


def _as_texts(prompt: Any) -> list[str]:
    """The texts of a list of texts; none for anything else."""
    return list(prompt) if isinstance(prompt, list) and all(isinstance(text, str) for text in prompt) else []
