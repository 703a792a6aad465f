"""The declarations that the settings read from the source equal the imported functions."""

import copy
import inspect
import pickle
import re
import subprocess
import sys
import typing
from typing import Any

import pytest

from flowrl.algorithms import registry
from flowrl.algorithms.registry import Registry
from flowrl.config import AdvantageConfig, PolicyLossConfig, parse
from flowrl.config.algorithm import declarations
from flowrl.config.algorithm.declarations import REQUIRED, Declaration
from flowrl.config.algorithm.setting_types import is_constant
from flowrl.config.base import CUSTOM
from tests.algorithms.own_functions import half

DECLARED = {
    (each, name): declaration
    for each in registry.REGISTRIES
    if each._settings is not None
    for name, declaration in declarations.declarations(each._settings.REGISTRY).items()
}


def as_parameters(*names: str) -> list[Any]:
    return [pytest.param(*key, value, id=f"{key[0].kind} {key[1]}") for key, value in DECLARED.items()]


@pytest.mark.parametrize(("registry", "name", "declaration"), as_parameters())
def test_a_declaration_equals_the_function(registry: Registry[Any], name: str, declaration: Declaration) -> None:
    function = registry.load(name)
    place = registry._registered[name]
    assert (place.__module__, place.__qualname__) == (declaration.module, declaration.function)
    prepared = registry.prepared(function)
    inputs = registry.inputs(function)
    for each in prepared.values():
        inputs |= registry.inputs(each)
    parameters = registry.parameters(function)
    assert declaration.inputs == {n: v for n, v in inputs.items() if n not in (*prepared, *parameters)}
    hints = {n: hint for each in (place, *prepared.values()) for n, hint in annotations_of(each).items()}
    settings = {n: p for n, p in parameters.items() if not is_constant(hints[n])}
    defaults = {n: REQUIRED if p.default is p.empty else p.default for n, p in settings.items()}
    if name == "dppo_kl":  # the divergences have different units
        defaults |= {"delta_low": 0.05, "delta_high": 0.05}
    assert {n: setting.default for n, setting in declaration.settings.items()} == defaults
    assert {n: setting.annotation for n, setting in declaration.settings.items()} == {n: hints[n] for n in settings}


def annotations_of(function: Any) -> dict[str, Any]:
    """Returns the types of the keyword-only parameters."""
    hints = typing.get_type_hints(function, include_extras=True)
    return {n: hints[n] for n, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY}


@pytest.mark.parametrize(("registry", "name", "declaration"), as_parameters())
def test_a_declaration_describes_the_function_and_each_setting(
    registry: Registry[Any], name: str, declaration: Declaration
) -> None:
    assert re.fullmatch(r"[A-Z].*\.", declaration.meaning), declaration.meaning
    for setting, described in declaration.settings.items():
        assert re.match(r"[A-Z].*\.", described.description), setting


@pytest.mark.parametrize(("registry", "name", "declaration"), as_parameters())
def test_checks_are_those_of_the_function(registry: Registry[Any], name: str, declaration: Declaration) -> None:
    checks = registry._checks[registry._registered[name]]
    assert [check.__name__ for check in declaration.checks] == [check.__name__ for check in checks]
    known = {*declaration.settings, "shaping", "samples_per_prompt", "batch_size", "max_response_tokens"}
    for check in checks:
        assert set(inspect.signature(check).parameters) <= known


def test_a_function_in_a_new_file_is_declared_without_a_line_elsewhere() -> None:
    code = """
import pathlib, tempfile, shutil, sys
from flowrl.config.algorithm import declarations
folder = pathlib.Path(tempfile.mkdtemp()) / "algorithms"
shutil.copytree(declarations.FOLDER, folder)
declarations.FOLDER = folder
(folder / "losses/constant.py").write_text('''
@policy_losses.register("constant")
def constant_loss(logprobs, old_logprobs, advantages, mask, *, scale: PositiveFloat = 2.0):
    \"\"\"Returns the constant loss.

    Args:
        scale: Factor of the loss.
    \"\"\"
''')
from flowrl.config import AnyPolicyLoss, parse
loss = parse(AnyPolicyLoss, {"kind": "constant", "scale": 3.0})
print(loss.arguments(), type(loss).__doc__, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "{'scale': 3.0} Constant loss. False\n"


@pytest.mark.parametrize(
    "settings",
    [
        AdvantageConfig.select("rloo", kl_coef=0.1, shaping=[{"kind": "clip_rewards", "high": 1.0}]),
        PolicyLossConfig.select("kl_cov", cov_fraction=0.5),
        PolicyLossConfig.select("a.b:c", options={"weight": 1}),
    ],
)
def test_generated_settings_can_be_pickled_and_copied(settings: Any) -> None:
    assert pickle.loads(pickle.dumps(settings)) == settings == copy.deepcopy(settings)
    assert parse(type(settings), settings.model_dump()) == settings


def test_a_check_of_a_user_function_reads_its_options() -> None:
    def check(weight: float) -> None:
        if weight > 1:
            raise ValueError(f"weight is {weight:g}")

    registry.policy_losses._checks[half] = (check,)
    try:
        registry.policy_losses.check("tests.algorithms.own_functions:half", {"weight": 0.5})
        with pytest.raises(registry.RegistryError, match=r"half: weight is 2"):
            registry.policy_losses.check("tests.algorithms.own_functions:half", {"weight": 2})
    finally:
        registry.policy_losses._checks[half] = ()


def test_a_user_function_is_a_member_of_each_union() -> None:
    assert CUSTOM in AdvantageConfig.members() and CUSTOM in PolicyLossConfig.members()
