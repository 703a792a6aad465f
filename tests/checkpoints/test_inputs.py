"""A resumed run rejects changed data, frozen models, tokenizers, chat templates and functions of the user."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from flowrl.checkpoints.inputs import check_same_inputs, input_checksums
from flowrl.checkpoints.run_folder import RunFolderError
from flowrl.config import Config, ImportName, RunConfig
from flowrl.config.data.data_settings import EvaluationSet
from flowrl.config.setting_tree import config_classes, may_name_code
from flowrl.data.checksums import FileChecksum
from recipes.distillation.config import DistillationConfig
from recipes.dpo.config import DPOConfig
from recipes.grpo.config import GRPOConfig
from recipes.ppo.config import PPOConfig
from recipes.reward_model.config import RewardModelRunConfig
from recipes.sft.config import SFTConfig
from tests.configs import grpo_settings, on_policy_settings, ppo_settings
from tests.errors import rejects

SFT_INPUTS = {
    "data.train",
    "actor.model.path",
    "actor.model.path (config)",
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
        ("m/config.json", '{"rms_norm_eps": 0.1}', ["actor.model.path", "config"]),
        ("m/generation_config.json", '{"eos_token_id": 5}', ["actor.model.path", "config"]),
        ("m/tokenizer.json", "Contents", ["actor.model.path", "tokenizer"]),
        ("m/vocab.txt", "a", ["actor.model.path", "tokenizer"]),
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


OWN = "own_code:used"
CUSTOM = {"kind": OWN}
JUDGE = {"judge": {"model": {"path": "model"}, "verdict": CUSTOM}}
USER_CODE: dict[str, dict[str, Any]] = {
    "actor.loss.kind": {"actor": {"loss": CUSTOM}},
    "actor.kl_loss_kind": {"actor": {"kl_loss_kind": OWN}},
    "actor.aggregation": {"actor": {"aggregation": OWN}},
    "algorithm.estimator": {"algorithm": {"estimator": OWN}},
    "algorithm.kl_kind": {"algorithm": {"estimator": "reinforce_plus_plus", "kl_coef": 0.1, "kl_kind": OWN}},
    "algorithm.kl_control.kind": {
        "algorithm": {"estimator": "reinforce_plus_plus", "kl_coef": 0.1, "kl_control": CUSTOM}
    },
    "algorithm.shaping.0.kind": {"algorithm": {"shaping": [CUSTOM]}},
    "algorithm.correction.kind": {"algorithm": {"correction": CUSTOM}},
    "rollout.engine": {"rollout": {"engine": "own_code:Used"}},
    "reward.function": {"reward": {"function": OWN}},
    "reward.evaluation": {"reward": {"evaluation": OWN}},
    "reward.options.grader": {"reward": {"function": "none:score", "options": {"grader": OWN}}},
    "reward.judge.verdict.kind": {"reward": {"function": None, **JUDGE}},
    "reward.components.0.function": {"reward": {"function": None, "components": [{"name": "a", "function": OWN}]}},
    "reward.components.0.judge.verdict.kind": {"reward": {"function": None, "components": [{"name": "a", **JUDGE}]}},
    "reward.evaluation.0.function": {"reward": {"evaluation": [{"name": "a", "function": OWN}]}},
    "environment.name": {"reward": None, "environment": {"name": "own_code:Used"}},
    "environment.options.checks.exact": {
        "reward": None,
        "environment": {"name": "own_environment:Own", "options": {"checks": {"exact": OWN}}},
    },
    "environment.options.tools.0": {
        "reward": None,
        "environment": {
            "name": "flowrl.environments.tool_environment:ToolEnvironment",
            "options": {"tools": [OWN]},
        },
    },
    "data.tests.hard.evaluation.extract_answer": {
        "data": {"tests": {"hard": {"files": "t.jsonl", "evaluation": {"extract_answer": OWN}}}}
    },
    "evaluation.extract_answer": {"evaluation": {"extract_answer": OWN}},
}
"""Key of a user's function or class -> settings that name it."""

