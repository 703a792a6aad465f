"""A resumed run rejects changed data, frozen models, tokenizers, chat templates and functions of the user."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from flowrl.checkpoints.inputs import check_same_inputs, input_checksums
from flowrl.checkpoints.run_folder import RunFolderError
from flowrl.config.data.data_settings import EvaluationSet
from flowrl.data.checksums import FileChecksum
from recipes.grpo.config import GRPOConfig
from recipes.sft.config import SFTConfig
from tests.configs import grpo_settings
from tests.errors import rejects

SFT_INPUTS = {
    "data.train",
    "actor.model.path",
    "actor.model.path (tokenizer)",
    "actor.model.path (chat template)",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a model with two weight files and a tokenizer without a separate template."""
    folder = tmp_path / "m"
    folder.mkdir()
    for name in ("a.safetensors", "b.safetensors", "tokenizer.json", "tokenizer_config.json", "config.json"):
        (folder / name).write_bytes(b"contents")
    return folder


@pytest.fixture
def sft(model: Path, tmp_path: Path) -> SFTConfig:
    """The config of a run that trains an adapter."""
    (tmp_path / "t.jsonl").write_text("rows")
    settings: dict[str, Any] = {
        "output": tmp_path / "run",
        "steps": 10,
        "actor": {"model": {"path": model}, "optimizer": {"lr": 1e-3}, "lora": {"rank": 2}},
        "data": {"train": tmp_path / "t.jsonl", "max_prompt_tokens": 8},
        "batch_size": 4,
    }
    return SFTConfig.model_validate(settings)


