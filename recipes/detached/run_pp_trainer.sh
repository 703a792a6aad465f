#!/usr/bin/env bash
# GRPO with schedule async: two replicas, one trainer with two pipeline stages. Arguments are settings: key=value.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart/warm_start.sh"
train_detached pp_trainer pp_trainer actor.engine.max_tokens_per_microbatch=256 "$@"
