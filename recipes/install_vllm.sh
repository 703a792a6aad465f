#!/usr/bin/env bash
# Installs vLLM for `rollout.engine: vllm`. On a machine with an NVIDIA driver, it installs the release, otherwise a
# build for CPUs with AVX2 or AVX-512.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source recipes/install.sh
ensure_environment ""
ensure_vllm
