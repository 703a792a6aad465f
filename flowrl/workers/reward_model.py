"""Worker that trains a reward model on preferences."""

from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from flowrl.config import RewardModelConfig
from flowrl.controller.worker import Dispatch, register
from flowrl.data.batch.tensordicts import make_tensordict
from flowrl.engines.models.loading import RewardModel, load_reward_model
from flowrl.engines.models.lora import add_adapter
from flowrl.engines.train.engine import TrainEngine, is_sharded
from flowrl.engines.train.microbatch import MicroBatch
from flowrl.workers.losses.loss import Loss
from flowrl.workers.losses.preference_losses import reward_model_loss
from flowrl.workers.model_worker import TrainedWorker, build_rank_mesh
from flowrl.workers.reward import row_scores

if TYPE_CHECKING:
    from flowrl.workers.groups import TrainedRewardModelGroup


class TrainedRewardModel(TrainedWorker["TrainedRewardModelGroup"]):
    """Worker that trains a reward model: a language model with a linear head that scores a row at its last token.

    A loss may read the computed input `scores` [B].
    """

    COMPUTED = ("scores",)

    def __init__(self, config: RewardModelConfig) -> None:
        self.config = config
        mesh = build_rank_mesh(self, config.engine)
        self.model: RewardModel = load_reward_model(
            config.model, head=config.head, seed=config.head_seed, on_meta=is_sharded(config.engine, mesh)
        )
        if config.lora is not None:
            add_adapter(self.model.language_model, config.lora)
            self.model.head.to(torch.promote_types(self.model.head.weight.dtype, torch.float32))
        self.engine = TrainEngine(
            self.model, config.optimizer, config.engine, mesh=mesh, device=torch.device(self.device)
        )

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("input_ids",), writes=("scores",), balance="tokens")
    def scores(self, batch: TensorDict) -> TensorDict:
        """Returns the score of each row under the current weights, `[B]`."""
        return make_tensordict({"scores": self.engine.evaluate_rows(batch, row_scores)})

    @classmethod
    def configured_loss(cls, config: RewardModelConfig) -> Loss:
        return reward_model_loss(config)

    def compute_inputs(self, model: nn.Module, micro: MicroBatch, mask_BL: Tensor, loss: Loss) -> dict[str, Tensor]:
        return {"scores": row_scores(model, micro).masked_fill(~mask_BL.any(-1), 0)}
