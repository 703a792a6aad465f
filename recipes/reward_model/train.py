"""Training of a reward model with a pairwise loss (Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, equation 1).

Usage: `python -m recipes.reward_model.train CONFIG [key=value ...]`
"""

import logging
import sys

from flowrl.cli import run_recipe
from flowrl.config import CheckFailed
from recipes.reward_model.config import RewardModelRunConfig

if __name__ == "__main__":  # here, because a wrong config is reported before the imports below, which take seconds
    sys.exit(run_recipe(RewardModelRunConfig, "recipes.reward_model.train:train"))

from flowrl.run.loop import Run, StartRun, Summary
from flowrl.run.preferences.preference_examples import PreferenceExamples
from flowrl.run.preferences.preference_inputs import evaluate_preferences
from flowrl.workers import TrainedRewardModel

_logger = logging.getLogger(__name__)


def train(config: RewardModelRunConfig, start: StartRun = Run) -> Summary:
    """Trains the reward model. Returns the summary of the run, with `accepted`, which is None without an evaluation.

    Raises CheckFailed if the model does not meet the criteria and `acceptance.on_failure` is `fail`.
    """
    examples, held_out = PreferenceExamples.read(config.data, config.reward)
    config = config.with_steps(len(examples))
    with start(config) as run:
        reward = run.group("reward", TrainedRewardModel, config.reward)
        run.add_checkpointable(reward)
        run.add_evaluation(held_out, lambda sets: evaluate_preferences(reward, sets))

        stream = examples.batches(config.batch_size, seed=config.seed, shuffle=config.data.order == "shuffle")
        for batch in run.batches(stream, policy=reward):
            # Raise the score of the chosen response above that of the rejected response. Then the run evaluates and
            # saves a checkpoint, if they are due.
            run.log(reward.update(batch))
        run.save_model(reward)
        summary = run.finish()

    if problem := config.acceptance.find_problem(summary):
        if config.acceptance.on_failure == "fail":
            raise CheckFailed(f"the reward model is not accepted: {problem}")
        _logger.warning("the reward model is not accepted: %s", problem)
    is_evaluated = summary.get("accuracy_after") is not None
    return summary | {"accepted": problem is None if is_evaluated else None}
