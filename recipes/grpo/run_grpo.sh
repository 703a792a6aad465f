#!/usr/bin/env bash
# GRPO on the quickstart's task. Further arguments are settings: key=value. SEED=0 comes from the environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source recipes/install.sh
ensure_environment ""
source recipes/quickstart/warm_start.sh

seed=${SEED:-0}
task=runs/quickstart/seed$seed
warm_start "$task" "$seed"
exec python -m recipes.grpo.train recipes/grpo/arithmetic.yaml output="$(next_folder runs/grpo)" seed="$seed" \
    actor.model.path="$task/sft/model" reference.model.path="$task/sft/model" \
    data.train="$task/data/train.jsonl" data.test="$task/data/test.jsonl" "$@"
