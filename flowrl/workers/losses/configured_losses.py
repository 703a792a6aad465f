"""The losses that the settings of the actor and the critic select, and the language-modeling loss.

Shape suffixes: B rows, L tokens of the longest row of a micro-batch.
"""

from dataclasses import replace

from torch import Tensor

from flowrl.algorithms import clipped_value_loss, kl_estimate, kl_loss
from flowrl.algorithms.registry import call, distillation_losses, kl_kinds, loss_and_metrics, per_token, policy_losses
from flowrl.config import ActorConfig, CriticConfig, StudentConfig
from flowrl.workers.losses.loss import ConfiguredFunction, Loss


def policy_loss(config: ActorConfig) -> Loss:
    """Returns the loss of an actor: policy loss, entropy bonus and KL loss.

    A rollout correction adds two optional columns. `loss_weights` multiplies the policy loss. `loss_mask` replaces the
    response mask.
    """
    objective = _PolicyObjective(config)
    computed = (*config.OUTPUTS, "mask")
    reads = [
        f"{name}{'' if is_required else '?'}" for name, is_required in objective.inputs.items() if name not in computed
    ]
    name = f"actor.loss {config.loss.kind}"
    if config.kl_loss_coef:
        reads.append("ref_logprobs")
        name += " with actor.kl_loss_coef"
    if config.old_logprobs == "current":
        # A recipe with several updates per batch may still store the column. Without it, the loss also computes the
        # metrics that `Advantages` computes from it.
        optional = ("old_logprobs?", "rollout_logprobs?", "ref_logprobs?")
        reads = [name for name in reads if name != "old_logprobs"]
        reads += [name for name in optional if name.removesuffix("?") not in reads]
    return Loss(
        objective,
        aggregation=config.aggregation,
        aggregation_scale=config.aggregation_scale,
        mask=("loss_mask", "response_mask"),
        reads=(*reads, "loss_weights?"),
        detached=() if config.entropy_coef else ("entropy",),
        name=name,
    )


def value_loss(config: CriticConfig) -> Loss:
    """Returns the clipped value loss of a critic."""
    return Loss(
        _value_objective, {"clip": config.value_clip}, columns={"old_values": "values"}, name="critic.value_clip"
    )


def distillation_loss(config: StudentConfig) -> Loss:
    """Returns the loss of a student.

    It reads those of the columns `teacher_logprobs`, `rollout_logprobs`, `topk_ids` and `teacher_topk_logprobs` that
    its function has as inputs.
    """
    function = distillation_losses.load(config.loss.kind)
    inputs = distillation_losses.inputs(function)
    columns = {"behavior_logprobs": "rollout_logprobs"} if "behavior_logprobs" in inputs else {}
    return Loss(function, config.loss.arguments(), columns=columns, name=f"actor.loss {config.loss.kind}")


class _PolicyObjective(ConfiguredFunction[ActorConfig]):
    """The policy loss, entropy bonus and KL loss of an actor."""

    def __init__(self, config: ActorConfig) -> None:
        super().__init__(config)
        self._function = policy_losses.load(config.loss.kind)
        self.inputs = policy_losses.inputs(self._function)
        self._arguments = config.loss.arguments()
        self._kl_kind = kl_kinds.load(config.kl_loss_kind) if config.kl_loss_coef else None

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, mask: Tensor, **columns: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        config, current = self._settings, logprobs.detach()
        inputs = {"logprobs": logprobs, "entropy": entropy, "old_logprobs": current, "mask": mask} | columns
        result = call(self._function, inputs, self._arguments)
        loss_BL, details = loss_and_metrics(result, mask, f"actor.loss {config.loss.kind}")
        if "loss_weights" in columns:
            loss_BL = loss_BL * columns["loss_weights"].masked_fill(~mask, 0)
        values = {"loss": loss_BL, "entropy": entropy} | details
        if config.old_logprobs == "current" and "old_logprobs" not in columns:
            if "rollout_logprobs" in columns:
                values["rollout_gap"] = (current - columns["rollout_logprobs"]).abs()
            if "ref_logprobs" in columns:
                values["kl"] = kl_estimate(current, columns["ref_logprobs"], kind="k3")
        if config.entropy_coef:
            loss_BL = loss_BL - config.entropy_coef * entropy
        if self._kl_kind is not None:
            kl_BL, _ = kl_loss(
                logprobs,
                columns["ref_logprobs"],
                mask,
                kind=self._kl_kind,
                gradient=config.kl_loss_gradient,
                old_logprobs=inputs["old_logprobs"] if config.kl_loss_unbiased else None,
            )
            kl_BL = per_token(kl_BL, mask, f"actor.kl_loss_kind {config.kl_loss_kind}")
            loss_BL = loss_BL + config.kl_loss_coef * kl_BL
            values["kl_loss"] = kl_BL
        return loss_BL, values


def _value_objective(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    loss_BL, clipped_BL = clipped_value_loss(values, old_values, returns, mask, clip=clip)
    return loss_BL, {"clip_fraction": clipped_BL}


def _cross_entropy(logprobs: Tensor) -> Tensor:
    return -logprobs


LANGUAGE_MODELING = Loss(_cross_entropy, temperature=1.0, name="language modeling")
"""Mean cross-entropy of the trained tokens, for SFT."""

PTX = replace(LANGUAGE_MODELING, label="ptx")
"""Mean cross-entropy of text that is mixed into a policy update. Its metrics are `actor/ptx/...`."""
