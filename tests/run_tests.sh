#!/usr/bin/env bash
# Installs the test dependencies and runs all tests not marked slow. --all includes slow ones; other arguments go to
# pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source recipes/install.sh
ensure_environment dev
ensure_vllm

selected="not slow"
arguments=()
for argument in "$@"; do
    if [[ $argument == --all ]]; then selected=""; else arguments+=("$argument"); fi
done
# Two workers, because tests mostly wait for processes. tests/conftest.py groups tests by file, slowest files first.
exec python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder -m "$selected" ${arguments[@]+"${arguments[@]}"}
