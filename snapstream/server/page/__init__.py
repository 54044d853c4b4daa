"""The chat page at /, its files under /page/, and its own route next to the OpenAI API.

Invariant: the page needs this server only. The policy sent with every file lets a browser load scripts and styles from
here only, and never turns text of a model or a document into HTML. Files are read once. ``GET /`` needs no
key; routes that compute are under /v1/ and need one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from snapstream.assets.documents import make_document
from snapstream.server.http.errors import bad_value

FOLDER = Path(__file__).parent
INDEX = "index.html"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # ask each time; the answer is 304 until the package changes
}

EXAMPLE_FAMILIES = ("multi_number", "multi_words", "kv")
EXAMPLE_SPARE = 48  # tokens left for template and question
MIN_EXAMPLE = 256
MAX_SEED = 999


Work = Callable[[dict[str, Any], Any], Coroutine[Any, Any, Response]]  # takes the body, which is {} for a GET


Answer = Callable[[HttpRequest, Work], Awaitable[Response]]  # runs a handler that computes
WithTokenizer = Callable[[Callable[[Any], dict[str, Any]]], Awaitable[dict[str, Any]]]  # off the event loop


@dataclass(frozen=True)
class PageFile:
    body: bytes
    media_type: str
    etag: str

    def response(self, known: str) -> Response:
        """``known``: the request's If-None-Match."""
        headers = {**HEADERS, "ETag": self.etag}
        if self.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.media_type, headers=headers)


def page_files() -> dict[str, PageFile]:
    return {path.name: _read(path) for path in sorted(FOLDER.iterdir()) if path.suffix in MEDIA_TYPES}


def _read(path: Path) -> PageFile:
    body = path.read_bytes()
    return PageFile(body, MEDIA_TYPES[path.suffix], f'"{sha256(body).hexdigest()[:32]}"')


def page_routes(answer: Answer, with_tokenizer: WithTokenizer, example_len: Callable[[], int]) -> APIRouter:
    """``example_len``: tokens of the longest example document for the model; 0: it was not trained on them."""
    files = page_files()
    router = APIRouter()

    @router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def index(request: HttpRequest) -> Response:
        return _send(request, INDEX)

    @router.api_route("/page/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def file(request: HttpRequest, name: str) -> Response:
        return _send(request, name)

    @router.get("/v1/page/example", include_in_schema=False)
    async def example(
        request: HttpRequest, tokens: Annotated[int, Query()] = 4096, seed: Annotated[int, Query(ge=0, le=MAX_SEED)] = 0
    ) -> Response:
        async def work(_: dict[str, Any], __: Any) -> Response:
            longest = example_len()
            if not longest:
                raise bad_value("example documents need the shipped tiny model", None)
            if not MIN_EXAMPLE <= tokens <= longest:
                raise bad_value(f"tokens is {tokens}; it must be from {MIN_EXAMPLE} to {longest}", "tokens")
            return JSONResponse(await with_tokenizer(lambda tokenizer: _make_example(tokenizer, tokens, seed)))

        return await answer(request, work)

    def _send(request: HttpRequest, name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        return files[name].response(request.headers.get("if-none-match", ""))

    return router


def _make_example(tokenizer: Any, tokens: int, seed: int) -> dict[str, Any]:
    """A generated document of about that many tokens, with a question and its answer."""

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    document = make_document(
        family=EXAMPLE_FAMILIES[seed % len(EXAMPLE_FAMILIES)],
        seed=seed,
        count_tokens=count,
        target_tokens=tokens - EXAMPLE_SPARE,
        num_questions=1,
    )
    question = document.questions[0]
    start, end = question.spans[0]
    return {
        "document": document.text,
        "question": question.text,
        "expected": question.value,
        "fact": document.text[start:end],
    }
