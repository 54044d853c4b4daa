"""``serve --role``: which half of a request a server does, and whether its options make sense for that half.

Invariant: whatever a half cannot do is refused before anything is loaded, with the option's name. ``run.py`` builds the
server; ``server/engine/elsewhere.py`` and ``server/peers/`` are the two halves at work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from snapstream.config import EngineOptions
from snapstream.config.addresses import is_loopback
from snapstream.server.engine.elsewhere import PromptReaders
from snapstream.server.engine.prefill_servers import PrefillServers, check_urls
from snapstream.server.engine.process import EngineProcess
from snapstream.server.settings import Duty
from snapstream.transfer.settings import TransferSettings, read_secret


@dataclass(frozen=True, kw_only=True)
class ApartOptions:
    """What a user says of it. ValueError, naming the option, for what does not fit together."""

    duty: Duty = "both"
    prefill: tuple[str, ...] = ()  # addresses of the servers that read prompts
    transfer_host: str | None = None  # where rows arrive; 127.0.0.1
    transfer_port: int = 0
    transfer_ca: Path | None = None
    secret_file: Path | None = None

    def __post_init__(self) -> None:
        if self.duty == "decode" and not self.prefill:
            raise ValueError("--role decode needs --prefill URL, a server with --role prefill; it may be repeated")
        given = {
            "--prefill": bool(self.prefill),
            "--transfer-host": self.transfer_host is not None,
            "--transfer-port": self.transfer_port != 0,
        }
        if self.duty != "decode" and any(given.values()):
            name = next(name for name, is_given in given.items() if is_given)
            raise ValueError(f"{name} is for --role decode; the role is {self.duty}")
        if self.duty == "both" and (self.transfer_ca is not None or self.secret_file is not None):
            raise ValueError("--transfer-ca and --transfer-secret-file are for --role prefill or decode")
        check_urls(self.prefill)

    def settings(self, host: str, cert: Path | None, key: Path | None) -> TransferSettings | None:
        """``host``, ``cert``, ``key``: of the server's own port. ValueError for what would be open to others."""
        if self.duty == "both":
            return None
        if self.duty == "prefill" and not is_loopback(host) and cert is None:
            raise ValueError(
                f"--host is {host}, which other machines reach, and prompts arrive there: --role prefill needs "
                "--tls-cert and --tls-key, or a loopback address"
            )
        is_receiver = self.duty == "decode"
        return TransferSettings(
            secret=read_secret(self.secret_file),
            host=(self.transfer_host or "127.0.0.1") if is_receiver else None,
            port=self.transfer_port,
            cert=cert if is_receiver else None,
            key=key if is_receiver else None,
            ca=self.transfer_ca,
        )

    def engine_options(self, options: EngineOptions, draft: Path | None) -> EngineOptions:
        """The engine's, as far as its half has any use for them."""
        if self.duty == "prefill" and draft is not None:
            raise ValueError("--draft shortens prompts where they come in; give it to the servers with --role decode")
        if self.duty != "decode":
            return options
        if options.prefix_dir is not None or options.prefix_store not in (None, "auto"):
            raise ValueError("--prefix-store and --prefix-dir are for the servers that read prompts: --role prefill")
        return replace(options, prefix_store=None)

    def make_readers(self, settings: TransferSettings | None) -> Callable[[EngineProcess], PromptReaders] | None:
        """Who reads the prompts of an engine that only answers."""
        if self.duty != "decode" or settings is None:
            return None
        return lambda engine: PrefillServers(self.prefill, settings, lambda: engine.facts.engine)
