"""Actor: the policy that is trained."""

from collections.abc import Container
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from flowrl.algorithms import aggregate, kl_loss, masked_range
from flowrl.algorithms.registry import aggregation_modes, kl_kinds, policy_losses
from flowrl.config import ActorConfig, ModelConfig, UserError
from flowrl.controller.worker import Dispatch, Worker, register
from flowrl.data.batch.tensordicts import lengths, make_tensordict
from flowrl.data.metric import Max, Mean, Metric, Min
from flowrl.data.returned_values import loss_and_metrics, per_token, scalar
from flowrl.engines.checkpoint.export import DESCRIPTION, describe_adapter
from flowrl.engines.models.loading import describe_model, load_policy, save_model
from flowrl.engines.models.lora import add_adapter
from flowrl.engines.train.engine import Denominators, TrainEngine, is_sharded
from flowrl.engines.train.microbatch import MicroBatch
from flowrl.workers.policy_model import PolicyModel, policy_logprobs
from flowrl.workers.role_mesh import mesh_of
from flowrl.workers.weight_sender import Sender


class Actor(Sender):
    """A causal language model with an optimizer.

    Args:
        config: model, optimizer and loss.
        temperature: of the rollout; log-probabilities are those of the distribution that was sampled from.
    """

    def __init__(self, config: ActorConfig, *, temperature: float = 1.0) -> None:
        self.config, self.temperature = config, temperature
        self._loss = policy_losses.load(config.loss)
        mesh = mesh_of(self, config.engine)
        self.model = load_policy(config.model, on_meta=is_sharded(config.engine, mesh))
        if config.lora is not None:
            add_adapter(self.model, config.lora)
        self.engine = TrainEngine(
            PolicyModel(self.model),
            config.optimizer,
            config.engine,
            mesh=mesh,
            device=torch.device(self.device),
        )
        self._described: dict[str, bytes] = {}

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("input_ids",), writes=("logprobs",))
    def logprobs(self, batch: TensorDict) -> TensorDict:
        """Log-probability `[T]` of every token under the present weights."""
        values_T = self.engine.evaluate(batch, partial(policy_logprobs, temperature=self.temperature))
        return make_tensordict(tokens={"logprobs": values_T}, lengths=lengths(batch))

    @register(
        Dispatch.DP_COMPUTE_METRIC,
        blocking=False,
        reads=(
            "input_ids",
            "response_mask",
            "old_logprobs",
            "advantages",
            "ref_logprobs?",
            "behavior_logprobs?",
            "selected?",
            "loss_weights?",
            "loss_mask?",
        ),
    )
    def update(self, batch: TensorDict) -> dict[str, Metric]:
        """One optimizer step on the configured policy loss, with entropy bonus and KL.

        A batch that was corrected has `loss_weights`, by which the policy loss is multiplied, and `loss_mask`, the
        tokens that the step is over instead of the response mask.
        """
        self._check_columns(batch)
        mask_column = "loss_mask" if "loss_mask" in batch["tokens"].keys() else "response_mask"  # noqa: SIM118 (a TensorDict)

        def loss(
            model: nn.Module, micro: MicroBatch, denominators: Denominators
        ) -> tuple[torch.Tensor, dict[str, Metric]]:
            return self._policy_loss(model, micro, denominators, mask_column)

        return self._named(self.engine.update(batch, loss, mask_column))

    @register(Dispatch.DP_COMPUTE_METRIC, blocking=False, reads=("input_ids", "response_mask"))
    def update_sft(self, batch: TensorDict) -> dict[str, Metric]:
        """One optimizer step of supervised fine-tuning: mean cross-entropy over the tokens of the response mask."""
        return self.engine.update(batch, _imitation_loss)

    @register(Dispatch.ALL_TO_ONE)
    def save(self, folder: Path) -> None:
        """Writes model and tokenizer as a `save_pretrained` folder."""
        save_model(self.model, self.config.model.path, folder, is_writer=self.rank == 0)

    def shares_weights_with(self, other: Worker) -> bool:
        """Whether a worker in this process may sample from this model's weights."""
        return not self.engine.is_sharded or other.context.role in self.context.aligned_roles

    @property
    def lends_copies(self) -> bool:
        """Whether what it lends is put together for each call: from parts on ranks, or from weights and adapter."""
        return self.engine.is_sharded or self.config.lora is not None

    def is_reference(self, model: ModelConfig, other: Worker) -> bool:
        """Whether, without its adapter, this model is the one that a worker in this process is to run."""
        # Of a model that ranks run together, each of them must be asked at the same time.
        alone = not self.engine.is_sharded and self.engine.mesh.sequence is None
        return (
            self.config.lora is not None
            and model == self.config.model
            and (alone or (other.mesh == self.mesh and other.context.role in self.context.aligned_roles))
        )

    def description(self) -> dict[str, bytes]:
        """The model's configuration and tokenizer, for `flowrl export`."""
        if not self._described and self.rank == 0:
            files = describe_model(self.model, self.config.model.path)
            if self.config.lora is not None:
                files |= describe_adapter(self.config.model, self.config.lora)
            self._described = {f"{DESCRIPTION}/{name}": data for name, data in files.items()}
        return self._described

    def _check_columns(self, batch: TensorDict) -> None:
        """Refuses a batch without a column that the loss reads. Raises UserError."""
        inputs = policy_losses.inputs(self._loss)
        wanted = {name: f"loss {self.config.loss}" for name in policy_losses.keywords if name in inputs}
        if self.config.kl_loss_coef:
            wanted["ref_logprobs"] = "kl_loss_coef"
        for name, setting in wanted.items():
            if name not in batch["tokens"].keys():  # noqa: SIM118 (a TensorDict)
                how = "the reference's logprobs" if name == "ref_logprobs" else "flowrl.run.advantages.Advantages"
                raise UserError(
                    f"actor.{setting} is set, but the batch has no column {name!r}; compute it before the update, "
                    f"with {how}"
                )

    def _policy_loss(
        self, model: nn.Module, micro: MicroBatch, denominators: Denominators, mask_column: str
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        config, mask_BL = self.config, micro.tokens[mask_column]
        entropy = "gradient" if config.entropy_coef else "value"
        logprobs_BL, entropy_BL = model(micro.input_ids, mask_BL, self.temperature, entropy, pack=micro.pack)
        loss_BL, details = self._loss_of_policy(logprobs_BL, micro, mask_BL)
        if "loss_weights" in micro.tokens:
            loss_BL = loss_BL * micro.tokens["loss_weights"]
        values = {"loss": loss_BL, "entropy": entropy_BL} | details
        if config.entropy_coef:
            loss_BL = loss_BL - config.entropy_coef * entropy_BL
        if config.kl_loss_coef:
            kl_BL, _ = kl_loss(
                logprobs_BL,
                micro.tokens["ref_logprobs"],
                mask_BL,
                kind=kl_kinds.load(config.kl_loss_kind),
                gradient=config.kl_loss_gradient,
            )
            kl_BL = per_token(kl_BL, mask_BL, f"actor.kl_loss_kind {config.kl_loss_kind}")
            loss_BL = loss_BL + config.kl_loss_coef * kl_BL
            values["kl_loss"] = kl_BL
        scale = {} if config.aggregation_scale is None else {"scale": config.aggregation_scale}
        loss = aggregation_modes.load(config.aggregation)(
            loss=loss_BL,
            mask=mask_BL,
            denominator=denominators.tokens if config.aggregation == "token_mean" else denominators.rows,
            **scale,
        )
        return scalar(loss, f"actor.aggregation {config.aggregation}"), token_means(values, mask_BL)

    def _loss_of_policy(
        self, logprobs_BL: torch.Tensor, micro: MicroBatch, mask_BL: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The configured loss per token `[B, L]`, and its metrics."""
        columns = {"logprobs": logprobs_BL, "mask": mask_BL} | {
            name: micro.tokens[name] for name in policy_losses.inputs(self._loss) if name not in ("logprobs", "mask")
        }
        result = self._loss(**columns, **loss_options(self.config, policy_losses.settings(self._loss)))
        return loss_and_metrics(result, mask_BL, f"actor.loss {self.config.loss}")

    def _named(self, metrics: dict[str, Metric]) -> dict[str, Metric]:
        return {f"{self.context.role}/{name}": metric for name, metric in metrics.items()}


def loss_options(config: ActorConfig, taken: Container[str]) -> dict[str, Any]:  # Any: as the settings are
    """The keyword arguments of the configured loss: what its own settings say, and what it takes of them."""
    settings = config.settings()
    if "loss_options" in settings:
        return dict(settings["loss_options"])
    # cov_fraction and its bounds go to the selection of tokens, cov_kl_coef to the loss as kl_coef.
    named = {name.removeprefix("cov_"): value for name, value in settings.items()}
    return {name: value for name, value in named.items() if name in taken}


def _imitation_loss(
    model: nn.Module, micro: MicroBatch, denominators: Denominators
) -> tuple[torch.Tensor, dict[str, Metric]]:
    mask_BL = micro.tokens["response_mask"]
    loss_BL = -model(micro.input_ids, mask_BL, pack=micro.pack)[0]
    loss = aggregate(loss_BL, mask_BL, mode="token_mean", denominator=denominators.tokens)
    return loss, token_means({"loss": loss_BL}, mask_BL)


def token_means(values: dict[str, torch.Tensor], mask_BL: torch.Tensor) -> dict[str, Metric]:
    """The mean of each `[B, L]` over the mask, and the smallest and the largest `ratio` of a loss that reports one.

    They merge over micro-batches and ranks.
    """
    sums = [value.detach().masked_fill(~mask_BL, 0).sum(dtype=torch.float64) for value in values.values()]
    extremes = masked_range(values["ratio"], mask_BL) if "ratio" in values else ()
    # One wait for the device, however many metrics there are.
    count, *numbers = torch.stack([mask_BL.sum().double(), *sums, *(x.double() for x in extremes)]).tolist()
    found: dict[str, Metric] = {name: Mean(total, count) for name, total in zip(values, numbers, strict=False)}
    if extremes and count:
        found |= {"ratio_min": Min(numbers[-2]), "ratio_max": Max(numbers[-1])}
    return found
