"""Types of worker groups: what a stub contains, and what pyright makes of it."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

import flowrl.workers
from flowrl.cli.main import main
from flowrl.controller.group_stubs import group_name, render_stubs, stub_path, worker_classes
from flowrl.workers import Actor
from tests.controller import stub_workers
from tests.controller.stub_workers import Judge

ROOT = Path(__file__).parents[2]


def stub_lines() -> list[str]:
    return [line.strip() for line in render_stubs([Judge], "a command").splitlines()]


@pytest.mark.parametrize(
    "signature",
    [
        "def rank_rows(self, batch: Batch, best: OrFuture[int] = 1) -> Batch:",
        "def mean(self, batch: Batch) -> dict[str, Metric]:",
        "def device_names(self) -> list[str]:",
        "def save(self, folder: OrFuture[Path]) -> None:",
        "def each(self, number: Sequence[OrFuture[int]]) -> list[int]:",
        'def first(self, *, mode: OrFuture[Literal["a", "b"]] = "a") -> Judge | None:',
    ],
)
def test_a_stub_has_the_types_of_the_driver(signature: str):
    assert signature in stub_lines()


@pytest.mark.parametrize(
    ("decorator", "method"),
    [("batched", "rank_rows"), ("nonblocking", "mean"), ("blocking", "device_names"), ("nonblocking", "save")],
)
def test_a_stub_says_what_a_call_returns(decorator: str, method: str):
    lines = stub_lines()
    index = next(i for i, line in enumerate(lines) if line.startswith(f"def {method}("))
    assert lines[index - 1] == f"@{decorator}"


def test_a_stub_imports_the_names_of_its_types_and_has_the_docstrings():
    lines = stub_lines()
    assert "from pathlib import Path" in lines and "from flowrl.data.metric import Metric" in lines
    assert '"""Sorts the rows by score. Returns the `best` first rows."""' in lines


def test_a_class_that_names_no_group_type_has_one_of_its_own_name():
    class Scribe(stub_workers.Base):
        pass

    assert (group_name(Actor), group_name(Scribe)) == ("ActorGroup", "ScribeGroup")


@pytest.mark.parametrize("module", [flowrl.workers, stub_workers])
def test_stubs_are_current(module: ModuleType):
    """If this fails, run `flowrl stubs` with the name of the module."""
    text = render_stubs(worker_classes(module), f"flowrl stubs {module.__name__}")
    assert stub_path(module).read_text() == text


def test_the_command_writes_a_stub_next_to_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "scribes.py").write_text((ROOT / "tests/controller/stub_workers.py").read_text())
    monkeypatch.chdir(tmp_path)
    assert main(["stubs", "scribes"]) == 0
    assert str(tmp_path / "scribes_groups.pyi") in capsys.readouterr().out
    assert "class JudgeGroup(TypedGroup):" in (tmp_path / "scribes_groups.pyi").read_text()


@pytest.mark.parametrize("module", ["no_such_module", "json"])
def test_a_module_without_worker_classes_is_rejected(module: str, capsys: pytest.CaptureFixture[str]):
    assert main(["stubs", module]) == 2
    assert module in capsys.readouterr().err


PROGRAM = """
from pathlib import Path
from flowrl import Batch, Future
from flowrl.data.metric import Metric
from flowrl.run.evaluation import Evaluation, evaluate
from flowrl.run.loop import Run, Summary
from flowrl.workers import Actor, Critic, Rollout
from recipes.ppo.config import PPOConfig
from tests.controller.stub_workers import Judge
import my_workers


def train(config: PPOConfig, run: Run, batch: Batch) -> None:
    actor = run.group("actor", Actor, config.actor)
    a: Batch = actor.logprobs(batch)
    b: Future[dict[str, Metric]] = actor.update(batch)
    c: Future[None] = actor.save.submit(Path("model"))
    d: dict[str, Metric] = actor.update(batch).get()
    actor.logprbs(batch)  # wrong: no such method
    actor.logprobs("batch")  # wrong: not a batch
    actor.save()  # wrong: no folder
    e: Batch = actor.update(batch)  # wrong: a future
    actor.update(batch, los=None)  # wrong: no such argument
    run.group("actor", Actor, config.actor, temperature=0.5)  # wrong: no such argument
    run.group("rollout", Rollout, config.actor, config.actor.model, seed=0)  # wrong: not a rollout's config
    run.group("critic", Critic, config.actor)  # wrong: not a critic's config
    rollout = run.group("rollout", Rollout, config.rollout, config.actor.model, seed=0)
    reward = run.rewards()
    f: Evaluation = evaluate(rollout, reward, batch)
    evaluate(reward, rollout, batch)  # wrong: in another order
    g: Batch = rollout.generate.submit(batch, temperature=0.0)
    rollout.generate(batch, greedy=True)  # wrong: no such argument
    h: Summary = run.finish()
    judge = run.group("judge", Judge)  # a worker of the user
    i: Future[list[str]] = judge.device_names.submit()
    j: list[str] = judge.device_names()
    k: list[str] = judge.device_names.submit()  # wrong: a future
    judge.rank_row(batch)  # wrong: no such method
    judge.rank_rows(batch, best="1")  # wrong: not a number
    documented = run.group("judge", my_workers.Judge)
    m: Batch = documented.judge(batch, limit=0.1)
    documented.judg(batch)  # wrong: no such method
"""


@pytest.mark.slow
def test_pyright_knows_the_methods_of_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The program also uses the worker class of docs/controller.md."""
    page = (ROOT / "docs/controller.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(# my_workers\.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "my_workers.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    assert main(["stubs", "my_workers"]) == 0
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)], "typeCheckingMode": "basic"}))
    result = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "-p", str(tmp_path), "--pythonpath", sys.executable],
        capture_output=True,
        text=True,
        check=False,
    )
    errors = json.loads(result.stdout)["generalDiagnostics"]
    wrong = [i for i, line in enumerate(textwrap.dedent(PROGRAM).splitlines()) if "# wrong" in line]
    assert sorted({error["range"]["start"]["line"] for error in errors}) == wrong, result.stdout
