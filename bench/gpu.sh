#!/usr/bin/env bash
# make gpu: on a machine with a GPU and no network. Builds in place for that GPU, runs the suites of its two backends,
# then the benchmarks. What was found is in $RESULTS, also when a part fails or runs out of time: under 9 minutes in all.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
results=$(realpath -m "${RESULTS:?RESULTS=DIR is needed: where the results go}")
mkdir -p "$results"
failed=0

part() { # seconds, name, command: its output goes to the screen and to $results/<name>.log
    local limit=$1 name=$2 started=$SECONDS
    shift 2
    echo "== $name"
    if timeout "$limit" "$@" 2>&1 | tee "$results/$name.log" | tail -n 40; then
        echo "== $name: done in $((SECONDS - started)) s"
    else
        echo "== $name: FAILED (or over $limit s) after $((SECONDS - started)) s" | tee -a "$results/failed.log"
        failed=1
    fi
}

capability=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())') || exit 1
export FASTBERT_CUDA_ARCHS=$capability
part 150 build "$python" -m pip install -q --no-build-isolation --no-deps -e .
part 20 info "$python" -m fastbert.info
part 170 tests "$python" -m pytest -q --maxfail=20 -k "triton or cuda" tests
part 100 ops "$python" -m pytest -q bench --benchmark-json="$results/ops.json"
[ -s "$results/ops.json" ] && part 20 report "$python" bench/report.py "$results/ops.json"
for dtype in bf16 fp32; do
    part 60 "throughput-$dtype" "$python" bench/pretrain_throughput.py --batch-size 256 --dtype $dtype --steps 10 \
        --rows floor fastbert "hf sdpa" "hf sdpa + compile" --out "$results/throughput-bert-base-$dtype.json"
done
exit $failed
