"""Replicas of the engine on Ray Serve: one HTTP front, or some, and engines on as many machines as there are.

    clients -> Ray's proxy -> ingress (the server's front) -> handle, router -> replica (one ``EngineProcess``)

``config.py`` is what a user says, ``application.py`` makes a Serve application of it, ``run.py`` runs that
(``snapstream deploy``). ``engine.py`` is the ``AsyncEngine`` that the front sees, ``board.py`` knows what each replica
has to do. Where some replicas only read prompts, ``readers.py`` asks them, and ``keys.py`` and ``certificates.py`` let
rows travel. Only ``application``, ``handles``, ``ingress``, ``keys``, ``replica``, ``router`` and ``run`` import ray.
"""
