"""``snapstream bench``, llama.cpp and ik_llama.cpp over the same GGUF file: random weights of a published shape.

    make peers                                                # once; or --llama-bench PATH, built from its source
    python -m benchmarks.peers.llama_bench --save             # 0.6B, 1B and 4B in q4_0, and a hybrid
    python -m benchmarks.peers.llama_bench --shapes qwen3-0.6b --depths 4096 16384
    python -m benchmarks.peers.llama_bench --shapes qwen3-30b-a3b-24th --kinds q4_k_m q4_0 --save    # a mixture
    python -m benchmarks.peers.llama_bench --shapes gpt-oss-20b-12th --kinds q8_0    # whose experts are MXFP4
    python -m benchmarks.peers.llama_bench --shapes tiny      # tries it, in seconds
    python -m benchmarks.peers.llama_bench --ik-llama-bench PATH    # and ik_llama.cpp's program, built from its source

They measure a prompt of 512 tokens and of each depth, and 128 tokens after a prompt of one and of each depth, with a
full cache, as many threads and else their own defaults; snapstream also with a quarter of the depth as slots. For each
repetition they take turns, as the read rate of a shared machine drifts within minutes.
llama.cpp is its own program llama-bench or, without one, xllamacpp, whose own times count. A file is deleted before the
next is written.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import ceilings, report
from benchmarks.peers.arms import ENVIRONMENTS
from benchmarks.peers.gguf_file import write_random_gguf

QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}  # fmt: skip
QWEN3_MOE = QWEN3 | {"architectures": ["Qwen3MoeForCausalLM"]}
TINY = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}  # fmt: skip
LFM2 = {"architectures": ["Lfm2ForCausalLM"], "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "conv_L_cache": 3, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "layer_types": ["full_attention" if at in (2, 5, 8, 10, 12, 14) else "conv" for at in range(16)],
        "norm_eps": 1e-5, "max_position_embeddings": 128000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}  # fmt: skip
# As published, but for the stretched rotary frequencies of Llama 3.2, which cost nothing.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                           "num_attention_heads": 16},
    "llama-3.2-1b": {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 2048,
                     "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
                     "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
                     "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "qwen3-4b": QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36},
    "lfm2-1.2b": LFM2,
    # Of 48 layers and of the vocabulary a 24th each, so that the shares of a step are those of the model.
    "qwen3-30b-a3b-24th": QWEN3_MOE | {"vocab_size": 6331, "hidden_size": 2048, "intermediate_size": 6144,
                                       "moe_intermediate_size": 768, "num_hidden_layers": 2, "num_experts": 128,
                                       "num_experts_per_tok": 8, "num_key_value_heads": 4},
    # Of 24 layers and of the vocabulary a 12th each, without the stretched rotary frequencies.
    "gpt-oss-20b-12th": {"architectures": ["GptOssForCausalLM"], "vocab_size": 16757, "hidden_size": 2880,
                         "intermediate_size": 2880, "num_hidden_layers": 2, "num_attention_heads": 64,
                         "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
                         "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"],
                         "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
                         "rope_parameters": {"rope_type": "default", "rope_theta": 1.5e5}},
    "tiny": QWEN3 | TINY,
    "tiny-moe": QWEN3_MOE | TINY | {"moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2},
    "tiny-lfm2": LFM2 | TINY | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
}  # fmt: skip


def tests_of(depths: list[int]) -> dict[str, tuple[int, int]]:
    """By name: the prompt and the new tokens."""
    tests = {"pp512": (512, 0), "tg128": (0, 128)}
    for depth in depths:
        tests |= {f"pp{depth}": (depth, 0), f"tg128 @ {depth}": (depth, 128)}
    return tests


def run(command: list[str], threads: int) -> Any:
    """The JSON that a command prints. An error, with its last lines, where it fails."""
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": str(threads)}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} ended with {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout)


def own_figures(file: Path, threads: int, repetitions: int, depths: list[int]) -> dict[str, Any]:
    """Tokens per second of ``snapstream bench``, and what it says about its engine."""
    program = sys.executable, "-m", "snapstream.cli", "bench"
    command = [*program, str(file), "-n", "128", "-r", str(repetitions), "--json"]
    lengths = "-p", "512", "-d", ",".join(map(str, [0, *depths]))
    found = run([*command, *lengths, "--budget", "full"], threads)
    tests = {test["test"]: test["tokens_per_s"] for test in found["tests"]}
    about = {name: found[name] for name in ("version", "machine", "executor", "weights", "rows")}
    shares = {test["test"]: test["read_share"] for test in found["tests"] if test["read_share"] is not None}
    rows = {**about, "read_gb_per_s": found["read_bytes_per_s"] / 1e9, "read_share": shares, "tokens_per_s": tests}
    for depth in depths:
        found = run([*command, "-p", "0", "-d", str(depth), "--budget", str(depth // 4)], threads)
        rows.setdefault("quarter", {})[f"tg128 @ {depth}"] = found["tests"][-1]["tokens_per_s"]
    return rows


def peer_figures(program: Path | None, file: Path, threads: int, repetitions: int, depths: list[int]) -> dict[str, Any]:
    """The same of llama.cpp, with its version."""
    if program is None:
        python = ENVIRONMENTS["llama_cpp"]
        if not python.exists():
            raise SystemExit("error: xllamacpp is not installed: `make peers`, or name a --llama-bench")
        numbers = map(str, (threads, repetitions, *depths))
        module = Path(__file__).parent / "rates_llama_cpp.py"
        found: dict[str, Any] = run([str(python), str(module), str(file), *numbers], threads)
        return found
    command = [str(program), "-m", str(file), "-n", "128", "-r", str(repetitions), "-t", str(threads), "-o", "json"]
    tests = run([*command, "-p", ",".join(map(str, [512, *depths]))], threads)
    if depths:
        tests += run([*command, "-p", "0", "-d", ",".join(map(str, depths))], threads)
    rates = {name: test["samples_ts"] for name, (num_prompt, num_new) in tests_of(depths).items() for test in tests
             if (test["n_prompt"], test["n_gen"], test.get("n_depth", 0))
             == ((0, num_new, num_prompt) if num_new else (num_prompt, 0, 0))}  # fmt: skip
    engine = f"llama-bench {tests[0]['build_number']} ({tests[0]['build_commit']})"
    return {"engine": engine, "tokens_per_s": rates}


def fork_figures(program: Path, file: Path, threads: int, repetitions: int, depths: list[int]) -> dict[str, Any]:
    """The same of ik_llama.cpp, a fork of it made for CPUs. It repacks weights as it starts (-rtr), and its llama-bench
    names depths otherwise.
    """
    prompts = ",".join(map(str, [512, *depths]))
    command = [str(program), "-m", str(file), "-p", prompts, "-n", "128", "-r", str(repetitions), "-t", str(threads)]
    after = [part for depth in depths for part in ("-gp", f"{depth},128")]
    tests = run([*command, *after, "-rtr", "1", "-o", "json"], threads)
    rates = {test["test"].replace("@pp", " @ "): test["samples_ts"] for test in tests}
    engine = f"ik_llama.cpp {tests[0]['build_number']} ({tests[0]['build_commit']})"
    return {"engine": engine, "tokens_per_s": rates}


def joined(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of one engine: rates of all rounds, and means of what snapstream says of the read rate."""
    found = dict(rounds[0])
    for name in ("tokens_per_s", "quarter"):
        if name in found:
            found[name] = {test: [rate for one in rounds for rate in one[name][test]] for test in found[name]}
    if "read_share" in found:
        found["read_gb_per_s"] = mean([one["read_gb_per_s"] for one in rounds])
        found["read_share"] = {test: mean([one["read_share"][test] for one in rounds]) for test in found["read_share"]}
    return found


