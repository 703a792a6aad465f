"""Each member of a union has its own settings and defaults, and rejects settings of other members."""

import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

import pytest
from pydantic import ValidationError

from flowrl.config import (
    ActorConfig,
    AnyAdvantage,
    AnyCorrection,
    AnyPolicyLoss,
    AnyPreference,
    AnySchedule,
    AnyShaping,
    Config,
    ConfigError,
    ImportNameError,
    import_attribute,
    imported_module_name,
    load,
    parse,
    to_yaml,
)
from flowrl.config.base import CUSTOM, check_import_name, members_of, missing_members
from tests.errors import rejects

MODEL = {"model": {"path": "model"}, "optimizer": {"lr": 1e-4}}
REQUIRED = {
    "rejection": {"high": 1.0},
    "overlong_penalty": {"max_length": 8, "buffer": 2},
    "length_penalty": {"correct_from": 1.0, "coef": 0.5},
    "clip_rewards": {"low": 0.0},
    "add": {"coef": 1.0},
    "mix": {"coef": 1.0},
    CUSTOM: {"options": {"bar": 0.5}},
}


class Group(Config):
    """A config file with one setting of every union."""

    advantage: AnyAdvantage
    loss: AnyPolicyLoss
    correction: AnyCorrection
    schedule: AnySchedule
    shaping: AnyShaping
    preference: AnyPreference


FIELDS = {
    "advantage": (AnyAdvantage, "grpo"),
    "loss": (AnyPolicyLoss, "ppo"),
    "correction": (AnyCorrection, "masked"),
    "schedule": (AnySchedule, "sync"),
    "shaping": (AnyShaping, "normalize_rewards"),
    "preference": (AnyPreference, "dpo"),
}


def settings_of(union: Any, name: str) -> dict[str, Any]:
    key = members_of(union)[name].KEY
    return {key: "a.b:c" if name == CUSTOM else name} | REQUIRED.get(name, {})


def group(**settings: Any) -> dict[str, Any]:
    return {field: settings_of(union, name) for field, (union, name) in FIELDS.items()} | settings


def test_each_member_has_its_own_defaults() -> None:
    assert parse(AnyPolicyLoss, {}).arguments() == {"clip_low": 0.2, "clip_high": 0.2}
    assert parse(AnyPolicyLoss, {"kind": "gspo"}).arguments() == {"clip_low": 3e-4, "clip_high": 4e-4}
    assert parse(AnyAdvantage, {"estimator": "grpo"}).arguments() == {"normalize_std": True}
    assert parse(AnyAdvantage, {"estimator": "gpg"}).arguments() == {"normalize_std": False}
    assert parse(AnyCorrection, {"kind": "masked"}).max_weight == 2.0


def test_settings_replace_defaults() -> None:
    loss = parse(AnyPolicyLoss, {"kind": "gspo", "clip_high": 0.01})
    assert loss.arguments() == {"clip_low": 3e-4, "clip_high": 0.01}


def test_a_loss_can_be_a_bare_name() -> None:
    assert ActorConfig.model_validate(MODEL | {"loss": "gspo"}).loss == parse(AnyPolicyLoss, {"kind": "gspo"})
    assert ActorConfig.model_validate(MODEL | {"loss": "a.b:c"}).loss.kind == "a.b:c"
    assert ActorConfig.model_validate(MODEL).loss.kind == "ppo"


@pytest.mark.parametrize(
    ("field", "name"), [(field, name) for field, (union, _) in FIELDS.items() for name in members_of(union)]
)
def test_every_member_is_read_back_from_its_yaml(field: str, name: str, tmp_path: Path) -> None:
    config = Group.model_validate(group(**{field: settings_of(FIELDS[field][0], name)}))
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    assert load(tmp_path / "c.yaml", [], Group) == config


