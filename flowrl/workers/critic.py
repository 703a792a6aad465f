"""Worker that trains the value model."""

from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from flowrl.config import CriticConfig
from flowrl.controller.worker import Dispatch, register
from flowrl.data.batch.tensordicts import lengths, make_tensordict
from flowrl.engines.models.loading import CriticModel, load_critic
from flowrl.engines.models.lora import add_adapter
from flowrl.engines.train.engine import TrainEngine, is_sharded
from flowrl.engines.train.microbatch import MicroBatch
from flowrl.workers.losses.configured_losses import value_loss
from flowrl.workers.losses.loss import Loss
from flowrl.workers.model_worker import TrainedWorker, build_rank_mesh

if TYPE_CHECKING:
    from flowrl.workers.groups import CriticGroup


class Critic(TrainedWorker["CriticGroup"]):
    """Worker that trains a value model: the backbone of a causal language model with a value head.

    A loss may read the computed input `values` [B, L], the value of the state before each token.
    """

    COMPUTED = ("values",)

    def __init__(self, config: CriticConfig) -> None:
        self.config = config
        mesh = build_rank_mesh(self, config.engine)
        parts = is_sharded(config.engine, mesh)
        self.model: CriticModel = load_critic(config.model, head=config.head, seed=config.head_seed, on_meta=parts)
        if config.lora is not None:
            add_adapter(self.model.backbone, config.lora)
            self.model.value_head.to(torch.promote_types(self.model.value_head.weight.dtype, torch.float32))
        self.engine = TrainEngine(
            self.model,
            config.optimizer,
            config.engine,
            mesh=mesh,
            device=torch.device(self.device),
        )

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("input_ids",), writes=("values",), balance="tokens")
    def values(self, batch: TensorDict) -> TensorDict:
        """Returns the value `[T]` of the state before each token. The value at position 0 is 0."""
        return make_tensordict(tokens={"values": self.engine.evaluate(batch, _values)}, lengths=lengths(batch))

    @classmethod
    def configured_loss(cls, config: CriticConfig) -> Loss:
        return value_loss(config)

    def compute_inputs(self, model: nn.Module, micro: MicroBatch, mask_BL: Tensor, loss: Loss) -> dict[str, Tensor]:
        return {"values": _values(model, micro).masked_fill(~mask_BL, 0)}


def _values(model: nn.Module, micro: MicroBatch) -> Tensor:
    return model(micro.input_ids, micro.pack)
