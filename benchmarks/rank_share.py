"""What one rank of sixteen does, measured alone on one device: steps of DeepSeek-R1, and layers of a long prompt.

Printed: *measured* milliseconds of the rank's share, and with the collectives that ``snapstream plan`` assumes the
*predicted* node, over one switch and over two nodes. ``gpu_suite/rank_share.py`` says how, and what this cannot show.

    python -m benchmarks.rank_share --save                      # R1 over 16: 54 GB of weights, rows of 32k slots
    python -m benchmarks.rank_share --slots 8192 --batch 256    # other rows
    python -m benchmarks.rank_share --layers 8                  # a device with less memory: some of the layers
    python -m benchmarks.rank_share --smoke                     # a tiny shape, on a CPU
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from benchmarks.gpu_suite.device import Device
from benchmarks.gpu_suite.rank_share import measured, share_of_r1, small_share
from benchmarks.gpu_suite.speed import ceilings
from benchmarks.gpu_suite.suite import Bench
from benchmarks.machine import report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--experts", choices=("tp", "ep"), default="tp")
    parser.add_argument("--layers", type=int, default=0, help="of the model, so many; 0: all")
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--slots", type=int, default=32_768)
    parser.add_argument("--prompt-len", type=int, default=131_072, help="0: no prompt")
    parser.add_argument("--chunk-len", type=int, default=512)
    parser.add_argument("--executor", choices=("graph", "eager"), default="graph")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, on a CPU where there is no GPU")
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.smoke:
        raise SystemExit("torch sees no GPU; --smoke runs a tiny shape without one")
    bench = Bench(Device("cuda" if torch.cuda.is_available() else "cpu"), args.smoke)
    if args.smoke:
        share = small_share()
    else:
        share = share_of_r1(
            args.ranks, args.layers, batches=tuple(args.batch), slots=args.slots, prompt_len=args.prompt_len,
            chunk_len=args.chunk_len, executor=args.executor,
        )  # fmt: skip
        share = replace(share, parallel=replace(share.parallel, experts=args.experts))
    figures = []
    with torch.inference_mode():
        list(ceilings(bench))
        for figure in measured(bench, share):
            figures.append(figure)
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in figure.items()}, flush=True)
    found = {"model": share.model.architecture, "is_smoke": args.smoke, **bench.device.describe(), "arms": figures}
    device = found["device"].lower().replace("nvidia", "").strip().replace(" ", "_") if bench.device.is_cuda else "cpu"
    report("rank_share", dict(bench.ceilings), found, save=args.save and not args.smoke, device=device)


if __name__ == "__main__":
    main()
