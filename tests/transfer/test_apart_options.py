"""``serve --role``: what does not fit together is refused before anything is loaded."""

from __future__ import annotations

import pytest

from snapstream.cli import main
from snapstream.transfer.settings import SECRET_VARIABLE

READER = ["--prefill", "http://127.0.0.1:1"]
DECODE = ["--role", "decode", *READER]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--role", "decode"], "--role decode needs --prefill URL"),
        (READER, "--prefill is for --role decode"),
        (["--transfer-host", "127.0.0.1"], "--transfer-host is for --role decode"),
        (["--transfer-secret-file", "x"], "are for --role prefill or decode"),
        (["--role", "prefill"], "holds no transfer secret"),
        (["--role", "decode", "--prefill", "http://192.0.2.1:1"], "prompts need https there"),
        (["--role", "decode", "--prefill", "ftp://127.0.0.1"], "must be an address like"),
        ([*DECODE, *READER], "names a server twice"),
        ([*DECODE, "--transfer-host", "192.0.2.1"], "this needs TLS"),
        ([*DECODE, "--transfer-host", "0.0.0.0"], "no sender can reach"),
        ([*DECODE, "--transfer-port", "99999"], "the transfer port is 99999"),
        ([*DECODE, "--transfer-ca", "/nowhere"], "is not a file"),
        (["--role", "prefill", "--transfer-ca", __file__], "certificates of authorities (PEM)"),
        ([*DECODE, "--tls-cert", __file__, "--tls-key", __file__], "are no certificate and its key"),
        ([*DECODE, "--prefix-store", "1MiB"], "are for the servers that read prompts"),
        (["--role", "prefill", "--host", "0.0.0.0"], "--role prefill needs --tls-cert and --tls-key"),
        (["--role", "prefill", "--draft", "x"], "give it to the servers with --role decode"),
    ],
    ids=lambda value: " ".join(value).replace(__file__, "a.py") if isinstance(value, list) else "",
)
def test_what_does_not_fit_together(
    options: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "holds no" in says:
        monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(SECRET_VARIABLE, "a secret of thirty-two characters")
    assert main(["serve", *options]) == 2
    told = " ".join(word for word in capsys.readouterr().err.split() if word != "│")
    assert says in told
