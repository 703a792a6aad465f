"""The gradient of a step with any losses does not depend on micro-batches, ranks, packing or sharding."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.algorithms import dpo_loss
from flowrl.data.batch.tensordicts import lengths
from tests.engines.closeness import FLOAT64_RTOL, assert_norm_close
from tests.engines.combined_losses import CASES, PAIRS, STEPS, TEMPERATURE, gradients, main, rows
from tests.engines.tiny import qwen2, to_float64
from tests.processes import run_ranks
from tests.slow_cases import selected_values, slow

pytestmark = pytest.mark.timeout(1800)  # with the slow cases, the fixture of all gradients takes minutes

RTOL = {torch.float64: FLOAT64_RTOL, torch.float32: 1e-5}


@functools.cache
def alone(step: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Returns the gradient of one process with padded rows, each batch in one micro-batch."""
    return gradients(step, {"packing": "never", "max_tokens_per_microbatch": 10_000}, dtype)


@pytest.mark.parametrize("packing", ["never", "always"])
@pytest.mark.parametrize("max_tokens", [1, 24, 60])
@pytest.mark.parametrize("step", STEPS)
def test_the_gradient_does_not_depend_on_micro_batches(step: str, max_tokens: int, packing: str) -> None:
    split = gradients(step, {"packing": packing, "max_tokens_per_microbatch": max_tokens}, torch.float64)
    assert_norm_close(split, alone(step))


@pytest.mark.parametrize("step", STEPS)
def test_the_gradient_does_not_depend_on_micro_batches_in_float32(step: str) -> None:
    split = gradients(step, {"packing": "always", "max_tokens_per_microbatch": 24}, torch.float32)
    assert_norm_close(split, alone(step, torch.float32), RTOL[torch.float32])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict]:
    """Runs the requested cases in four processes; returns one mapping from (case, step) to a gradient per process."""
    folder: Path = tmp_path_factory.mktemp("combined")
    run_ranks(main, (folder, selected_values(request, "name")), 4)
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


def cases() -> list[Any]:
    return [slow(name) if case.slow else name for name, case in CASES.items()]


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", cases())
def test_the_gradient_does_not_depend_on_ranks(results: list[dict], name: str, step: str) -> None:
    dtype = CASES[name].dtype
    for rank in range(CASES[name].ranks):
        assert_norm_close(results[rank][name, step], alone(step, dtype), RTOL[dtype])


def test_the_gradient_of_a_pair_loss_is_that_of_its_definition() -> None:
    """Computes DPO row by row with the model itself. The last pair has no trained tokens and does not count."""
    model, batch = to_float64(qwen2(initializer_range=0.1)), rows(12, seed=0)
    sums: dict[int, list[tuple[Tensor, Tensor]]] = {}
    starts = torch.cumsum(lengths(batch), 0) - lengths(batch)
    for pair, start, length in zip(PAIRS, starts.tolist(), lengths(batch).tolist(), strict=True):
        ids, mask, ref = (
            batch["tokens", name][start : start + length] for name in ("input_ids", "response_mask", "ref_logprobs")
        )
        logprobs = (model(input_ids=ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        own = logprobs.gather(-1, ids[1:, None])[:, 0][mask[1:]].sum()
        sums.setdefault(pair, []).append((own, ref[mask].sum()))
    losses = []
    for pair in range(5):
        (chosen, ref_chosen), (rejected, ref_rejected) = sums[pair]
        losses.append(dpo_loss(*(x[None] for x in (chosen, rejected, ref_chosen, ref_rejected)), beta=0.5)[0])
    torch.cat(losses).mean().backward()
    expected = {f"language_model.{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_norm_close(alone("pair"), expected)
