#!/usr/bin/env bash
# GRPO on the quickstart's task with two makers that generate all the time and one trainer, which never wait for each other.
# Further arguments are settings: key=value, such as schedule.max_staleness=2 rollout.engine=vllm.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source recipes/quickstart/warm_start.sh
exec bash recipes/grpo/run_grpo.sh placement=placement/detached_2m1t.yaml placement.device=cpu \
    schedule.kind=async output="$(next_folder runs/detached_2m1t)" "$@"
