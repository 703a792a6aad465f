#!/usr/bin/env bash
# GRPO with schedule async: a vLLM replica on two devices, two trainers. Arguments are settings: key=value.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart/warm_start.sh"
train_detached tp_maker tp_maker rollout.engine=vllm "$@"
