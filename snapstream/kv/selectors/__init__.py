"""How the top-k slots of a row are filled: one file per method.

``snapkv.py`` is the default, ``hops.py`` follows chains of facts, ``diverse.py`` keeps tokens that the question does
not point at; they share ``scoring.py``. A method's file imports torch only when the method selects. To add a method,
write a ``Selector`` and name it in ``SELECTORS`` (``config/kv.py``), or from outside with ``SELECTORS.add``.
"""
