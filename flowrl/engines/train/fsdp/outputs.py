"""The outputs of each kind of model for a micro-batch."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from flowrl.engines.train.base import Outputs
from flowrl.engines.train.microbatch import MicroBatch

Compute = Callable[[nn.Module, MicroBatch, Outputs], Mapping[str, Tensor]]
"""Type of a function that returns the outputs of a model for a micro-batch. Values of other tokens are undefined."""


def policy_outputs(model: nn.Module, micro: MicroBatch, outputs: Outputs) -> dict[str, Tensor]:
    """Returns the outputs of a `PolicyModel`."""
    names = outputs.names
    topk = 0
    if "topk_logprobs" in names or "topk_ids" in names:
        topk = outputs.topk if isinstance(outputs.topk, int) else micro.tokens[outputs.topk].long()
    output = model(
        micro.input_ids,
        outputs.mask_of(micro),
        outputs.temperature,
        "none" if "entropy" not in names else "value" if "entropy" in outputs.detached else "gradient",
        micro.pack,
        topk=topk,
        num_tokens=outputs.num_tokens,
        has_hidden="hidden" in names,
    )
    return {name: getattr(output, name) for name in names}


def value_outputs(model: nn.Module, micro: MicroBatch, outputs: Outputs) -> dict[str, Tensor]:
    """Returns the values of a `CriticModel`."""
    return {"values": model(micro.input_ids, micro.pack)}


def score_outputs(model: nn.Module, micro: MicroBatch, outputs: Outputs) -> dict[str, Tensor]:
    """Returns the scores of a `RewardModel`."""
    return {"scores": model(micro.input_ids, micro.lengths, micro.pack)}
