"""The HTTP server; the engine runs in a separate process.

``apis.py`` lists the wire APIs (``openai/``, ``responses/``, ``anthropic.py``), ``http/`` serves any of them,
``engine/`` runs the engine process, ``page/`` is the chat page. ``app.py`` puts them together, ``run.py`` serves them
on a socket.
"""
