"""Tests name lookup and signature checks of the registries."""

import ast
import functools
import inspect
import re
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from flowrl import algorithms
from flowrl.algorithms import clip_cov_loss, grpo
from flowrl.algorithms.registry import (
    REGISTRIES,
    Registry,
    RegistryError,
    advantage_estimators,
    aggregation_modes,
    distillation_losses,
    kl_controls,
    kl_kinds,
    policy_losses,
    preference_losses,
    reward_model_losses,
    reward_shaping,
    rollout_corrections,
)
from flowrl.config import (
    AdvantageConfig,
    AnyAdvantage,
    AnyCorrection,
    AnyDistillation,
    AnyKlControl,
    AnyPolicyLoss,
    AnyPreference,
    AnyRewardModelLoss,
    AnyShaping,
    PolicyLossConfig,
)
from flowrl.config.base import CUSTOM, Aggregation, KlKind, Member, members_of
from tests.algorithms.own_functions import half

ROOT = Path(__file__).parents[2]

OWN_MODULE = "tests.algorithms.own_functions"
DOCUMENT = Path(__file__).parents[2] / "docs/algorithms.md"


@pytest.mark.parametrize(("registry", "name"), [(r, n) for r in REGISTRIES for n in r.names])
def test_every_name_loads_a_function_that_matches_its_kind(registry: Registry, name: str) -> None:
    function = registry.load(name)
    registry._check_signature(function, name, registry.prepared(function))
    assert set(registry.required) <= set(registry.inputs(function))


UNIONS = {
    advantage_estimators: members_of(AnyAdvantage),
    policy_losses: members_of(AnyPolicyLoss),
    rollout_corrections: members_of(AnyCorrection),
    reward_shaping: members_of(AnyShaping),
    kl_controls: members_of(AnyKlControl),
    preference_losses: members_of(AnyPreference),
    reward_model_losses: members_of(AnyRewardModelLoss),
    distillation_losses: members_of(AnyDistillation),
}


@pytest.mark.parametrize(("registry", "members"), UNIONS.items())
def test_configs_have_the_names_of_the_registry(registry: Registry, members: dict[str, type[Member]]) -> None:
    assert set(members) - {CUSTOM} == set(registry._declared)


@pytest.mark.parametrize(("registry", "kind"), [(kl_kinds, KlKind), (aggregation_modes, Aggregation)])
def test_configs_take_the_modes_of_the_registry(registry: Registry, kind: type) -> None:
    check = kind.__metadata__[0].func  # pyright: ignore[reportAttributeAccessIssue] (typing.Annotated)
    assert [check(name) for name in registry.names] == list(registry.names)
    with pytest.raises(ValueError, match=re.escape(", ".join(registry.names))):
        check("neither")


def test_a_bound_name_is_the_function_with_its_setting() -> None:
    logprobs, reference = torch.tensor([[-1.0]]), torch.tensor([[-1.5]])
    assert kl_kinds.load("k1")(logprobs=logprobs, ref_logprobs=reference).item() == 0.5
    assert kl_kinds.load("k2")(logprobs=logprobs, ref_logprobs=reference).item() == 0.125


def test_a_kind_without_required_inputs_lists_optional_inputs() -> None:
    with pytest.raises(RegistryError, match=r"logits, mask; .*chosen_logprobs"):
        preference_losses.load(f"{OWN_MODULE}:wrong_inputs")


def test_only_functions_can_be_registered() -> None:
    for loss in (functools.partial(half, weight=0.1), WeightedLoss()):
        with pytest.raises(RegistryError, match=rf"mine .*{type(loss).__name__}"):
            policy_losses.register("mine")(loss)
    assert "mine" not in policy_losses.names


class WeightedLoss:
    """Callable object, which is not a valid loss."""

    def __call__(self, logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor) -> None: ...


def test_an_unknown_name_lists_available_names_and_the_nearest() -> None:
    with pytest.raises(RegistryError, match=r"'gsop'.*gspo.*kl_cov.* ppo, .*dppo_kl"):
        policy_losses.load("gsop")


def test_an_existing_name_is_rejected() -> None:
    with pytest.raises(RegistryError, match=r"\bppo\b"):
        policy_losses.register("ppo")(lambda logprobs, old_logprobs, advantages, mask: None)


def test_a_name_that_is_not_an_identifier_is_rejected() -> None:
    with pytest.raises(RegistryError, match="'my loss'"):
        policy_losses.register("my loss")


