#!/usr/bin/env bash
# DPO of a Qwen model on UltraFeedback, on GPUs.
# Arguments: the name of a config of this folder, then settings: key=value.
set -euo pipefail
config=${1:?name a config of this folder, such as qwen1.5b}
source "$(dirname "${BASH_SOURCE[0]}")/../install.sh"
enter_repository data
exec python -m recipes.dpo.train "recipes/dpo/$config.yaml" "${@:2}"
