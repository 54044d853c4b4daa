"""Replicas of the engine on Ray Serve: one HTTP front or several, and engines on as many machines as there are.

    clients -> Ray's proxy -> ingress (the HTTP server) -> handle, router -> replica (one ``EngineProcess``)

``config.py`` reads the config file, ``application.py`` makes and runs a Serve application (``snapstream deploy``).
``engine.py`` is the ``AsyncEngine`` of the ingress, ``registry.py`` knows the load of each replica. With prefill
replicas, rows are sent from replica to replica with the secret and the certificates of ``certificates.py``. Only
``application``, ``certificates``, ``ingress`` and ``replica`` import ray.
"""
