#!/usr/bin/env bash
# Trains a small model in all stages and compares them. Arguments are settings: key=value, or STAGE.key=value.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../install.sh"
run_module recipes.pipeline.run "$@"
