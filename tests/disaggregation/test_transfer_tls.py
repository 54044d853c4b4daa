"""Rows over TLS, with certificates made for the test; skipped without openssl."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from snapstream.disaggregation.connector import ReceiveBuffer, TcpConnector
from snapstream.disaggregation.protocol import TransferSettings
from snapstream.types import Request, RowTicket, SamplingParams
from snapstream.wire import MAGIC
from tests.disaggregation.rows import BUDGET, SECRET, SIZES, bodies, receiving, sending
from tests.waiting import HANG_S

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    key, cert = folder / f"{name}-key.pem", folder / f"{name}.pem"
    make = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={name} -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        [*make.split(), "-keyout", str(key), "-out", str(cert)], capture_output=True, check=True, timeout=HANG_S
    )
    return cert, key


def test_a_row_over_tls_and_who_gets_none(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "own")
    other, _ = certificate(tmp_path, "other")
    with receiving(cert=cert, key=key) as there:
        ticket = there.expect()
        assert ticket.uses_tls
        here = sending(ticket, ca=cert)
        here.put_all()
        landing = there.result(ticket)
        assert isinstance(landing, ReceiveBuffer) and [bytes(part) for part in landing.parts] == bodies()
        assert here.result() == ""

        again = there.expect()
        assert "certificate" in sending(again, ca=other).result().lower()
        assert "certificate" in sending(again).result().lower(), "the system's authorities do not know it"
        with socket.create_connection((again.host, again.port), timeout=HANG_S) as plain:
            plain.sendall(MAGIC * 25)
            greeting = b""
            with suppress(ConnectionResetError):
                greeting = plain.recv(200)
            assert MAGIC not in greeting, "nobody is greeted without TLS"
        assert again.key not in there.delivered and there.receiver.num_tickets == 1


def test_authorities_that_are_gone_cost_one_row_and_not_the_engine(tmp_path: Path) -> None:
    cert, _ = certificate(tmp_path, "own")
    connector = TcpConnector(TransferSettings(secret=SECRET, ca=cert), SIZES, {})
    cert.unlink()
    one = SamplingParams(max_tokens=1)
    ticket = RowTicket(host="127.0.0.1", port=1, key="00" * 16, uses_tls=True)
    with pytest.raises(ValueError, match="cannot send another row now: .*No such file"):
        connector.open(Request(request_id="a", prompt_token_ids=(1,), sampling=one, ticket=ticket), BUDGET)


def test_a_proof_holds_for_the_certificate_that_it_was_made_for(tmp_path: Path) -> None:
    """Somebody between the two, whom the sender trusts, passes bytes on in both directions: the proof is refused."""
    cert, key = certificate(tmp_path, "own")
    between, between_key = certificate(tmp_path, "between")
    with receiving(cert=cert, key=key) as there, socket.create_server(("127.0.0.1", 0)) as listener:
        ticket = there.expect()
        context = TransferSettings(secret=SECRET, host="127.0.0.1", cert=between, key=between_key).server_context()
        assert context is not None
        here = sending(replace(ticket, port=listener.getsockname()[1]), ca=between)
        plain, _ = listener.accept()
        onward = ssl.create_default_context(cafile=str(cert))
        there_too = socket.create_connection((ticket.host, ticket.port))
        with (
            context.wrap_socket(plain, server_side=True) as near,
            onward.wrap_socket(there_too, server_hostname="127.0.0.1") as far,
        ):

            def pass_on(source: ssl.SSLSocket, target: ssl.SSLSocket) -> None:
                with suppress(OSError):
                    while data := source.recv(4096):
                        target.sendall(data)

            threads = [threading.Thread(target=pass_on, args=pair, daemon=True) for pair in ((near, far), (far, near))]
            for thread in threads:
                thread.start()
            assert "the connecting side does not know the shared secret" in here.result()
        assert there.receiver.num_tickets == 1