OTHER_RECIPES: dict[str, tuple[type[RunConfig], dict[str, Any]]] = {
    "preference loss": (DPOConfig, {"batch_size": 2, "actor": {"loss": CUSTOM}}),
    "reward model loss": (RewardModelRunConfig, {"batch_size": 2, "reward": {"loss": CUSTOM}}),
    "distillation loss": (DistillationConfig, {"actor": {"loss": CUSTOM}}),
}
"""Kind of a user's function -> recipe and the settings that name it."""


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module with a function and the class of a rollout engine."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    code = tmp_path / "own_code.py"
    code.write_text(
        "from flowrl.config import EngineCapabilities\n\n\ndef used():\n    return 1\n\n\n"
        "class Used:\n    capabilities = EngineCapabilities(own_process=False)\n"
    )
    importlib.invalidate_caches()
    return code


def check_changed_code(config: RunConfig, key: str, code: Path) -> None:
    """Asserts that a changed file of code is rejected with the key of its setting."""
    before = input_checksums(config)
    check_same_inputs(before, config)
    code.write_text(code.read_text().replace("return 1", "return 2"))
    with rejects(key, error=RunFolderError):
        check_same_inputs(before, config)


@pytest.mark.parametrize("key", USER_CODE)
def test_changed_functions_and_classes_of_the_user_are_rejected(key: str, model: Path, own_code: Path) -> None:
    settings = grpo_settings(model=model)
    for section, values in USER_CODE[key].items():
        settings[section] = None if values is None else settings.get(section, {}) | values
    check_changed_code(GRPOConfig.model_validate(settings), key, own_code)


@pytest.mark.parametrize("kind", OTHER_RECIPES)
def test_changed_losses_of_all_recipes_are_rejected(kind: str, model: Path, own_code: Path) -> None:
    cls, changes = OTHER_RECIPES[kind]
    settings = {name: value for name, value in on_policy_settings(model=model).items() if name in cls.model_fields}
    role = next(name for name in ("actor", "reward") if name in changes)
    trained = {"model": {"path": model}, "optimizer": {"lr": 1e-4}}
    settings |= changes | {role: trained | changes[role]}
    if "teacher" in cls.model_fields:
        settings["teacher"] = {"model": {"path": model}}
    check_changed_code(cls.model_validate(settings), f"{role}.loss.kind", own_code)


def test_a_setting_of_a_recipe_of_the_user_is_an_input(sft: SFTConfig, own_code: Path) -> None:
    class OwnConfig(SFTConfig):
        """Settings of a recipe with a function of its own."""

        weighting: ImportName
        """Weight of a row."""

    config = OwnConfig.model_validate(sft.model_dump() | {"weighting": OWN})
    check_changed_code(config, "weighting", own_code)


def test_every_kind_of_user_code_is_tested() -> None:
    """A new setting that accepts `module:name` needs a case above."""
    names = {key.rpartition(".")[2] for key in (*USER_CODE, "weighting")}
    recipes = (GRPOConfig, PPOConfig, SFTConfig, *(cls for cls, _ in OTHER_RECIPES.values()))
    for cls in recipes:
        paths = {path.rpartition(".")[2] for path in code_settings(cls)}
        assert paths - {"recipe"} <= names


def code_settings(cls: type[Config], prefix: str = "") -> set[str]:
    """Returns the keys of all settings below a config class that accept the name of a function or a class."""
    keys = set()
    for name, field in cls.model_fields.items():
        keys |= {prefix + name} if may_name_code(field) else set()
        for group in config_classes(field.annotation):
            keys |= code_settings(group, f"{prefix}{name}.")
    return keys


@pytest.mark.parametrize(
    ("importing", "changed"),
    [
        ("import own_helpers", "own_helpers.py"),
        ("def used():\n    from own_package.inner import scale", "own_package/inner.py"),
        ("from own_package import inner", "own_package/inner.py"),
        ("import own_package.inner", "own_package/__init__.py"),
        ("import own_package.inner", "own_package/sibling.py"),
        ("import own_package.inner", "own_helpers.py"),
        ("from own_package.folder import inner", "own_package/folder/inner.py"),
    ],
)
@pytest.mark.parametrize("key", ["reward.function", "reward.options.grader"])
def test_changed_modules_that_a_function_imports_are_rejected(
    key: str, importing: str, changed: str, model: Path, own_code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("own_")]:
        monkeypatch.delitem(sys.modules, name)
    folder = own_code.parent
    (folder / "own_package/folder").mkdir(parents=True)  # a package without __init__.py
    (folder / "own_package/folder/inner.py").touch()
    (folder / "own_helpers.py").write_text("import own_code  # a cycle\n")
    (folder / "own_package/__init__.py").touch()
    (folder / "own_package/inner.py").write_text("from . import sibling\n")
    (folder / "own_package/sibling.py").write_text("import own_helpers\n")
    own_code.write_text(f"import json, torch\n{importing}\n")
    importlib.invalidate_caches()
    config = GRPOConfig.model_validate(grpo_settings(model=model) | USER_CODE[key])
    before = input_checksums(config)
    assert not [key for key in before if "torch" in key]
    (folder / changed).write_text((folder / changed).read_text() + "\nchanged = True\n")
    with rejects(key, "modules", error=RunFolderError):
        check_same_inputs(before, config)


