"""Replicas of the engine on Ray Serve: one or more HTTP servers (ingresses), and engines on any number of machines.

    clients -> Ray's proxy -> ingress (the HTTP server) -> handle, router -> replica (one ``EngineProcess``)

``config.py`` reads the config file, ``application.py`` makes and runs a Serve application (``snapstream deploy``).
``replicas.py`` is the ``AsyncEngine`` of the ingress, and knows the load of each replica. With prefill
replicas, rows are sent from replica to replica with the secret and the certificates of ``certificates.py``. Only
``actors``, ``application`` and ``certificates`` import ray.
"""
