#!/usr/bin/env bash
# Starts a Ray node on every host of HOSTFILE, runs a recipe from this machine (the first host), and ends the nodes.
#
#   bash recipes/cluster/run_multinode.sh HOSTFILE COMMAND...    appends --address HOST:PORT to COMMAND
#   FLOWRL_SSH="ssh -p 2222"                                     ssh command; the host and a command are appended
set -euo pipefail
if [[ -f ${1:-} ]]; then
    set -- "$(cd "$(dirname "$1")" && pwd)/$(basename "$1")" "${@:2}"
fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source recipes/install.sh
ensure_environment ""
exec python -m recipes.cluster.multinode "$@"
