"""Preference losses and pretraining text in YAML: every name with its defaults, and what does not belong refused."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from flowrl.algorithms.registry import preference_losses, ptx_forms
from flowrl.config import Config, ConfigError, PreferenceConfig, PtxConfig, RunConfig, load, to_yaml
from flowrl.config.algorithm.choice import OWN
from flowrl.config.algorithm.preference import PREFERENCE_LOSSES, PTX_FORMS
from flowrl.run.preflight import check_functions

OWN_MODULE = "tests.algorithms.own_functions"


class PairsConfig(RunConfig):
    """The config of a recipe of one's own."""

    preference: PreferenceConfig

    ptx: PtxConfig = PtxConfig(form="add", coef=0.5)


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str], PairsConfig]:
    def from_text(preference: str, ptx: str = "{form: mix, coef: 0.25}") -> PairsConfig:
        path = tmp_path / "pairs.yaml"
        path.write_text(f"output: runs/pairs\nsteps: 1\npreference: {preference}\nptx: {ptx}\n")
        return load(path, [], PairsConfig)

    return from_text


def test_a_loss_is_read_with_the_defaults_of_its_own(read: Callable[..., PairsConfig]) -> None:
    config = read("{loss: dpo, label_smoothing: 0.1}")
    assert config.preference.arguments() == {"beta": 0.1, "label_smoothing": 0.1}
    assert read("{loss: simpo}").preference.arguments() == {"beta": 2.0, "margin": 1.0}
    assert config.ptx.arguments() == {"coef": 0.25}


@pytest.mark.parametrize(
    ("preference", "ptx", "way_out"),
    [
        ("{loss: dpoo}", "{form: add, coef: 1}", r"'dpoo' is no preference loss; did you mean dpo\? There are log_sig"),
        ("{loss: ipo, label_smoothing: 0.1}", "{form: add, coef: 1}", "label_smoothing belongs to loss dpo and does"),
        (
            "{loss: dpo, label_smoothing: 0.5}",
            "{form: add, coef: 1}",
            r"preference\.label_smoothing is 0\.5.* less than",
        ),
        ("{loss: kto, options: {a: 1}}", "{form: add, coef: 1}", "options belongs to loss module:function"),
        ("{loss: dpo}", "{form: ad, coef: 1}", r"'ad' is no ptx form; did you mean add\? There are add, mix"),
        ("{loss: dpo}", "{form: add}", "coef is missing: form add needs it"),
        ("{loss: dpo}", "{form: mix, coef: 1.5}", r"coef is 1\.5, but form mix needs one in \[0, 1\]"),
    ],
)
def test_what_does_not_belong_is_refused(
    preference: str, ptx: str, way_out: str, read: Callable[..., PairsConfig]
) -> None:
    with pytest.raises(ConfigError, match=way_out):
        read(preference, ptx)


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        *[(PreferenceConfig, {"loss": name}) for name in PREFERENCE_LOSSES if name != OWN],
        *[(PtxConfig, {"form": name, "coef": 1.0}) for name in PTX_FORMS if name != OWN],
        (PreferenceConfig, {"loss": "a.b:c", "options": {"bar": 0.5}}),
    ],
)
def test_every_choice_is_read_back_from_its_yaml(cls: type[Config], settings: dict[str, Any], tmp_path: Path) -> None:
    config = cls.model_validate(settings)
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    assert load(tmp_path / "c.yaml", [], cls) == config


# One pair: the policy says -1 and -3, the reference -2 and -2. One answer: -1 against -2, desirable, z = 0.
COLUMNS = {
    "chosen_logprobs": torch.tensor([-1.0]),
    "rejected_logprobs": torch.tensor([-3.0]),
    "ref_chosen_logprobs": torch.tensor([-2.0]),
    "ref_rejected_logprobs": torch.tensor([-2.0]),
    "chosen_scores": torch.tensor([1.0]),
    "rejected_scores": torch.tensor([0.0]),
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
    "dpo": softplus(-0.1 * 2),
    "dpo_hinge": 1 - 0.1 * 2,
    "ipo": (2 - 1 / 0.2) ** 2,
    "simpo": softplus(-(2 * (-1 + 3) - 1)),
    "orpo": 1 + 0.1 * softplus(-(log_odds(-1) - log_odds(-3))),
    "kto": 1 / (1 + math.exp(0.1)),
}


@pytest.mark.parametrize("name", preference_losses.names)
def test_every_loss_takes_its_columns_and_its_defaults(name: str) -> None:
    function = preference_losses.load(name)
    columns = {column: COLUMNS[column] for column in preference_losses.inputs(function)}
    loss, metrics = function(**columns, **PreferenceConfig(loss=name).arguments())
    assert loss.tolist() == pytest.approx([EXPECTED[name]], abs=1e-5)
    assert metrics["accuracy"].tolist() == [1.0]


@pytest.mark.parametrize(("form", "expected"), [("add", 3.0 + 0.25 * 4), ("mix", 0.75 * 3 + 0.25 * 4)])
def test_every_form_mixes_two_losses(form: str, expected: float) -> None:
    mixed = ptx_forms.load(form)(torch.tensor(3.0), torch.tensor(4.0), **PtxConfig(form=form, coef=0.25).arguments())
    assert mixed.item() == expected


def test_functions_of_ones_own_are_checked_before_anything_starts(read: Callable[..., PairsConfig]) -> None:
    loss, form = f"loss: '{OWN_MODULE}:gap'", f"form: '{OWN_MODULE}:weighed'"
    check_functions(read(f"{{{loss}, options: {{margin: 1.0}}}}", f"{{{form}, options: {{share: 0.5}}}}"))
    with pytest.raises(ConfigError, match=r"preference\.loss: .*needs the setting margin"):
        check_functions(read(f"{{{loss}}}"))
    with pytest.raises(ConfigError, match=r"ptx\.form: .*has no setting part; it has share"):
        check_functions(read("{loss: dpo}", f"{{{form}, options: {{part: 1}}}}"))


def test_a_coefficient_out_of_range_is_refused() -> None:
    with pytest.raises(ValidationError, match="greater than 0"):
        PreferenceConfig(loss="dpo", beta=0.0)
