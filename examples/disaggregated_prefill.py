"""Two servers on this machine: one prefills prompts, the other decodes. Clients talk to the second only.

python examples/disaggregated_prefill.py --model Qwen3-0.6B/
"""

import argparse
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from snapstream.assets import TINY_MODEL


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def serve(model: str, port: int, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "snapstream.cli", "serve", model, "--port", str(port), "--budget", "256", *options]
    return subprocess.Popen(command)


def until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            if httpx.get(f"{url}/health/ready", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"{url} ended with code {process.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(TINY_MODEL))
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32))
        shared = ["--transfer-secret-file", str(secret)]
        ports = free_port(), free_port()
        prefill, decode = (f"http://127.0.0.1:{port}" for port in ports)
        servers = [serve(args.model, ports[0], "--role", "prefill", *shared)]
        try:
            until_ready(prefill, servers[0])
            servers.append(serve(args.model, ports[1], "--role", "decode", "--prefill", prefill, *shared))
            until_ready(decode, servers[1])
            prompt = (
                "The code of the vault is 4821907. " + "The sky was grey. " * 20 + "\n\nWhat is the code of the vault?"
            )
            body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 16, "temperature": 0}
            answer = httpx.post(f"{decode}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
            print("answer:", answer["choices"][0]["message"]["content"])
            for line in httpx.get(f"{decode}/metrics", timeout=10).text.splitlines():
                if line.startswith("snapstream:rows_received_total"):
                    print(line)
        finally:
            for server in servers:
                server.terminate()
            for server in servers:
                server.wait()


if __name__ == "__main__":
    main()
