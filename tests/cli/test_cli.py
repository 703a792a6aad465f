"""`flowrl` prints the requested output, or a one-line error with exit code 2."""

import gc
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flowrl.checkpoints.run_folder import write_json
from flowrl.cli import exit_code, main, run_recipe
from flowrl.cli.imports import collection_paused
from flowrl.config import ConfigError, RolloutLogConfig, RunConfig, loading
from flowrl.report.chrome_trace import chrome_trace
from flowrl.report.rollout_log import RolloutLog
from flowrl.run.interrupt import Interrupted
from flowrl.run.loop import Run
from recipes.ppo.config import PPOConfig
from tests.errors import missing_facts
from tests.report.call_events import STEP
from tests.slow_cases import slow

ROOT = Path(__file__).parents[2]
DEEPSEEK = str(ROOT / "recipes/ppo/deepseek7b.yaml")
SLOW_LIBRARIES = ("matplotlib", "numpy", "pandas", "ray", "scipy", "sklearn", "torch", "transformers", "vllm")
"""Libraries that take up to seconds to import. Commands without a model do not use them."""
SPLIT = str(ROOT / "placement/split.yaml")


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Returns the one-line error that rejects `argv`."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err.strip()


def test_the_seven_billion_recipe_splits_eight_gpus_in_halves(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", DEEPSEEK, "--devices", "8"]) == 0
    rows = {row.split()[0]: row.split()[3:] for row in capsys.readouterr().out.splitlines()[2:7]}
    first, second = ["0", "1", "2", "3", *"...."], [*"....", "0", "1", "2", "3"]
    assert rows == {"actor": first, "rollout": first, "reference": first, "critic": second, "reward": second}


def test_the_seven_billion_recipe_is_rejected_with_three_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(capsys, "plan", DEEPSEEK, "--devices", "3").startswith(
        f"error: {DEEPSEEK}:11: placement.pools.policy "
    )


def test_a_template_of_a_recipe_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "grpo"]) == 0
    by_name = capsys.readouterr().out
    assert main(["config", "recipes.grpo.config:GRPOConfig"]) == 0
    assert capsys.readouterr().out == by_name and "recipe: recipes.grpo.config:GRPOConfig\n" in by_name


def test_an_unknown_recipe_is_a_one_line_error_with_the_available_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert not missing_facts(error_of(capsys, "config", "gpro"), "gpro", "grpo", "ppo", "sft")
    assert "nowhere" in error_of(capsys, "config", "nowhere:Config")
    assert "RunConfig" in error_of(capsys, "config", "recipes.quickstart.task:Problem")


def test_a_placement_file_is_planned_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", SPLIT, "device=cpu", "--devices", "2,2"]) == 0
    assert capsys.readouterr().out.lower().startswith("4 cpu devices")


def test_settings_may_follow_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", DEEPSEEK, "--devices", "4", f"placement={SPLIT}", "placement.device=cpu"]) == 0
    assert capsys.readouterr().out.lower().startswith("4 cpu devices")


def test_the_config_states_its_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", DEEPSEEK, "devices=[4, 4]"]) == 0
    assert capsys.readouterr().out.lower().startswith("8 cuda devices")


def test_a_plan_shows_the_number_of_updates_and_uneven_minibatches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", DEEPSEEK, "--devices", "8", "minibatch_size=300"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "updates" in line)
    assert not missing_facts(line, 400, 100, 3, 300, 124)


def test_an_unknown_key_is_a_one_line_error_with_a_near_match(capsys: pytest.CaptureFixture[str]) -> None:
    assert not missing_facts(
        error_of(capsys, "plan", DEEPSEEK, "actor.optimzer.lr=1"), "actor.optimzer", "actor.optimizer"
    )


@pytest.mark.parametrize("setting", ["actor.loss", "actor.kl_loss_kind", "reward.function"])
def test_a_plan_with_a_function_that_cannot_be_imported_is_rejected(
    capsys: pytest.CaptureFixture[str], setting: str
) -> None:
    message = error_of(capsys, "plan", DEEPSEEK, "--devices", "8", f"{setting}=nowhere:f")
    assert f": {setting}: " in message and not missing_facts(message, "nowhere")


