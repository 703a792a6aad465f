"""Settings in YAML files and overrides are read. Every invalid setting is reported with its file, line and a fix."""

import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.config import ConfigError, DataConfig, Placement, load, recipe_class, to_yaml
from flowrl.config.algorithm.policy_loss import GspoLoss
from flowrl.config.load import RENAMED_KEYS
from recipes.grpo.config import GRPOConfig
from recipes.ppo.config import PPOConfig
from tests.errors import missing_facts

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
    with pytest.raises(ConfigError, match=r"ppo.yaml:1: .*recipes\.ppo\.train"):
        load(ppo, [], GRPOConfig)


@pytest.mark.parametrize("name", ["recipes.pqo.config:PPOConfig", "recipes.ppo.config:Nothing", "PPOConfig", "3"])
def test_a_missing_recipe_is_reported_with_its_line(ppo: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"ppo.yaml:1: recipe"):
        recipe_class(rewrite(ppo, "recipes.ppo.config:PPOConfig", name))


def test_an_unknown_key_is_named_with_its_line_and_the_closest_key(ppo: Path) -> None:
    message = error_of(rewrite(ppo, "minibatch_size", "minibatch_sise"))
    assert message.startswith("ppo.yaml:5: ") and not missing_facts(message, "minibatch_sise", "minibatch_size")


def test_a_key_in_the_wrong_group_names_the_right_groups(ppo: Path) -> None:
    message = error_of(ppo, "lr=1e-5")
    assert message.startswith("lr=1e-5: ") and not missing_facts(message, "actor.optimizer.lr", "critic.optimizer.lr")


def test_an_unknown_key_without_a_near_match_lists_the_available_keys(ppo: Path) -> None:
    message = error_of(ppo, "data.zzz=1")
    assert message.startswith("data.zzz=1: ") and not missing_facts(message, "data.zzz", *DataConfig.model_fields)


def test_a_wrong_type_is_named_with_key_line_value_and_expected_type(ppo: Path) -> None:
    message = error_of(rewrite(ppo, "steps: 2", "steps: many"))
    assert message.startswith("ppo.yaml:3: steps ") and not missing_facts(message, "many", "integer")


@pytest.mark.parametrize("value", ["true", "2.5", "'2'", "[2]", "0", "null"])
def test_a_count_is_a_positive_integer(ppo: Path, value: str) -> None:
    assert error_of(ppo, f"steps={value}").startswith(f"steps={value}: steps ")


def test_a_missing_setting_is_named(ppo: Path) -> None:
    assert error_of(rewrite(ppo, "steps: 2\n", "")).startswith("ppo.yaml: `steps` ")


def test_several_errors_are_counted_and_a_misspelling_comes_first(ppo: Path) -> None:
    message = error_of(rewrite(rewrite(ppo, "steps: 2\n", ""), "max_response_tokens", "max_response_tokns"))
    assert not missing_facts(message, "rollout.max_response_tokns", 2)


def test_text_in_place_of_a_group_is_rejected(ppo: Path) -> None:
    assert not missing_facts(error_of(ppo, "actor.model=tiny"), "actor.model", "tiny")


