#!/usr/bin/env bash
# Starts Ray on every host of HOSTFILE, runs a recipe on them from this machine, the first host, and ends what it started.
#
#   bash recipes/cluster/run_multinode.sh HOSTFILE COMMAND...    --address HOST:PORT is put at the end of COMMAND
#   FLOWRL_SSH="ssh -p 2222"                                     how a host is reached: this, the host, a command
set -euo pipefail
if [[ -f ${1:-} ]]; then
    set -- "$(cd "$(dirname "$1")" && pwd)/$(basename "$1")" "${@:2}"
fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source recipes/install.sh
ensure_environment ""
exec python -m recipes.cluster.multinode "$@"
