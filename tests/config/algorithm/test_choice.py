"""Settings follow their choice: defaults of its own, and nothing that belongs to another."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flowrl.config import ActorConfig, AdvantageConfig, Config, CorrectionConfig, load, to_yaml
from flowrl.config.algorithm.advantage import CORRECTIONS, ESTIMATORS
from flowrl.config.algorithm.choice import OWN
from flowrl.config.roles import LOSSES

TRAINED: dict[str, Any] = {"model": {"path": "model"}, "optimizer": {"lr": 1e-4}}


def actor(**settings: Any) -> ActorConfig:
    return ActorConfig.model_validate(TRAINED | settings)


def test_defaults_are_those_of_the_choice() -> None:
    assert actor().settings() == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    assert actor(loss="gspo").settings() == {"clip_low": 3e-4, "clip_high": 4e-4}
    assert AdvantageConfig(estimator="grpo").normalize_std is True
    assert AdvantageConfig(estimator="gpg").normalize_std is False
    assert CorrectionConfig(kind="masked").max_weight == 2.0


def test_what_is_given_stays() -> None:
    assert actor(loss="gspo", clip_high=0.01).settings() == {"clip_low": 3e-4, "clip_high": 0.01}


@pytest.mark.parametrize(
    ("cls", "settings", "way_out"),
    [
        (
            ActorConfig,
            TRAINED | {"loss": "reinforce", "clip_low": 0.1},
            "clip_low belongs to loss ppo, .*gspo.*remove it",
        ),
        (ActorConfig, TRAINED | {"loss": "cispo", "dual_clip": 3.0}, "dual_clip belongs to loss ppo, decoupled_ppo"),
        (ActorConfig, TRAINED | {"loss": "gsop"}, r"'gsop' is no policy loss; did you mean gspo\? There are ppo, "),
        (ActorConfig, TRAINED | {"loss": "my loss:f"}, "not of the form module:name"),
        (ActorConfig, TRAINED | {"loss_options": {"a": 1}}, "loss_options belongs to loss module:function"),
        (ActorConfig, TRAINED | {"loss": "clip_cov", "cov_low": 6.0}, "cov_low is 6, above cov_high, 5"),
        (ActorConfig, TRAINED | {"kl_loss_kind": "m:f", "kl_loss_gradient": "k2"}, "kl_loss_gradient does nothing"),
        (AdvantageConfig, {"estimator": "grpo", "kl_coef": 0.1}, "kl_coef belongs to estimator gae, rloo"),
        (AdvantageConfig, {"estimator": "rlo"}, "'rlo' is no estimator; did you mean rloo"),
        (AdvantageConfig, {"estimator": "pass_at_k", "k": 1}, "greater than or equal to 2"),
        (AdvantageConfig, {"estimator": "gdpo", "reward_weights": [1.0, 2.0]}, "2 numbers for 1 reward_columns"),
        (CorrectionConfig, {"kind": "rejection"}, "high is missing: kind rejection needs it"),
        (CorrectionConfig, {"kind": "truncated", "high": 1.0}, "high belongs to kind rejection"),
        (CorrectionConfig, {"kind": "masked", "min_weight": 3.0}, "min_weight is 3, above max_weight, 2"),
        (CorrectionConfig, {"kind": "rejection", "low": 2.0, "high": 1.0}, "low is 2, above high, 1"),
        (CorrectionConfig, {"kind": "rejection", "kl_kind": "k3", "low": 0.0, "high": 1.0}, "low bounds k1 alone, k3"),
    ],
)
def test_what_does_not_belong_is_refused(cls: type[Config], settings: dict[str, Any], way_out: str) -> None:
    with pytest.raises(ValidationError, match=way_out):
        cls.model_validate(settings)


CHOICES = [
    *[(AdvantageConfig, {"estimator": name}) for name in ESTIMATORS if name != OWN],
    *[(ActorConfig, TRAINED | {"loss": name}) for name in LOSSES if name != OWN],
    *[(CorrectionConfig, {"kind": name, "high": 1.0}) for name in CORRECTIONS if name == "rejection"],
    (AdvantageConfig, {"estimator": "a.b:c", "options": {"bar": 0.5}}),
    (AdvantageConfig, {"estimator": "rloo", "correction": {"kind": "truncated"}}),
]


@pytest.mark.parametrize(("cls", "settings"), CHOICES)
def test_every_choice_is_read_back_from_its_yaml(cls: type[Config], settings: dict[str, Any], tmp_path: Path) -> None:
    config = cls.model_validate(settings)
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    assert load(tmp_path / "c.yaml", [], cls) == config


def test_an_unknown_name_is_refused_without_torch() -> None:
    code = (
        "import sys\nfrom flowrl.config import AdvantageConfig\n"
        "try: AdvantageConfig(estimator='gea')\nexcept ValueError as error: print('did you mean gae' in str(error))\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
