"""Every invalid setting is reported with its file, line and a fix."""

from pathlib import Path

import pytest

from flowrl.config import ConfigError, DataConfig, load, load_located
from flowrl.config.error_messages import FOREIGN_KEYS, REMOVED_KEYS, renamed_keys
from flowrl.config.setting_tree import setting_paths
from recipes.grpo.config import GRPOConfig
from recipes.ppo.config import PPOConfig
from recipes.sft.config import SFTConfig
from tests.config.ppo_file import error_of, rewrite
from tests.errors import missing_facts, rejects


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


@pytest.mark.parametrize(
    ("override", "facts"),
    [
        ("actor.optimizer.betas=[0.9]", ("actor.optimizer.betas", 0.9)),
        ("actor.optimizer.betas=[]", ("actor.optimizer.betas", "entries")),
        ("placement={pools: {main: [1]}, roles: {pool: {}}}", ("placement.roles.pool.pool",)),
    ],
)
def test_missing_entries_of_lists_and_mappings_are_one_line(ppo: Path, override: str, facts: tuple) -> None:
    message = error_of(ppo, override)
    assert not missing_facts(message, *facts) and len(message.splitlines()) == 1


def test_several_errors_are_counted_and_a_misspelling_comes_first(ppo: Path) -> None:
    message = error_of(rewrite(rewrite(ppo, "steps: 2\n", ""), "max_response_tokens", "max_response_tokns"))
    assert not missing_facts(message, "rollout.max_response_tokns", 2)


def test_text_in_place_of_a_group_is_rejected(ppo: Path) -> None:
    assert not missing_facts(error_of(ppo, "actor.model=tiny"), "actor.model", "tiny")


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


@pytest.mark.parametrize(("old", "new"), sorted(renamed_keys().items()))
def test_a_renamed_key_is_an_error_that_names_the_new_key(ppo: Path, old: str, new: str) -> None:
    message = error_of(ppo, f"{old}=1")
    assert message.startswith(f"{old}=1: {old} ") and new in message


@pytest.mark.parametrize("name", REMOVED_KEYS)
def test_a_removed_key_is_an_error_that_names_its_replacement(ppo: Path, name: str) -> None:
    message = error_of(ppo, f"{name}=a:b")
    assert message.startswith(f"{name}=a:b: {name} ") and REMOVED_KEYS[name] in message


def test_an_error_of_a_group_validator_names_the_line_of_the_setting(ppo: Path) -> None:
    assert error_of(ppo, "rollout.transfer.via=nccl").startswith("rollout.transfer.via=nccl: rollout: transfer.via ")


def test_every_error_is_listed_with_its_file_and_line(ppo: Path) -> None:
    (ppo.parent / "two.yaml").write_text("pools: {main: [2]}\nroles:\n  actor: 3\n")
    rewrite(ppo, "batch_size: 8\nminibatch_size: 4", "batch_size: many\nminibatch_sise: 4\nplacement: two.yaml")
    rewrite(ppo, "actor:\n  model: {path: model}", "actor:\n  model: 3")
    message = error_of(ppo, "steps=0")
    lines = {line.strip().split(" ")[0]: line for line in message.splitlines()[1:]}
    assert not missing_facts(message.splitlines()[0], 5)
    expected = {
        "ppo.yaml:4:": "batch_size",
        "ppo.yaml:5:": "minibatch_sise",
        "two.yaml:3:": "placement.roles.actor",
        "ppo.yaml:8:": "actor.model",
        "steps=0:": "steps",
    }
    assert lines.keys() == expected.keys()
    assert [key for key, name in expected.items() if missing_facts(lines[key], name)] == []


def test_a_misspelled_required_setting_is_one_error(ppo: Path) -> None:
    message = error_of(rewrite(ppo, "minibatch_size", "minibatch_sise"))
    assert "\n" not in message and not missing_facts(message, "minibatch_sise", "minibatch_size")
    message = error_of(rewrite(rewrite(ppo, "minibatch_sise", "minibatch_size"), "{lr: 1e-4}", "{learning_rate: 1e-4}"))
    assert len(message.splitlines()) == 3
    assert not missing_facts(message, "actor.optimizer.learning_rate", "actor.optimizer.lr", "critic.optimizer.lr")


def test_a_setting_of_several_types_is_one_error(ppo: Path) -> None:
    message = error_of(ppo, "actor.lora={rank: 4, targets: 3}")
    assert "\n" not in message and not missing_facts(message, "actor.lora.targets", "all_linear", "list")
    message = error_of(ppo, "actor.lora={rank: 4, targets: [3]}")
    assert "\n" not in message and not missing_facts(message, "actor.lora.targets.0")


