#!/usr/bin/env bash
# GRPO with schedule async on the quickstart's task: two replicas, one trainer. Arguments are settings: key=value.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart/warm_start.sh"
train_detached 2m1t 2m1t "$@"
