"""The wire APIs of the server. To add one: a package with its ``API`` (``http/api.py``), and a line here."""

from __future__ import annotations

from snapstream.server import anthropic, openai, responses

APIS = (openai.API, responses.API, anthropic.API)  # in the order of /openapi.json
