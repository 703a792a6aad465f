"""The roles of a run that generate text: rollouts and judges."""

from collections.abc import Iterator
from typing import NamedTuple

from flowrl.config import JudgeConfig, ModelConfig, RolloutConfig, RunConfig, keys_of, models_of


class Generator(NamedTuple):
    """A rollout or a judge."""

    role: str
    key: str
    """Key of its settings in the config."""
    settings: RolloutConfig
    """Settings of its engine."""
    model: ModelConfig | None
    """Model with which it generates. None: the run has no actor."""
    model_key: str
    """Key of the settings of the model."""


def find_generators(config: RunConfig) -> Iterator[Generator]:
    """Yields the rollouts and judges of a run."""
    keys, actor = keys_of(config), models_of(config).get("actor")
    for role, value in config.role_settings.items():
        if isinstance(value, JudgeConfig):
            yield Generator(role, keys[role], value.generation, value.model, f"{keys[role]}.model")
        elif isinstance(value, RolloutConfig):
            yield Generator(role, keys[role], value, None if actor is None else actor.model, "actor.model")
