#!/usr/bin/env bash
# Everything that a GPU is asked, in three calls of about five minutes:
#
#     bash benchmarks/gpu_suite/calls.sh 1 FOLDER     # is it right; peers and the attention kernel
#     bash benchmarks/gpu_suite/calls.sh 2 FOLDER     # the other sections that no GPU has run
#     bash benchmarks/gpu_suite/calls.sh 3 FOLDER     # those that one has
#
# FOLDER gets logs, one JSON for all calls (gpu.json) and what Triton compiled, as parts of an archive. Unpack that
# into TRITON_CACHE_DIR before the next call on a new machine of the same kind. Jobs run in processes with time limits
# of their own, so one that hangs costs only itself. "list" instead of a number collects the tests and names the
# sections without running any.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
call=${1:?1, 2, 3 or list} out=${2:?a folder}
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
  # An interrupt, so that what failed before the end of the time is reported.
  timeout -s INT -k 10 "$seconds" "$python" -m pytest -q -rf --tb=short -p no:cacheprovider --timeout=150 \
    --timeout-method=thread "$@" > "$out/$name.log" 2>&1
  echo "$name: exit $?, $(tail -1 "$out/$name.log")"
}

suite() { # SECONDS SECTIONS...
  local seconds=$1
  shift
  if [ "$call" = list ]; then
    echo "sections: $*"
    return
  fi
  "$python" -m benchmarks.gpu_suite --out "$out/gpu.json" --budget-s "$seconds" --only "$@" 2>&1 | tee "$out/suite$call.log" | tail -60
}

if [ "$call" = 1 ] || [ "$call" = list ]; then
  if [ "$call" = 1 ]; then
    nvidia-smi
    "$python" -c 'import torch, triton, transformers as t; print(torch.__version__, triton.__version__, t.__version__)'
  fi
  # 682 tests took 127 s of an H100 and 16 cores.
  tests all 200 -n 14 --dist worksteal tests/gpu -k "not two_to_the_31 and not memory_is" --ignore tests/gpu/test_ranks.py
  suite 160 peers decode_kernel requests
fi
if [ "$call" = 2 ] || [ "$call" = list ]; then
  suite 430 streams drafts decode_8b_heads decode_8b_fp8 decode_8b_int4 decode_lite prefill_lite latent_kernel experts_kernel narrow_linear decode_8b_narrow peers_continuous
fi
if [ "$call" = 3 ] || [ "$call" = list ]; then
  tests memory 100 tests/gpu/test_graph.py -k memory_is
  tests ranks 100 tests/gpu/test_ranks.py
  suite 250 decode_8b decode_small prefixes spec_prefill prefill_8b largest_batch attention prefill_kernels
fi
if [ "$call" != list ]; then # cubins are what takes long; 15 MB per part
  (cd "$TRITON_CACHE_DIR" && find . -name '*.cubin' -o -name '*.json' -o -name '*.so' | tar czf - -T - | split -b 15000000 - "$out/triton.tgz.")
fi
