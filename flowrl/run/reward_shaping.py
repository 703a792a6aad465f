"""From scores to rewards by the functions of `algorithm.shaping`, one after another, over the whole batch."""

from collections.abc import Sequence

import torch
from tensordict import TensorDict

from flowrl.algorithms import RewardMoments, update_moments
from flowrl.algorithms.registry import reward_shaping
from flowrl.config import ShapingConfig, UserError
from flowrl.data.batch.tensordicts import lengths, pad_tokens

Moments = tuple[RewardMoments, ...]
"""One for each shaping."""

INPUT_COLUMNS = {"rewards": "scores", "scores": "scores", "lengths": "response_mask", "groups": "group"}
"""Input of a shaping -> the column that it is made of."""


def shaping_columns(shaping: Sequence[ShapingConfig]) -> list[str]:
    """The columns that these shapings read."""
    inputs = [name for one in shaping for name in reward_shaping.inputs(reward_shaping.load(one.kind))]
    return list(dict.fromkeys(INPUT_COLUMNS[name] for name in inputs if name in INPUT_COLUMNS))


def remembers(shaping: Sequence[ShapingConfig]) -> bool:
    """Whether one of them depends on the rewards of the steps before."""
    return any("moments" in reward_shaping.inputs(reward_shaping.load(one.kind)) for one in shaping)


def shaped_rewards(
    table: TensorDict, shaping: Sequence[ShapingConfig], moments: Moments
) -> tuple[torch.Tensor, Moments]:
    """([B], moments): the scores of a whole batch after every shaping, and the moments with this batch counted.

    `rewards` of a function is what the one before made of them, `scores` the column itself; `lengths` counts the tokens
    that the policy chose, and `moments` are of all rewards that ever came to the function, this batch's included.
    """
    scores_B = table["rows", "scores"]
    found = {"scores": scores_B, "groups": table["rows"].get("group", None)}
    if "tokens" in table.keys() and "response_mask" in table["tokens"].keys():  # noqa: SIM118 (a TensorDict)
        found["lengths"] = pad_tokens(table["tokens", "response_mask"], lengths(table)).sum(-1)
    rewards_B, counted = scores_B, []
    for one, before in zip(shaping, moments, strict=True):
        function = reward_shaping.load(one.kind)
        inputs = reward_shaping.inputs(function)
        counted.append(update_moments(before, rewards_B) if "moments" in inputs else before)
        found |= {"rewards": rewards_B, "moments": counted[-1]}
        rewards_B = function(**{name: found[name] for name in inputs}, **one.arguments())
        if not isinstance(rewards_B, torch.Tensor) or rewards_B.shape != scores_B.shape:
            is_tensor = isinstance(rewards_B, torch.Tensor)
            returned = f"shape {list(rewards_B.shape)}" if is_tensor else f"a {type(rewards_B).__name__}"
            raise UserError(
                f"algorithm.shaping {one.kind} returned {returned}, it must return rewards of shape "
                f"{list(scores_B.shape)}"
            )
    return rewards_B.float(), tuple(counted)
