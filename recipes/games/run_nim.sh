#!/usr/bin/env bash
# GRPO on Nim against a fixed opponent, after a warm start on random games. Arguments are settings: key=value.
# The environment variables SEED (default 0) and OUTPUT (default runs/games) set the seed and the output folder.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart/warm_start.sh"
enter_repository environments
seed=${SEED:-0}
folder=${OUTPUT:-runs/games}/seed$seed

python -m recipes.games.prepare --output "$folder/data" --seed "$seed"
fine_tune recipes/games/sft.yaml "$folder/sft" "$seed" \
    actor.model.path="$folder/data/model" data.train="$folder/data/sft.jsonl"
exec python -m recipes.grpo.train recipes/games/nim.yaml output="$(next_folder "$folder/grpo")" seed="$seed" \
    actor.model.path="$folder/sft/model" data.train="$folder/data/train.jsonl" data.test="$folder/data/test.jsonl" "$@"
