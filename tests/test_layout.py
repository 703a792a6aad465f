"""Conventions for files and folders: names, docstrings of packages, numbers of modules, length of lines, size."""

import ast
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.test_architecture import imports

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent for path in (ROOT / "flowrl").rglob("__init__.py"))
SHARED_NAMES = {"__init__.py", "__main__.py", "base.py", "engine.py", "transfer.py"}
"""Module names that several packages may have."""

PRAGMA = re.compile(r"\s*# (noqa|pyright|type):.*")
"""Comments for tools, which do not count, as in ruff's E501."""

MAX_MODULES = 13
MAX_LINE = 120
MAX_TERMS = 62
MAX_TRACKED_BYTES = 11 * 1024**2


def test_module_names_are_unique() -> None:
    names = Counter(path.name for path in (ROOT / "flowrl").rglob("*.py") if path.name not in SHARED_NAMES)
    assert sorted(name for name, count in names.items() if count > 1) == []


def test_the_docstring_of_a_package_names_exactly_its_imports() -> None:
    """The docstring ends with "May import ..." and names packages of flowrl, before "except" or "but" the allowed."""
    wrong = {package.relative_to(ROOT).as_posix(): find_wrong_imports(package) for package in PACKAGES}
    assert {package: names for package, names in wrong.items() if names} == {}


def find_wrong_imports(package: Path) -> list[str]:
    """Returns the imports that the docstring of a package excludes or omits, and those that it names without need."""
    purpose, statement = (ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or "").split("May import")
    assert purpose.strip(), package
    own = ".".join(package.relative_to(ROOT).parts)
    imported = {name for path in package.rglob("*.py") for _, name in imports(path) if is_within(name, "flowrl")}
    imported = {name for name in imported if not is_within(name, own)}
    allowed, *excluded = (re.findall(r"`(flowrl[.\w]*)`", part) for part in re.split(r"\bexcept\b|\bbut\b", statement))
    wrong = [name for names in excluded for name in names if any(is_within(one, name) for one in imported)]
    if "every package of flowrl" not in statement:
        wrong += [name for name in imported if not any(is_within(name, one) for one in allowed)]
        wrong += [one for one in allowed if not any(is_within(name, one) for name in imported)]
    return sorted(wrong)


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_packages_have_few_modules() -> None:
    large = [package for package in PACKAGES if len([*package.glob("[!_]*.py")]) > MAX_MODULES]
    assert [package.relative_to(ROOT).as_posix() for package in large] == []


def is_table_row(path: Path, line: str) -> bool:
    """Returns whether a line is a row of a Markdown table, which cannot be wrapped."""
    return path.suffix == ".md" and line.startswith("|")


def test_lines_are_short() -> None:
    folders = ("flowrl", "recipes", "tests", "docs", "placement", ".ci")
    paths = [*ROOT.glob("*"), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    long = [
        f"{path.relative_to(ROOT).as_posix()}:{number}"
        for path in paths
        if path.suffix in (".py", ".md", ".sh", ".yaml") or path == ROOT / ".ci/run"
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if len(PRAGMA.sub("", line)) > MAX_LINE and not is_table_row(path, line)
    ]
    assert long == []


def test_glossary_is_short() -> None:
    rows = [line for line in (ROOT / "docs/glossary.md").read_text().splitlines() if line.startswith("| ")]
    assert len([row for row in rows if not row.startswith("| term ")]) <= MAX_TERMS


def test_tracked_files_are_small() -> None:
    if not (ROOT / ".git").exists():  # a folder, or a file in a further worktree
        pytest.skip("not a git checkout")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    sizes = {name: (ROOT / name).lstat().st_size for name in names.split("\0") if name and (ROOT / name).exists()}
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:5]
    assert sizes and sum(sizes.values()) < MAX_TRACKED_BYTES, f"the largest files are {largest}"
