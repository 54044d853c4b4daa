"""What callers hand to ``LLM``, made plain or refused: prompts, sampling parameters, conversations.

Nothing is guessed: what is not clearly a text or a list of token ids is a ValueError that says what was given. Arrays
and tensors of ids count as lists. ``llm.py`` uses this; the rules of messages are in ``conversation.py``, limits that
depend on the model in ``engine/validate.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from snapstream.config import as_count
from snapstream.request import SamplingParams
from snapstream.request.conversation import as_conversation, is_list, named


def as_prompts(prompts: Any) -> list[str | list[int]]:
    """One prompt or several, as a list: texts, or lists of token ids."""
    prompts = _plain(prompts)
    if isinstance(prompts, str):
        return [prompts]
    if is_list(prompts):
        items = [_plain(item) for item in prompts]
        if items and not any(isinstance(item, str) or is_list(item) for item in items):
            return [_as_ids(items, "prompt")]
        return [item if isinstance(item, str) else _as_ids(item, f"prompt {i}") for i, item in enumerate(items)]
    raise ValueError(f"prompts is {named(prompts)}; it must be a text, a list of token ids, or a list of these")


def as_params(params: Any, count: int) -> list[SamplingParams]:
    """One ``SamplingParams`` for each of ``count`` prompts; None means the defaults."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not is_list(params) or not all(isinstance(item, SamplingParams) for item in params):
        raise ValueError(f"params is {named(params)}; it must be a SamplingParams, or a list with one per prompt")
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling parameters were given for {count} prompts")
    return list(params)


def as_conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """One conversation or several, as a list of lists of messages whose content is text."""
    if messages is None or not is_list(messages) or not messages:
        raise ValueError(f"messages is {named(messages)}; it must be a list of messages, each with role and content")
    conversations = [messages] if isinstance(messages[0], Mapping) else messages
    return [as_conversation(conversation) for conversation in conversations]


def _plain(value: Any) -> Any:
    """Arrays and tensors as lists, everything else as it is."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, Sequence) else value


def _as_ids(value: Any, name: str) -> list[int]:
    if not is_list(value):
        raise ValueError(f"{name} is {named(value)}; it must be a text or a list of token ids")
    return [as_count(f"{name}: token id", token, 0, field="prompts") for token in value]
