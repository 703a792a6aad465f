"""The program under test: the PPO recipe with the workers of workers.py.

Usage: `python -m tests.chaos.training CONFIG`
"""

import sys
from types import FunctionType

from flowrl.cli import run_recipe
from recipes.ppo.config import PPOConfig

if __name__ == "__main__":  # here, because the imports below take seconds
    sys.exit(run_recipe(PPOConfig, "tests.chaos.training:train"))

from flowrl.run import role_groups
from flowrl.run.loop import Summary
from recipes.ppo import train as recipe
from tests.chaos.workers import (
    TracedActor,
    TracedCritic,
    TracedEnvironment,
    TracedReference,
    TracedReward,
    TracedRollout,
)

REPLACED = {
    "Actor": TracedActor,
    "Critic": TracedCritic,
    "Reference": TracedReference,
    "Rollout": TracedRollout,
}
"""Name in the recipe -> its replacement."""

_train = FunctionType(recipe.train.__code__, vars(recipe) | REPLACED, argdefs=recipe.train.__defaults__)
"""A copy of the recipe's `train` that uses the traced workers. It does not modify the recipe's module."""


def train(config: PPOConfig) -> Summary:
    """Runs the recipe with the traced workers. The process of this program runs nothing else."""
    role_groups.Reward, role_groups.EnvironmentWorker = TracedReward, TracedEnvironment
    return _train(config)
