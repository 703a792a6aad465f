"""Real trackers in their offline modes have the metrics, tables and results of a run."""

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from flowrl.config import ConfigError, ReportConfig
from flowrl.report.rollout_log import Kind, Row
from flowrl.report.trackers.open_trackers import check_trackers, open_trackers
from flowrl.report.trackers.tracker import OptionalTracker, TrackedRun, Tracker, table_rows, tracker_folder
from tests.errors import missing_facts

ROWS: list[Row] = [
    {"prompt": "1+1=", "response": "2", "answer": "2", "score": 1.0, "rewards": {"task": 1.0}},
    {
        "prompt": "1+2=",
        "response": "<b>4",
        "answer": "3",
        "score": 0.25,
        "rewards": {"task": None},
        "other_scores": {"size": 2.0},
    },
]


def track(trackers: Sequence[Tracker], steps: Sequence[int], summary: Mapping[str, Any] | None = None) -> None:
    for tracker in trackers:
        for step in steps:
            tracker.write_metrics(step, {"reward": step / 4, "kl": math.nan})
        tracker.write_rows("training", steps[-1], ROWS)
        if summary is not None:
            tracker.finish(summary)
        tracker.close()
        tracker.close()


def opened(folder: Path, tracker: Mapping[str, Any], last_step: int = -1) -> list[Tracker]:
    config = ReportConfig.model_validate({"tensorboard": False, "trackers": [tracker]})
    messages: list[str] = []
    trackers = open_trackers(config, TrackedRun(folder, {"steps": 3, "actor": {"lr": 0.1}}, last_step), messages.append)
    assert not messages
    return trackers


def test_a_table_has_the_scores_of_each_row() -> None:
    columns, data = table_rows(ROWS)
    first, second = (dict(zip(columns, row, strict=True)) for row in data)
    assert first["response"] == "2" and first["score"] == 1.0 and first["size"] is None and first["advantage"] is None
    assert second["task"] is None and second["size"] == 2.0


class Broken:
    """Fails in the second call."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.num_calls = 0

    def write_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.num_calls += 1
        if self.num_calls == 2:
            raise self.error

    def write_rows(self, kind: Kind, step: int, rows: Sequence[Row]) -> None:
        self.num_calls += 1

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.num_calls += 1

    def close(self) -> None:
        self.num_calls += 1


class Unprintable(Exception):
    def __str__(self) -> str:
        raise OSError


@pytest.mark.parametrize(
    ("error", "fact"), [(ConnectionError("the network is down"), "the network is down"), (Unprintable(), "Unprintable")]
)
def test_a_tracker_that_fails_is_reported_once_and_the_run_continues(error: Exception, fact: str) -> None:
    messages: list[str] = []
    broken = Broken(error)
    tracker = OptionalTracker("wandb", broken, messages.append)
    track([tracker], [1, 2, 3], {})
    assert broken.num_calls == 2
    assert len(messages) == 1 and "wandb" in messages[0] and fact in messages[0]


def test_an_interrupt_is_no_error_of_a_tracker() -> None:
    with pytest.raises(KeyboardInterrupt):
        track([OptionalTracker("wandb", Broken(KeyboardInterrupt()), print)], [1, 2])


def test_a_tracker_that_cannot_be_opened_is_reported_and_the_run_continues(tmp_path: Path) -> None:
    """A file has the name of the tracker's folder."""
    pytest.importorskip("wandb")
    (tmp_path / "wandb").write_text("")
    tracker = {"kind": "wandb", "mode": "offline"}
    config = ReportConfig.model_validate({"tensorboard": False, "trackers": [tracker]})
    messages: list[str] = []
    assert open_trackers(config, TrackedRun(tmp_path, {}), messages.append) == []
    assert len(messages) == 1 and "wandb" in messages[0]


# A user's tracker.


class Lines:
    """Writes one line per call."""

    def __init__(self, run: TrackedRun, name: str) -> None:
        self._path = run.folder / name

    @staticmethod
    def check(name: str) -> None:
        if "/" in name:
            raise ConfigError(f"{name} is no name of a file")
        if name == "interrupted":
            raise KeyboardInterrupt
        if not name:
            raise ZeroDivisionError

    def write_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._write(f"{step} {values['reward']}")

    def write_rows(self, kind: Kind, step: int, rows: Sequence[Row]) -> None:
        self._write(f"{kind} {step} {len(rows)}")

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._write(json.dumps(dict(summary)))

    def close(self) -> None: ...

    def _write(self, line: str) -> None:
        with self._path.open("a") as file:
            print(line, file=file)


def test_a_users_class_receives_the_run_and_its_options(tmp_path: Path) -> None:
    settings = {"kind": f"{__name__}:Lines", "options": {"name": "lines.txt"}}
    check_trackers(ReportConfig.model_validate({"trackers": [settings]}))
    track(opened(tmp_path, settings), [1, 2], {"groups": 3})
    assert (tmp_path / "lines.txt").read_text().splitlines() == ["1 0.25", "2 0.5", "training 2 2", '{"groups": 3}']


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"kind": f"{__name__}:Missing"}, ("report.trackers.0", "Missing")),
        ({"kind": f"{__name__}:Lines", "options": {"name": "a", "rate": 2}}, ("report.trackers.0", "rate")),
        ({"kind": f"{__name__}:ROWS"}, ("report.trackers.0", "class", "write_metrics")),
        ({"kind": f"{__name__}:TrackedRun"}, ("report.trackers.0", "write_metrics")),
        ({"kind": f"{__name__}:Lines", "options": {"name": "a/b"}}, ("a/b",)),
        ({"kind": f"{__name__}:Lines", "options": {"name": ""}}, ("report.trackers.0", "check", "ZeroDivisionError")),
    ],
)
def test_a_users_class_that_cannot_be_a_tracker_is_rejected(settings: Mapping[str, Any], facts: Sequence[str]) -> None:
    with pytest.raises(ConfigError) as error:
        check_trackers(ReportConfig.model_validate({"trackers": [settings]}))
    assert not missing_facts(str(error.value), *facts)


