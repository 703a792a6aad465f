#!/usr/bin/env bash
# Two-digit arithmetic from nothing: installs, makes data and a small model, warms it up, trains it with PPO.
#
#   bash recipes/quickstart/run_quickstart.sh [key=value ...]      settings of ppo.yaml
#   SEED=0 OUTPUT=runs/quickstart                                  from the environment
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source recipes/install.sh
ensure_environment ""

source recipes/quickstart/warm_start.sh

seed=${SEED:-0}
task=${OUTPUT:-runs/quickstart}/seed$seed
warm_start "$task" "$seed"

exec python -m recipes.ppo.train recipes/quickstart/ppo.yaml output="$(next_folder "$task/ppo")" seed="$seed" \
    actor.model.path="$task/sft/model" critic.model.path="$task/sft/model" reference.model.path="$task/sft/model" \
    data.train="$task/data/train.jsonl" data.test="$task/data/test.jsonl" "$@"
