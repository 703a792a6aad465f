#!/usr/bin/env bash
# Training of a reward model on UltraFeedback, on GPUs.
# Arguments: the name of a config of this folder, then settings: key=value.
set -euo pipefail
config=${1:?name a config of this folder, such as qwen0.5b}
source "$(dirname "${BASH_SOURCE[0]}")/../install.sh"
enter_repository data
exec python -m recipes.reward_model.train "recipes/reward_model/$config.yaml" "${@:2}"
