#!/usr/bin/env bash
# GRPO with schedule async on the quickstart's task: two replicas, two trainers. Arguments are settings: key=value.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart/warm_start.sh"
train_detached 2m2t 2m2t "$@"
