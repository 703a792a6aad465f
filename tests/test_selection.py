"""The tables of tests/selection.py, and the files that each command imports."""

import pytest

from tests.selection import MIXED_PATHS, PARTS, PROCESS_PATHS, TESTS, is_ignored, part_of


@pytest.mark.parametrize("path", [*PROCESS_PATHS, *MIXED_PATHS, *(path for paths in PARTS.values() for path in paths)])
def test_a_listed_file_or_folder_exists(path: str) -> None:
    assert (TESTS / path).is_dir() if path.endswith("/") or not path else (TESTS / path).is_file()


def test_a_test_belongs_to_the_first_part_that_contains_it() -> None:
    assert part_of(TESTS / "recipes/test_seeds.py") == "learning"
    assert part_of(TESTS / "recipes/test_resume.py") == "products"


@pytest.mark.parametrize(
    ("path", "expression", "expected"),
    [
        ("recipes/", "(not slow) and not processes", True),
        ("recipes/test_sft.py", "not processes", True),
        ("recipes/test_sft.py", "(not slow) and processes", False),
        ("controller/test_group.py", "(not slow) and not processes", False),
        ("controller/test_group.py", "processes", False),
        ("data/test_chat.py", "(not slow) and processes", True),
        ("data/test_chat.py", "slow or processes", False),
        ("data/", "processes", False),  # its files are ignored
        ("data/test_chat.py", "not slow", False),
        ("recipes/test_sft.py", "not slow", False),
        ("recipes/test_sft.py", "", False),
    ],
)
def test_a_command_ignores_the_files_that_cannot_contain_its_tests(path: str, expression: str, expected: bool) -> None:
    assert is_ignored(TESTS / path, expression) == expected
