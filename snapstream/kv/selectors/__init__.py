"""How the top-k slots of a row are filled: one file per method.

``snapkv.py`` is the default, ``hops.py`` follows chains of facts, ``diverse.py`` also keeps tokens that the question
does not point at; they share ``scoring.py``. Each imports torch only when it selects. To add a method, write a
``Selector`` and name it in ``SELECTORS`` (``config/kv.py``), or call ``SELECTORS.add`` from outside.
"""
