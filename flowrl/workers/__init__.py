"""Worker classes of the roles. Each class wraps an engine and declares the columns that its methods read and write.

Entry points: `Actor`, `Critic`, `EnvironmentWorker`, `Judge`, `Reference`, `Reward`, `RewardModel`, `Rollout` and
`TrainedRewardModel`. `Loss` describes a loss for the trained roles. `LANGUAGE_MODELING` is the loss of SFT, and `PTX`
is the same loss on text in a policy update. `groups.pyi` has the types of the groups, for type checkers and editors.
May import `flowrl.algorithms`, `flowrl.config`, `flowrl.controller`, `flowrl.data`, `flowrl.devices.device`,
`flowrl.engines`, `flowrl.environments`, `flowrl.rewards` and `flowrl.user_code.channel`.
"""

from flowrl.workers.actor import Actor
from flowrl.workers.critic import Critic
from flowrl.workers.environment import EnvironmentWorker
from flowrl.workers.judge import Judge
from flowrl.workers.losses.configured_losses import LANGUAGE_MODELING, PTX
from flowrl.workers.losses.loss import Loss
from flowrl.workers.reference import Reference
from flowrl.workers.reward import Reward, RewardModel
from flowrl.workers.reward_model import TrainedRewardModel
from flowrl.workers.rollout import Rollout

__all__ = [
    "LANGUAGE_MODELING",
    "PTX",
    "Actor",
    "Critic",
    "EnvironmentWorker",
    "Judge",
    "Loss",
    "Reference",
    "Reward",
    "RewardModel",
    "Rollout",
    "TrainedRewardModel",
]
