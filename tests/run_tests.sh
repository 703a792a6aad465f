#!/usr/bin/env bash
# Installs the test dependencies and runs all tests not marked slow. --all includes slow ones, of which those of the
# HTML report need an installed Chromium. --all PART runs only one part of all tests: benchmarks runs every program of
# tests/benchmarks with its smallest case. Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source recipes/install.sh
ensure_environment dev
python -m recipes.install_vllm

selected="not slow"
arguments=()
while [[ $# -gt 0 ]]; do
    case "$1" in
    --all)
        selected=""
        if [[ ${2:-} == benchmarks ]]; then
            arguments+=(tests/benchmarks)
            shift
        fi
        ;;
    *) arguments+=("$1") ;;
    esac
    shift
done
browsers=(chromium chromium-browser google-chrome-stable google-chrome)
if [[ -z $selected && -z $(type -P "${browsers[@]}") ]]; then
    echo "no Chromium is installed (apt-get install chromium): the browser tests of the HTML report are skipped" >&2
fi
# Three workers on two cores, because tests wait for processes about half of the time. A file, with its module fixtures,
# stays on one worker. The order is that of tests/conftest.py, slowest files first. Groups of files that share a Ray are
# not possible: with pytest 9.2, xdist 3.8 ignores xdist_group marks
# (https://github.com/pytest-dev/pytest-xdist/issues/1386).
exec python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "$selected" ${arguments[@]+"${arguments[@]}"}
