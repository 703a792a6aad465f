"""The programs of docs pages without tests of their own run and print the output in their comments."""

import re
import runpy
from pathlib import Path

import pytest
import yaml

from flowrl.cli import main
from flowrl.config import DataConfig, Placement, load
from flowrl.data.reading.generated_rows import generate_lines

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def blocks(page: str, language: str = "") -> list[str]:
    """Returns the code blocks of a page in a language."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in fenced if name == language]


@pytest.mark.parametrize("page", ["architecture.md", "cluster.md", "placement.md", "training.md"])
def test_the_program_of_a_page_prints_the_output_in_its_comment(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = (block for block in blocks(page, "python") if "print(" in block)
    path = tmp_path / "program.py"
    path.write_text(program)
    runpy.run_path(str(path), run_name="__main__")
    (expected,) = re.findall(r"^ *print\(.*\)  # (.*)", program, re.MULTILINE)
    assert capsys.readouterr().out.strip() == expected


PRINTING = [
    pytest.param(block, id=f"{page}-{index}")
    for page in ("batch.md", "rewards.md")
    for index, block in enumerate(block for block in blocks(page, "python") if "print(" in block)
]


@pytest.mark.parametrize("program", PRINTING)
def test_the_programs_print_the_output_in_their_comments(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    path = tmp_path / "program.py"
    path.write_text(program)
    runpy.run_path(str(path), run_name="__main__")
    expected = re.findall(r"^ *print\(.*\)  # (.*)", program, re.MULTILINE)
    assert expected and capsys.readouterr().out.splitlines() == expected


@pytest.mark.parametrize("program", [block for block in blocks("batch.md", "python") if "assert " in block])
def test_the_asserting_program_of_the_batch_page_runs(program: str) -> None:
    exec(program, {})


def test_the_documented_rows_of_reasoning_gym_can_be_generated() -> None:
    (example,) = [block for block in blocks("rewards.md", "yaml") if "reasoning_gym" in block]
    data = DataConfig.model_validate(yaml.safe_load(example))
    assert isinstance(data.test, tuple)
    rows = [next(iter(generate_lines(source))) for source in (data.training_files[0], data.test[0])]
    assert all(b"reasoning_gym" in row for row in rows) and rows[0] != rows[1]


def test_the_documented_placement_is_the_split_placement() -> None:
    (example,) = blocks("placement.md", "yaml")
    placement = Placement.model_validate(yaml.safe_load(example))
    assert placement == load(ROOT / "placement/split.yaml", [], Placement)


PLANS = [
    block.split("\n", 1)
    for page in (DOCS / "placement.md", DOCS / "step_time.md", *sorted((ROOT / "recipes").glob("*/README.md")))
    for block in re.findall(
        r"^```\n(\$ flowrl plan recipes/.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
]


@pytest.mark.parametrize(("command", "expected"), PLANS)
def test_the_documented_plans_are_the_output_of_the_command(
    command: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    main(command.split()[2:])
    assert " ".join(expected.split()) in " ".join("".join(capsys.readouterr()).split())


def test_twelve_documented_plans_are_compared() -> None:
    assert len(PLANS) == 12
