#!/usr/bin/env bash
# Measures flowrl on a GPU, in three parts. `first` and `second` take at most four minutes each and need one GPU, no
# network, and a host with Python, torch, transformers, peft and pytest. `vllm` needs a host with vLLM and takes longer.
#
#   usage: tests/run_gpu.sh first|second|vllm RESULTS [WHEELS]      (default of WHEELS: .whl in the repository)
#   PYTHON=python3 DEVICE=cuda                                      environment variables; DEVICE=cpu rehearses a part
#
# RESULTS is a file. It receives every figure as soon as it is measured, the most valuable ones first, and at the end a
# summary with all figures, skips and failures. WHEELS is a folder of wheels that the host lacks; it may be absent.
# Exits with 1 if a measurement or a test fails, or if there is a GPU and nothing runs, for example because torch does
# not support its driver; with 0 if there is no GPU.
set -uo pipefail
usage="usage: tests/run_gpu.sh first|second|vllm RESULTS [WHEELS]"
part=${1:-} results=${2:-}
[[ $part =~ ^(first|second|vllm)$ && -n $results ]] || { echo "$usage" >&2; exit 2; }
results=$(realpath -m "$results") || exit 2
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
wheels=${3:-.whl}
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
seconds=225 # the summary and the interpreter of this script take the rest of the four minutes
[[ $part != vllm ]] || seconds=5400
status=0
num_run=0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
: >"$results" || exit 2
report() { echo "$*" | tee -a "$results"; }

# finish: prints the summary and exits.
finish() {
    local pattern
    for pattern in '\* |[0-9]+ (passed|failed|skipped|deselected|error)' SKIPPED '(FAILED|ERROR) '; do
        grep -E "^($pattern)" "$results" | cut -c 1-240
    done >"$work/summary"
    report "== summary of $part: $num_run programs in $SECONDS s, exit code $status"
    tee -a "$results" <"$work/summary"
    exit "$status"
}

report "part $part, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown), $(date -u +%Y-%m-%dT%H:%MZ)"
if compgen -G "$wheels/*.whl" >/dev/null; then
    install=("$python" -m pip install -q --no-index --no-deps --no-compile --target "$work/site")
    if timeout -k 5 60 "${install[@]}" "$wheels"/*.whl >>"$results" 2>&1; then
        report "installed $(compgen -G "$wheels/*.whl" | wc -l) wheels from $wheels"
    else
        report "FAILED to install the wheels in $wheels"
        status=1
    fi
else
    report "no wheels in $wheels: using the packages of $python"
fi
export PYTHONPATH=$work/site:$PWD PYTHONUNBUFFERED=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1

# find_missing PACKAGES...: prints the packages that the interpreter does not find, without importing them.
find_missing() {
    "$python" -c 'import sys
from importlib.util import find_spec
print(*(name for name in sys.argv[1:] if find_spec(name) is None))' "$@" 2>/dev/null || echo "$*"
}
# stop_without_gpu REASON: ends the part. That is a failure if the host has a GPU.
stop_without_gpu() {
    if nvidia-smi -L 2>/dev/null | grep -q '^GPU ' || [ -e /dev/nvidia0 ]; then
        report "FAILED everything, although there is a GPU: $1"
        status=1
    else
        report "SKIPPED everything: $1"
    fi
    finish
}
if [ -n "$(find_missing torch)" ]; then stop_without_gpu "torch is missing"; fi
if [ "$device" = cpu ]; then
    gpu="none, rehearsal on the CPU with tiny sizes"
elif ! gpu=$("$python" -c "import torch; print(torch.cuda.get_device_name(), torch.__version__)" 2>"$work/error"); then
    tee -a "$results" <"$work/error"
    stop_without_gpu "torch finds none: $(tail -n 1 "$work/error")"
fi
report "GPU: $gpu"

# run NAME END PACKAGES COMMAND...: runs a command. It is ended END seconds after the start of this script.
run() {
    local name=$1 limit missing code
    limit=$(($2 - SECONDS))
    # shellcheck disable=SC2086 # several packages
    missing=$(find_missing $3)
    shift 3
    [ -z "$missing" ] || { report "SKIPPED $name: missing: $missing"; return; }
    [ "$limit" -gt 5 ] || { report "SKIPPED $name: the time is over"; return; }
    report "== $name"
    timeout -k 5 "$limit" "$@" 2>&1 | tee -a "$results"
    code=${PIPESTATUS[0]}
    # 5: pytest selected no test.
    if [ "$code" -eq 5 ]; then report "SKIPPED $name: no test is marked gpu"; return; fi
    num_run=$((num_run + 1))
    case $code in
    0) return ;;
    124 | 137) report "FAILED $name: ended by the limit of $limit s" ;;
    *) report "FAILED $name: exit code $code" ;;
    esac
    status=1
}

packages="transformers tensordict pydantic"
# measure NAME END PACKAGES CELLS: measures cells, and skips those that may take longer than until END.
measure() {
    run "${@:1:3}" "$python" -m tests.benchmarks.gpu --device "$device" --folder "$work" \
        --end "$((EPOCHSECONDS - SECONDS + $2))" "$4"
}
# run_tests NAME END PACKAGES FILES...: runs the tests marked gpu of these files.
run_tests() {
    # Without pyproject.toml, whose options belong to plugins that the host may lack, but with its markers.
    local markers='import tomllib
with open("pyproject.toml", "rb") as file:
    print("\n".join(tomllib.load(file)["tool"]["pytest"]["ini_options"]["markers"]))'
    run "${@:1:3}" "$python" -m pytest -c /dev/null -o "markers=$("$python" -c "$markers")" --rootdir . -q -rfEs \
        -m gpu -p no:cacheprovider --import-mode importlib "${@:4}"
}
mapfile -t files < <(grep -rlF --include='test_*.py' 'pytest.mark.gpu' tests | sort)
mapfile -t vllm_files < <(printf '%s\n' "${files[@]}" | grep /vllm/)
mapfile -t other_files < <(printf '%s\n' "${files[@]}" | grep -v /vllm/)

case $part in
first)
    # Expected ends in seconds: 40, 120, 180.
    measure "memory of two processes" 80 "$packages" memory
    measure "speed of training steps" 150 "$packages" mfu
    measure "speed with compilation" "$seconds" "$packages" compile
    ;;
second)
    # Expected ends: 85, 140, 225. Of the engines, the last measurement is skipped on a slow host.
    measure "engines" 110 "$packages" engines
    run_tests "tests marked gpu" 165 "$packages pytest" "${other_files[@]}"
    measure "learning" "$seconds" "$packages rich" grpo
    ;;
vllm)
    measure "GRPO with vLLM" 3600 "$packages ray vllm" vllm
    run_tests "tests of vLLM marked gpu" "$seconds" "$packages pytest ray vllm" "${vllm_files[@]}"
    ;;
esac
if [ "$num_run" -eq 0 ]; then
    report "FAILED every program was skipped"
    status=1
fi
finish
