"""Every path in the tables of tests/selection.py exists."""

import pytest

from tests.selection import PARTS, PROCESS_PATHS, TESTS, part_of


@pytest.mark.parametrize("path", [*PROCESS_PATHS, *(path for paths in PARTS.values() for path in paths)])
def test_a_listed_file_or_folder_exists(path: str) -> None:
    assert (TESTS / path).is_dir() if path.endswith("/") or not path else (TESTS / path).is_file()


def test_a_test_belongs_to_the_first_part_that_contains_it() -> None:
    assert part_of(TESTS / "recipes/test_seeds.py") == "learning"
    assert part_of(TESTS / "recipes/test_resume.py") == "products"
