"""One conversation made ready for the engine, whatever API it came by, and the answer to it on its way.

    body -> plan (tools, format) -> wish (sampling) -> trimmed by the draft, if asked for -> token ids -> request

Other APIs write their conversations as a ``ChatBody`` and go this way. Invariant: what leaves ``ready_chat`` can be
served; everything else was a 400 that names a field of the body.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Response

from snapstream.request import Request
from snapstream.server.http.errors import ApiError
from snapstream.server.http.sse import CHUNKS, EventStream, Frames
from snapstream.server.openai.front import Front
from snapstream.server.openai.generation import Step, run_prompts
from snapstream.server.openai.prompt_trims import TrimFacts, TrimWish, told
from snapstream.server.openai.protocol import ChatBody
from snapstream.server.openai.reading import Reading
from snapstream.server.openai.sampling import chat_wish, check_answer_size, check_samples, make_request
from snapstream.server.openai.tally import Tally
from snapstream.server.openai.thoughts import CLOSING, Beginning, find_beginning, room_for, unheard
from snapstream.server.openai.tools.definitions import told_tools
from snapstream.server.openai.tools.plan import plan_answer
from snapstream.server.openai.visit import AnswerVisit


@dataclass(frozen=True, kw_only=True)
class ReadyChat:
    """A conversation that the engine can take, and how its answer is read."""

    model: str  # the served name that the request means
    request: Request
    reading: Reading
    trimming: TrimWish


async def ready_chat(front: Front, body: ChatBody, answer_id: str, namespace: str) -> ReadyChat:
    """Check and prepare a conversation of a caller in ``namespace``; ApiError for what cannot be served."""
    model = front.need_model(body.model)
    plan = plan_answer(body, front.call_format, front.texts, has_place=front.tells_tools)
    plan = replace(plan, shows_special=plan.shows_special or front.shows_special)
    front.ignored.note(unheard(front.template, body))
    wish = chat_wish(body, front.facts, plan)
    check_samples(1, wish.sampling.n, front.settings)
    trimming = front.trims.wish(body)
    if plan.grammar is not None:
        await front.need_grammar(plan.grammar, plan.grammar_param)
    done = await kept_whole(front, body, trimming, namespace, has_tools=plan.has_tools)
    if trimming.how is not None and done is None:
        messages, tools = await front.prompts.conversation(body.messages), told_tools(body.tools)
        messages, done = await front.trims.chat(messages, tools if plan.has_tools else None, trimming, namespace)
        body = body.model_copy(update={"messages": messages})
    prompt = await front.prompts.chat(body, front.facts.max_model_len, has_tools=plan.has_tools)
    beginning, ids = find_beginning(front.reasoning, prompt.ending, prompt.written), prompt.ids
    if plan.grammar is not None and beginning is not Beginning.ANSWER:
        grammar = room_for(plan.grammar, beginning, front.texts.symbols)
        await front.need_grammar(grammar, plan.grammar_param)
        wish = replace(wish, sampling=replace(wish.sampling, grammar=grammar))
    trim = None if done is None else done.of(len(ids))
    request = make_request(answer_id, ids, wish, front.facts, prompt_param="messages", has_tokenizer=True, trim=trim)
    check_answer_size([request], front.facts, front.settings)
    reading = Reading(beginning, front.texts.id_of(CLOSING), plan.make_parser)
    return ReadyChat(model=model, request=request, reading=reading, trimming=trimming)


async def kept_whole(
    front: Front, body: ChatBody, trimming: TrimWish, namespace: str, *, has_tools: bool
) -> TrimFacts | None:
    """What is told of a conversation that the draft need not trim, because most of it is stored; None for others.

    A prompt that is too long as it stands may fit once it is trimmed, so it is no error here.
    """
    if trimming.how is None or trimming.how.keep is None or front.facts.engine.prefix_store is None:
        return None
    try:
        ids = (await front.prompts.chat(body, front.facts.max_model_len, has_tools=has_tools)).ids
    except ApiError:
        return None
    return front.trims.kept_whole(len(ids), await front.engine.num_stored(ids, namespace), trimming)


def new_tally(front: Front, requests: Sequence[Request], trimming: TrimWish, visit: AnswerVisit) -> Tally:
    """The tally of an answer, which the visit's line in the log will tell."""
    visit.tally = Tally(
        requests=requests,
        budget=requests[0].budget or front.facts.engine.budget,
        selector=requests[0].selector or front.facts.engine.selector,
        prompt_compression=told(trimming.how),
    )
    return visit.tally


def run(front: Front, requests: Sequence[Request], visit: AnswerVisit) -> AsyncGenerator[Step, None]:
    """The engine's steps; nothing runs before the first is asked for."""
    max_rows = front.facts.engine.max_rows
    requests = [replace(request, namespace=visit.namespace) for request in requests]
    return run_prompts(front.engine, front.metrics, requests, visit.born, max_at_once=max_rows)


async def stream(
    front: Front, items: AsyncGenerator[Any, None], visit: AnswerVisit, frames: Frames = CHUNKS
) -> Response:
    """A streamed answer. It begins with the first item: what fails until then has a status of its own."""
    try:
        first = await anext(items)
    except StopAsyncIteration:
        raise RuntimeError("the engine's answer had no samples") from None
    except BaseException:
        await items.aclose()
        raise
    return EventStream(first, items, front.error, visit.end, frames)
