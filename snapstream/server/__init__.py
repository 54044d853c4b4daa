"""The OpenAI-compatible server: HTTP in one process, the engine in another.

``http/`` is what any front needs, ``openai/`` the API, ``engine/`` the other process, ``page/`` the chat page.
``app.py`` puts them together, ``run.py`` puts that on a socket. Beside them stand what two rooms or the commands use:
``settings.py`` (told once, at start), ``metrics.py`` (of front and engine), ``logs.py`` (of server and proxy).
"""
