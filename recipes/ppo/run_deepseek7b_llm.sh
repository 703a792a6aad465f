#!/usr/bin/env bash
# PPO of deepseek-llm-7b-chat with vLLM on one node with eight GPUs, split in halves. Arguments are settings: key=value.
# Prepares GSM8K from the Hub, or from the folder in the environment variable GSM8K, unless data/gsm8k/test exists.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../install.sh"
enter_repository data
python -m recipes.install_vllm
if [[ ! -d data/gsm8k/test ]]; then
    python -m recipes.data.prepare gsm8k tokenizer=deepseek-ai/deepseek-llm-7b-chat output=data/gsm8k max_tokens=512 \
        ${GSM8K:+source="$GSM8K"}
fi
exec python -m recipes.ppo.train recipes/ppo/deepseek7b.yaml "$@"
