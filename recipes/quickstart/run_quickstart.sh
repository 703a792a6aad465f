#!/usr/bin/env bash
# Two-digit arithmetic from nothing: installs, makes data and a small model, warms it up, trains it with PPO.
#
#   bash recipes/quickstart/run_quickstart.sh [key=value ...]      settings of ppo.yaml
#   SEED=0 OUTPUT=runs/quickstart                                  from the environment
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source recipes/install.sh
ensure_environment ""

seed=${SEED:-0}
output=${OUTPUT:-runs/quickstart}/seed$seed
here=recipes/quickstart

python -m recipes.quickstart.prepare --output "$output/data" --seed "$seed"
# The warm start of a seed is the same every time: one that is there is used.
if [[ ! -f $output/sft/summary.json ]]; then
    python -m recipes.sft.train $here/sft.yaml output="$output/sft" seed="$seed" \
        model.path="$output/data/model" data.train="$output/data/sft.jsonl"
fi
exec python -m recipes.ppo.train $here/ppo.yaml output="$output/ppo" seed="$seed" \
    actor.model.path="$output/sft/model" critic.model.path="$output/sft/model" reference.model.path="$output/sft/model" \
    data.train="$output/data/train.jsonl" data.test="$output/data/test.jsonl" "$@"
