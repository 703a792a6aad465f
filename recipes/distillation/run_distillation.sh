#!/usr/bin/env bash
# Distillation of a teacher with more examples on the quickstart's task. Arguments are settings: key=value.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart/warm_start.sh"
distill runs/distillation "$@"