def test_an_interrupt_of_a_check_is_no_error_of_the_tracker() -> None:
    settings = {"kind": f"{__name__}:Lines", "options": {"name": "interrupted"}}
    with pytest.raises(KeyboardInterrupt):
        check_trackers(ReportConfig.model_validate({"trackers": [settings]}))


def test_a_new_run_removes_the_folder_of_an_attempt_without_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "lines").mkdir()
    assert tracker_folder(TrackedRun(tmp_path, {}, last_step=0), "lines").is_dir()
    assert not tracker_folder(TrackedRun(tmp_path, {}), "lines").exists()


# wandb.


def read_wandb(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the history and the summary of the newest offline run. Another process reads its binary file."""
    code = """
import json, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2 as pb

def records(data):  # the log format of LevelDB, after a header of 7 bytes
    position, parts = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        size, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # complete, or the last part
            yield parts
            parts = b""

name = lambda item: item.key or "/".join(item.nested_key)
history, summary = [], {}
for data in records(Path(sys.argv[1]).read_bytes()):
    record = pb.Record.FromString(data)
    if record.WhichOneof("record_type") == "history":
        history.append({name(item): json.loads(item.value_json) for item in record.history.item})
    if record.WhichOneof("record_type") == "summary":
        summary |= {name(item): json.loads(item.value_json) for item in record.summary.update}
print(json.dumps([history, summary]))
"""
    path = max(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    history, summary = json.loads(subprocess.check_output([sys.executable, "-c", code, path], text=True))
    return history, summary


def test_wandb_has_metrics_tables_and_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    folder = tmp_path / "run"
    folder.mkdir()
    settings = {"kind": "wandb", "mode": "offline", "project": "arithmetic"}
    track(opened(folder, settings), [0, 1, 2], {"accuracy_after": 0.5, "groups": {"trained": 3}})
    history, summary = read_wandb(folder)
    assert [(line["step"], line["reward"]) for line in history if "reward" in line] == [(0, 0), (1, 0.25), (2, 0.5)]
    assert all(math.isnan(float(line["kl"])) for line in history if "kl" in line)
    assert summary["accuracy_after"] == 0.5
    (table,) = folder.glob("wandb/offline-run-*/files/media/table/rollouts/*.table.json")
    columns, data = table_rows(ROWS)
    assert json.loads(table.read_text())["columns"] == columns
    assert json.loads(table.read_text())["data"] == data
    first_id = (folder / "wandb/run_id").read_text()
    track(opened(folder, settings, last_step=1), [2, 3])
    assert {path.name.rpartition("-")[2] for path in folder.glob("wandb/offline-run-*-*")} == {first_id}


def test_wandb_without_an_api_key_is_rejected_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    online = ReportConfig.model_validate({"trackers": ["wandb"]})
    with pytest.raises(ConfigError, match="mode: offline"):
        check_trackers(online)
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {'0' * 40}\n")
    (tmp_path / "netrc").chmod(0o600)
    check_trackers(online)
    (tmp_path / "netrc").unlink()
    check_trackers(ReportConfig.model_validate({"trackers": [{"kind": "wandb", "mode": "offline"}]}))


# trackio.


def test_trackio_has_metrics_tables_and_results(tmp_path: Path) -> None:
    """Trackio reads its folder when it is imported, so another process runs the program."""
    pytest.importorskip("trackio")
    code = f"""
import json, sys
from pathlib import Path
from tests.report.trackers.test_trackers import opened, track
folder = Path({str(tmp_path / "run")!r})
folder.mkdir()
settings = {{"kind": "trackio", "project": "arithmetic"}}
track(opened(folder, settings), [0, 1, 2], {{"accuracy_after": 0.5}})
track(opened(folder, settings, last_step=2), [3])
import trackio
(run,) = trackio.Api().runs("arithmetic")
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps(SQLiteStorage.get_logs("arithmetic", run.name)))
"""
    variables = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    variables["HOME"] = str(tmp_path)
    output = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True, cwd=Path.cwd()
    ).stdout
    records = json.loads(output.splitlines()[-1])
    assert [(line["step"], line["reward"]) for line in records if "reward" in line] == [
        (0, 0), (1, 0.25), (2, 0.5), (3, 0.75),
    ]  # fmt: skip
    tables = [line["rollouts/training"] for line in records if "rollouts/training" in line]
    assert [row["response"] for row in tables[0]["_value"]] == ["2", "<b>4"]
    assert any(line.get("summary/accuracy_after") == 0.5 for line in records)
    assert len(output.splitlines()) == 1


# Settings.


@pytest.mark.parametrize(
    ("trackers", "fact"),
    [(["wandb", {"kind": "wandb", "mode": "offline"}], "more than once"), (["mlflow"], "mlflow")],
)
def test_invalid_trackers_are_rejected(trackers: list[Any], fact: str) -> None:
    with pytest.raises(ValueError, match=fact):
        ReportConfig.model_validate({"trackers": trackers})


def test_a_missing_package_is_rejected_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.report.trackers.open_trackers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"flowrl\[trackio\]"):
        check_trackers(ReportConfig.model_validate({"trackers": ["trackio"]}))
