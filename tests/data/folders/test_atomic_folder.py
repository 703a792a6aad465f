from pathlib import Path

import pytest

from flowrl.config import UserError
from flowrl.data.folders.atomic_folder import rename_at_end, write_atomically
from tests.errors import missing_facts


def test_a_folder_gets_its_name_when_it_is_complete(tmp_path: Path) -> None:
    with write_atomically(tmp_path / "new") as partial:
        (partial / "file").write_text("x")
        assert not (tmp_path / "new").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert (tmp_path / "new/file").read_text() == "x"


def test_a_failed_write_leaves_no_files(tmp_path: Path) -> None:
    reason = r"No space left on device"
    with pytest.raises(UserError, match=reason) as caught, write_atomically(tmp_path / "new") as partial:
        (partial / "file").write_text("x")
        Path("/dev/full").write_text("x")
    assert not missing_facts(str(caught.value), tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_the_block_creates_gets_its_name_at_the_end(tmp_path: Path) -> None:
    with rename_at_end(tmp_path / "new") as partial:
        assert not partial.exists()
        partial.mkdir()
        assert not (tmp_path / "new").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_an_error_of_the_block_is_not_an_error_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), rename_at_end(tmp_path / "new") as partial:
        partial.mkdir()
        (tmp_path / "missing").read_text()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as caught, rename_at_end(tmp_path / "file" / "new"):
        pass
    assert not missing_facts(str(caught.value), tmp_path / "file" / "new")
