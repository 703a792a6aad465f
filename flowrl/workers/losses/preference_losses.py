"""Builds the losses of a policy and of a reward model that are trained on preferences, from their settings.

Shape suffixes: B rows, L tokens of the longest row of a micro-batch, P pairs.

The rows of a pair are adjacent, the chosen response first. A mask is true for the tokens of the last assistant turn.
"""

from torch import Tensor

from flowrl.algorithms import sequence_logprobs
from flowrl.algorithms.registry import call, described, preference_losses, reward_model_losses
from flowrl.config import PreferenceActorConfig, PreferenceConfig, RewardModelConfig, RewardModelLossConfig, UserError
from flowrl.workers.losses.loss import ConfiguredFunction, Loss, MaskedMetric

PAIR, REFERENCE = "pair", "ref_response_logprobs"
"""Names of the row columns with the id of a pair, and with the log-probability under the reference."""


def preference_loss(config: PreferenceActorConfig) -> Loss:
    """Returns the loss of a policy that is trained on preferences: a mean over pairs, or over rows for KTO.

    It reads `ref_response_logprobs` if it compares the policy with a reference. KTO also reads `desirable` and
    `reference_kl`.
    """
    loss, name = config.loss, f"actor.loss {config.loss.kind}"
    inputs = preference_losses.inputs(preference_losses.load(loss.kind))
    reference = [REFERENCE] if any(column.startswith("ref_") for column in inputs) else []
    if not loss.is_paired:
        reads = (*reference, "desirable", "reference_kl")
        return Loss(_LabeledObjective(loss), aggregation="row_mean", reads=reads, name=name)
    if unknown := [column for column in inputs if not column.removeprefix("ref_").startswith(("chosen_", "rejected_"))]:
        raise UserError(f"{name} reads {', '.join(unknown)}, which a loss of pairs does not receive: remove it")
    return Loss(
        _PairObjective(loss),
        aggregation="group_mean",
        group=PAIR,
        group_size=2,
        reads=(PAIR, *reference),
        name=name,
    )


def reward_model_loss(config: RewardModelConfig) -> Loss:
    """Returns the loss of a reward model, a mean over pairs. The optional column `margin` overrides the setting."""
    return Loss(
        _RewardObjective(config.loss),
        aggregation="group_mean",
        group=PAIR,
        group_size=2,
        name=f"reward.loss {config.loss.kind}",
    )


class _PairObjective(ConfiguredFunction[PreferenceConfig]):
    """A loss of pairs."""

    def __init__(self, loss: PreferenceConfig) -> None:
        super().__init__(loss)
        self._arguments, self._function = loss.arguments(), preference_losses.load(loss.kind)

    def __call__(self, logprobs: Tensor, mask: Tensor, **columns: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        sums_B, lengths_B = sequence_logprobs(logprobs, mask, mode="sum"), mask.sum(-1)
        responses = {"logprobs": sums_B, "mean_logprobs": sums_B / lengths_B.clamp(min=1), "lengths": lengths_B}
        if REFERENCE in columns:
            responses["ref_logprobs"] = columns[REFERENCE].to(sums_B.dtype)
        values: dict[str, Tensor] = {}
        for name, value_B in responses.items():
            prefix, kind = ("ref_", "logprobs") if name == "ref_logprobs" else ("", name)
            values[f"{prefix}chosen_{kind}"], values[f"{prefix}rejected_{kind}"] = _split_pairs(value_B)
        result = call(self._function, values, self._arguments)
        loss_P, metrics = _check(result, f"actor.loss {self._settings.kind}")
        chosen_P, rejected_P = _split_pairs(sums_B)
        return loss_P, metrics | {"chosen_logprobs": chosen_P, "rejected_logprobs": rejected_P}


class _LabeledObjective(ConfiguredFunction[PreferenceConfig]):
    """A loss of single responses with a label."""

    def __init__(self, loss: PreferenceConfig) -> None:
        super().__init__(loss)
        self._arguments, self._function = loss.arguments(), preference_losses.load(loss.kind)

    def __call__(
        self, logprobs: Tensor, mask: Tensor, **columns: Tensor
    ) -> tuple[Tensor, dict[str, Tensor | MaskedMetric]]:
        sums_B = sequence_logprobs(logprobs, mask, mode="sum")
        desirable_B = columns["desirable"]
        loss_B, metrics = self._function(
            logprobs=sums_B,
            ref_logprobs=columns[REFERENCE].to(sums_B.dtype),
            desirable=desirable_B,
            reference_kl=columns["reference_kl"][0].to(sums_B.dtype),  # one value of the step
            **self._arguments,
        )
        shown = {"accuracy": metrics["accuracy"], "reference_kl": columns["reference_kl"]}
        for name, is_of_kind_B in (("chosen", desirable_B), ("rejected", ~desirable_B)):
            shown |= {
                f"{name}_reward": MaskedMetric(metrics["reward"], is_of_kind_B),
                f"{name}_logprobs": MaskedMetric(sums_B, is_of_kind_B),
            }
        return loss_B, shown


class _RewardObjective(ConfiguredFunction[RewardModelLossConfig]):
    """A loss of the scores of pairs."""

    def __init__(self, loss: RewardModelLossConfig) -> None:
        super().__init__(loss)
        self._arguments, self._function = loss.arguments(), reward_model_losses.load(loss.kind)

    def __call__(self, scores: Tensor, margin: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        chosen_P, rejected_P = _split_pairs(scores)
        inputs = {"chosen_scores": chosen_P, "rejected_scores": rejected_P}
        if margin is not None:
            inputs["margins"] = _split_pairs(margin)[0].to(chosen_P.dtype)
        result = call(self._function, inputs, self._arguments)
        return _check(result, f"reward.loss {self._settings.kind}")


def _split_pairs(values_B: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the values of the chosen and of the rejected responses, each [P]."""
    return values_B[::2], values_B[1::2]


def _check(result: object, what: str) -> tuple[Tensor, dict[str, Tensor]]:
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
        return result
    raise UserError(f"{what} returned {described(result)}, but must return a loss per pair and a dictionary of metrics")
