"""The README shows what is there."""

import re
from pathlib import Path

SUFFIXES = {".py", ".yaml", ".sh", ".md"}
UNLISTED = {"__init__.py", "README.md"}


def test_the_tree_names_every_file_and_nothing_else() -> None:
    text = Path("README.md").read_text()
    tree = text[text.index("## Tree") :]
    listed = set(re.findall(r"[\w.]+\.(?:py|yaml|sh|md)\b", tree))
    files = [path for top in ("flowrl", "recipes", "placement", "docs") for path in Path(top).rglob("*")]
    present = {path.name for path in files if path.suffix in SUFFIXES and path.name not in UNLISTED}
    assert listed - {"run_tests.sh"} == present


def test_every_link_of_the_documents_leads_somewhere() -> None:
    for document in (Path("README.md"), *Path("docs").glob("*.md"), *Path("recipes").rglob("README.md")):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document}: {target}"
