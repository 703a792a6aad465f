"""Settings in YAML files and overrides are read. Every invalid setting is reported with its file, line and a fix."""

import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.config import ConfigError, Placement, load, recipe_class, to_yaml
from flowrl.config.algorithm.policy_loss import GspoLoss
from flowrl.config.load import RENAMED_KEYS
from recipes.grpo.config import GRPOConfig
from recipes.ppo.config import PPOConfig

PPO = """\
recipe: recipes.ppo.config:PPOConfig
output: runs/test
steps: 2
batch_size: 8
minibatch_size: 4
actor:
  model: {path: model}
  optimizer: {lr: 1e-4}
critic:
  model: {path: model}
  optimizer: {lr: 1e-4}
reference:
  model: {path: model}
reward: {function: "rewards:score"}
rollout: {max_response_tokens: 8}
algorithm: {estimator: gae}
data: {train: train.jsonl, max_prompt_tokens: 8}
"""


@pytest.fixture
def ppo(tmp_path: Path) -> Path:
    """The path of a PPO config with all required settings."""
    path = tmp_path / "ppo.yaml"
    path.write_text(PPO)
    return path


def error_of(path: Path, *overrides: str) -> str:
    """Returns the error message for a PPO config, without its folder."""
    with pytest.raises(ConfigError) as caught:
        load(path, overrides, PPOConfig)
    return str(caught.value).replace(f"{path.parent}/", "")


def rewrite(path: Path, old: str, new: str) -> Path:
    path.write_text(path.read_text().replace(old, new))
    return path


def test_a_number_with_an_exponent_and_no_dot_is_a_number(ppo: Path) -> None:
    assert load(ppo, [], PPOConfig).actor.optimizer.lr == 1e-4


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones(ppo: Path) -> None:
    config = load(ppo, ["steps=3", "actor.optimizer.lr=1e-5", "steps=4", "rollout.stop_ids=[[1, 2]]"], PPOConfig)
    assert (config.steps, config.actor.optimizer.lr, config.rollout.stop_ids) == (4, 1e-5, ((1, 2),))


def test_a_written_config_reads_back_equal(ppo: Path, tmp_path: Path) -> None:
    config = load(
        ppo, ["placement.pools={a: [1], b: 1/2}", "placement.roles={actor: a, critic: {pool: b, tp: 2}}"], PPOConfig
    )
    written = tmp_path / "config.yaml"
    written.write_text(to_yaml(config))
    assert load(written, [], PPOConfig) == config


def test_the_recipe_key_leads_to_the_config_class(ppo: Path) -> None:
    assert recipe_class(ppo) is PPOConfig


def test_a_file_of_another_recipe_is_rejected(ppo: Path) -> None:
    with pytest.raises(ConfigError, match=r"ppo.yaml:1: .*python -m recipes.ppo.train"):
        load(ppo, [], GRPOConfig)


@pytest.mark.parametrize("name", ["recipes.pqo.config:PPOConfig", "recipes.ppo.config:Nothing", "PPOConfig", "3"])
def test_a_missing_recipe_is_reported_with_its_line(ppo: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"ppo.yaml:1: recipe"):
        recipe_class(rewrite(ppo, "recipes.ppo.config:PPOConfig", name))


def test_an_unknown_key_is_named_with_its_line_and_the_closest_key(ppo: Path) -> None:
    message = error_of(rewrite(ppo, "minibatch_size", "minibatch_sise"))
    assert message.startswith("ppo.yaml:5: ") and "did you mean minibatch_size?" in message


def test_a_key_in_the_wrong_group_names_the_right_groups(ppo: Path) -> None:
    message = error_of(ppo, "lr=1e-5")
    assert message.startswith("lr=1e-5: ") and "actor.optimizer.lr or critic.optimizer.lr" in message


def test_an_unknown_key_without_a_near_match_lists_the_available_keys(ppo: Path) -> None:
    assert error_of(ppo, "data.zzz=1") == (
        "data.zzz=1: unknown setting data.zzz; data accepts train, test, max_prompt_tokens, evaluation_rows, shuffle"
    )


def test_a_wrong_type_is_named_with_key_line_value_and_expected_type(ppo: Path) -> None:
    assert (
        error_of(rewrite(ppo, "steps: 2", "steps: many")) == "ppo.yaml:3: steps is 'many', but must be a valid integer"
    )


@pytest.mark.parametrize("value", ["true", "2.5", "'2'", "[2]", "0", "null"])
def test_a_count_is_a_whole_positive_number(ppo: Path, value: str) -> None:
    assert error_of(ppo, f"steps={value}").startswith(f"steps={value}: steps is ")


def test_a_missing_setting_is_named(ppo: Path) -> None:
    assert error_of(rewrite(ppo, "steps: 2\n", "")) == "ppo.yaml: `steps` is required: number of training steps"


def test_several_errors_are_counted_and_a_misspelling_comes_first(ppo: Path) -> None:
    message = error_of(rewrite(rewrite(ppo, "steps: 2\n", ""), "max_response_tokens", "max_response_tokns"))
    assert "rollout.max_response_tokns" in message and message.endswith("(and 2 more errors)")