def test_a_mismatched_signature_is_rejected_by_the_decorator() -> None:
    def loss(logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        return logprobs * advantages

    with pytest.raises(RegistryError, match=r"my_loss .*old_logprobs, mask"):
        policy_losses.register("my_loss")(loss)
    assert "my_loss" not in policy_losses.names


def test_settings_that_are_not_keyword_only_are_rejected_if_the_inputs_are_known() -> None:
    def shaping(rewards: torch.Tensor, bar: float) -> torch.Tensor:
        return rewards

    with pytest.raises(RegistryError, match=r"mine .*\bbar\b.* \*"):
        reward_shaping.register("mine")(shaping)


def test_an_estimator_may_read_any_column_except_its_results() -> None:
    def by_length(scores: torch.Tensor, num_tools: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return scores

    def circular(returns: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return returns

    advantage_estimators._check_signature(by_length, "by_length")
    with pytest.raises(RegistryError, match=r"circular .*\breturns\b.*columns of the batch"):
        advantage_estimators._check_signature(circular, "circular")


def test_a_custom_function_is_loaded_by_its_module_and_by_its_registered_name() -> None:
    by_function = policy_losses.load(f"{OWN_MODULE}:half")
    assert policy_losses.load(f"{OWN_MODULE}:half_reinforce") is by_function
    assert policy_losses.load("half_reinforce") is by_function


def test_registering_a_function_twice_has_no_effect() -> None:
    half = policy_losses.load(f"{OWN_MODULE}:half")
    assert policy_losses.register("half_reinforce")(half) is half


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("no_such_module:f", "ModuleNotFoundError"),
        (f"{OWN_MODULE}:absent", "AttributeError"),
        (f"{OWN_MODULE}:NOT_A_FUNCTION", r"NOT_A_FUNCTION.* int"),
        (f"{OWN_MODULE}:half", r"advantages.* mask"),
        (f"{OWN_MODULE}:scaled", r"mask"),
    ],
)
def test_an_object_that_does_not_match_the_kind_is_rejected(name: str, pattern: str) -> None:
    with pytest.raises(RegistryError, match=pattern):
        advantage_estimators.check(name)


def test_settings_are_checked_against_the_signature() -> None:
    advantage_estimators.check(f"{OWN_MODULE}:sign", {"bar": 0.5})
    with pytest.raises(RegistryError, match="bar"):
        advantage_estimators.check(f"{OWN_MODULE}:sign")
    with pytest.raises(RegistryError, match=r"height.*\bbar\b"):
        advantage_estimators.check(f"{OWN_MODULE}:sign", {"bar": 0.5, "height": 1})
    with pytest.raises(RegistryError, match=r"bar is 'high', but .*number"):
        advantage_estimators.check(f"{OWN_MODULE}:sign", {"bar": "high"})


def test_the_settings_of_a_function_are_its_keyword_only_parameters() -> None:
    assert advantage_estimators.settings(grpo, normalize_std=False) == AdvantageConfig.select(
        "grpo", normalize_std=False
    )
    assert policy_losses.settings(clip_cov_loss, clip_low=0.1).arguments() == {
        "clip_low": 0.1, "clip_high": 0.2, "cov_fraction": 2e-4, "cov_low": 1.0, "cov_high": 5.0
    }  # fmt: skip
    assert policy_losses.settings(half, weight=0.1) == PolicyLossConfig.select(
        f"{OWN_MODULE}:half", options={"weight": 0.1}
    )
    with pytest.raises(ValidationError, match="eps"):
        advantage_estimators.settings(grpo, eps=0.1)  # a constant, which is not a setting


SECTIONS = {
    "## Advantage estimators": advantage_estimators,
    "## Policy losses": policy_losses,
    "## KL estimates": kl_kinds,
    "## Aggregations": aggregation_modes,
    "## Rollout corrections": rollout_corrections,
    "## Preference losses": preference_losses,
    "## Reward model losses": reward_model_losses,
    "## Distillation losses": distillation_losses,
    "## Reward shaping": reward_shaping,
    "## KL control": kl_controls,
}


def table_rows(section: str) -> list[list[str]]:
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]


@pytest.mark.parametrize("title", SECTIONS)
def test_the_document_has_only_names_of_the_registry(title: str) -> None:
    """docs/config.md, which is generated, has all names."""
    (section,) = (part for part in re.split(r"(?m)^(?=## )", DOCUMENT.read_text()) if part.startswith(title))
    named = [name for cells in table_rows(section) for name in re.findall(r"`(\w+)`", cells[4])]
    assert named and set(named) <= SECTIONS[title]._declared.keys()


def test_the_document_has_a_row_for_every_function() -> None:
    listed = {name for cells in table_rows(DOCUMENT.read_text()) for name in re.findall(r"`(\w+)`", cells[0])}
    functions = {name for name in algorithms.__all__ if inspect.isfunction(getattr(algorithms, name))}
    assert functions - listed == set()


def test_an_aggregation_must_accept_the_denominator():
    def mean(loss, mask):
        return loss.sum()

    with pytest.raises(RegistryError, match=r"my_mean .*\bdenominator"):
        aggregation_modes.register("my_mean")(mean)


def loaded_names(path: Path) -> set[str]:
    """Returns the names of the variables and attributes that a module reads, without imports and definitions."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def test_every_public_function_has_a_caller() -> None:
    files = [path for package in ("flowrl", "recipes") for path in (ROOT / package).rglob("*.py")]
    loaded = {path: loaded_names(path) for path in files if path.name != "__init__.py"}
    registered = {registry.load(name) for registry in REGISTRIES for name in registry.names}
    registered = {function.func if isinstance(function, functools.partial) else function for function in registered}
    functions = [getattr(algorithms, name) for name in algorithms.__all__]
    functions = [function for function in functions if inspect.isfunction(function) and function not in registered]
    unused = [
        function.__name__
        for function in functions
        if not any(
            function.__name__ in names
            for path, names in loaded.items()
            if path != Path(inspect.getsourcefile(function) or "")
        )
    ]
    assert unused == []
