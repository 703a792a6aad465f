#!/usr/bin/env bash
# GRPO of a small mixture of experts over two ranks, after a warm start. Arguments are settings: key=value.
# The environment variables SEED (default 0) and OUTPUT (default runs/moe) set the seed and the output folder.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart/warm_start.sh"
enter_repository
seed=${SEED:-0}
folder=${OUTPUT:-runs/moe}/seed$seed

python -m recipes.quickstart.prepare --output "$folder/data" --seed "$seed"
python -m recipes.moe.prepare --output "$folder/model" --seed "$seed"
fine_tune recipes/quickstart/sft.yaml "$folder/sft" "$seed" steps=700 \
    actor.model.path="$folder/model" actor.router_loss_coef=0.01 data.train="$folder/data/sft.jsonl"
exec python -m recipes.grpo.train recipes/moe/arithmetic.yaml output="$(next_folder "$folder/grpo")" seed="$seed" \
    actor.model.path="$folder/sft/model" data.train="$folder/data/train.jsonl" data.test="$folder/data/test.jsonl" "$@"
