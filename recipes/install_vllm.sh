#!/usr/bin/env bash
# Installs vLLM for `rollout.engine: vllm`: the release on a machine with an NVIDIA driver, else a build for CPUs with AVX2
# or AVX-512.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source recipes/install.sh
ensure_environment ""
ensure_vllm
