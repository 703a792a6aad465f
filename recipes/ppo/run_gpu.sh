#!/usr/bin/env bash
# PPO of a language model on GSM8K, on GPUs with vLLM.
# Arguments: the name of a config of this folder, then settings: key=value.
set -euo pipefail
config=${1:?name a config of this folder, such as qwen1.5b}
source "$(dirname "${BASH_SOURCE[0]}")/../install.sh"
enter_repository data
python -m recipes.install_vllm
exec python -m recipes.ppo.train "recipes/ppo/$config.yaml" "${@:2}"
