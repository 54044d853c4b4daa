"""What the engine that answers a request asks of the one that reads its prompt: a request, as JSON.

Of sampling only what concerns the prompt goes along: tokens are drawn where the row arrives. Invariant: what comes back
from the JSON is checked as any request is; a peer names a selector and its settings, and no code.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields, is_dataclass
from hashlib import sha256
from typing import Any

from snapstream.config import SELECTORS, KVBudget, Selector
from snapstream.request import Request, RowTicket, SamplingParams
from snapstream.transfer.wire import WireError, read_json

_PROMPT_FIELDS = ("prompt_logprobs", "return_kept")


def read_for(request: Request, ticket: RowTicket) -> Request:
    """The request that another engine is given: it reads the prompt, and sends the row to ``ticket``."""
    own = {name: getattr(request.sampling, name) for name in _PROMPT_FIELDS}
    return Request(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=SamplingParams(max_tokens=1, temperature=0.0, **own),
        budget=request.budget,
        selector=request.selector,
        positions=request.positions,
        priority=request.priority,
        namespace=request.namespace,
        ticket=ticket,
    )


def read_name(ticket: RowTicket) -> str:
    """The id of a request at the engine that reads: ids of several askers may be alike, a ticket is nobody else's.

    Nor is it the ticket's key itself, which no log may show.
    """
    return f"read-{sha256(ticket.key.encode()).hexdigest()[:32]}"


def request_to_bytes(request: Request, budget: KVBudget, selector: Selector) -> bytes:
    """A request with a ticket; ``budget`` and ``selector`` are the engine's own, for a request that names none.

    ValueError for a selector that another engine cannot be told of.
    """
    assert request.ticket is not None
    return json.dumps(
        {
            "request_id": request.request_id,
            "prompt_token_ids": request.prompt_token_ids,
            "positions": request.positions,
            "priority": request.priority,
            "namespace": request.namespace,
            "budget": asdict(request.budget or budget),
            "selector": _told(request.selector or selector),
            "ticket": asdict(request.ticket),
            **{name: getattr(request.sampling, name) for name in _PROMPT_FIELDS},
        }
    ).encode()


def request_from_bytes(data: bytes | bytearray) -> Request:
    """WireError for anything else than what ``request_to_bytes`` writes, with the field and the reason."""
    told = read_json(data, "request")
    try:
        name, chosen = told["request_id"], told["selector"]
        namespace = told["namespace"]
        if not isinstance(name, str) or not isinstance(namespace, str):
            raise ValueError("request_id and namespace must be texts")
        return Request(
            request_id=name,
            prompt_token_ids=_ids(told, "prompt_token_ids"),
            sampling=SamplingParams(max_tokens=1, temperature=0.0, **{name: told[name] for name in _PROMPT_FIELDS}),
            budget=KVBudget(**told["budget"]),
            selector=SELECTORS.get(chosen["name"])(**chosen["settings"]),
            positions=None if told["positions"] is None else _ids(told, "positions"),
            priority=told["priority"],
            namespace=namespace,
            ticket=RowTicket(**told["ticket"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WireError(f"the request cannot be read: {type(error).__name__}: {str(error)[:200]}") from None


def _told(selector: Selector) -> dict[str, Any]:
    """A selector's name and settings."""
    names: list[str] = [field.name for field in fields(selector)] if is_dataclass(selector) else []
    if SELECTORS.names.count(selector.name) != 1 or type(selector) is not SELECTORS.get(selector.name):
        raise ValueError(f"selector {selector.name!r} is not in SELECTORS, so no other engine can be told of it")
    return {"name": selector.name, "settings": {name: getattr(selector, name) for name in names}}


def _ids(told: dict[str, Any], name: str) -> tuple[int, ...]:
    found = told[name]
    if not isinstance(found, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in found):
        raise ValueError(f"{name} must be a list of whole numbers")
    return tuple(found)
