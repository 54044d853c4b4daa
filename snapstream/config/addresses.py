"""What an address of a server means for who can reach it."""

from __future__ import annotations

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a socket bound to ``host``."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