def test_options_are_never_executed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools of an environment run in its own processes. An option may also be any other text."""
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
    files = {"reward.options.file", "reward.options.list.0", "reward.options.list.1"}
    assert {key for key in with_options if "options" in key} == files
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


@pytest.mark.parametrize(
    "changed", ["config.json", "tokenizer.json", "chat_template.jinja", "own.jinja", "generation_config.json"]
)
def test_the_files_of_judges_are_inputs(changed: str, model: Path, tmp_path: Path) -> None:
    judge = tmp_path / "judge"
    judge.mkdir()
    (judge / "conversation_template.json").write_text('{"chat_template": "own.jinja"}')
    (judge / "own.jinja").write_text("{{ messages }}")
    reward = {"components": [{"name": "style", "judge": {"model": {"path": judge}}}]}
    config = GRPOConfig.model_validate(grpo_settings(model=model, reward=reward))
    before = input_checksums(config)
    (judge / changed).write_text("{{ changed }}")
    with rejects("reward_style.model.path", error=RunFolderError):
        check_same_inputs(before, config)


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ("scorer/config.json", "reward.model.path"),
        ("scorer/tokenizer.json", "reward.model.path"),
        ("scorer/chat_template.jinja", "reward.model.path"),
        ("policy/tokenizer.json", "reward.policy_tokenizer"),
        ("frozen/config.json", "reference.model.path"),
        ("critic/config.json", "critic.model.path"),
    ],
)
def test_the_configs_and_tokenizers_of_all_roles_are_inputs(
    changed: str, key: str, model: Path, tmp_path: Path
) -> None:
    for name in ("scorer", "policy", "frozen", "critic"):
        (tmp_path / name).mkdir()
    settings = ppo_settings(model=model)
    settings["critic"]["model"] = {"path": tmp_path / "critic"}
    settings["reference"]["model"] = {"path": tmp_path / "frozen"}
    settings["actor"]["kl_loss_coef"] = 0.1  # uses the reference
    settings["reward"] = {"model": {"path": tmp_path / "scorer"}, "policy_tokenizer": tmp_path / "policy"}
    config = PPOConfig.model_validate(settings)
    before = input_checksums(config)
    check_same_inputs(before, config)
    (tmp_path / changed).write_text("changed")
    with rejects(key, error=RunFolderError):
        check_same_inputs(before, config)


@pytest.mark.parametrize("changed", ["named.jinja", "named/chat_template.jinja", "named/tokenizer_config.json"])
def test_the_files_that_a_conversation_template_names_are_inputs(changed: str, sft: SFTConfig, tmp_path: Path) -> None:
    (tmp_path / "named").mkdir()
    (tmp_path / "named.jinja").write_text("{{ messages }}")
    template = tmp_path / "template.json"
    template.write_text(json.dumps({"chat_template": changed.partition("/")[0]}))
    config = sft.model_copy(update={"data": sft.data.model_copy(update={"template": template})})
    before = input_checksums(config)
    (tmp_path / changed).write_text("{{ changed }}")
    with rejects("data.template", "chat", error=RunFolderError):
        check_same_inputs(before, config)


def test_a_changed_shard_of_a_prepared_folder_is_rejected(sft: SFTConfig, tmp_path: Path) -> None:
    shard = tmp_path / "prepared/arrow/part-00000.arrow"
    shard.parent.mkdir(parents=True)
    shard.write_text("rows")
    (tmp_path / "prepared/manifest.json").write_text("{}")
    config = sft.model_copy(update={"data": sft.data.model_copy(update={"train": tmp_path / "prepared"})})
    before = input_checksums(config)
    shard.write_text("Rows")
    with rejects("data.train", "shards", error=RunFolderError):
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