def test_a_plan_without_known_models_and_own_functions_loads_no_slow_library_and_reads_no_docstring() -> None:
    arguments = ["plan", DEEPSEEK, "--devices", "8"]
    arguments += [f"{role}.model.path=unknown" for role in ("actor", "critic", "reference")]
    code = f"import linecache, sys\nfrom flowrl.cli import main\nmain({arguments})\n"
    code += f"print([m for m in {SLOW_LIBRARIES} if m in sys.modules], [f for f in linecache.cache if '/config/' in f])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] []"


@pytest.mark.parametrize("is_enabled", [True, False])
def test_pausing_the_garbage_collector_restores_its_state_also_after_an_error(is_enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        with pytest.raises(ImportError), collection_paused():
            is_paused = not gc.isenabled()
            raise ImportError
        assert (is_paused, gc.isenabled()) == (True, is_enabled)
    finally:
        (gc.enable if before else gc.disable)()


PLACEMENT = """device: cpu
pools:
  main: [1]
roles:
  actor: man
  rollout: main
  reference: main
  critic: main
  reward: main
"""


def test_an_error_in_a_placement_names_its_file_and_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, recipe = tmp_path / "place.yaml", tmp_path / "recipe.yaml"
    path.write_text(PLACEMENT)
    recipe.write_text(f"# first\nplacement: {path}\n" + (ROOT / "recipes/ppo/deepseek7b.yaml").read_text())
    recipe.write_text(re.sub(r"^placement:\n(  .*\n)+", "", recipe.read_text(), flags=re.MULTILINE))
    for arguments in ([str(path)], [DEEPSEEK, f"placement={path}"], [str(recipe)]):
        assert not missing_facts(error_of(capsys, "plan", *arguments), f"{path}:5", "placement.roles.actor", "man")
    override = "placement.roles.actor=man"
    assert error_of(capsys, "plan", SPLIT, "roles.actor=man", "device=cpu").startswith("error: roles.actor=man: ")
    assert error_of(capsys, "plan", DEEPSEEK, override, "--devices", "8").startswith(f"error: {override}: ")


def test_a_call_in_an_error_is_not_a_setting() -> None:
    recipe = str(ROOT / "recipes/ppo/deepseek7b.yaml")
    with pytest.raises(ConfigError) as caught, loading(recipe, [], PPOConfig):
        raise ConfigError("rollout.generate on device 0:0 needs 3 GB")
    assert str(caught.value).startswith("rollout.generate ")


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the working folder of the test, in which the files that the quickstart creates do not exist."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_error_of_a_path_names_its_file_and_line(capsys: pytest.CaptureFixture[str], empty_folder: Path) -> None:
    recipe = str(ROOT / "recipes/quickstart/ppo.yaml")
    model = [f"{role}.model.path={empty_folder}" for role in ("actor", "critic", "reference")]
    assert run_recipe(PPOConfig, print, [recipe, f"output={empty_folder}/out", *model]) == 2
    message = capsys.readouterr().err
    assert not missing_facts(message, "data.train", "runs/quickstart/seed0/data/train.jsonl")
    assert re.search(rf"{recipe}:\d+: data.train", message)


def test_a_plan_states_why_the_memory_is_unknown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    settings = ["actor.model.path=unknown/model", f"critic.model.path={tmp_path}", "reference.model.dtype=float64"]
    assert main(["plan", DEEPSEEK, "--devices", "8", *settings]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("memory unknown")]
    facts = [("actor.model.path", "unknown/model"), ("reference.model.dtype", "float64")]
    facts.append(("critic.model.path", "mamba"))
    assert len(lines) == 3
    for line, expected in zip(sorted(lines), sorted(facts), strict=True):
        assert not missing_facts(line, *expected)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_plan_rejects_sequences_that_the_model_does_not_support(
    capsys: pytest.CaptureFixture[str], empty_folder: Path, role: str
) -> None:
    (empty_folder / "config.json").write_text('{"model_type": "mamba", "max_position_embeddings": 1535}')
    recipe = [str(ROOT / "recipes/quickstart/ppo.yaml"), f"{role}.model.path={empty_folder}"]
    lengths = ["data.max_prompt_tokens=1024", "rollout.max_response_tokens=512"]
    message = error_of(capsys, "plan", *recipe, *lengths)
    assert message.startswith(f"error: {lengths[0]} and {lengths[1]}: ")
    assert not missing_facts(message, "data.max_prompt_tokens", "rollout.max_response_tokens", 1536, 1535, empty_folder)
    assert main(["plan", *recipe, *lengths, "data.max_prompt_tokens=1023"]) == 0


def test_no_devices_are_a_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for counts in ("0", "0,0"):
        with pytest.raises(SystemExit) as caught:
            main(["plan", DEEPSEEK, "--devices", counts])
        message = capsys.readouterr().err
        assert caught.value.code == 2 and "--devices" in message and "placement" not in message
    assert not missing_facts(error_of(capsys, "plan", DEEPSEEK, "devices=[0]"), "devices", "0")


@pytest.mark.parametrize("argv", [["plan"], ["doctor"]])
def test_a_missing_config_is_the_only_missing_argument(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    assert "KEY=VALUE" not in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(SystemExit):
        run_recipe(RunConfig, print, [])
    assert "KEY=VALUE" not in capsys.readouterr().err.splitlines()[-1]


def test_a_setting_in_place_of_the_config_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert not missing_facts(error_of(capsys, "plan", "steps=3"), "YAML", "steps")
    with pytest.raises(SystemExit):
        main(["plan", "--steps", "3"])
    assert "steps=3" in capsys.readouterr().err


def test_the_doctor_takes_its_config_only_as_the_first_argument(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "recipes/quickstart/sft.yaml")
    assert error_of(capsys, "doctor", config, "steps=3").startswith(f"error: {config}: ")
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--rollout", config])
    assert caught.value.code == 2


def test_a_file_without_a_recipe_is_a_one_line_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("steps: 3\n")
    assert "recipe" in error_of(capsys, "plan", str(path))


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run folder with a trace."""
    folder = tmp_path / "run"
    folder.mkdir()
    write_json(folder / "trace.json", chrome_trace(STEP), indent=None)
    return folder


@pytest.mark.parametrize("named", ["", "trace.json"])
def test_a_run_is_explained_by_its_folder_or_its_trace(
    capsys: pytest.CaptureFixture[str], run_folder: Path, named: str
) -> None:
    assert main(["trace", str(run_folder / named)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("5 calls in 0.00 ms\n")
    assert "66" in printed


def test_the_end_of_a_run_is_explained(capsys: pytest.CaptureFixture[str], run_folder: Path) -> None:
    assert main(["trace", str(run_folder), "--last", "50e-9"]) == 0
    assert capsys.readouterr().out.startswith("2 calls")


def test_a_folder_without_a_trace_is_a_one_line_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert error_of(capsys, "trace", str(tmp_path)).startswith(f"error: {tmp_path}/trace.json")


def test_a_trace_without_steps_is_a_one_line_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_json(tmp_path / "trace.json", chrome_trace([]), indent=None)
    assert str(tmp_path) in error_of(capsys, "trace", str(tmp_path))


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """A run folder with generated text."""
    log = RolloutLog(tmp_path / "rollouts", RolloutLogConfig())
    rows = [{"row": i, "prompt": "p", "response": f"r{i}", "score": s} for i, s in enumerate((0.5, 0.0, 1.0))]
    log.write("training", 20, rows)
    log.write("evaluation", 0, [{"row": 0, "prompt": "p", "response": "\ud800 é \x1b[0m", "score": 0.0}])
    return tmp_path


@pytest.mark.parametrize(
    ("options", "responses"),
    [
        ([], ["r0", "r1", "r2"]),
        (["--plain"], ["r0", "r1", "r2"]),
        (["--step", "20", "--worst", "2"], ["r1", "r0"]),
        (["--best", "1"], ["r2"]),
        (["--evaluation"], ["\\ud800 é \\x1b[0m"]),
    ],
)
def test_saved_responses_are_shown(
    capsys: pytest.CaptureFixture[str], text_folder: Path, options: list[str], responses: list[str]
) -> None:
    assert main(["show", str(text_folder), *options]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  response: ")]
    assert [line.removeprefix("  response: ") for line in shown] == responses


def test_responses_are_shown_on_an_ascii_terminal(text_folder: Path) -> None:
    command = [sys.executable, "-m", "flowrl.cli", "show", str(text_folder), "--evaluation"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert r"\ud800 \xe9 \x1b[0m" in done.stdout


def test_missing_responses_are_one_line_errors(capsys: pytest.CaptureFixture[str], text_folder: Path) -> None:
    assert not missing_facts(error_of(capsys, "show", str(text_folder), "--step", "3"), 3, 20)
    assert "rollouts" in error_of(capsys, "show", str(ROOT))
    assert not missing_facts(error_of(capsys, "show", str(text_folder / "none")), text_folder / "none")


def test_the_command_starts_without_loading_rich_or_matplotlib() -> None:
    code = "import sys, flowrl.cli; print([m for m in ('rich', 'matplotlib', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["paln"],
        ["plan"],
        ["plan", SPLIT, "--device", "3"],
        ["plan", SPLIT, "--devices", "x"],
        ["trace"],
        ["trace", "run", "--last", "0"],
        ["trace", "run", "--last", "soon"],
        ["trace", "run", "--last", "nan"],
        ["show"],
        ["show", "run", "--worst", "0"],
        ["show", "run", "--worst", "3", "--best", "3"],
        ["show", "run", "--step", "x"],
    ],
)
def test_a_wrong_command_line_ends_with_code_two(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2 and "flowrl" in capsys.readouterr().err


def test_user_errors_become_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The form of the line is the feature."""

    def program() -> None:
        raise ConfigError("a.yaml:1: steps is 0")

    assert exit_code(program) == 2
    assert capsys.readouterr().err == "error: a.yaml:1: steps is 0\n"


@pytest.mark.parametrize(
    ("ending", "code", "line"),
    [
        (Interrupted(signal.SIGTERM, "ended by SIGTERM after step 3"), 143, "ended by SIGTERM after step 3\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_an_interrupted_program_ends_with_its_signal_and_a_line(
    ending: KeyboardInterrupt, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def program() -> None:
        raise ending

    assert exit_code(program) == code
    assert capsys.readouterr().err == line


def test_a_defect_keeps_its_traceback() -> None:
    with pytest.raises(ValueError):
        exit_code(lambda: int("x"))


def test_a_full_disk_is_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: Path("/dev/full").write_text("x")) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1


PROGRAM = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_module(sys.argv[0], run_name="__main__")
except SystemExit as ended:
    print(ended.code, [name for name in ("torch", "ray", "transformers") if name in sys.modules])
"""
"""Runs a recipe as `python -m` does, and prints its exit code and the slow modules that are then loaded."""


@pytest.mark.parametrize(
    ("recipe", "config"),
    [
        ("ppo", "recipes/quickstart/ppo.yaml"),
        slow("grpo", "recipes/grpo/arithmetic.yaml"),
        slow("sft", "recipes/quickstart/sft.yaml"),
    ],
)
def test_a_wrong_config_is_reported_before_torch_is_imported(recipe: str, config: str, tmp_path: Path) -> None:
    for setting in ("stepss=3", f"data.train={tmp_path}/none.jsonl", "seed=0 --steps 3"):
        command = [sys.executable, "-c", PROGRAM, f"recipes.{recipe}.train", config, *setting.split()]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout == "2 []\n" and "error: " in done.stderr and "Traceback" not in done.stderr


def test_a_missing_model_is_reported_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    settings = [f"data.train={tmp_path}/rows.jsonl", f"data.test={tmp_path}/rows.jsonl", f"model.path={tmp_path}/none"]
    command = [sys.executable, "-c", PROGRAM, "recipes.sft.train", "recipes/quickstart/sft.yaml", *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "2 []\n" and not missing_facts(done.stderr, "model.path", f"{tmp_path}/none")


SINGLE_FILE = """
import sys

from flowrl.cli import run_recipe
from flowrl.config import RoleConfig, RunConfig


class Config(RunConfig):
    actor: RoleConfig = RoleConfig()
    scale: float = 1.0


def train(config: Config) -> None:
    print(config.recipe, config.scale)


if __name__ == "__main__":
    sys.exit(run_recipe(Config, train))
"""


def test_a_recipe_in_a_single_file_reads_its_own_config(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SINGLE_FILE)
    placement = "{device: cpu, pools: {main: [1]}, roles: {actor: main}}"
    (tmp_path / "my.yaml").write_text(f"recipe: mine:Config\noutput: out\nsteps: 3\nplacement: {placement}\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for program in (["-m", "mine"], ["mine.py"]):
        command = [sys.executable, *program, "my.yaml", "scale=2.5"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "mine:Config 2.5\n", "")


def test_an_output_folder_that_disappears_is_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: RunConfig) -> None:
        with Run(config):
            shutil.rmtree(config.output)
            (config.output / "metrics.jsonl").read_text()

    assert run_recipe(RunConfig, train, [inline_run(tmp_path)]) == 2
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 1 and not missing_facts(errors, tmp_path / "out")


def open_before_the_run(config: RunConfig) -> None:
    Path("/missing/rewards.json").read_text()


def open_during_the_run(config: RunConfig) -> None:
    with Run(config):
        shutil.rmtree(config.output)
        Path("/missing/rewards.json").read_text()


def open_in_a_folder_without_a_run(config: RunConfig) -> None:
    (config.output / "rewards.json").read_text()


@pytest.mark.parametrize("train", [open_before_the_run, open_during_the_run, open_in_a_folder_without_a_run])
def test_another_missing_file_is_reported_with_its_traceback(
    train: Callable[[RunConfig], None], tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match=r"rewards\.json"):
        run_recipe(RunConfig, train, [inline_run(tmp_path)])


def inline_run(folder: Path) -> str:
    """Returns the config file of a run without workers."""
    placement = "{device: cpu, pools: {main: [1]}, roles: {actor: main}}"
    (folder / "my.yaml").write_text(f"output: {folder}/out\nsteps: 3\nbackend: inline\nplacement: {placement}\n")
    return str(folder / "my.yaml")


@pytest.mark.parametrize("options", [["--steps", "3"], ["--steps=3"], ["seed=1", "--steps", "3", "threads=1"]])
def test_an_option_in_place_of_a_setting_is_explained(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", DEEPSEEK, *options])
    assert caught.value.code == 2 and "steps=3" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        run_recipe(RunConfig, print, [DEEPSEEK, *options])
    assert caught.value.code == 2 and "steps=3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        (["generate", "--temprature", "1"], ["--temprature", "--temperature", "flowrl generate --help"]),
        (["generate", "model", "--prompts=-", "--engine", "tgi"], ["--engine", "tgi", "vllm"]),
        (["generate", "model", "--prompts=-", "--samples", "-1"], ["--samples", "-1"]),
        (["generate", "model", "--prompts=-", "other"], ["other", "flowrl generate --help"]),
        (["eval", "model", "--k", "x"], ["--k", "k=x", "flowrl eval --help"]),
        (["eval", "model", "--temp", "0"], ["--temp", "--temperature", "flowrl eval --help"]),
        (["generate", "model", "--systm=be brief"], ["--systm", "--system"]),
        (["generate", "model", "--stop", "---"], ["--stop=---"]),
        (["generate", "model", "--stop", "--prompts"], ["--stop"]),
        (["eval", "model", "--sample=3"], ["--sample", "--samples"]),
        (["data", "checks"], ["checks", "check", "flowrl data --help"]),
        (["plans"], ["plans", "flowrl --help"]),
        (["--verison"], ["--verison", "flowrl --help"]),
        ([], ["COMMAND", "flowrl --help"]),
    ],
    ids=" ".join,
)
def test_an_invalid_command_line_is_one_sentence(
    argv: list[str], facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    printed = capsys.readouterr()
    assert caught.value.code == 2 and printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert [fact for fact in facts if fact not in printed.err] == []


def test_an_invalid_command_line_of_a_recipe_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_recipe(RunConfig, print, [DEEPSEEK, "--adress", "host:1"])
    message = capsys.readouterr().err
    assert caught.value.code == 2 and message.startswith("error: ") and message.count("\n") == 1
    assert not missing_facts(message, "--adress", "--address")


@pytest.mark.parametrize("command", [["replay", "run", "--step"], ["data", "show", "data.yaml", "--rows"]])
def test_an_option_that_needs_a_whole_number_says_so(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, "two"])
    message = capsys.readouterr().err
    assert caught.value.code == 2 and message.count("\n") == 1
    assert not missing_facts(message, command[-1], "two", "whole", "number")
