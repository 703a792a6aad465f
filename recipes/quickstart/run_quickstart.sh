#!/usr/bin/env bash
# Installs missing packages, creates data and a small model, fine-tunes it, and trains it with PPO.
#
#   bash recipes/quickstart/run_quickstart.sh [key=value ...]      overrides settings of ppo.yaml
#   SEED=0 OUTPUT=runs/quickstart                                  environment variables
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
