"""A ticket: the right to fill one row of another engine, once."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

KEY_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTicket:
    """Names a row that an engine has reserved, and where that engine takes it. Plain data, also as JSON.

    ValueError for what can name no row.
    """

    host: str
    port: int
    key: str = field(repr=False)  # 16 random bytes as hex; who knows it may fill the row, so no log shows it
    uses_tls: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not 1 <= len(self.host) <= 255:
            raise ValueError(f"the host of a ticket is {self.host!r}; it must be a name or an address")
        if not isinstance(self.port, int) or not 1 <= self.port <= 65535:
            raise ValueError(f"the port of a ticket is {self.port!r}; it must be a number from 1 to 65535")
        if not isinstance(self.key, str) or not re.fullmatch(f"[0-9a-f]{{{2 * KEY_BYTES}}}", self.key):
            raise ValueError(f"the key of a ticket must be {KEY_BYTES} bytes in hexadecimal")
        if not isinstance(self.uses_tls, bool):
            raise ValueError(f"uses_tls of a ticket is {self.uses_tls!r}; it must be true or false")
