import json
import platform
from importlib.metadata import version
from pathlib import Path

from flowrl.checkpoints.run_files import read_system
from flowrl.checkpoints.run_folder import RunFolder
from flowrl.checkpoints.system_info import describe_system


def test_a_run_folder_has_the_versions_and_the_machine(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    system = read_system(folder.path)
    assert system is not None
    assert system["versions"]["python"] == platform.python_version()
    assert system["versions"]["torch"] == version("torch")
    assert system["machine"]["cores"] >= 1 and system["machine"]["memory_gb"] > 0
    assert system["machine"]["processor"]


def test_a_resume_replaces_the_description(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    (folder.path / "system.json").write_text("{}")
    RunFolder.reopen(folder.path, {})
    system, now = read_system(folder.path), json.loads(json.dumps(describe_system()))
    assert system is not None
    assert system | {"started": None} == now | {"started": None}