@pytest.fixture
def grpo(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GRPOConfig:
    """The config of a run whose reward is defined in one module and exported by another."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_scores.py").write_text("def score(response, **row):\n    return 1.0\n")
    (tmp_path / "own_rewards.py").write_text("from own_scores import score\n")
    (tmp_path / "own_tests.py").write_text("def exact(response, **row):\n    return 1.0\n")
    importlib.invalidate_caches()
    for name in ("own_scores", "own_rewards", "own_tests"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    reward = {"function": "own_rewards:score", "evaluation": "own_tests:exact"}
    settings = grpo_settings(model=model, reward=reward)
    settings["actor"]["kl_loss_coef"] = 0.1  # uses the reference
    return GRPOConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("changed", "contents", "facts"),
    [
        ("t.jsonl", "swor", ["data.train"]),
        ("t.jsonl", "row", ["data.train", 3, 4]),
        ("m/b.safetensors", "Contents", ["actor.model.path"]),
        ("m/tokenizer.json", "Contents", ["actor.model.path", "tokenizer"]),
        ("m/tokenizer_config.json", "Contents", ["actor.model.path", "tokenizer"]),
        ("m/chat_template.jinja", "a new template", ["actor.model.path", "chat", "template", 0, 14]),
    ],
)
def test_changed_files_are_rejected(
    sft: SFTConfig, tmp_path: Path, changed: str, contents: str, facts: list[object]
) -> None:
    before = input_checksums(sft)
    assert before.keys() == SFT_INPUTS
    check_same_inputs(before, sft)
    (tmp_path / changed).write_text(contents)
    with rejects(*facts, error=RunFolderError):
        check_same_inputs(before, sft)


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ("own_rewards.py", "reward.function"),
        ("own_scores.py", "reward.function"),
        ("own_tests.py", "reward.evaluation"),
        ("m/tokenizer.json", "actor.model.path"),
        ("m/a.safetensors", "reference.model.path"),
    ],
)
def test_changed_reward_functions_and_models_are_rejected(
    grpo: GRPOConfig, tmp_path: Path, changed: str, key: str
) -> None:
    before = input_checksums(grpo)
    check_same_inputs(before, grpo)
    (tmp_path / changed).write_text((tmp_path / changed).read_text() + "\n# changed\n")
    with rejects(key, error=RunFolderError):
        check_same_inputs(before, grpo)


USER_CODE: dict[str, dict[str, Any]] = {
    "actor.loss.kind": {"actor": {"loss": {"kind": "own_code:used"}}},
    "actor.kl_loss_kind": {"actor": {"kl_loss_kind": "own_code:used"}},
    "algorithm.estimator": {"algorithm": {"estimator": "own_code:used"}},
    "algorithm.shaping.0.kind": {"algorithm": {"estimator": "grpo", "shaping": [{"kind": "own_code:used"}]}},
    "algorithm.correction.kind": {"algorithm": {"estimator": "grpo", "correction": {"kind": "own_code:used"}}},
    "environment.name": {"reward": None, "environment": {"name": "own_code:Used"}},
    "environment.options.tools.0": {
        "reward": None,
        "environment": {
            "name": "flowrl.environments.tool_environment:ToolEnvironment",
            "options": {"tools": ["own_code:used"]},
        },
    },
    "data.tests.hard.evaluation.extract_answer": {
        "data": {"tests": {"hard": {"files": "t.jsonl", "evaluation": {"extract_answer": "own_code:used"}}}}
    },
}
"""Key of a user's function or class -> settings that name it."""


@pytest.mark.parametrize("key", USER_CODE)
def test_changed_functions_and_classes_of_the_user_are_rejected(
    key: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    code = tmp_path / "own_code.py"
    code.write_text("def used():\n    return 1\n\n\nclass Used:\n    pass\n")
    importlib.invalidate_caches()
    settings = grpo_settings(model=model)
    for section, values in USER_CODE[key].items():
        settings[section] = None if values is None else settings.get(section, {}) | values
    config = GRPOConfig.model_validate(settings)
    before = input_checksums(config)
    assert key in before
    check_same_inputs(before, config)
    code.write_text(code.read_text().replace("return 1", "return 2"))
    with rejects(key, error=RunFolderError):
        check_same_inputs(before, config)


def test_options_are_never_executed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools of an environment run in its own processes. Options of a reward may be any text."""
    monkeypatch.syspath_prepend(tmp_path)
    executed = f"from pathlib import Path\nPath({str(tmp_path / 'executed')!r}).touch()\n"
    (tmp_path / "own_package").mkdir()
    for name in ("side.py", "own_package/__init__.py", "own_package/tools.py"):
        (tmp_path / name).write_text(executed)
    importlib.invalidate_caches()
    names = [f"{tmp_path}/side.py:main", "own_package.tools:used", "own_package.none:used", "none.at.all:used"]
    environment = {"name": "flowrl.environments.tool_environment:ToolEnvironment", "options": {"tools": names}}
    with_tools = input_checksums(
        GRPOConfig.model_validate(grpo_settings(model=model, reward=None, environment=environment))
    )
    assert {key for key in with_tools if "options" in key} == {f"environment.options.tools.{i}" for i in range(2)}
    reward = {"function": "none:score", "options": {"mode": "os:path", "file": names[0], "list": names}}
    with_options = input_checksums(GRPOConfig.model_validate(grpo_settings(model=model, reward=reward)))
    assert not any("options" in key for key in with_options)
    assert not (tmp_path / "executed").exists()


def test_a_function_that_a_decorator_registered_is_an_input(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_registered.py").write_text("def other():\n    return 1\n")
    importlib.invalidate_caches()
    config = grpo_settings(model=model)
    config["actor"]["loss"] = {"kind": "own_registered:named_by_a_decorator"}
    assert "actor.loss.kind" in input_checksums(GRPOConfig.model_validate(config))


def test_a_changed_prompt_of_a_judge_is_rejected(model: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Rate {response} from 1 to 10.")
    reward = {"judge": {"model": {"path": model}, "prompt_file": prompt}}
    config = GRPOConfig.model_validate(grpo_settings(model=model, reward=reward))
    before = input_checksums(config)
    prompt.write_text("Rate {response} from 1 to 5.")
    with rejects("reward.prompt_file", error=RunFolderError):
        check_same_inputs(before, config)


@pytest.mark.parametrize("key", ["data.template", "rollout.template", "reward.policy_template"])
def test_changed_conversation_templates_are_rejected(key: str, model: Path, tmp_path: Path) -> None:
    names = ("data.template", "rollout.template", "reward.policy_template")
    templates = {name: tmp_path / f"{name}.json" for name in names}
    for path in templates.values():
        path.write_text("{}")
    settings = grpo_settings(model=model)
    settings["data"]["template"] = templates["data.template"]
    settings["rollout"]["template"] = templates["rollout.template"]
    settings["reward"] = {"model": {"path": model}, "policy_template": templates["reward.policy_template"]}
    config = GRPOConfig.model_validate(settings)
    before = input_checksums(config)
    check_same_inputs(before, config)
    templates[key].write_text('{"stop_ids": [[5]]}')
    with rejects(key, error=RunFolderError):
        check_same_inputs(before, config)


def test_a_fully_trained_model_is_not_an_input(sft: SFTConfig) -> None:
    trained = sft.actor.model_copy(update={"lora": None})
    assert input_checksums(sft.model_copy(update={"actor": trained})).keys() == SFT_INPUTS - {"actor.model.path"}


def test_every_evaluation_file_is_an_input(sft: SFTConfig, tmp_path: Path) -> None:
    (tmp_path / "hard.jsonl").write_text("rows")
    data = sft.data.model_copy(update={"tests": {"hard": EvaluationSet(files=tmp_path / "hard.jsonl")}})
    config = sft.model_copy(update={"data": data})
    before = input_checksums(config)
    assert before.keys() == SFT_INPUTS | {"data.tests.hard"}
    (tmp_path / "hard.jsonl").write_text("other rows")
    with rejects("data.tests.hard", error=RunFolderError):
        check_same_inputs(before, config)


def test_a_template_under_another_name_is_another_template(sft: SFTConfig, model: Path) -> None:
    before = input_checksums(sft)
    (model / "chat_template.jinja~").write_text("a backup is not a template")
    check_same_inputs(before, sft)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    with rejects("chat", "template", error=RunFolderError):
        check_same_inputs(before, sft)
    with_template = input_checksums(sft)
    (model / "chat_template.jinja").rename(model / "chat_template.json")
    with rejects("chat", "template", error=RunFolderError):
        check_same_inputs(with_template, sft)


def test_inputs_without_a_checksum_are_accepted(sft: SFTConfig, tmp_path: Path) -> None:
    (tmp_path / "m" / "tokenizer.json").write_text("changed")
    check_same_inputs({"data.train": input_checksums(sft)["data.train"]}, sft)


@pytest.mark.parametrize("offset", [0, 335, 999])
def test_a_large_file_is_sampled_over_its_full_length(
    sft: SFTConfig, tmp_path: Path, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrl.checkpoints.inputs._CHUNK_BYTES", 10)
    monkeypatch.setattr("flowrl.checkpoints.inputs._FULL_CHECKSUM_BYTES", 100)
    weights = bytearray(1000)
    (tmp_path / "m" / "a.safetensors").write_bytes(weights)
    before = input_checksums(sft)
    weights[offset] = 1
    (tmp_path / "m" / "a.safetensors").write_bytes(weights)
    assert input_checksums(sft) != before


def test_rows_of_another_version_of_reasoning_gym_are_rejected(sft: SFTConfig) -> None:
    generated = {"reasoning_gym": {"leg_counting": 1}}
    data = {"train": [generated], "test": [generated], "tests": {"own": [generated]}, "max_prompt_tokens": 8}
    config = SFTConfig.model_validate(sft.model_dump() | {"data": data})
    before = input_checksums(config)
    keys = {f"data.{name}.0.reasoning_gym" for name in ("train", "test", "tests.own")}
    assert {key for key in before if "reasoning_gym" in key} == keys
    check_same_inputs(before, config)
    with rejects("data.train.0.reasoning_gym", error=RunFolderError):
        check_same_inputs(before | {"data.train.0.reasoning_gym": FileChecksum(6, 1)}, config)