@pytest.mark.parametrize(
    ("field", "settings", "words"),
    [
        # A setting of another member: its name, its owners, and the selected member.
        ("loss", {"kind": "reinforce", "clip_low": 0.1}, ["loss.clip_low", "ppo", "gspo", "reinforce", "loss.kind"]),
        ("loss", {"kind": "cispo", "dual_clip": 3.0}, ["loss.dual_clip", "ppo, decoupled_ppo", "cispo"]),
        ("loss", {"options": {"a": 1}}, ["loss.options", CUSTOM, "ppo"]),
        (
            "advantage",
            {"estimator": "grpo", "kl_coef": 0.1},
            ["advantage.kl_coef", "gae, reinforce_plus_plus", "rloo", "grpo"],
        ),
        ("correction", {"kind": "truncated", "high": 1.0}, ["correction.high", "rejection", "truncated"]),
        ("shaping", {"kind": "clip_rewards", "low": 0.0, "buffer": 4}, ["shaping.buffer", "overlong_penalty"]),
        ("preference", {"kind": "ipo", "label_smoothing": 0.1}, ["preference.label_smoothing", "dpo", "ipo"]),
        ("schedule", {"max_staleness": 1}, ["schedule.max_staleness", "schedule.kind: async", "sync"]),
        # An unknown name: the nearest one and all others.
        ("loss", "gsop", ["loss.kind", "'gsop'", "did you mean gspo", "ppo, decoupled_ppo"]),
        ("loss", {"kind": "gsop"}, ["loss.kind", "'gsop'", "did you mean gspo"]),
        ("advantage", {"estimator": "rlo"}, ["advantage.estimator", "'rlo'", "did you mean rloo"]),
        ("correction", {"kind": "truncate"}, ["correction.kind", "did you mean truncated"]),
        ("shaping", {"kind": "clip_reward"}, ["shaping.kind", "did you mean clip_rewards"]),
        ("preference", {"kind": "dpoo"}, ["preference.kind", "did you mean dpo"]),
        ("correction", {}, ["`correction.kind` is required", "truncated, masked, rejection"]),
        # A missing setting.
        ("correction", {"kind": "rejection"}, ["`correction.high` is required"]),
        ("shaping", {"kind": "overlong_penalty", "max_length": 8}, ["`shaping.buffer` is required"]),
        # A value out of range.
        ("loss", {"kind": "clip_cov", "cov_low": 6.0}, ["loss: cov_low is 6, above cov_high, 5"]),
        ("advantage", {"estimator": "pass_at_k", "k": 1}, ["advantage.k is 1"]),
        ("advantage", {"estimator": "gdpo", "reward_weights": [1.0, 2.0]}, ["reward_weights", "reward_columns"]),
        ("correction", {"kind": "masked", "min_weight": 3.0}, ["min_weight is 3", "max_weight, 2"]),
        ("correction", {"kind": "rejection", "low": 2.0, "high": 1.0}, ["low is 2", "high, 1"]),
        ("correction", {"kind": "rejection", "kl_kind": "k3", "low": 0.0, "high": 1.0}, ["low", "kl_kind: k1"]),
        ("preference", {"kind": "dpo", "beta": 0.0}, ["preference.beta is 0.0"]),
        ("preference", {"kind": "dpo", "label_smoothing": 0.5}, ["preference.label_smoothing is 0.5"]),
        ("loss", {"kind": "my loss:f"}, ["loss.kind", "'my loss:f'"]),
    ],
)
def test_an_error_names_the_setting_the_choices_and_the_location(
    field: str, settings: Any, words: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(to_yaml(Group.model_validate(group())))
    with pytest.raises(ConfigError) as error:
        load(path, [f"{field}={settings}"], Group)
    message = str(error.value)
    assert message.startswith(f"{field}={settings}: ") and "\n" not in message
    assert all(word in message for word in words), message


def test_a_kl_gradient_of_a_custom_kl_is_rejected() -> None:
    with pytest.raises(ValidationError, match="kl_loss_gradient"):
        ActorConfig.model_validate(MODEL | {"kl_loss_kind": "m:f", "kl_loss_gradient": "k2"})


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"kl_loss_gradient": "k2"}, r"kl_loss_unbiased.*kl_loss_gradient is k2"),
        ({"kl_loss_kind": "k2"}, r"kl_loss_unbiased.*kl_loss_kind is k2"),
        ({"kl_loss_kind": "abs"}, r"kl_loss_unbiased.*kl_loss_kind is abs"),
    ],
)
def test_an_unbiased_kl_loss_that_would_be_biased_is_rejected(settings: dict[str, str], pattern: str) -> None:
    unbiased = MODEL | {"kl_loss_coef": 0.1, "kl_loss_unbiased": True}
    with pytest.raises(ValidationError, match=pattern):
        ActorConfig.model_validate(unbiased | settings)
    assert ActorConfig.model_validate(unbiased | {"kl_loss_kind": "k1"}).kl_loss_unbiased


