#!/usr/bin/env bash
# PPO on the quickstart's task. Actor, rollout and reference share one CPU slot, and critic and reward share another, so
# that actor and critic are updated at the same time. Further arguments are settings: key=value, such as
# placement.device=cuda devices=[8].
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source recipes/quickstart/warm_start.sh
exec bash recipes/quickstart/run_quickstart.sh placement=placement/split.yaml placement.device=cpu devices=[2] \
    output="$(next_folder runs/ppo_split)" "$@"
