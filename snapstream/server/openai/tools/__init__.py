"""Tool calls: a request's tools (``request.py``), and how models write calls (``format.py``, ``formats/``)."""