@pytest.mark.parametrize("settings", [{"kl_loss_kind": "k1"}, {"kl_loss_gradient": "k1"}])
def test_a_kl_loss_without_an_expected_gradient_is_rejected(settings: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match=r"(?s)kl_loss_gradient.*k2"):
        ActorConfig.model_validate(MODEL | {"kl_loss_coef": 0.1} | settings)


def test_the_kl_loss_may_have_the_value_of_k1_with_the_gradient_of_k2() -> None:
    settings = MODEL | {"kl_loss_coef": 0.1, "kl_loss_kind": "k1", "kl_loss_gradient": "k2"}
    assert ActorConfig.model_validate(settings).kl_loss_gradient == "k2"


def test_unknown_names_are_rejected_without_torch() -> None:
    code = (
        "import sys\nfrom flowrl.config import AnyAdvantage, parse\n"
        "try: parse(AnyAdvantage, {'estimator': 'gea'})\nexcept ValueError as error: print('gae' in str(error))\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_a_file_is_imported_once_as_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "own code.py"
    file.write_text("value = []\n")
    monkeypatch.chdir(tmp_path)
    values = [import_attribute(name) for name in (f"{file}:value", "own code.py:value", "./own code.py:value")]
    assert values[0] is values[1] is values[2]
    assert sys.modules[imported_module_name(f"{file}:value")].value is values[0]
    assert imported_module_name("a.b:c") == "a.b"


def test_a_file_that_fails_is_imported_again(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    with rejects(file, error=ImportNameError):
        import_attribute(f"{file}:value")
    file.write_text("1 / 0")
    with rejects(file, "ZeroDivisionError", error=ImportNameError):
        import_attribute(f"{file}:value")
    file.write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        import_attribute(f"{file}:value")
    file.write_text("value = 1  # corrected")
    assert import_attribute(f"{file}:value") == 1


@pytest.mark.parametrize(
    "name", ["file.py", ".py:f", "folder/.py:f", "file.py:", "file.py:f.g", "a-b:f", "folder/file:f"]
)
def test_a_malformed_name_of_a_function_is_rejected(name: str) -> None:
    with pytest.raises(ImportNameError):
        check_import_name(name)


class Speaker(Protocol):
    @property
    def name(self) -> str: ...

    def speak(self, text: str, *, loudly: bool = False) -> None: ...


class Complete:
    name = "complete"

    def speak(self, text: str, **settings: bool) -> None: ...


class Quiet:
    def speak(self, text: str) -> None: ...


@pytest.mark.parametrize(
    ("cls", "missing"), [(Complete, []), (Quiet, ["name", "speak(loudly)"]), (object, ["name", "speak"])]
)
def test_missing_members_are_methods_properties_and_keyword_only_parameters(cls: type, missing: list[str]) -> None:
    assert missing_members(cls, [Speaker]) == missing
    assert missing_members(cls, [Speaker], with_properties=False) == [name for name in missing if name != "name"]
