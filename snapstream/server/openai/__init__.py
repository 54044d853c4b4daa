"""OpenAI's Chat Completions and Completions, and the chat path that all APIs share."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from snapstream.server.http.api import Api


def _routes(server: Any) -> APIRouter:
    from snapstream.server.openai.routes import openai_routes

    return openai_routes(server)


API = Api(prefix="/v1", routes=_routes, error_body=lambda error: error.body)
