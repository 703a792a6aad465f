"""The README and the links of the documentation."""

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "recipes").rglob("README.md")]


def test_the_readme_shows_the_loop_of_the_ppo_recipe() -> None:
    (loop,) = re.findall(r"```python\n(.*?)\n```", README, re.DOTALL)
    program = (ROOT / "recipes/ppo/train.py").read_text(encoding="utf-8")
    start, end = program.index("        for batch in run.rollouts"), program.index("        run.save_model")
    assert loop == textwrap.dedent(program[start:end]).rstrip()


def test_the_readme_has_one_line_per_package() -> None:
    packages = {f"flowrl/{path.parent.name}" for path in (ROOT / "flowrl").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(flowrl/\w+)` \|", README, re.MULTILINE)) == packages


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 142


def test_the_scripts_of_the_readme_exist() -> None:
    scripts = re.findall(r"^bash ([\w/.]+\.sh)", README, re.MULTILINE)
    assert scripts and [script for script in scripts if not (ROOT / script).exists()] == []


def test_links_lead_to_existing_files() -> None:
    links = [
        (document, target)
        for document in DOCUMENTS
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", document.read_text(encoding="utf-8"))
    ]
    assert links and [f"{doc}: {target}" for doc, target in links if not (doc.parent / target).exists()] == []