def test_text_in_place_of_a_group_is_rejected(ppo: Path) -> None:
    assert error_of(ppo, "actor.model=tiny").endswith("actor.model is 'tiny', but must be a group of settings")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [1, 2\nb: 3\n", "bad.yaml:2: not valid YAML"),
        ("a: 1\nb: 2\na: 3\n", "bad.yaml:3: a is set twice"),
        ("1: 2\n", "bad.yaml:1: key '1' is not text"),
        ("- 1\n", "bad.yaml: is a list"),
        ("", "bad.yaml: is empty"),
        ("a: !!int x\n", "bad.yaml: not valid YAML"),
    ],
)
def test_yaml_that_is_not_a_mapping_is_rejected(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert error_of(path).startswith(problem)


def test_a_missing_file_is_rejected(tmp_path: Path) -> None:
    assert error_of(tmp_path / "none.yaml") == "none.yaml: cannot be read, No such file or directory"
    (tmp_path / "one.yaml").write_text("steps: 1")
    (tmp_path / "another.yaml").write_text("steps: 2")
    assert error_of(tmp_path / "none.yaml").endswith("No such file or directory; the folder has another.yaml, one.yaml")


@pytest.mark.parametrize("override", ["steps", "=3", ".steps=3", "actor..model=x"])
def test_an_argument_that_is_not_an_override_is_rejected(ppo: Path, override: str) -> None:
    assert error_of(ppo, override) == f"{override!r} is not an override: write key=value, like actor.optimizer.lr=1e-5"


def test_an_override_below_a_plain_value_is_rejected(ppo: Path) -> None:
    assert error_of(ppo, "steps.x=1") == "steps.x=1: steps is 2, but must be a group of settings"


def test_an_override_below_null_creates_the_group(ppo: Path) -> None:
    rewrite(ppo, "{max_response_tokens: 8}", "{max_response_tokens: 8, engine: vllm, vllm: null}")
    vllm = load(ppo, ["rollout.vllm.max_model_len=16"], PPOConfig).rollout.vllm
    assert vllm is not None and vllm.max_model_len == 16


def test_a_placement_may_be_a_file_beside_the_config(ppo: Path) -> None:
    (ppo.parent / "two.yaml").write_text("pools: {main: [2]}\nroles: {actor: main}\n")
    config = load(ppo, ["placement=two.yaml", "placement.device=cpu"], PPOConfig)
    assert config.placement == Placement(device="cpu", pools={"main": [2]}, roles={"actor": "main"})


def test_an_error_in_an_included_file_names_that_file_and_line(ppo: Path) -> None:
    (ppo.parent / "bad.yaml").write_text("roles: {actor: main}\npools:\n  main: 3\n")
    assert error_of(ppo, "placement=bad.yaml").startswith("bad.yaml:3: placement.pools.main: ")


def test_a_missing_included_file_is_rejected(ppo: Path) -> None:
    message = "placement is none.yaml, but there is no such file; the folder has ppo.yaml"
    assert error_of(ppo, "placement=none.yaml").endswith(message)
    assert error_of(ppo, "schedule=async").endswith("set schedule.kind=async")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("schedule=async1", "schedule.kind 'async1' (did you mean async?); available: sync, one_step_off, async"),
        ("schedule=detached", "schedule.kind 'detached'; available: sync, one_step_off, async"),
        ("algorithm=gea", "algorithm.estimator 'gea' (did you mean gae?)"),
        ("schedule=schedules/async1", "schedule is schedules/async1, but there is no such file"),
        ("schedule=none.yaml", "schedule is none.yaml, but there is no such file; the folder has ppo.yaml"),
    ],
)
def test_an_error_for_a_bare_name_lists_the_available_names(ppo: Path, override: str, words: str) -> None:
    message = error_of(ppo, override)
    assert message.startswith(f"{override}: ") and words in message


def test_a_setting_of_another_member_is_reported_at_its_location(ppo: Path) -> None:
    assert error_of(ppo, "schedule.max_staleness=2") == (
        "schedule.max_staleness=2: schedule.max_staleness belongs to kind async, not to sync: remove it, "
        "or set schedule.kind: async"
    )
    message = error_of(ppo, "actor.loss=reinforce", "actor.loss.clip_low=0.1")
    assert message.startswith("actor.loss.clip_low=0.1: ") and "reinforce" in message
    assert error_of(ppo, "shedule.kind=async").startswith("shedule.kind=async: unknown setting shedule")
    rewrite(ppo, "{estimator: gae}", "{estimator: gae,\n  k: 2}")
    assert error_of(ppo).startswith("ppo.yaml:17: algorithm.k ")


@pytest.mark.parametrize(("old", "new"), RENAMED_KEYS.items())
def test_a_renamed_key_is_an_error_that_names_the_new_key(ppo: Path, old: str, new: str) -> None:
    message = error_of(ppo, f"{old}=1")
    assert message.startswith(f"{old}=1: {old} was renamed: set {new}")


def test_a_setting_of_a_bare_name_can_be_overridden(ppo: Path) -> None:
    rewrite(ppo, "optimizer: {lr: 1e-4}\ncritic", "optimizer: {lr: 1e-4}\n  loss: gspo\ncritic")
    loss = load(ppo, ["actor.loss.clip_high=0.01"], PPOConfig).actor.loss
    assert loss == GspoLoss(kind="gspo", clip_high=0.01)


def test_an_error_of_a_group_validator_names_the_line_of_the_setting(ppo: Path) -> None:
    assert error_of(ppo, "rollout.transfer.via=nccl").startswith("rollout.transfer.via=nccl: rollout: transfer.via is ")
    assert error_of(ppo, "batch_size=9", "samples_per_prompt=2").startswith("batch_size=9: batch_size is 9, ")


def test_reading_a_config_does_not_load_torch_or_ray() -> None:
    code = "import sys, recipes.ppo.config, flowrl.cli; sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
