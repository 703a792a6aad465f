import json
import logging
import shutil
from pathlib import Path

import pytest
import yaml

from flowrl.checkpoints.run_folder import (
    RunFolder,
    RunFolderError,
    log_to_file,
    remove_temporary_files,
    replacing,
    write_json,
)
from tests.full_disk import file_size_limit


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError) as caught,
        file_size_limit(100_000),
        replacing(tmp_path / "summary.json") as temporary,
    ):
        temporary.write_text("x" * 200_000)
    assert caught.value.filename == str(tmp_path / "summary.json")
    assert not list(tmp_path.iterdir())


def test_a_new_folder_contains_the_resolved_config(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "runs" / "one", {"steps": 3, "data": {"train": "a.jsonl"}})
    assert yaml.safe_load(folder.config.read_text()) == {"steps": 3, "data": {"train": "a.jsonl"}}
    assert {file.name for file in folder.path.iterdir()} == {"config.yaml", "system.json"}


def test_an_empty_folder_is_accepted(tmp_path: Path) -> None:
    assert RunFolder.create(tmp_path, {}).config.exists()


def test_the_folder_of_another_run_is_rejected(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", {"seed": 1})
    with pytest.raises(RunFolderError, match=str(tmp_path / "run")):
        RunFolder.create(tmp_path / "run", {"seed": 2})
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()) == {"seed": 1}


def test_a_folder_with_other_files_is_rejected_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RunFolderError, match=r"thesis\.tex"):
        RunFolder.create(tmp_path, {})
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_place_of_the_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(RunFolderError, match=str(tmp_path / "run")):
        RunFolder.create(tmp_path / "run", {})


def test_a_folder_below_a_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="file/run"):
        RunFolder.create(tmp_path / "file" / "run", {})


def test_a_config_that_yaml_cannot_represent_creates_no_folder(tmp_path: Path) -> None:
    with pytest.raises(yaml.YAMLError):
        RunFolder.create(tmp_path / "run", {"model": object()})
    assert not (tmp_path / "run").exists()


def test_json_has_null_for_non_finite_numbers(tmp_path: Path) -> None:
    write_json(tmp_path / "summary.json", {"a": float("nan"), "b": [1.5, float("inf")], "c": ("x", 2)})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"a": None, "b": [1.5, None], "c": ["x", 2]}


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path: Path) -> None:
    write_json(tmp_path / "summary.json", {"seconds": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "summary.json", {"seconds": object()})
    with pytest.raises(OSError), replacing(tmp_path / "summary.json") as temporary:
        temporary.write_text("half")
        raise OSError
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]
    assert json.loads((tmp_path / "summary.json").read_text()) == {"seconds": 1}


def test_a_folder_is_replaced_atomically(tmp_path: Path) -> None:
    for name in ("old.txt", "new.txt"):
        with replacing(tmp_path / "model") as temporary:
            temporary.mkdir()
            (temporary / name).write_text("")
    assert [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*")] == ["model", "model/new.txt"]


def test_partial_folders_of_an_aborted_save_are_removed_and_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "model") as temporary:
        raise KeyboardInterrupt
    temporary.mkdir()
    (temporary / "weights").write_text("half")
    (tmp_path / ".model.0.tmp").write_text("another program's")
    remove_temporary_files(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".model.0.tmp"]


def test_a_log_file_also_has_the_records_from_before_its_folder_was_created(tmp_path: Path):
    logger = logging.getLogger("flowrl.test-log")
    with log_to_file("flowrl.test-log") as set_file:
        logger.info("early")
        logger.info("also early")
        assert not list(tmp_path.iterdir())
        set_file(tmp_path / "log")
        logger.info("late")
        assert len((tmp_path / "log").read_text().splitlines()) == 3
    logger.info("after the block")
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.split(maxsplit=2)[2] for line in lines] == ["early", "also early", "late"]
    assert not logger.handlers


@pytest.mark.parametrize("is_open", [True, False])
def test_a_log_that_cannot_be_written_is_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_open: bool
) -> None:
    folder, logger = tmp_path / "run", logging.getLogger("flowrl.test-log")
    folder.mkdir()
    with log_to_file("flowrl.test-log") as set_file:
        set_file(folder / "log")
        if is_open:
            logger.info("early")
        else:
            shutil.rmtree(folder)
        with file_size_limit(100_000):
            logger.info("x" * 200_000)
        logger.info("late")
    assert not capsys.readouterr().err


def test_a_log_without_records_creates_no_file(tmp_path: Path):
    with log_to_file("flowrl.test-log") as set_file:
        set_file(tmp_path / "log")
    assert not list(tmp_path.iterdir())