@pytest.mark.parametrize(
    ("text", "location"),
    [
        ("a: [1, 2\nb: 3\n", "bad.yaml:2: "),
        ("a: 1\nb: 2\na: 3\n", "bad.yaml:3: a "),
        ("1: 2\n", "bad.yaml:1: key '1' "),
        ("- 1\n", "bad.yaml: "),
        ("", "bad.yaml: "),
        ("a: !!int x\n", "bad.yaml: "),
    ],
)
def test_yaml_that_is_not_a_mapping_is_rejected(tmp_path: Path, text: str, location: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert error_of(path).startswith(location)


def test_a_missing_file_is_rejected(tmp_path: Path) -> None:
    assert error_of(tmp_path / "none.yaml").startswith("none.yaml: ")
    (tmp_path / "one.yaml").write_text("steps: 1")
    (tmp_path / "another.yaml").write_text("steps: 2")
    assert not missing_facts(error_of(tmp_path / "none.yaml"), "another.yaml", "one.yaml")


@pytest.mark.parametrize("override", ["steps", "=3", ".steps=3", "actor..model=x"])
def test_an_argument_that_is_not_an_override_is_rejected(ppo: Path, override: str) -> None:
    assert error_of(ppo, override).startswith(f"{override!r} ")


def test_an_override_below_a_plain_value_is_rejected(ppo: Path) -> None:
    message = error_of(ppo, "steps.x=1")
    assert message.startswith("steps.x=1: steps ") and not missing_facts(message, 2)


def test_an_override_below_null_creates_the_group(ppo: Path) -> None:
    rewrite(ppo, "{max_response_tokens: 8}", "{max_response_tokens: 8, engine: vllm, vllm: null}")
    vllm = load(ppo, ["rollout.vllm.max_model_len=16"], PPOConfig).rollout.vllm
    assert vllm is not None and vllm.max_model_len == 16


def test_a_placement_can_be_a_file_next_to_the_config(ppo: Path) -> None:
    (ppo.parent / "two.yaml").write_text("pools: {main: [2]}\nroles: {actor: main}\n")
    config = load(ppo, ["placement=two.yaml", "placement.device=cpu"], PPOConfig)
    assert config.placement == Placement(device="cpu", pools={"main": [2]}, roles={"actor": "main"})


def test_an_error_in_an_included_file_names_that_file_and_line(ppo: Path) -> None:
    (ppo.parent / "bad.yaml").write_text("roles: {actor: main}\npools:\n  main: 3\n")
    assert error_of(ppo, "placement=bad.yaml").startswith("bad.yaml:3: placement.pools.main: ")


def test_a_missing_included_file_is_rejected(ppo: Path) -> None:
    assert not missing_facts(error_of(ppo, "placement=none.yaml"), "placement", "none.yaml", "ppo.yaml")
    assert not missing_facts(error_of(ppo, "schedule=async"), "schedule.kind", "async")


@pytest.mark.parametrize(
    ("override", "facts"),
    [
        ("schedule=async1", ("schedule.kind", "async1", "async", "sync", "one_step_off")),
        ("schedule=detached", ("schedule.kind", "detached", "async", "sync", "one_step_off")),
        ("algorithm=gea", ("algorithm.estimator", "gea", "gae")),
        ("schedule=schedules/async1", ("schedule", "schedules/async1")),
        ("schedule=none.yaml", ("schedule", "none.yaml", "ppo.yaml")),
    ],
)
def test_an_error_for_a_bare_name_lists_the_available_names(ppo: Path, override: str, facts: tuple[str, ...]) -> None:
    message = error_of(ppo, override)
    assert message.startswith(f"{override}: ") and not missing_facts(message, *facts)


def test_a_setting_of_another_member_is_reported_at_its_location(ppo: Path) -> None:
    message = error_of(ppo, "schedule.max_staleness=2")
    assert message.startswith("schedule.max_staleness=2: schedule.max_staleness ")
    assert not missing_facts(message, "async", "sync", "schedule.kind")
    message = error_of(ppo, "actor.loss=reinforce", "actor.loss.clip_low=0.1")
    assert message.startswith("actor.loss.clip_low=0.1: ") and "reinforce" in message
    assert error_of(ppo, "shedule.kind=async").startswith("shedule.kind=async: ")
    rewrite(ppo, "{estimator: gae}", "{estimator: gae,\n  k: 2}")
    assert error_of(ppo).startswith("ppo.yaml:17: algorithm.k ")


@pytest.mark.parametrize(("old", "new"), RENAMED_KEYS.items())
def test_a_renamed_key_is_an_error_that_names_the_new_key(ppo: Path, old: str, new: str) -> None:
    message = error_of(ppo, f"{old}=1")
    assert message.startswith(f"{old}=1: {old} ") and new in message


def test_a_setting_of_a_bare_name_can_be_overridden(ppo: Path) -> None:
    rewrite(ppo, "optimizer: {lr: 1e-4}\ncritic", "optimizer: {lr: 1e-4}\n  loss: gspo\ncritic")
    loss = load(ppo, ["actor.loss.clip_high=0.01"], PPOConfig).actor.loss
    assert loss == GspoLoss(kind="gspo", clip_high=0.01)


def test_an_error_of_a_group_validator_names_the_line_of_the_setting(ppo: Path) -> None:
    assert error_of(ppo, "rollout.transfer.via=nccl").startswith("rollout.transfer.via=nccl: rollout: transfer.via ")
    assert error_of(ppo, "batch_size=9", "samples_per_prompt=2").startswith("batch_size=9: batch_size ")


def test_reading_a_config_does_not_load_torch_or_ray() -> None:
    code = "import sys, recipes.ppo.config, flowrl.cli; sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
