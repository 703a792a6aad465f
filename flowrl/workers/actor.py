"""Actor: the policy that is trained."""

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from flowrl.algorithms import aggregate, clipped_policy_loss, kl_estimate
from flowrl.config import ActorConfig
from flowrl.controller.register import Dispatch, register
from flowrl.controller.worker import Worker
from flowrl.data.metric import Mean, Metric
from flowrl.data.table import lengths, make_table
from flowrl.engines.microbatch import MicroBatch
from flowrl.engines.models import load_policy, save_model
from flowrl.engines.train import Denominators, TrainEngine
from flowrl.engines.weights import export_weights
from flowrl.workers.forward import policy_logprobs, policy_logprobs_and_entropy


class Actor(Worker):
    """A causal language model with an optimizer.

    Args:
        config: model, optimizer and loss.
        temperature: of the rollout; log-probabilities are those of the distribution that was sampled from.
    """

    collective = True

    def __init__(self, config: ActorConfig, *, temperature: float = 1.0) -> None:
        self.config, self.temperature = config, temperature
        self.model = load_policy(config.model)
        self.engine = TrainEngine(
            self.model,
            config.optimizer,
            config.engine,
            group=self.context.process_group,
            device=torch.device(self.device),
        )

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("input_ids",), writes=("logprobs",))
    def logprobs(self, batch: TensorDict) -> TensorDict:
        """Log-probability `[T]` of every token under the present weights."""
        values_T = self.engine.evaluate(batch, lambda model, micro: policy_logprobs(model, micro, self.temperature))
        return make_table(tokens={"logprobs": values_T}, lengths=lengths(batch))

    @register(
        Dispatch.DP_COMPUTE_METRIC,
        blocking=False,
        reads=("input_ids", "response_mask", "old_logprobs", "advantages", "ref_logprobs?"),
    )
    def update(self, batch: TensorDict) -> dict[str, Metric]:
        """One optimizer step on the clipped policy loss, with the configured entropy bonus and KL."""
        if self.config.kl_loss_coef and "ref_logprobs" not in batch["tokens"].keys():  # noqa: SIM118 (a TensorDict)
            raise ValueError(
                "kl_loss_coef is set, but the batch has no column 'ref_logprobs'; compute it before the update"
            )
        return self._named(self.engine.update(batch, self._policy_loss))

    @register(Dispatch.DP_COMPUTE_METRIC, blocking=False, reads=("input_ids", "response_mask"))
    def update_sft(self, batch: TensorDict) -> dict[str, Metric]:
        """One optimizer step of supervised fine-tuning: mean cross-entropy over the tokens of the response mask."""
        return self.engine.update(batch, _imitation_loss)

    @register(Dispatch.RANK_ZERO, blocking=False)
    def weights(self) -> dict[str, Any]:  # Any: NumPy arrays, see engines/weights.py
        """The present weights, for a rollout in another process."""
        return export_weights(self.model)

    @register(Dispatch.RANK_ZERO)
    def save(self, folder: Path) -> None:
        """Writes model and tokenizer as a `save_pretrained` folder."""
        save_model(self.model, self.config.model.path, folder)

    def _policy_loss(
        self, model: nn.Module, micro: MicroBatch, denominators: Denominators
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        config, mask_BL = self.config, micro.tokens["response_mask"]
        logprobs_BL, entropy_BL = policy_logprobs_and_entropy(
            model, micro, self.temperature, entropy_gradient=config.entropy_coef > 0
        )
        loss_BL, details = clipped_policy_loss(
            logprobs_BL,
            micro.tokens["old_logprobs"],
            micro.tokens["advantages"],
            mask_BL,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
        )
        per_token = {"loss": loss_BL, "entropy": entropy_BL} | details
        if config.entropy_coef:
            loss_BL = loss_BL - config.entropy_coef * entropy_BL
        if config.kl_loss_coef:
            kl_BL = kl_estimate(logprobs_BL, micro.tokens["ref_logprobs"], kind=config.kl_loss_kind)
            loss_BL = loss_BL + config.kl_loss_coef * kl_BL
            per_token["kl_loss"] = kl_BL
        loss = aggregate(
            loss_BL,
            mask_BL,
            mode=config.aggregation,
            denominator=denominators.tokens if config.aggregation == "token_mean" else denominators.rows,
            scale=config.aggregation_scale,
        )
        return loss, token_means(per_token, mask_BL)

    def _named(self, metrics: dict[str, Metric]) -> dict[str, Metric]:
        return {f"{self.context.role}/{name}": metric for name, metric in metrics.items()}


def _imitation_loss(
    model: nn.Module, micro: MicroBatch, denominators: Denominators
) -> tuple[torch.Tensor, dict[str, Metric]]:
    mask_BL = micro.tokens["response_mask"]
    loss_BL = -policy_logprobs(model, micro, temperature=1.0)
    loss = aggregate(loss_BL, mask_BL, mode="token_mean", denominator=denominators.tokens)
    return loss, token_means({"loss": loss_BL}, mask_BL)


def token_means(values: dict[str, torch.Tensor], mask_BL: torch.Tensor) -> dict[str, Metric]:
    """The mean of each `[B, L]` over the mask, as metrics that merge over micro-batches and ranks."""
    count = float(mask_BL.sum())
    return {
        name: Mean(float(value.detach().masked_fill(~mask_BL, 0).sum(dtype=torch.float64)), count)
        for name, value in values.items()
    }
