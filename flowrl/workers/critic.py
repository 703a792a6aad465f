"""Worker that trains the value model."""

import torch
from tensordict import TensorDict
from torch import nn

from flowrl.algorithms import aggregate, clipped_value_loss
from flowrl.config import CriticConfig
from flowrl.controller.worker import Dispatch, register
from flowrl.data.batch.tensordicts import lengths, make_tensordict
from flowrl.data.metric import Metric
from flowrl.engines.models.loading import load_critic
from flowrl.engines.models.lora import add_adapter
from flowrl.engines.train.engine import Denominators, TrainEngine, is_sharded
from flowrl.engines.train.microbatch import MicroBatch
from flowrl.workers.actor import token_means
from flowrl.workers.model_worker import TrainedWorker, build_rank_mesh


class Critic(TrainedWorker):
    """Worker that trains a value model: the backbone of a causal language model with a value head."""

    def __init__(self, config: CriticConfig) -> None:
        self.config = config
        mesh = build_rank_mesh(self, config.engine)
        parts = is_sharded(config.engine, mesh)
        model = load_critic(config.model, head=config.head, seed=config.head_seed, on_meta=parts)
        if config.lora is not None:
            add_adapter(model.backbone, config.lora)
            model.value_head.to(torch.promote_types(model.value_head.weight.dtype, torch.float32))
        self.engine = TrainEngine(
            model,
            config.optimizer,
            config.engine,
            mesh=mesh,
            device=torch.device(self.device),
        )

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("input_ids",), writes=("values",))
    def values(self, batch: TensorDict) -> TensorDict:
        """Returns the value `[T]` of the state before each token. The value at position 0 is 0."""
        return make_tensordict(tokens={"values": self.engine.evaluate(batch, _values)}, lengths=lengths(batch))

    @register(Dispatch.DP_COMPUTE_METRIC, blocking=False, reads=("input_ids", "response_mask", "values", "returns"))
    def update(self, batch: TensorDict) -> dict[str, Metric]:
        """Takes one optimizer step on the clipped value loss. Returns metrics."""
        metrics = self.engine.update(batch, self._value_loss)
        return {f"{self.context.role}/{name}": metric for name, metric in metrics.items()}

    def _value_loss(
        self, model: nn.Module, micro: MicroBatch, denominators: Denominators
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        mask_BL = micro.tokens["response_mask"]
        values_BL = _values(model, micro)
        loss_BL, clipped_BL = clipped_value_loss(
            values_BL, micro.tokens["values"], micro.tokens["returns"], mask_BL, clip=self.config.value_clip
        )
        loss = aggregate(loss_BL, mask_BL, mode="token_mean", denominator=denominators.tokens)
        return loss, token_means({"loss": loss_BL, "clip_fraction": clipped_BL}, mask_BL)


def _values(model: nn.Module, micro: MicroBatch) -> torch.Tensor:
    return model(micro.input_ids, micro.pack)
