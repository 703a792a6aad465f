"""KTO: preference optimization from single responses labeled as desirable or undesirable.

Shape suffix: B rows.
"""

import torch
from torch import Tensor

from flowrl.algorithms.masking import at_least_float32
from flowrl.algorithms.registry import PositiveFloat, preference_losses


@preference_losses.register("kto")
def kto_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    reference_kl: Tensor | float,
    *,
    beta: PositiveFloat = 0.1,
    desirable_weight: PositiveFloat = 1.0,
    undesirable_weight: PositiveFloat = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the KTO loss of single responses, which are labeled as desirable or undesirable.

    r is logprobs - ref_logprobs, and z is reference_kl:

        desirable    L = desirable_weight   (1 - sigmoid(beta (r - z)))
        undesirable  L = undesirable_weight (1 - sigmoid(beta (z - r)))

    Args:
        logprobs: [B], log-probabilities of the responses under the policy, summed over tokens.
        ref_logprobs: [B], the same under the reference. Receives no gradient.
        desirable: bool [B].
        reference_kl: >= 0, scalar, from `kto_reference_kl` over the whole batch. Receives no gradient.
        beta: Strength of the KL regularization to the reference.
        desirable_weight: Weight of desirable responses.
        undesirable_weight: Weight of undesirable responses.
    Returns: a tuple (loss [B], metrics [B] without gradient). The loss of a step is the mean over its rows. Metrics:
        accuracy: 1 where the reward is above beta z (desirable) or below it (undesirable).
        reward: beta r.
        chosen_reward: beta r of desirable responses, 0 for undesirable responses. rejected_reward: the reverse.
        is_chosen: 1 for desirable responses. sum(chosen_reward) / sum(is_chosen) is the mean chosen reward.
    Raises: ValueError for mismatched shapes, `desirable` not bool, beta or a weight <= 0, or an invalid reference_kl.

    Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306, section 4. The paper balances n desirable and m
    undesirable responses with (desirable_weight n) / (undesirable_weight m) of 1 or slightly more.
    """
    for name, value in (
        ("beta", beta),
        ("desirable_weight", desirable_weight),
        ("undesirable_weight", undesirable_weight),
    ):
        if not value > 0:
            raise ValueError(f"{name} is {value}, but must be above 0")
    if desirable.dtype != torch.bool:
        raise ValueError(f"desirable is {desirable.dtype}, but must be torch.bool: pass `desirable.bool()`")
    if not (logprobs.dim() == 1 and logprobs.shape == ref_logprobs.shape == desirable.shape):
        shapes = f"{list(logprobs.shape)}, {list(ref_logprobs.shape)}, {list(desirable.shape)}"
        raise ValueError(f"logprobs, ref_logprobs and desirable have shapes {shapes}, but must all be [B]")
    _check_reference_kl(reference_kl)
    point = reference_kl.detach() if isinstance(reference_kl, Tensor) else reference_kl
    ratio_B = at_least_float32(logprobs) - at_least_float32(ref_logprobs.detach())
    gain_B = beta * torch.where(desirable, ratio_B - point, point - ratio_B)
    weight_B = torch.full_like(ratio_B.detach(), undesirable_weight).masked_fill(desirable, desirable_weight)
    # 1 - sigmoid(x) = sigmoid(-x), which is accurate where sigmoid(x) is nearly 1.
    return weight_B * torch.sigmoid(-gain_B), _metrics(beta * ratio_B.detach(), gain_B.detach(), desirable)


@torch.no_grad()
def kto_reference_kl(mismatched_logprobs: Tensor, mismatched_ref_logprobs: Tensor) -> Tensor:
    """Returns an estimate of KL(policy || reference) from responses paired with mismatched prompts.

        z = max(0, mean(mismatched_logprobs - mismatched_ref_logprobs))

    Args:
        mismatched_logprobs: [B]. Entry i is the policy's log-probability of a response to another prompt, given the
            prompt of row i.
        mismatched_ref_logprobs: [B], the same under the reference.
    Returns: a scalar >= 0, in at least float32, without gradient. The scalar is 0 for B = 0.
    Raises: ValueError for mismatched shapes.

    Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306, section 4. Pass the rows of the whole step, from all
    ranks. The paper computes z per micro-batch, so its loss depends on the split.
    """
    if mismatched_logprobs.dim() != 1 or mismatched_logprobs.shape != mismatched_ref_logprobs.shape:
        shapes = f"{list(mismatched_logprobs.shape)} and {list(mismatched_ref_logprobs.shape)}"
        raise ValueError(f"mismatched_logprobs and mismatched_ref_logprobs have shapes {shapes}, both must be [B]")
    ratio_B = at_least_float32(mismatched_logprobs) - at_least_float32(mismatched_ref_logprobs)
    mean = ratio_B.double().sum() / max(1, len(ratio_B))
    return mean.clamp(min=0).to(ratio_B.dtype)


def _check_reference_kl(reference_kl: Tensor | float) -> None:
    if isinstance(reference_kl, Tensor):
        # Reading the value would synchronize with the device.
        if reference_kl.dim() != 0:
            raise ValueError(
                f"reference_kl has shape {list(reference_kl.shape)}, but must be a scalar: one for the step"
            )
    elif not reference_kl >= 0:
        raise ValueError(f"reference_kl is {reference_kl}, but must be 0 or more: take it from kto_reference_kl")


def _metrics(reward_B: Tensor, gain_B: Tensor, desirable_B: Tensor) -> dict[str, Tensor]:
    return {
        "accuracy": (gain_B > 0).to(reward_B.dtype),
        "reward": reward_B,
        "chosen_reward": torch.where(desirable_B, reward_B, 0),
        "rejected_reward": torch.where(desirable_B, 0, reward_B),
        "is_chosen": desirable_B.to(reward_B.dtype),
    }
