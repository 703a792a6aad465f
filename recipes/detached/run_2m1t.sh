#!/usr/bin/env bash
# Trains GRPO on the quickstart's task with schedule async: two rollout replicas and one trainer on separate devices.
# Arguments are settings, for example schedule.max_staleness=2 rollout.engine=vllm.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source recipes/quickstart/warm_start.sh
exec bash recipes/grpo/run_grpo.sh placement=placement/detached_2m1t.yaml placement.device=cpu \
    schedule.kind=async output="$(next_folder runs/detached_2m1t)" "$@"
