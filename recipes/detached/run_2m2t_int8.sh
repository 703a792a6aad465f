#!/usr/bin/env bash
# GRPO with schedule async: two replicas with int8 weights, two trainers. Arguments are settings: key=value.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart/warm_start.sh"
train_detached 2m2t_int8 2m2t rollout.quantization=int8 "$@"
