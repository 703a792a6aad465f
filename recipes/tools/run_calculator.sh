#!/usr/bin/env bash
# GRPO with a calculator tool on products of two-digit numbers, after a warm start. Arguments are settings: key=value.
# The environment variables SEED (default 0) and OUTPUT (default runs/tools) set the seed and the output folder.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart/warm_start.sh"
enter_repository
seed=${SEED:-0}
folder=${OUTPUT:-runs/tools}/seed$seed

python -m recipes.tools.prepare --output "$folder/data" --seed "$seed"
fine_tune recipes/tools/sft.yaml "$folder/sft" "$seed" \
    actor.model.path="$folder/data/model" data.train="$folder/data/sft.jsonl"
exec python -m recipes.grpo.train recipes/tools/calculator.yaml output="$(next_folder "$folder/grpo")" seed="$seed" \
    actor.model.path="$folder/sft/model" data.train="$folder/data/train.jsonl" data.test="$folder/data/test.jsonl" "$@"
