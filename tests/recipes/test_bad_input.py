"""What a user can get wrong: one sentence, exit code 2, and nothing half-written."""

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


@pytest.fixture
def refusal(
    ppo_config: Callable[..., PPOConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs PPO with overrides; returns the sentence on stderr, and checks that there is nothing else."""

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


def test_a_malformed_line_is_named_by_file_and_line(refusal: Callable[..., str], tmp_path: Path) -> None:
    path = data_file(tmp_path, prompt("1+1"), '{"messages": [')
    assert f"{path}, line 2" in refusal(f"data.train={path}")
    assert not (tmp_path / "run").exists()


def test_an_empty_dataset_is_refused(refusal: Callable[..., str], tmp_path: Path) -> None:
    assert "is empty" in refusal(f"data.train={data_file(tmp_path)}")
    assert not (tmp_path / "run").exists()


def test_a_missing_dataset_is_refused(refusal: Callable[..., str], tmp_path: Path) -> None:
    assert "nowhere.jsonl" in refusal(f"data.train={tmp_path}/nowhere.jsonl")


def test_a_prompt_longer_than_allowed_is_named_by_line(refusal: Callable[..., str], tmp_path: Path) -> None:
    path = data_file(tmp_path, prompt("1+1"), prompt("1+1+1+1+1+1+1+1+1+1"))
    sentence = refusal(f"data.train={path}", "data.max_prompt_tokens=8")
    assert f"{path}, line 2" in sentence and "max_prompt_tokens" in sentence


def test_prompt_and_response_longer_than_the_model_are_refused(refusal: Callable[..., str], tmp_path: Path) -> None:
    sentence = refusal("rollout.max_response_tokens=60")
    assert "76" in sentence and "64 tokens" in sentence
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["rollout.stop_ids=[[3],[3,99999]]"], "rollout.stop_ids.1 has the token 99999, which no response can say"),
        (["rollout.stop_ids=abc"], "rollout.stop_ids is 'abc', but must be a list, in square brackets"),
        (
            ["rollout.engine=vllm", "rollout.vllm.max_model_len=4"],
            "rollout.vllm.max_model_len is 4, less than data.max_prompt_tokens + rollout.max_response_tokens, 22",
        ),
        (["rollout.engine=vllm", "rollout.quantization=int4", "algorithm.correction.kind=truncated"], "on GPUs only"),
    ],
)
def test_rollouts_that_cannot_be_are_refused(
    settings: list[str], sentence: str, refusal: Callable[..., str], tmp_path: Path
) -> None:
    assert sentence in refusal("placement.device=cpu", *settings)
    assert not (tmp_path / "run").exists()


def test_an_unknown_key_names_the_nearest_one(refusal: Callable[..., str]) -> None:
    assert "minibatch_size" in refusal("minibatch_row=8")


def test_a_wrong_type_names_the_key(refusal: Callable[..., str]) -> None:
    assert "steps" in refusal("steps=many")


def test_the_folder_of_another_run_is_refused_and_left_as_it_was(refusal: Callable[..., str], tmp_path: Path) -> None:
    other = tmp_path / "run"
    other.mkdir()
    (other / "config.yaml").write_text("mine")
    assert "another run" in refusal()
    assert [path.name for path in other.iterdir()] == ["config.yaml"]


def test_a_folder_without_a_model_is_refused(refusal: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    sentence = refusal(f"actor.model.path={tmp_path}/empty")
    assert f"actor.model.path: no tokenizer can be loaded from {tmp_path}/empty" in sentence


def test_a_critic_without_a_model_is_refused_and_leaves_no_run(refusal: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    sentence = refusal(f"critic.model.path={tmp_path}/empty")
    assert "critic" in sentence and str(tmp_path / "empty") in sentence
    assert not (tmp_path / "run").exists()


def test_an_unknown_reward_function_is_refused_and_leaves_no_run(refusal: Callable[..., str], tmp_path: Path) -> None:
    assert "recipes.quickstart.task:scor" in refusal("reward.function=recipes.quickstart.task:scor")
    assert not (tmp_path / "run").exists()


def raises(prompt: str, response: str, answer: str, **columns: object) -> float:
    return 1 / 0


def without_answer(prompt: str, response: str) -> float:
    return 0.0


@pytest.mark.parametrize("function", ["raises", "without_answer"])
def test_a_reward_function_at_fault_is_named_with_its_line(
    function: str, refusal: Callable[..., str], tmp_path: Path
) -> None:
    sentence = refusal(f"reward.function={__name__}:{function}")
    told = {"raises": r"raised ZeroDivisionError: division by zero \(.*test_bad_input\.py, line \d+\) for prompt"}
    assert re.search(told.get(function, r"cannot be called by name .*write it as"), sentence)
    assert not (tmp_path / "run").exists()


def test_a_truncated_model_file_is_refused(refusal: Callable[..., str], task_folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(task_folder / "model", broken)
    (broken / "model.safetensors").write_bytes(b"0" * 100)
    assert str(broken) in refusal(f"critic.model.path={broken}")
    assert not (tmp_path / "run").exists()


def test_a_placement_that_does_not_fit_is_refused(refusal: Callable[..., str], tmp_path: Path) -> None:
    sentence = refusal("backend=ray", "placement=placement/split.yaml", "devices=[3]", "placement.device=cpu")
    assert "placement.pools.policy" in sentence
    assert not (tmp_path / "run").exists()


def test_a_single_strategy_on_two_ranks_is_refused(refusal: Callable[..., str]) -> None:
    sentence = refusal(
        "backend=ray", "placement.device=cpu", "placement.pools.main=[2]", "actor.engine.strategy=single"
    )
    assert "actor.engine.strategy" in sentence


def test_a_role_is_not_cut_as_its_engine_cannot(refusal: Callable[..., str]) -> None:
    two = ("backend=ray", "placement.device=cpu", "placement.pools.main=[2]")
    pipeline = refusal(*two, "placement.roles.actor={pool: main, pp: 2}")
    assert "placement.roles.actor has pp 2, but no engine runs a model's layers as a pipeline" in pipeline
    copies = refusal(*two, "placement.roles.actor={pool: main, tp: 2}", "actor.engine.strategy=ddp")
    assert "actor.engine.strategy is ddp, but placement.roles.actor has tp 2, which cuts the model" in copies


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("{rank: 4, targets: [query]}", "lora.targets names query, which is no inner linear layer of qwen2"),
        ("{rank: 4, dropout: 0.1}", "actor.lora: dropout is not supported, because the policy that is trained must be"),
        ("{alpha: 4}", "actor.lora.rank is missing"),
        ("{rank: 4, target: all}", "actor.lora.target; did you mean actor.lora.targets"),
    ],
)
def test_an_adapter_that_cannot_be_is_refused(
    refusal: Callable[..., str], tmp_path: Path, override: str, sentence: str
) -> None:
    assert sentence in refusal(f"actor.lora={override}")
    assert not (tmp_path / "run").exists()


def test_an_example_that_ends_with_the_question_is_refused(
    task_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = data_file(tmp_path, prompt("1+1"))
    file = tmp_path / "sft.yaml"
    file.write_text(
        f"output: {tmp_path}/run\nbackend: inline\nsteps: 1\nrows_per_step: 1\nmodel: {{path: {task_folder}/model}}\n"
        f"optimizer: {{lr: 1.0e-3}}\ndata: {{train: {path}, max_prompt_tokens: 16}}\n"
    )
    assert run_recipe(SFTConfig, train_sft, [str(file)]) == 2
    assert f"{path}, line 1" in capsys.readouterr().err
