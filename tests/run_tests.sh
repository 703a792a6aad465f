#!/usr/bin/env bash
# Installs the test dependencies and runs all tests not marked slow. --all includes slow ones, of which those of the
# HTML report need an installed Chromium. --all PART runs only the slow tests of one part: products, faults, learning,
# browser or benchmarks (PARTS in tests/selection.py). Other arguments go to pytest.
#
# Two commands run side by side: the tests with the Ray of their session (marked `processes`), whose output is shown at
# the end, and all others. If an argument is a path, one command runs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source recipes/install.sh

ensure_environment dev
python -m recipes.install_vllm
parts=$(python -c 'from tests.selection import PARTS; print(*PARTS)')

selected="not slow"
has_path=
arguments=()
while [[ $# -gt 0 ]]; do
    case "$1" in
    --all)
        selected=""
        if [[ -n ${2:-} && " $parts " == *" $2 "* ]]; then
            selected=$2
            shift
        fi
        ;;
    *)
        arguments+=("$1")
        [[ ! -e ${1%%::*} ]] || has_path=1
        ;;
    esac
    shift
done
browsers=(chromium chromium-browser google-chrome-stable google-chrome)
if [[ $selected != "not slow" && -z $(type -P "${browsers[@]}") ]]; then
    echo "no Chromium is installed (apt-get install chromium): the browser tests of the HTML report are skipped" >&2
fi

if [[ -n $has_path ]]; then
    exec python -m pytest -m "$selected" "${arguments[@]}"
fi
outputs=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -rf "$outputs"' EXIT
# run_marked MARKERS: runs the selected tests with these markers.
run_marked() {
    python -m pytest -m "${selected:+($selected) and }$1" ${arguments[@]+"${arguments[@]}"} 2>&1
}
run_marked processes >"$outputs/processes" &
with_processes=$!
statuses=(0 0)
run_marked "not processes" | tee "$outputs/others" || statuses[0]=$?
wait "$with_processes" || statuses[1]=$?
cat "$outputs/processes"
echo
echo "Both commands, exit codes ${statuses[*]}:"
grep -hE '^(FAILED|ERROR) ' "$outputs"/* || true
tail -qn 1 "$outputs/others" "$outputs/processes"
# pytest exits with 5 if it selects no test, which is an error only if neither command has one.
for status in "${statuses[@]}"; do
    [[ $status == 0 || $status == 5 ]] || exit "$status"
done
[[ "${statuses[*]}" != "5 5" ]] || exit 5
