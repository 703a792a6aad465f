#!/usr/bin/env bash
# GRPO with dynamic sampling on tasks of reasoning-gym, after a warm start. Arguments are settings: key=value.
# The environment variables SEED (default 0) and OUTPUT (default runs/reasoning) set the seed and the output folder.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart/warm_start.sh"
enter_repository rewards
seed=${SEED:-0}
folder=${OUTPUT:-runs/reasoning}/seed$seed

python -m recipes.reasoning.prepare --output "$folder/model" --seed "$seed"
fine_tune recipes/reasoning/sft.yaml "$folder/sft" "$seed" \
    actor.model.path="$folder/model" data.train.0.seed=$((500 + seed))
exec python -m recipes.grpo.train recipes/reasoning/reasoning.yaml output="$(next_folder "$folder/grpo")" seed="$seed" \
    actor.model.path="$folder/sft/model" data.train.0.seed="$seed" "$@"
