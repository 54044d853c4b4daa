"""llama.cpp's own server for one GGUF file, until Ctrl-C: its cache of prompts on, and drafts from n-grams.

.venv-peers/llama_cpp/bin/python -m benchmarks.peers.serve_llama_cpp model.gguf --port 8002
"""

from __future__ import annotations

import argparse
import signal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--port", type=int, default=8002)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=32768, help="tokens")
    parser.add_argument("--no-drafts", action="store_true")
    args = parser.parse_args()
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = args.file
    params.n_parallel, params.n_ctx, params.port = 1, args.context, args.port
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    if not args.no_drafts:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    server = xllamacpp.Server(params)
    print(f"serving {args.file} at {server.listening_address}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
