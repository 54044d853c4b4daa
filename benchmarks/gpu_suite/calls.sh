#!/usr/bin/env bash
# Everything that a GPU is asked first, in four calls of at most ten minutes:
#
#     bash benchmarks/gpu_suite/calls.sh 1 FOLDER     # does it run, and is it right
#     bash benchmarks/gpu_suite/calls.sh 2 FOLDER     # the figures that decide
#     bash benchmarks/gpu_suite/calls.sh 3 FOLDER     # the ladder of kernel looping
#     bash benchmarks/gpu_suite/calls.sh 4 FOLDER     # the rest
#
# FOLDER gets logs and one JSON per call. Jobs run in processes with time limits of their own, so one that hangs costs
# only itself. "list" instead of a number collects the tests and names the sections without running any.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
call=${1:?1, 2, 3, 4 or list} out=${2:?a folder}
mkdir -p "$out"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 NCCL_SOCKET_IFNAME=lo
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton} SNAPSTREAM_CACHE=${SNAPSTREAM_CACHE:-/tmp/snapstream}
python=${PYTHON:-python3}

tests() { # NAME SECONDS ARGUMENTS...: pytest with a log; 'thread' ends a process that hangs inside the driver
  local name=$1 seconds=$2
  shift 2
  if [ "$call" = list ]; then
    echo "$name: $("$python" -m pytest --collect-only -q "$@" 2> /dev/null | tail -1)"
    return
  fi
  timeout "$seconds" "$python" -m pytest -q -p no:cacheprovider --timeout=150 --timeout-method=thread "$@" > "$out/$name.log" 2>&1
  echo "$name: exit $?, $(tail -1 "$out/$name.log")"
}

suite() { # SECONDS SECTIONS...
  local seconds=$1
  shift
  if [ "$call" = list ]; then
    echo "sections: $*"
    return
  fi
  "$python" -m benchmarks.gpu_suite --out "$out/call$call.json" --budget-s "$seconds" --only "$@" 2>&1 | tee "$out/suite$call.log" | tail -60
}

if [ "$call" = 1 ] || [ "$call" = list ]; then
  if [ "$call" = 1 ]; then
    nvidia-smi
    g++ --version | head -1
    "$python" -c 'import torch, triton, transformers as t; print(torch.__version__, triton.__version__, t.__version__)'
  fi
  tests looped_first 120 tests/gpu/test_looped.py -x -k "bfloat16-1-qwen3-registers or bfloat16-1-qwen3-ring"
  tests kernels 420 -n 6 tests/gpu/test_triton_kernels.py tests/gpu/test_fp8.py -k "not two_to_the_31" &
  tests graph 420 -n 6 tests/gpu/test_graph.py tests/gpu/test_equalities.py -k "not memory_is" &
  tests looped 420 -n 4 tests/gpu/test_looped.py -k "bfloat16 and (registers or ring) and (-1- or -16-)" &
  wait
fi
if [ "$call" = 2 ] || [ "$call" = list ]; then
  suite 570 decode_8b prefill_8b decode_small decode_kernel largest_batch streams decode_8b_fp8
fi
if [ "$call" = 3 ] || [ "$call" = list ]; then
  suite 560 looping looping_8b
fi
if [ "$call" = 4 ] || [ "$call" = list ]; then
  tests memory 100 tests/gpu/test_graph.py -k memory_is
  tests ranks 120 tests/gpu/test_ranks.py
  suite 340 attention narrow_linear decode_8b_narrow requests prefixes latent_kernel experts_kernel
fi
