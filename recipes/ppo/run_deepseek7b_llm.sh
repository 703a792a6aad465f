#!/usr/bin/env bash
# PPO of deepseek-llm-7b-chat on one node with eight GPUs, split in halves. Further arguments are settings: key=value.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source recipes/install.sh
ensure_environment ""
exec python -m recipes.ppo.train recipes/ppo/deepseek7b.yaml "$@"
