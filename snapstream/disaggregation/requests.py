"""The request that a decode engine sends to a prefill engine over HTTP, and the proof that its sender knows the secret.

Only the sampling parameters that concern the prompt are sent: tokens are sampled where the row arrives. Invariants: a
request from a peer is checked as any request is, and names a selector and its settings, but no code. The proof is
in a header, so that a client without the secret is refused before a byte of the body is read; it covers path and body.
A replayed request is harmless: it holds a ticket, which is good once.
"""

from __future__ import annotations

import hmac
from dataclasses import replace
from hashlib import sha256

from snapstream.config import SELECTORS, KVBudget, Selector
from snapstream.types import Request, RowTicket, SamplingParams
from snapstream.wire import WireError, mac, pack, unpack_one

HEADER = "x-snapstream-proof"  # digest of the body, and MAC of it and the path, both as hex


def proof_of(secret: bytes, path: str, body: bytes) -> str:
    """The header for a request."""
    digest = sha256(body).hexdigest()
    return f"{digest}:{_mac(secret, path, digest)}"


def digest_of(secret: bytes, path: str, header: str) -> str | None:
    """The digest that the body must have; None for a proof that is wrong or missing."""
    digest, _, found = header.partition(":")
    is_right = hmac.compare_digest(found.encode(), _mac(secret, path, digest).encode())
    return digest if is_right else None


def has_digest(body: bytes, digest: str) -> bool:
    return hmac.compare_digest(sha256(body).hexdigest(), digest)


def _mac(secret: bytes, path: str, digest: str) -> str:
    return mac(secret, b"http", f"{path}\0{digest}".encode()).hex()


def prefill_request(request: Request, ticket: RowTicket) -> Request:
    """The request for a prefill engine, which sends the row to ``ticket``."""
    return Request(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=request.sampling.prompt_logprobs,
            return_kept=request.sampling.return_kept,
        ),
        budget=request.budget,
        selector=request.selector,
        positions=request.positions,
        priority=request.priority,
        namespace=request.namespace,
        ticket=ticket,
    )


def prefill_request_id(ticket: RowTicket) -> str:
    """The request's id at the prefill engine: ids of several decode engines may be equal, those of tickets are not.

    It is not the ticket's key itself, which no log may show.
    """
    return f"read-{sha256(ticket.key.encode()).hexdigest()[:32]}"


def request_to_bytes(request: Request, budget: KVBudget, selector: Selector) -> bytes:
    """A request made by ``prefill_request``; ``budget`` and ``selector``: the engine's, if the request names none.

    ValueError for a selector that other processes do not know.
    """
    selector = request.selector or selector
    if selector.name not in SELECTORS or type(selector) is not SELECTORS.get(selector.name):
        raise ValueError(f"selector {selector.name!r} is not in SELECTORS, so it cannot be sent to another engine")
    return pack(replace(request, budget=request.budget or budget, selector=selector))


def request_from_bytes(data: bytes | bytearray) -> Request:
    """WireError for anything but what ``request_to_bytes`` writes; keeps what ``prefill_request`` keeps."""
    request = unpack_one(data, Request)
    if request.ticket is None or request.budget is None or request.selector is None:
        raise WireError("the request must have a ticket, a budget and a selector")
    return prefill_request(request, request.ticket)
