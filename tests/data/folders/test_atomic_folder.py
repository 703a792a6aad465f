from pathlib import Path

import pytest

from flowrl.config import UserError
from flowrl.data.folders.atomic_folder import write_atomically
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
