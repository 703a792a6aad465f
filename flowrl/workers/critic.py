"""Worker that trains the value model."""

from typing import TYPE_CHECKING

from tensordict import TensorDict

from flowrl.config import CriticConfig
from flowrl.controller.worker import Dispatch, register
from flowrl.data.batch.tensordicts import lengths, make_tensordict
from flowrl.engines.train.base import Outputs
from flowrl.workers.losses.configured_losses import value_loss
from flowrl.workers.losses.loss import Loss
from flowrl.workers.model_worker import TrainedWorker

if TYPE_CHECKING:
    from flowrl.workers.groups import CriticGroup


_VALUES = Outputs(("values",))


class Critic(TrainedWorker["CriticGroup"]):
    """Worker that trains a value model: the backbone of a causal language model with a value head.

    A loss may read the computed input `values` [B, L], the value of the state before each token.
    """

    KIND, COMPUTED = "critic", ("values",)

    config: CriticConfig

    def __init__(self, config: CriticConfig) -> None:
        super().__init__(config)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("input_ids",), writes=("values",), balance="tokens")
    def values(self, batch: TensorDict) -> TensorDict:
        """Returns the value `[T]` of the state before each token. The value at position 0 is 0."""
        values_T = self.engine.forward(batch, _VALUES)["values"]
        return make_tensordict(tokens={"values": values_T}, lengths=lengths(batch))

    @classmethod
    def configured_loss(cls, config: CriticConfig) -> Loss:
        return value_loss(config)
