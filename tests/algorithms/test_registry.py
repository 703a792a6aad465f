"""Names lead to functions; what fits no kind, or no name, is told in one sentence."""

import functools
import inspect
import re
from pathlib import Path

import pytest
import torch

from flowrl import algorithms
from flowrl.algorithms.registry import (
    REGISTRIES,
    Registry,
    RegistryError,
    advantage_estimators,
    aggregation_modes,
    kl_controls,
    kl_kinds,
    policy_losses,
    preference_losses,
    ptx_forms,
    reward_shaping,
    rollout_corrections,
)
from flowrl.config.algorithm.advantage import CORRECTIONS, ESTIMATORS
from flowrl.config.algorithm.choice import OWN, Aggregation, KlKind
from flowrl.config.algorithm.preference import PREFERENCE_LOSSES, PTX_FORMS
from flowrl.config.algorithm.shaping import KL_CONTROLS, SHAPINGS
from flowrl.config.roles import LOSSES
from tests.algorithms.own_functions import half

OWN_MODULE = "tests.algorithms.own_functions"
DOCUMENT = Path(__file__).parents[2] / "docs/algorithms.md"


@pytest.mark.parametrize(("registry", "name"), [(r, n) for r in REGISTRIES for n in r.names])
def test_every_name_leads_to_a_function_that_fits_its_kind(registry: Registry, name: str) -> None:
    function = registry.load(name)
    registry._check_signature(function, name)
    assert set(registry.required) <= set(registry.inputs(function))


@pytest.mark.parametrize(
    ("registry", "choices"),
    [
        (advantage_estimators, ESTIMATORS),
        (policy_losses, LOSSES),
        (rollout_corrections, CORRECTIONS),
        (reward_shaping, SHAPINGS),
        (kl_controls, KL_CONTROLS),
        (preference_losses, PREFERENCE_LOSSES),
        (ptx_forms, PTX_FORMS),
    ],
)
def test_configs_know_the_names_of_the_registry(registry: Registry, choices: dict) -> None:
    shipped = {name for name in registry.names if name != "half_reinforce"}
    assert set(choices) - {OWN} == shipped


@pytest.mark.parametrize(("registry", "kind"), [(kl_kinds, KlKind), (aggregation_modes, Aggregation)])
def test_configs_take_the_modes_of_the_registry(registry: Registry, kind: type) -> None:
    check = kind.__metadata__[0].func  # pyright: ignore[reportAttributeAccessIssue] (typing.Annotated)
    assert [check(name) for name in registry.names] == list(registry.names)
    with pytest.raises(ValueError, match=re.escape(f"; there are {', '.join(registry.names)}, and")):
        check("neither")


@pytest.mark.parametrize("choices", [ESTIMATORS, LOSSES])
def test_every_setting_of_a_choice_is_one_of_its_function(choices: dict) -> None:
    registry = advantage_estimators if choices is ESTIMATORS else policy_losses
    adapted = {"kl_coef", "kl_kind", "kl_control", "whiten", "reward_columns", "cov_fraction", "cov_low", "cov_high"}
    names = {"reward_weights": "weights", "cov_kl_coef": "kl_coef", "cov_kl_kind": "kl_kind"}
    for name, settings in choices.items():
        if name != OWN:
            taken = registry.settings(registry.load(name))
            assert {names.get(s, s) for s in settings if s not in adapted} <= set(taken)


@pytest.mark.parametrize(
    ("registry", "choices"),
    [
        (reward_shaping, SHAPINGS),
        (kl_controls, KL_CONTROLS),
        (preference_losses, PREFERENCE_LOSSES),
        (ptx_forms, PTX_FORMS),
    ],
)
def test_the_settings_of_a_choice_are_keywords_of_its_function(registry: Registry, choices: dict) -> None:
    for name, settings in choices.items():
        if name != OWN:
            registry.check(name, settings)


def test_a_bound_name_is_the_function_with_its_setting() -> None:
    logprobs, reference = torch.tensor([[-1.0]]), torch.tensor([[-1.5]])
    assert kl_kinds.load("k1")(logprobs=logprobs, ref_logprobs=reference).item() == 0.5
    assert kl_kinds.load("k2")(logprobs=logprobs, ref_logprobs=reference).item() == 0.125


def test_a_kind_without_required_inputs_names_those_that_there_are() -> None:
    with pytest.raises(RegistryError, match="takes logits, mask: its inputs are as it needs chosen_logprobs, "):
        preference_losses.load(f"{OWN_MODULE}:wrong_inputs")


