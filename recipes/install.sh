# Functions that install flowrl. The scripts of the recipes source this file.

# run_module MODULE ARGUMENTS...: installs flowrl, and replaces the script by MODULE, in the root of the repository.
run_module() {
    enter_repository
    exec python -m "$@"
}

# enter_repository [EXTRAS]: changes to the root of the repository, and installs flowrl with EXTRAS.
enter_repository() {
    cd "$(dirname "${BASH_SOURCE[0]}")/.." || return
    ensure_environment "${1:-}"
}

# absolute_path PATH: prints the absolute path of an existing file, and any other text unchanged.
absolute_path() { if [[ -f $1 ]]; then realpath "$1"; else echo "$1"; fi; }

# ensure_environment EXTRAS: installs flowrl with EXTRAS ("", "data", "rewards", "environments", or "dev", which has all
# others) into the active environment. If none is active, it creates and activates .venv. It does nothing if
# pyproject.toml has not changed since the last installation. An installed copy of flowrl is not replaced.
ensure_environment() {
    local extras=$1 root env checksum stamp installed
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    env=${VIRTUAL_ENV:-}
    if [[ -z $env && -n ${CONDA_PREFIX:-} && ${CONDA_DEFAULT_ENV:-} != base ]]; then
        env=$CONDA_PREFIX
    fi
    if [[ -z $env ]]; then
        env=$root/.venv
        [[ -f $env/bin/activate ]] || _make_environment "$env" || return
        # shellcheck disable=SC1091 # created above
        source "$env/bin/activate"
    fi
    # The root is part of the stamp, because the installation is editable.
    checksum="$(cksum <"$root/pyproject.toml") $root"
    stamp=$env/.flowrl-installed
    for installed in "$extras" dev; do
        if [[ -f $stamp-$installed && $(<"$stamp-$installed") == "$checksum" ]]; then
            return
        fi
    done
    if _has_copy; then
        # pip takes the requirements of the extras from the installed copy, and leaves the copy as it is.
        [[ -z $extras ]] || python -m pip install --quiet --disable-pip-version-check "flowrl[$extras]"
        return
    fi
    _report "installing flowrl${extras:+[$extras]} into $env; this takes some minutes the first time"
    if [[ $(uname) == Linux && -z ${PIP_EXTRA_INDEX_URL:-}${PIP_FIND_LINKS:-} ]] &&
        ! command -v nvidia-smi >/dev/null; then
        _report "no NVIDIA driver found: README.md describes how to install the smaller CPU build of torch"
    fi
    rm -f "$stamp"-*
    python -m pip install --quiet --disable-pip-version-check --editable "$root${extras:+[$extras]}" || return
    echo "$checksum" >"$stamp-$extras"
    echo "$checksum" >"$stamp-"
}

# _has_copy: returns 0 if flowrl is installed in the active environment as a copy, which is not editable.
_has_copy() {
    # -P: a folder flowrl.egg-info in the working directory is not an installation.
    python -P - <<'PYTHON'
import json, sys
from importlib.metadata import PackageNotFoundError, distribution

try:
    origin = distribution("flowrl").read_text("direct_url.json")
except PackageNotFoundError:
    sys.exit(1)
sys.exit(json.loads(origin or "{}").get("dir_info", {}).get("editable", False))
PYTHON
}

_make_environment() {
    local python
    for python in python3 python python3.13 python3.12 python3.11; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            _report "creating $1 with $(command -v "$python")"
            # venv writes bin/activate last, so an interrupted creation starts over.
            "$python" -m venv --clear "$1"
            return
        fi
    done
    _report "no Python 3.11 or newer on PATH: install one, or activate an environment that has one"
    return 2
}

_report() { echo "flowrl: $*" >&2; }