@pytest.mark.parametrize(
    ("override", "facts"),
    [
        ("algorithm.estimator=ppo", ("actor.loss.kind", "policy", "gae", "grpo")),
        ("algorithm=ppo", ("actor.loss.kind", "policy", "gae", "grpo")),
        ("actor.loss=grpo", ("actor.loss.kind", "algorithm.estimator", "estimator", "ppo")),
        ("actor.loss.kind=truncated", ("actor.loss.kind", "algorithm.correction.kind", "correction")),
    ],
)
def test_a_name_of_another_union_is_explained(ppo: Path, override: str, facts: tuple[str, ...]) -> None:
    assert not missing_facts(error_of(ppo, override), *facts)


def test_a_name_that_two_unions_share_is_unknown_in_neither(ppo: Path) -> None:
    assert load(ppo, ["actor.loss=gpg"], PPOConfig).actor.loss.kind == "gpg"


@pytest.mark.parametrize(
    ("override", "suggested"),
    [
        ("learning_rate=1e-5", {"actor.optimizer.lr", "critic.optimizer.lr"}),
        ("actor.learning_rate=1e-5", {"actor.optimizer.lr"}),
        ("actor.optimizer.learning_rate=1e-5", {"actor.optimizer.lr"}),
        ("actor.bf16=true", {"actor.engine.compute_dtype", "bfloat16"}),
        ("num_generations=4", {"samples_per_prompt"}),
        ("rollout.max_new_tokens=4", {"rollout.max_response_tokens"}),
        ("beta=0.04", {"algorithm.kl_coef"}),
        ("trainer.total_epochs=2", {"steps"}),
        ("trainer.total_training_steps=2", {"steps"}),
        ("actor_rollout_ref.actor.optim.lr=1e-6", {"actor.optimizer.lr"}),
        ("actor_rollout_ref.rollout.n=4", {"samples_per_prompt"}),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=4", {"minibatch_size"}),
        ("data.train_batch_size=4", {"batch_size"}),
        ("max_completion_length=4", {"rollout.max_response_tokens"}),
        ("num_train_epochs=4", {"steps"}),
        ("per_device_train_batch_size=4", {"batch_size", "gradient_accumulation_steps"}),
        ("experience_batch_size=4", {"batch_size", "num_collect_steps", "processes", "tp"}),
        ("accumulation_steps=4", {"minibatch_size", "train_batch_size", "processes", "tp"}),
        ("train_batch_size=4", {"minibatch_size", "accumulation_steps", "ColossalChat", "verl"}),
        ("ptx_coef=0.1", {"ptx.coef"}),
        ("algorithm.kl_ctrl.kl_coef=0.1", {"algorithm.kl_coef"}),
        ("actor_rollout_ref.actor.use_kl_loss=true", {"actor.kl_loss_coef"}),
        ("actor_rollout_ref.model.path=model", {"actor.model.path"}),
        ("num_iterations=2", {"ppo_epochs"}),
        ("trainer.n_gpus_per_node=8", {"devices"}),
        ("rollout.stop_strings=[a]", {"data.template", "stop_strings"}),
        ("rollout.stop=a", {"data.template", "stop_strings"}),
    ],
)
def test_a_key_of_another_library_names_the_setting(ppo: Path, override: str, suggested: set[str]) -> None:
    message = error_of(ppo, override)
    assert not missing_facts(message, *suggested)
    assert override.startswith("learning_rate") or missing_facts(message, "critic.optimizer.lr")


def test_a_formula_has_only_settings_of_the_config(ppo: Path, tmp_path: Path) -> None:
    message = error_of(ppo, "train_batch_size=4")
    assert not missing_facts(message, "batch_size", "samples_per_prompt")
    assert "ptx" not in message
    (tmp_path / "sft.yaml").write_text("steps: 3\n")
    with rejects("train_batch_size", "batch_size", error=ConfigError) as caught:
        load(tmp_path / "sft.yaml", ["train_batch_size=4"], SFTConfig)
    assert missing_facts(str(caught.value), "samples_per_prompt")


def test_every_key_of_another_library_has_a_setting() -> None:
    paths = {path for cls in (PPOConfig, GRPOConfig, SFTConfig) for path in setting_paths(cls)}
    values = [(ends,) if isinstance(ends, str) else ends for ends in FOREIGN_KEYS.values()]
    ends = {end.partition(":")[0] for choices in values for end in choices}
    assert {end for end in ends if not any(f".{path}".endswith(f".{end}") for path in paths)} == set()
    # Only some estimators have kl_coef.
    assert FOREIGN_KEYS.keys() & {path.rpartition(".")[2] for path in paths} == {"kl_coef"}


