#!/usr/bin/env bash
# Runs the GPU benchmark and the tests marked gpu, most valuable first, within 8 minutes and without a network.
#
#   usage: tests/run_gpu.sh [WHEELS] [RESULTS]      (default: .whl gpu_results.txt)
#
# WHEELS is a folder of wheels that the host lacks; it may be absent. RESULTS receives the outcome of every part, and
# the reason for each part that is skipped. Exits with 1 if a part fails, and with 0 without a GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
wheels=${1:-.whl}
results=${2:-gpu_results.txt}
python=${PYTHON:-python3}
deadline=$((SECONDS + 470))
status=0
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
: >"$results"
report() { echo "$*" | tee -a "$results"; }

report "commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown), $(date -u +%Y-%m-%dT%H:%MZ)"
if compgen -G "$wheels/*.whl" >/dev/null; then
    if "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl >>"$results" 2>&1; then
        report "installed $(compgen -G "$wheels/*.whl" | wc -l) wheels from $wheels"
    else
        report "FAILED to install the wheels in $wheels"
    fi
else
    report "no wheels in $wheels: using the packages of $python"
fi
export PYTHONPATH=$site:$PWD HF_HUB_OFFLINE=1

has() { "$python" -c "import $1" 2>/dev/null; }
if ! has torch; then
    report "SKIPPED everything: torch is missing"
    exit 0
fi
if ! gpu=$("$python" -c "import torch; assert torch.cuda.is_available(); print(torch.cuda.get_device_name(), torch.__version__)" 2>/dev/null); then
    report "SKIPPED everything: no GPU"
    exit 0
fi
report "GPU: $gpu"

# run NAME PACKAGES COMMAND...: runs a command in the remaining time if all packages can be imported.
run() {
    local name=$1 packages=$2 package left code
    shift 2
    for package in $packages; do
        has "$package" || { report "SKIPPED $name: $package is missing"; return; }
    done
    left=$((deadline - SECONDS))
    [ "$left" -gt 5 ] || { report "SKIPPED $name: out of time"; return; }
    report "== $name"
    timeout "$left" "$@" 2>&1 | tail -n 60 | tee -a "$results"
    code=${PIPESTATUS[0]}
    # 5: pytest selected no test.
    if [ "$code" -ne 0 ] && [ "$code" -ne 5 ]; then report "FAILED $name (exit code $code)"; status=1; fi
}

core="transformers peft tensordict pydantic"
pytest=("$python" -m pytest -q -rs -m gpu -p no:cacheprovider -o addopts=--import-mode=importlib)
run "benchmark" "$core" "$python" -m tests.benchmarks.gpu
run "attention and packing" "$core pytest" "${pytest[@]}" tests/engines/models/test_attention.py tests/engines/train/test_packed_rows.py
run "precision and offload" "$core pytest" "${pytest[@]}" tests/engines/train/test_precision.py
run "generation" "$core pytest" "${pytest[@]}" tests/engines/rollout/hf
run "8-bit layers" "$core pytest" "${pytest[@]}" tests/engines/models/test_int8.py
run "vLLM" "$core pytest ray vllm" "${pytest[@]}" tests/engines/rollout/vllm
run "other tests" "$core pytest ray" "${pytest[@]}" tests --ignore=tests/engines
report "finished after ${SECONDS} s with status $status"
exit "$status"
