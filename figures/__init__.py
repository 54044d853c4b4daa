"""What evals and benchmarks share when they store and show results: machine, Markdown, charts, and the documents.

``machine``, ``markdown`` and ``chart`` lie below both. ``documents`` lies above them: it asks both for their tables and
writes README.md and docs (``python -m figures``). Evals and benchmarks never import each other.
"""
