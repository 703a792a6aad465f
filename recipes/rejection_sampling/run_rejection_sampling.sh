#!/usr/bin/env bash
# Rejection sampling on the quickstart's task. Arguments are settings: key=value. SEED=0 comes from the environment.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart/warm_start.sh"
train_on_prompts rejection_sampling runs/rejection_sampling "$@"
