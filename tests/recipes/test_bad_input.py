"""User errors end with exit code 2 and one line that names the setting, and leave no run folder."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flowrl.cli import run_recipe
from flowrl.config import to_yaml
from recipes.ppo.config import PPOConfig
from recipes.ppo.train import train
from recipes.sft.config import SFTConfig
from recipes.sft.train import train as train_sft
from tests.errors import missing_facts

SCRIPTED = "tests.engines.rollout.scripted_engine"


@pytest.fixture
def rejection(
    ppo_config: Callable[..., PPOConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Returns a function that runs PPO with overrides, expects exit code 2, and returns the error line."""

    def run(*overrides: str) -> str:
        config = ppo_config(recipe="recipes.ppo.config:PPOConfig")
        file = tmp_path / "config.yaml"
        file.write_text(to_yaml(config))
        assert run_recipe(PPOConfig, train, [str(file), *overrides]) == 2
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
        return printed.err

    return run


def data_file(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return path


def prompt(content: str) -> str:
    return json.dumps({"messages": [{"from": "human", "content": content}], "answer": "2"})


def test_malformed_line_is_named_by_file_and_line(rejection: Callable[..., str], tmp_path: Path) -> None:
    path = data_file(tmp_path, prompt("1+1"), '{"messages": [')
    assert f"{path}, line 2" in rejection(f"data.train={path}")
    assert not (tmp_path / "run").exists()


def test_a_critic_with_too_few_embeddings_is_rejected_before_the_start(
    rejection: Callable[..., str], tmp_path: Path, task_folder: Path
) -> None:
    shutil.copytree(task_folder / "model", tmp_path / "small")
    path = tmp_path / "small" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 5}))
    assert not missing_facts(rejection(f"critic.model.path={tmp_path / 'small'}"), "critic.model.path", 5)
    assert not (tmp_path / "run").exists()


def test_a_reward_model_without_a_head_is_rejected_before_the_start(
    rejection: Callable[..., str], tmp_path: Path, task_folder: Path
) -> None:
    message = rejection(f"reward={{model: {{path: {task_folder / 'model'}}}}}")
    assert not missing_facts(message, "reward.model.path", task_folder / "model", "score.weight", "reward.head")
    assert "starting" not in message and not (tmp_path / "run").exists()


def test_empty_dataset_is_rejected(rejection: Callable[..., str], tmp_path: Path) -> None:
    path = data_file(tmp_path)
    assert str(path) in rejection(f"data.train={path}")
    assert not (tmp_path / "run").exists()


def test_missing_dataset_is_rejected(rejection: Callable[..., str], tmp_path: Path) -> None:
    assert "nowhere.jsonl" in rejection(f"data.train={tmp_path}/nowhere.jsonl")


def test_too_long_prompt_is_named_by_line(rejection: Callable[..., str], tmp_path: Path) -> None:
    path = data_file(tmp_path, prompt("1+1"), prompt("1+1+1+1+1+1+1+1+1+1"))
    error = rejection(f"data.train={path}", "data.max_prompt_tokens=8")
    assert f"{path}, line 2" in error and "max_prompt_tokens" in error


def test_rows_longer_than_the_model_are_rejected(rejection: Callable[..., str], tmp_path: Path) -> None:
    error = rejection("rollout.max_response_tokens=60")
    assert "76" in error and "64 tokens" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        (["rollout.stop_ids=[[3],[3,99999]]"], ("rollout.stop_ids.1", 99999)),
        (["rollout.stop_ids=abc"], ("rollout.stop_ids", "abc")),
        (["rollout.engine=vllm", "rollout.vllm.max_model_len=4"], ("rollout.vllm.max_model_len", 4, 22)),
        (
            ["rollout.engine=vllm", "rollout.quantization=int4", "algorithm.correction.kind=truncated"],
            ("rollout.quantization", "int4"),
        ),
        (["rollout.engine=vlm"], ("rollout.engine", "vlm", "vllm", "module", "Class")),
        (
            [f"rollout.engine={SCRIPTED}:IncompleteEngine"],
            (SCRIPTED, "IncompleteEngine", "start", "poll"),
        ),
        (
            [f"rollout.engine={SCRIPTED}:BatchEngine", "schedule.kind=async", "schedule.max_staleness=1"],
            ("schedule.kind", "async", SCRIPTED, "BatchEngine", "one_step_off"),
        ),
        ([f"rollout.engine={SCRIPTED}:DedicatedEngine"], (SCRIPTED, "DedicatedEngine", "backend", "inline")),
    ],
)
def test_unsupported_rollout_settings_are_rejected(
    settings: list[str], facts: tuple, rejection: Callable[..., str], tmp_path: Path
) -> None:
    assert not missing_facts(rejection("placement.device=cpu", *settings), *facts)
    assert not (tmp_path / "run").exists()