@pytest.mark.parametrize("key", ["beta", "kl_coef"])
def test_the_kl_coefficient_is_a_setting_that_the_estimator_has(ppo: Path, key: str) -> None:
    message = error_of(rewrite(ppo, "estimator: gae", "estimator: grpo"), f"{key}=0.04")
    assert not missing_facts(message, "actor.kl_loss_coef") and missing_facts(message, "algorithm.kl_coef")
    message = error_of(rewrite(ppo, "estimator: grpo", "estimator: gae"), f"{key}=0.04")
    assert not missing_facts(message, "algorithm.kl_coef") and missing_facts(message, "actor.kl_loss_coef")


def test_all_invalid_overrides_are_reported(ppo: Path) -> None:
    unknown = ("actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.optim.lr=1e-6", "beta=0.1", "steps=0")
    lines = error_of(ppo, *unknown).splitlines()[1:]
    assert {line.strip().partition(": ")[0] for line in lines} == set(unknown)
    malformed = ("steps.x=1", "placement=none.yaml", "lr")
    assert len(error_of(ppo, *malformed).splitlines()) == 1 + len(malformed)


@pytest.mark.parametrize(
    ("override", "has_hint"),
    [
        ("steps='3'", True),
        ("actor.optimizer.lr='1e-4'", True),
        ("data.strict='false'", True),
        ("steps=three", False),
        ("steps='3.5'", False),
        ("data.strict=maybe", False),
    ],
)
def test_a_quoted_number_is_explained(ppo: Path, override: str, has_hint: bool) -> None:
    assert bool(missing_facts(error_of(ppo, override), "quotes")) is not has_hint


def test_a_text_or_nothing_in_place_of_a_group_is_explained(ppo: Path) -> None:
    assert not missing_facts(error_of(ppo, "actor.model=gpt2"), "actor.model", "path", "gpt2")
    assert not missing_facts(error_of(rewrite(ppo, "{max_response_tokens: 8}", "")), "rollout", "empty")


def test_a_description_of_several_lines_is_one_sentence(ppo: Path) -> None:
    message = error_of(ppo, "placement={roles: {actor: main}}")
    assert (
        "\n" not in message and not missing_facts(message, "placement.pools", "all") and "Pools do not" not in message
    )


@pytest.mark.parametrize(("override", "has_functions"), [("schedule.kind=a", False), ("actor.loss=a", True)])
def test_user_functions_are_available_only_in_unions_that_have_them(
    ppo: Path, override: str, has_functions: bool
) -> None:
    assert ("module:function" in error_of(ppo, override)) is has_functions


@pytest.mark.parametrize(
    ("overrides", "locations"),
    [
        (["samples_per_prompt=7"], "ppo.yaml:4 and samples_per_prompt=7"),
        (["batch_size=9", "samples_per_prompt=2"], "batch_size=9 and samples_per_prompt=2"),
        (["minibatch_size=100"], "minibatch_size=100 and ppo.yaml:4"),
        (["actor.optimizer.total_steps=3", "actor.optimizer.warmup_steps=5"], None),
    ],
)
def test_an_error_about_several_settings_has_the_location_of_each(
    ppo: Path, overrides: list[str], locations: str | None
) -> None:
    locations = locations or " and ".join(reversed(overrides))
    assert error_of(ppo, *overrides).startswith(f"{locations}: ")


def test_a_later_error_about_several_settings_has_the_location_of_each(ppo: Path) -> None:
    overrides = ["rollout.max_response_tokens=90"]
    _, locate = load_located(ppo, overrides, PPOConfig)
    message = "data.max_prompt_tokens + rollout.max_response_tokens is 98"
    line = next(i for i, text in enumerate(ppo.read_text().splitlines(), 1) if "max_prompt_tokens" in text)
    assert locate(message) == f"{ppo}:{line} and {overrides[0]}: {message}"
    assert locate("samples_per_prompt is 1, but rollout.max_response_tokens is 90").startswith(f"{overrides[0]}: ")
    assert locate("a batch_size of 3") == "a batch_size of 3"


def test_an_empty_list_of_files_needs_one_entry(ppo: Path) -> None:
    with rejects("data.train", "path", "list", "1", "entry", error=ConfigError):
        load(ppo, ["data.train=[]"], PPOConfig)
