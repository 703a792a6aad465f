#!/usr/bin/env bash
# Installs what the tests need, then runs all but those marked slow. --all runs those too; other arguments go to pytest.
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
# Two at a time: much of a test is waiting for processes to start. What one file shares, such as Ray, is started once.
exec python -m pytest -n 2 --dist loadfile -m "$selected" ${arguments[@]+"${arguments[@]}"}
