#!/usr/bin/env bash
# PPO on the quickstart's task, with all roles colocated in two processes. Further arguments are settings: key=value.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source recipes/quickstart/warm_start.sh
exec bash recipes/quickstart/run_quickstart.sh output="$(next_folder runs/ppo)" "$@"
