"""Worker that trains a reward model on preferences."""

from typing import TYPE_CHECKING

from tensordict import TensorDict

from flowrl.config import RewardModelConfig
from flowrl.controller.worker import Dispatch, register
from flowrl.data.batch.tensordicts import make_tensordict
from flowrl.workers.losses.loss import Loss
from flowrl.workers.losses.preference_losses import reward_model_loss
from flowrl.workers.model_worker import TrainedWorker
from flowrl.workers.reward import SCORES

if TYPE_CHECKING:
    from flowrl.workers.groups import TrainedRewardModelGroup


class TrainedRewardModel(TrainedWorker["TrainedRewardModelGroup"]):
    """Worker that trains a reward model: a language model with a linear head that scores a row at its last token.

    A loss may read the computed input `scores` [B].
    """

    KIND, COMPUTED = "reward_model", ("scores",)

    config: RewardModelConfig

    def __init__(self, config: RewardModelConfig) -> None:
        super().__init__(config)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("input_ids",), writes=("scores",), balance="tokens")
    def scores(self, batch: TensorDict) -> TensorDict:
        """Returns the score of each row under the current weights, `[B]`."""
        return make_tensordict({"scores": self.engine.forward(batch, SCORES)["scores"]})

    @classmethod
    def configured_loss(cls, config: RewardModelConfig) -> Loss:
        return reward_model_loss(config)
