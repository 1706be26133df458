#!/usr/bin/env bash
# All that needs a GPU, in under seven minutes: build, the tests that matter most there, the tables, the sanitizer.
# Nothing is downloaded. OUT: folder for logs, JSON and markdown; PYTHON: one with torch, triton and pytest; TOTAL: seconds.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-bench_output/gpu}
PYTHON=${PYTHON:-python3}
TOTAL=${TOTAL:-415}
mkdir -p "$OUT"
export PYTHONPATH=. CKPT_OPS_TEST_BACKENDS=${CKPT_OPS_TEST_BACKENDS:-cuda,triton} CKPT_OPS_TEST_EXAMPLES=5
FAILED=()

# step NAME SECONDS COMMAND...: its output goes to a log, its outcome and last lines to the terminal. The rest goes on.
# A step gets its seconds or what is left of all: those that matter least come last.
step() {
    local name=$1 limit=$2 start=$SECONDS left=$((TOTAL - SECONDS))
    shift 2
    ((left < limit)) && limit=$left
    if ((limit < 5)); then echo "== $name: no time left" && FAILED+=("$name") && return; fi
    if timeout "$limit" "$@" >"$OUT/$name.log" 2>&1; then local outcome=ok; else local outcome="FAILED ($?)"; FAILED+=("$name"); fi
    echo "== $name: $outcome, $((SECONDS - start)) s"
    tail -n "${LINES_OF_LOG:-4}" "$OUT/$name.log"
}

step machine 20 nvidia-smi
step build 150 "$PYTHON" setup.py -q build_ext --inplace
step info 40 "$PYTHON" -m ckpt_ops info
step gpu_tests 60 "$PYTHON" -m pytest -q tests/test_gpu.py
LINES_OF_LOG=60
step bench_rows 100 "$PYTHON" -m bench --gpu --dtype bfloat16 --providers ours:all,compile,fused --without attention --out "$OUT/rows"
step bench_attention 60 "$PYTHON" -m bench --gpu --dtype bfloat16 --providers ours:all,fused --case attention --out "$OUT/attention"
step bench_small 40 "$PYTHON" -m bench --small --dtype bfloat16 --providers ours:all,eager,fused --out "$OUT/small"
LINES_OF_LOG=4
step memcheck 40 compute-sanitizer --tool memcheck --error-exitcode 9 "$PYTHON" -m pytest -q tests/test_gpu.py -k sanitized
step racecheck 40 compute-sanitizer --tool racecheck --error-exitcode 9 "$PYTHON" -m pytest -q tests/test_gpu.py -k sanitized
step op_tests 120 "$PYTHON" -m pytest -q tests/test_mask.py tests/ops --ignore tests/ops/test_compile.py --maxfail 20

echo "done in $SECONDS s; failed: ${FAILED[*]:-none}"
((${#FAILED[@]} == 0))
