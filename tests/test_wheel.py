"""The wheel has the packages and data files that flowrl needs outside of its repository, and no others."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from recipes.install_vllm import CPU_VERSION, VERSIONS

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
LOAD = """
import sys
from pathlib import Path
import flowrl
from flowrl.config.load import find_included_placements, load
from recipes.ppo.config import PPOConfig
site = Path(sys.argv[1])
assert Path(flowrl.__file__).is_relative_to(site)
config = load(site / "recipes/ppo/deepseek7b.yaml", ["placement=split", "placement.device=cpu"], PPOConfig)
assert set(config.placement.pools) == {"policy", "judges"}
print(*find_included_placements())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("flowrl", "recipes", "placement"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-c", BUILD, str(source)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next(source.glob("*.whl")))


@pytest.mark.slow
def test_the_wheel_has_two_packages_with_all_modules_and_data_files(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    modules = {
        path
        for folder in ("flowrl", "recipes")
        for path in (ROOT / folder).rglob("*.py*")
        if path.suffix in (".py", ".pyi")
    }
    assets = (*(ROOT / "flowrl/report/page/assets").iterdir(), *(ROOT / "flowrl").rglob("*.json"))
    data = (*(ROOT / "recipes").rglob("*.yaml"), *assets)
    expected = {path.relative_to(ROOT).as_posix() for path in (*modules, *data)}
    assert names == expected | {f"flowrl/placements/{path.name}" for path in (ROOT / "placement").glob("*.yaml")}


@pytest.mark.slow
def test_a_wheel_finds_the_included_placements_outside_of_the_repository(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    wheel.extractall(tmp_path / "site")
    command = [sys.executable, "-c", LOAD, str(tmp_path / "site")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {path.stem for path in (ROOT / "placement").glob("*.yaml")}


@pytest.mark.slow
def test_the_vllm_extras_accept_the_tested_version_and_none_without_weight_versions(wheel: zipfile.ZipFile) -> None:
    """Outputs of vLLM have the weight version of each token since 0.32."""
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    lines = wheel.read(name).decode().splitlines()
    requirements = [Requirement(line.split(": ", 1)[1]) for line in lines if line.startswith("Requires-Dist: vllm")]
    assert {str(requirement.marker) for requirement in requirements} == {
        'extra == "vllm"',
        'extra == "vllm-integers"',
    }
    assert {requirement.specifier for requirement in requirements} == {SpecifierSet(VERSIONS)}
    assert CPU_VERSION in SpecifierSet(VERSIONS)
    assert not any(requirement.specifier.contains("0.31.0") for requirement in requirements)
