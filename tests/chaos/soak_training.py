"""The program of soak.py: the GRPO recipe with the workers of workers.py.

Usage: `python -m tests.chaos.soak_training CONFIG`
"""

import sys
from types import FunctionType

from flowrl.cli import run_recipe
from recipes.grpo.config import GRPOConfig

if __name__ == "__main__":  # here, because the imports below take seconds
    sys.exit(run_recipe(GRPOConfig, "tests.chaos.soak_training:train"))

from flowrl.run import role_groups
from flowrl.run.loop import Summary
from recipes.grpo import train as recipe
from tests.chaos.workers import TracedActor, TracedEnvironment, TracedReward, TracedRollout

_train = FunctionType(
    recipe.train.__code__,
    vars(recipe) | {"Actor": TracedActor, "Rollout": TracedRollout},
    argdefs=recipe.train.__defaults__,
)
"""A copy of the recipe's `train` that uses the traced workers. It does not modify the recipe's module."""


def train(config: GRPOConfig) -> Summary:
    """Runs the recipe with the traced workers. The process of this program runs nothing else."""
    role_groups.Reward, role_groups.EnvironmentWorker = TracedReward, TracedEnvironment
    return _train(config)
