import base64
import hashlib
import json
import math
import re
import shutil
import zlib
from pathlib import Path

import pytest

from flowrl.checkpoints.run_folder import folder_lock
from flowrl.cli import main
from flowrl.report.page.write_report import compress, render_page, write_report
from tests.report.page.generated_run import HOSTILE, write_run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("made") / "grpo", num_steps=12, every=4)


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "runs" / "grpo")


def head_of(path: Path) -> dict:
    head = decode(path.read_text(encoding="utf-8"), "head")
    assert isinstance(head, dict)
    return head


def parts_of(path: Path) -> set[str]:
    return set(re.findall(r'id="data-([\w-]+)"', path.read_text(encoding="utf-8")))


def test_a_report_has_all_parts_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    path = run / "report.html"
    assert str(path) in capsys.readouterr().out
    assert parts_of(path) == {"head", "curves-0", "timeline-0", "rows-0", "tokens-0"}
    head = head_of(path)
    assert head["runs"][0]["missing"] == {}
    assert all(not entry["differs"] for entry in head["settings"])


def test_several_runs_have_distinct_names_and_differences(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_run(tmp_path / "others" / "grpo", num_steps=5, seed=1)
    monkeypatch.chdir(tmp_path)
    path = write_report([run, other])
    assert path == Path("report.html")
    head = head_of(path)
    assert [entry["name"] for entry in head["runs"]] == ["runs/grpo", "others/grpo"]
    different = {entry["key"]: entry["values"] for entry in head["settings"] if entry["differs"]}
    assert different["steps"] == ["12", "5"] and different["actor.optimizer.lr"] == ["0.0003", "0.0001"]


def test_a_running_run_has_the_parts_that_exist(run: Path) -> None:
    for name in ("summary.json", "trace.json", "system.json"):
        (run / name).unlink()
    with folder_lock(run):
        path = write_report([run])
    (entry,) = head_of(path)["runs"]
    assert entry["status"] == "running"
    assert entry["missing"].keys() == {"timeline", "system"}
    assert parts_of(path) == {"head", "curves-0", "rows-0", "tokens-0"}


def test_a_run_before_its_first_step_has_a_report(run: Path) -> None:
    for name in ("summary.json", "trace.json", "metrics.jsonl"):
        (run / name).unlink()
    shutil.rmtree(run / "rollouts")
    (entry,) = head_of(write_report([run]))["runs"]
    assert entry["missing"].keys() == {"curves", "timeline", "rows"}


def cut_metrics(run: Path) -> list[str]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "corrupt", *lines[2:]]))
    return [str(run)]


def remove_config(run: Path) -> list[str]:
    (run / "config.yaml").unlink()
    return [str(run)]


def write_file(name: str, text: str):
    def write(run: Path) -> list[str]:
        (run / name).write_text(text)
        return [str(run)]

    return write


@pytest.mark.parametrize(
    ("break_run", "message"),
    [
        (lambda run: [str(run / "nothing")], "does not exist"),
        (lambda run: [str(run / "config.yaml")], "is a file"),
        (remove_config, "config.yaml"),
        (write_file("config.yaml", ""), "is empty"),
        (write_file("summary.json", "{"), "summary.json"),
        (write_file("summary.json", "[]"), "summary.json"),
        (write_file("system.json", "{"), "system.json"),
        (write_file("health.jsonl", '{"check": "kl"}\n'), "health.jsonl"),
        (write_file("trace.json", "{}"), "trace.json"),
        (write_file("rollouts/training-000004.jsonl", "{\n"), "training-000004.jsonl"),
        (cut_metrics, "line 2"),
        (lambda run: [str(run), str(run)], "twice"),
        (lambda run: [str(run), "--output", str(run)], "is a folder"),
        (lambda run: [str(run), "--output", str(run / "metrics.jsonl")], ".html"),
        (lambda run: [str(run), "--output", str(run / "nothing" / "a.html")], "cannot write"),
        (lambda run: [str(run), "--output", str(run / "metrics.jsonl" / "a.html")], "cannot write"),
    ],
)
def test_wrong_input_is_one_sentence_and_writes_nothing(
    run: Path, break_run, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = break_run(run)
    before = {path: path.stat().st_mtime_ns for path in run.parent.rglob("*")}
    assert main(["report", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and len(error.splitlines()) == 1
    assert {path: path.stat().st_mtime_ns for path in run.parent.rglob("*")} == before


def test_a_report_is_replaced(run: Path) -> None:
    write_report([run])
    lines = (run / "metrics.jsonl").read_text().splitlines()
    record = json.loads(lines[-1]) | {"step": 13}
    (run / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(record)]) + "\n")
    assert head_of(write_report([run]))["runs"][0]["steps"] == 13


def decode(page: str, name: str) -> object:
    (text,) = re.findall(rf'id="data-{name}">([^<]*)</script>', page)
    return json.loads(zlib.decompress(base64.b64decode(text)))


def test_parts_are_in_the_page_and_no_text_of_them_is_markup() -> None:
    page = render_page({"head": {"text": HOSTILE}, "rows-0": [1]}, f"run {HOSTILE}")
    assert decode(page, "head") == {"text": HOSTILE}
    assert decode(page, "rows-0") == [1]
    assert "hacked=1</script>" not in page and "<img" not in page
    assert page.count("<script") == page.count("</script>") == 3


def test_the_policy_allows_only_the_script_and_the_style_of_the_page() -> None:
    page = render_page({"head": {}}, "run")
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy


def test_the_page_names_no_other_file() -> None:
    page = render_page({"head": {}}, "run")
    assert re.findall(r"(?:src|href)=\"(?!#)[^\"]*\"|@import|https?://(?!www\.w3\.org/2000/svg)", page) == []


def test_values_that_are_not_finite_are_null() -> None:
    text = zlib.decompress(base64.b64decode(compress({"a": [math.nan, math.inf, 1.5]})))
    assert json.loads(text) == {"a": [None, None, 1.5]}