def test_what_is_no_function_cannot_be_registered() -> None:
    for loss in (functools.partial(half, weight=0.1), WeightedLoss()):
        with pytest.raises(
            RegistryError, match=rf"^mine is a {type(loss).__name__}, and a policy loss must be .* with def$"
        ):
            policy_losses.register("mine")(loss)
    assert "mine" not in policy_losses.names


class WeightedLoss:
    """A loss that is an object."""

    def __call__(self, logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor) -> None: ...


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(RegistryError, match=r"'gsop' is no policy loss; did you mean gspo\? There are ppo, .*kl_cov"):
        policy_losses.load("gsop")


def test_a_taken_name_is_refused() -> None:
    with pytest.raises(RegistryError, match="ppo is the name of another policy loss"):
        policy_losses.register("ppo")(lambda logprobs, old_logprobs, advantages, mask: None)


def test_a_name_that_is_no_word_is_refused() -> None:
    with pytest.raises(RegistryError, match="'my loss' cannot name a policy loss"):
        policy_losses.register("my loss")


def test_a_signature_that_does_not_fit_is_refused_where_the_function_is_decorated() -> None:
    def loss(logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        return logprobs * advantages

    with pytest.raises(RegistryError, match="does not take old_logprobs, mask: its inputs are logprobs, old_logprobs"):
        policy_losses.register("my_loss")(loss)
    assert "my_loss" not in policy_losses.names


def test_settings_that_are_not_keyword_only_are_refused() -> None:
    def estimator(scores: torch.Tensor, mask: torch.Tensor, bar: float) -> torch.Tensor:
        return scores

    with pytest.raises(RegistryError, match=r"takes bar: .*settings come after a \*"):
        advantage_estimators.register("mine")(estimator)


def test_a_function_of_ones_own_is_found_by_its_module_and_by_its_registered_name() -> None:
    by_function = policy_losses.load(f"{OWN_MODULE}:half")
    assert policy_losses.load(f"{OWN_MODULE}:half_reinforce") is by_function
    assert policy_losses.load("half_reinforce") is by_function


def test_registering_a_function_again_is_no_second_function() -> None:
    half = policy_losses.load(f"{OWN_MODULE}:half")
    assert policy_losses.register("half_reinforce")(half) is half


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module:f", "cannot be loaded .*No module named 'no_such_module'"),
        (f"{OWN_MODULE}:absent", "cannot be loaded .*absent"),
        (f"{OWN_MODULE}:NOT_A_FUNCTION", "is a int, not a function"),
        (f"{OWN_MODULE}:wrong_inputs", "takes logits: its inputs are mask"),
    ],
)
def test_what_is_no_function_of_the_kind_is_refused(name: str, reason: str) -> None:
    with pytest.raises(RegistryError, match=reason):
        advantage_estimators.check(name)


def test_settings_are_held_against_the_signature() -> None:
    advantage_estimators.check(f"{OWN_MODULE}:sign", {"bar": 0.5})
    with pytest.raises(RegistryError, match="needs the setting bar"):
        advantage_estimators.check(f"{OWN_MODULE}:sign")
    with pytest.raises(RegistryError, match="has no setting height; it has bar"):
        advantage_estimators.check(f"{OWN_MODULE}:sign", {"bar": 0.5, "height": 1})


SECTIONS = {
    "## Advantage estimators": advantage_estimators,
    "## Policy losses": policy_losses,
    "## KL estimates": kl_kinds,
    "## Aggregations": aggregation_modes,
    "## Rollout corrections": rollout_corrections,
    "## Preference losses": preference_losses,
    "## Reward shaping": reward_shaping,
    "## KL control": kl_controls,
    "## Pretraining text": ptx_forms,
}


def table_rows(section: str) -> list[list[str]]:
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]


@pytest.mark.parametrize("title", SECTIONS)
def test_the_document_has_the_names_of_each_registry(title: str) -> None:
    (section,) = (part for part in re.split(r"(?m)^(?=## )", DOCUMENT.read_text()) if part.startswith(title))
    named = [name for cells in table_rows(section) for name in re.findall(r"`(\w+)`", cells[4])]
    assert sorted(named) == sorted(name for name in SECTIONS[title].names if name != "half_reinforce")


def test_the_document_has_a_row_for_every_function() -> None:
    listed = {name for cells in table_rows(DOCUMENT.read_text()) for name in re.findall(r"`(\w+)`", cells[0])}
    functions = {name for name in algorithms.__all__ if inspect.isfunction(getattr(algorithms, name))}
    assert functions - listed == set()


def test_an_aggregation_takes_the_denominator_of_its_step():
    def mean(loss, mask):
        return loss.sum()

    with pytest.raises(RegistryError, match=r"aggregation .*mean does not take denominator: add it after a \*"):
        aggregation_modes.register("my_mean")(mean)
