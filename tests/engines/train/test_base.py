"""Outputs of micro-batches: their masks, their order, and the denominators of a loss."""

import math
from typing import Any

import pytest
import torch

from flowrl.config import TRAIN_ENGINES, ConfigError, TrainCapabilities
from flowrl.data.batch.tensordicts import make_tensordict
from flowrl.engines.train.base import (
    Denominators,
    Outputs,
    check_train_engine,
    collect_outputs,
    count_targets,
    load_train_engine_class,
    mask_outputs,
)
from flowrl.engines.train.microbatch import microbatches
from tests.errors import rejects

LENGTHS = [3, 1, 2]
MASK = [False, True, True, False, False, True]


def batch() -> Any:
    ids = torch.tensor([1, 2, 3, 4, 5, 6])
    tokens = {"input_ids": ids, "response_mask": torch.tensor(MASK)}
    return make_tensordict({"group": torch.tensor([7, 7, 9])}, tokens, torch.tensor(LENGTHS))


def test_outputs_are_zero_outside_of_the_mask_even_if_they_are_nan() -> None:
    (micro,) = microbatches(batch(), 100)  # rows of 1, 2 and 3 tokens
    ones_BL = torch.ones(micro.mask.shape).masked_fill(~micro.mask, math.nan)
    values = {"logprobs": ones_BL, "hidden": ones_BL[..., None].expand(*ones_BL.shape, 2), "scores": torch.ones(3)}
    outputs = Outputs(("logprobs", "hidden", "scores"), "response_mask")
    masked = mask_outputs(values, micro, outputs)
    assert masked["logprobs"].tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert masked["hidden"][..., 1].tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert masked["scores"].tolist() == [0, 1, 1]
    unmasked = mask_outputs(values, micro, Outputs(("logprobs",)))
    assert unmasked["logprobs"].tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_no_gradient_flows_through_masked_and_detached_outputs() -> None:
    (micro,) = microbatches(batch(), 100)
    values = {name: torch.ones(micro.mask.shape, requires_grad=True) for name in ("logprobs", "entropy")}
    masked = mask_outputs(values, micro, Outputs(("logprobs", "entropy"), "response_mask", detached=("entropy",)))
    (masked["logprobs"] + masked["entropy"]).sum().backward()
    assert values["logprobs"].grad is not None
    assert values["logprobs"].grad.tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert values["entropy"].grad is None


@pytest.mark.parametrize("max_tokens", [1, 4, 100])
def test_outputs_of_micro_batches_are_in_the_order_of_the_batch(max_tokens: int) -> None:
    outputs = Outputs(("logprobs", "topk_logprobs", "scores"), topk=2)
    passes = [
        (
            micro,
            {
                "logprobs": micro.input_ids.float(),
                "topk_logprobs": torch.stack([micro.input_ids, -micro.input_ids], dim=-1),
                "scores": micro.rows["group"],
            },
        )
        for micro in microbatches(batch(), max_tokens)
    ]
    collected = collect_outputs(batch(), outputs, passes)
    assert collected["logprobs"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert collected["topk_logprobs"].tolist() == [[i, -i] for i in range(1, 7)]
    assert collected["scores"].tolist() == [7, 7, 9]


def test_a_rank_without_rows_has_empty_outputs() -> None:
    empty = make_tensordict({}, {"input_ids": torch.zeros(0, dtype=torch.int64)}, torch.zeros(0, dtype=torch.int64))
    collected = collect_outputs(empty, Outputs(("logprobs", "topk_ids"), topk=3), [])
    assert {name: tuple(value.shape) for name, value in collected.items()} == {"logprobs": (0,), "topk_ids": (0, 3)}


def test_denominators_count_tokens_rows_and_groups_of_the_mask() -> None:
    assert count_targets(batch(), "response_mask", None) == Denominators(3, 2)
    groups_B = torch.tensor([0, 0, 1])
    assert count_targets(batch(), "response_mask", groups_B) == Denominators(3, 2, 2)


def test_an_output_that_the_engine_does_not_compute_is_rejected() -> None:
    (micro,) = microbatches(batch(), 100)
    with rejects("topk_ids", "logprobs", "engine.kind"):
        mask_outputs({"logprobs": torch.ones(micro.mask.shape)}, micro, Outputs(("topk_ids",)))


@pytest.mark.parametrize("name", TRAIN_ENGINES)
def test_the_included_engines_have_the_methods_of_the_protocol(name: str) -> None:
    check_train_engine(name)
    assert load_train_engine_class(name).capabilities is TRAIN_ENGINES[name]


class Unfinished:
    capabilities = TrainCapabilities()

    def forward(self) -> None: ...


def test_an_engine_without_a_method_of_the_protocol_is_rejected() -> None:
    with rejects("forward_backward", "export_weights", "save_state", "docs/extend.md", error=ConfigError):
        check_train_engine("tests.engines.train.test_base:Unfinished")
