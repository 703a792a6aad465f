#!/usr/bin/env bash
# Installs what the tests need, then runs all but those marked slow. --all runs those too; other arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source recipes/install.sh
ensure_environment dev

selected="not slow"
arguments=()
for argument in "$@"; do
    if [[ $argument == --all ]]; then selected=""; else arguments+=("$argument"); fi
done
exec python -m pytest -m "$selected" ${arguments[@]+"${arguments[@]}"}