def mean(rates: list[float]) -> float:
    return sum(rates) / len(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-bench", type=Path, metavar="PATH")
    parser.add_argument("--ik-llama-bench", type=Path, metavar="PATH", help="llama-bench of ik_llama.cpp")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES)[:4])
    kinds = ("f16", "q8_0", "q4_0", "q2_k", "iq3_xxs", "q3_k_m", "iq4_xs", "q4_k_m", "q5_k_m")
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=["q4_0"])
    parser.add_argument("--depths", nargs="+", type=int, default=[])
    parser.add_argument("--repetitions", type=int, default=2, help="of each test, one for each turn of an engine")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results")
    args = parser.parse_args()
    work = args.threads, 1, args.depths
    ceiling, models = ceilings(), []
    for shape in args.shapes:
        for kind in args.kinds:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / f"{shape}-{kind}.gguf"
                write_random_gguf(SHAPES[shape], file, kind)
                size = file.stat().st_size
                runs: dict[str, list[dict[str, Any]]] = {}
                for _ in range(args.repetitions):
                    runs.setdefault("snapstream", []).append(own_figures(file, *work))
                    runs.setdefault("llama_cpp", []).append(peer_figures(args.llama_bench, file, *work))
                    if args.ik_llama_bench:
                        runs.setdefault("ik_llama_cpp", []).append(fork_figures(args.ik_llama_bench, file, *work))
            engines = {name: joined(rounds) for name, rounds in runs.items()}
            models.append({"shape": shape, "kind": kind, "file_bytes": size, **engines})
            for test in tests_of(args.depths):
                rates = (f"{name} {mean(engine['tokens_per_s'][test]):,.1f}" for name, engine in engines.items())
                print(f"{shape} {kind} {test}: {', '.join(rates)} tokens/s", flush=True)
    are_mixtures = all("num_experts_per_tok" in SHAPES[shape] for shape in args.shapes)
    report(
        "peers_llama_bench" + ("_mixture" if are_mixtures else "") + ("_depths" if args.depths else ""),
        ceiling,
        {"threads": args.threads, "models": models},
        save=args.save,
    )


if __name__ == "__main__":
    main()