def test_unknown_setting_names_the_closest_one(rejection: Callable[..., str]) -> None:
    assert "minibatch_size" in rejection("minibatch_row=8")


def test_wrong_type_names_the_setting(rejection: Callable[..., str]) -> None:
    assert "steps" in rejection("steps=many")


def test_folder_of_another_run_is_rejected_and_unchanged(rejection: Callable[..., str], tmp_path: Path) -> None:
    other = tmp_path / "run"
    other.mkdir()
    (other / "config.yaml").write_text("mine")
    assert str(other) in rejection()
    assert [path.name for path in other.iterdir()] == ["config.yaml"]


def test_folder_without_model_is_rejected(rejection: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    error = rejection(f"actor.model.path={tmp_path}/empty")
    assert not missing_facts(error, "actor.model.path", f"{tmp_path}/empty")


def test_critic_without_model_is_rejected(rejection: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    error = rejection(f"critic.model.path={tmp_path}/empty")
    assert "critic" in error and str(tmp_path / "empty") in error
    assert not (tmp_path / "run").exists()


def test_unknown_reward_function_is_rejected(rejection: Callable[..., str], tmp_path: Path) -> None:
    assert "recipes.quickstart.task:scor" in rejection("reward.function=recipes.quickstart.task:scor")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("function", "facts"), [("raises", ("ZeroDivisionError",)), ("of_a_missing_column", ("difficulty", "answer"))]
)
def test_faulty_reward_function_is_named(
    function: str, facts: tuple, rejection: Callable[..., str], tmp_path: Path
) -> None:
    error = rejection(f"reward.function=tests.recipes.scored:{function}")
    assert not missing_facts(error, *facts)
    assert function != "raises" or re.search(r"scored\.py\D{1,8}\d+", error)
    assert not (tmp_path / "run").exists()


def test_truncated_model_file_is_rejected(rejection: Callable[..., str], task_folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(task_folder / "model", broken)
    (broken / "model.safetensors").write_bytes(b"0" * 100)
    assert str(broken) in rejection(f"critic.model.path={broken}")
    assert not (tmp_path / "run").exists()


def test_placement_that_does_not_fit_is_rejected(rejection: Callable[..., str], tmp_path: Path) -> None:
    error = rejection("backend=ray", "placement=placement/split.yaml", "devices=[3]", "placement.device=cpu")
    assert "placement.pools.policy" in error
    assert not (tmp_path / "run").exists()


def test_single_strategy_on_two_ranks_is_rejected(rejection: Callable[..., str]) -> None:
    error = rejection("backend=ray", "placement.device=cpu", "placement.pools.main=[2]", "actor.engine.strategy=single")
    assert "actor.engine.strategy" in error


def test_parallel_sizes_that_no_engine_supports_are_rejected(rejection: Callable[..., str]) -> None:
    two = ("backend=ray", "placement.device=cpu", "placement.pools.main=[2]")
    pipeline = rejection(*two[:2], "placement.pools.main=[3]", "placement.roles.actor={pool: main, pp: 3}")
    assert not missing_facts(pipeline, "placement.roles.actor.pp", 3, 2, "layers")
    copies = rejection(*two, "placement.roles.actor={pool: main, tp: 2}", "actor.engine.strategy=ddp")
    assert "placement.roles.actor" in copies and not missing_facts(copies, "actor.engine.strategy", "ddp", 2)


@pytest.mark.parametrize(
    ("override", "facts"),
    [
        ("{rank: 4, targets: [query]}", ("actor.lora.targets", "query", "qwen2")),
        ("{rank: 4, dropout: 0.1}", ("dropout",)),
        ("{alpha: 4}", ("actor.lora.rank",)),
        ("{rank: 4, target: all}", ("actor.lora.target", "actor.lora.targets")),
    ],
)
def test_unsupported_adapters_are_rejected(
    rejection: Callable[..., str], tmp_path: Path, override: str, facts: tuple
) -> None:
    assert not missing_facts(rejection(f"actor.lora={override}").replace("`", ""), *facts)
    assert not (tmp_path / "run").exists()


def test_sft_example_without_answer_is_rejected(
    task_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = data_file(tmp_path, prompt("1+1"))
    file = tmp_path / "sft.yaml"
    file.write_text(
        f"output: {tmp_path}/run\nbackend: inline\nsteps: 1\nbatch_size: 1\n"
        f"actor: {{model: {{path: {task_folder}/model}}, optimizer: {{lr: 1.0e-3}}}}\n"
        f"data: {{train: {path}, max_prompt_tokens: 16}}\n"
    )
    assert run_recipe(SFTConfig, train_sft, [str(file)]) == 2
    assert f"{path}, line 1" in capsys.readouterr().err
