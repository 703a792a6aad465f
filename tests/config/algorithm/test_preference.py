"""Preference losses: the settings in YAML select a function and are its keyword arguments."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.algorithms.registry import Registry, preference_losses, reward_model_losses
from flowrl.config import (
    AnyPreference,
    AnyRewardModelLoss,
    ConfigError,
    PreferenceActorConfig,
    RewardModelConfig,
    RunConfig,
    load,
    parse,
)
from flowrl.run.checks.config_checks import check_functions

CUSTOM_MODULE = "tests.algorithms.own_functions"


class PairsConfig(RunConfig):
    """The config of a user's recipe."""

    preference: AnyPreference


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str], PairsConfig]:
    def from_text(preference: str) -> PairsConfig:
        path = tmp_path / "pairs.yaml"
        path.write_text(f"output: runs/pairs\nsteps: 1\npreference: {preference}\n")
        return load(path, [], PairsConfig)

    return from_text


def test_a_loss_is_read_with_the_defaults_of_its_own(read: Callable[..., PairsConfig]) -> None:
    config = read("{kind: dpo, label_smoothing: 0.1}")
    assert config.preference.arguments() == {"beta": 0.1, "label_smoothing": 0.1}
    assert read("{kind: simpo}").preference.arguments() == {"beta": 2.0, "margin": 1.0}


# One pair: log-probabilities -1 and -3 of the policy, -2 and -2 of the reference.
# One response: -1 and -2, desirable, z = 0.
COLUMNS = {
    "chosen_logprobs": torch.tensor([-1.0]),
    "rejected_logprobs": torch.tensor([-3.0]),
    "chosen_mean_logprobs": torch.tensor([-1.0]),
    "rejected_mean_logprobs": torch.tensor([-3.0]),
    "ref_chosen_logprobs": torch.tensor([-2.0]),
    "ref_rejected_logprobs": torch.tensor([-2.0]),
    "chosen_lengths": torch.tensor([2]),
    "chosen_scores": torch.tensor([1.0]),
    "rejected_scores": torch.tensor([0.0]),
    "margins": torch.tensor([0.0]),
    "logprobs": torch.tensor([-1.0]),
    "ref_logprobs": torch.tensor([-2.0]),
    "desirable": torch.tensor([True]),
    "reference_kl": torch.tensor(0.0),
}


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def log_odds(logprob: float) -> float:
    return logprob - math.log(1 - math.exp(logprob))


EXPECTED = {
    "log_sig": softplus(-1),
    "log_exp": softplus(-1),
    "cpo": softplus(-0.1 * 2) + 1 / 2,
    "dpo": softplus(-0.1 * 2),
    "dpo_hinge": 1 - 0.1 * 2,
    "ipo": (2 - 1 / 0.2) ** 2,
    "simpo": softplus(-(2 * (-1 + 3) - 1)),
    "orpo": 1 + 0.1 * softplus(-(log_odds(-1) - log_odds(-3))),
    "kto": 1 / (1 + math.exp(0.1)),
}


KINDS = [(preference_losses, AnyPreference), (reward_model_losses, AnyRewardModelLoss)]


@pytest.mark.parametrize(("registry", "union", "name"), [(r, u, name) for r, u in KINDS for name in r.names])
def test_every_loss_takes_its_columns_and_its_defaults(registry: Registry, union: Any, name: str) -> None:
    function = registry.load(name)
    columns = {column: COLUMNS[column] for column in registry.inputs(function)}
    loss, metrics = function(**columns, **parse(union, name).arguments())
    assert loss.tolist() == pytest.approx([EXPECTED[name]], abs=1e-5)
    assert metrics["accuracy"].tolist() == [1.0]


def test_custom_functions_are_checked_before_the_run_starts(read: Callable[..., PairsConfig]) -> None:
    loss = f"kind: '{CUSTOM_MODULE}:gap'"
    check_functions(read(f"{{{loss}, options: {{margin: 1.0}}}}"))
    with pytest.raises(ConfigError, match=r"preference: .*\bmargin\b"):
        check_functions(read(f"{{{loss}}}"))


class PreferenceRunConfig(RunConfig):
    """The config of a recipe with both roles that are trained on preferences."""

    actor: PreferenceActorConfig

    reward: RewardModelConfig


def test_functions_of_the_roles_are_checked_before_the_run_starts(tmp_path: Path) -> None:
    trained = {"model": {"path": "model"}, "optimizer": {"lr": 1e-3}}
    settings = {"output": tmp_path / "run", "steps": 1, "actor": trained, "reward": trained}
    config = PreferenceRunConfig.model_validate(settings)
    assert (config.actor.loss.kind, config.reward.loss.kind) == ("dpo", "log_sig")
    check_functions(config)
    for role in ("actor", "reward"):
        loss = {"loss": f"{CUSTOM_MODULE}:wrong_inputs"}
        with pytest.raises(ConfigError, match=rf"{role}\.loss: .*logits"):
            check_functions(PreferenceRunConfig.model_validate(settings | {role: trained | loss}))


def test_the_inputs_of_a_loss_state_the_data_that_it_reads() -> None:
    members = {name: parse(AnyPreference, name) for name in preference_losses.names}
    assert [name for name, member in members.items() if not member.is_paired] == ["kto"]
    for name, member in members.items():
        inputs = preference_losses.inputs(preference_losses.load(name))
        assert any(column.startswith("ref_") for column in inputs) == member.needs_reference, name
    custom = parse(AnyPreference, f"{CUSTOM_MODULE}:gap")
    assert custom.is_paired and custom.needs_reference is None
