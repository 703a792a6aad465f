"""Log-probabilities and entropies from hidden states against literals, materialized logits, and finite differences."""

import math
import shutil
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms import (
    candidate_logprobs,
    logprobs_and_entropy_from_hidden,
    logprobs_from_hidden,
    token_entropy,
    token_logprobs,
    top_tokens_from_hidden,
)
from flowrl.algorithms import hidden_logprobs as module
from tests.algorithms.largest import Largest
from tests.engines.closeness import FLOAT64_RTOL, assert_norm_close, reduction_rtol

Inputs = dict[str, Any]  # Any: tensors and settings
HEADS: list[Inputs] = [{}, {"temperature": 0.7}, {"softcap": 2.0, "temperature": 1.3}]


def random_inputs(seed: int, rows: int = 3, length: int = 5, size: int = 4, vocabulary: int = 11) -> Inputs:
    """Returns hidden, weight and bias (requiring gradient), tokens, mask."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"hidden": (rows, length, size), "weight": (vocabulary, size), "bias": (vocabulary,)}
    actual: Inputs = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in shapes.items()
    }
    actual["tokens"] = torch.randint(vocabulary, (rows, length), generator=generator)
    actual["mask"] = torch.rand((rows, length), generator=generator) < 0.7
    return actual


def changed(inputs: Inputs, **change: Any) -> Inputs:  # Any: as in Inputs
    return inputs | change


def full(inputs: Inputs, temperature: float = 1.0, softcap: float | None = None) -> tuple[Tensor, Tensor]:
    """Returns both results from materialized logits."""
    logits = inputs["hidden"] @ inputs["weight"].T + inputs["bias"]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs_all = (logits / temperature).log_softmax(-1)
    chosen = logprobs_all[:, :-1].gather(-1, inputs["tokens"][:, 1:, None]).squeeze(-1)
    entropy = -(logprobs_all.exp() * logprobs_all).sum(-1)[:, :-1]
    pad = torch.nn.functional.pad
    return torch.where(inputs["mask"], pad(chosen, (1, 0)), 0), torch.where(inputs["mask"], pad(entropy, (1, 0)), 0)


def sum_of(values: tuple[Tensor, Tensor]) -> Tensor:
    return values[0].sum() + values[1].sum()


def gradients(value: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, [inputs[name] for name in ("hidden", "weight", "bias")])


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._TILE_SIDES, "cpu", (3, 4))


def test_by_hand():
    # The head doubles the state for token 0 and adds ln 3 to token 1: logits [0, ln 3] then [2 ln 3, ln 3].
    hidden = torch.tensor([[[0.0], [math.log(3)], [50.0]]])
    weight, bias = torch.tensor([[2.0], [0.0]]), torch.tensor([0.0, math.log(3)])
    tokens, mask = torch.tensor([[0, 1, 0]]), torch.ones(1, 3, dtype=torch.bool)
    logprobs, entropy = logprobs_and_entropy_from_hidden(hidden, weight, tokens, mask, bias=bias)
    assert_close(logprobs, torch.tensor([[0.0, math.log(0.75), math.log(0.75)]]))
    assert_close(entropy, torch.tensor([[0.0, 0.5623351, 0.5623351]]))


def test_softcap_and_temperature_by_hand():
    # 2 tanh(1 / 2) = 0.9242343; over the temperature 0.5 that is 1.8484687 against 0.
    hidden, weight = torch.tensor([[[1.0], [0.0]]]), torch.tensor([[1.0], [0.0]])
    tokens, mask = torch.tensor([[0, 0]]), torch.ones(1, 2, dtype=torch.bool)
    logprobs = logprobs_from_hidden(hidden, weight, tokens, mask, softcap=2.0, temperature=0.5)
    assert_close(logprobs, torch.tensor([[0.0, -math.log1p(math.exp(-1.8484687))]]))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.usefixtures("small_tiles")
def test_results_and_gradients_agree_with_materialized_logits(head: Inputs):
    inputs = random_inputs(0)
    ours, theirs = logprobs_and_entropy_from_hidden(**inputs, **head), full(inputs, **head)
    assert_norm_close(ours, theirs, rtol=FLOAT64_RTOL)
    weights = torch.randn(2, 3, 5, dtype=torch.float64)
    value, expected = ((weights[0] * x[0] + weights[1] * x[1]).sum() for x in (ours, theirs))
    assert_norm_close(gradients(value, inputs), gradients(expected, inputs), rtol=FLOAT64_RTOL)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.usefixtures("small_tiles")
def test_both_pass_a_gradient_check(head: Inputs):
    inputs = random_inputs(1, 2, 3, 2, 6)

    def results(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return logprobs_and_entropy_from_hidden(hidden, weight, inputs["tokens"], inputs["mask"], bias=bias, **head)

    assert torch.autograd.gradcheck(results, [inputs[name] for name in ("hidden", "weight", "bias")])


@given(seed=st.integers(0, 2**16), sides=st.tuples(st.integers(1, 20), st.integers(1, 20)))
@settings(max_examples=25, deadline=None)
def test_results_and_gradients_do_not_depend_on_the_tiles(seed: int, sides: tuple[int, int]):
    inputs = random_inputs(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module._TILE_SIDES, "cpu", sides)
        logprobs, entropy = logprobs_and_entropy_from_hidden(**inputs)
        actual = gradients((logprobs - 0.3 * entropy).sum(), inputs)
    expected = full(inputs)
    assert_norm_close((logprobs, entropy), expected, rtol=FLOAT64_RTOL)
    assert_norm_close(actual, gradients((expected[0] - 0.3 * expected[1]).sum(), inputs), rtol=FLOAT64_RTOL)


def test_logprobs_are_equal_with_and_without_entropy():
    inputs = random_inputs(2)
    assert_close(logprobs_from_hidden(**inputs), logprobs_and_entropy_from_hidden(**inputs)[0], rtol=0, atol=0)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.usefixtures("small_tiles")
def test_candidates_have_the_results_and_gradients_of_separate_tokens(head: Inputs):
    inputs = random_inputs(3) | head
    others = torch.randint(11, (2, 3, 5), generator=torch.Generator().manual_seed(0))
    candidates = torch.stack([inputs["tokens"], *others], dim=-1)
    together, entropy = logprobs_and_entropy_from_hidden(**changed(inputs, tokens=candidates))
    separate = [logprobs_from_hidden(**changed(inputs, tokens=candidates[..., i])) for i in range(3)]
    assert_norm_close(together, torch.stack(separate, dim=-1), rtol=FLOAT64_RTOL)
    weights = torch.rand(together.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected_entropy = logprobs_and_entropy_from_hidden(**inputs)[1]
    expected = sum(((weights[..., i] * separate[i]).sum() for i in range(3)), expected_entropy.square().sum())
    assert_norm_close(
        gradients((weights * together).sum() + entropy.square().sum(), inputs),
        gradients(expected, inputs),
        rtol=FLOAT64_RTOL,
    )


def test_candidates_of_logits_have_the_results_and_gradients_of_separate_tokens():
    inputs = random_inputs(5)
    logits = (inputs["hidden"] @ inputs["weight"].T + inputs["bias"]).detach().requires_grad_()
    candidates = torch.randint(11, (3, 5, 2), generator=torch.Generator().manual_seed(0))
    together = candidate_logprobs(logits, candidates, temperature=0.7)
    separate = torch.stack([token_logprobs(logits, ids, temperature=0.7) for ids in candidates.unbind(-1)], dim=-1)
    assert_norm_close(together, separate, rtol=FLOAT64_RTOL)
    assert_norm_close(
        torch.autograd.grad(together.square().sum(), logits),
        torch.autograd.grad(separate.square().sum(), logits),
        rtol=FLOAT64_RTOL,
    )
    with pytest.raises(ValueError, match="candidates"):
        candidate_logprobs(logits, candidates[..., 0])


@pytest.mark.parametrize("k", [1, 3, 11])
@pytest.mark.usefixtures("small_tiles")
def test_top_tokens_are_those_of_materialized_logits(k: int):
    inputs = random_inputs(4)
    settings: Inputs = {name: inputs[name] for name in ("hidden", "weight", "mask", "bias")} | {"k": k}
    logits = inputs["hidden"] @ inputs["weight"].T + inputs["bias"]
    expected = torch.nn.functional.pad(logits[:, :-1].topk(k).indices, (0, 0, 1, 0))
    actual = top_tokens_from_hidden(**settings)
    assert torch.equal(actual, expected.masked_fill(~inputs["mask"][..., None], 0))
    assert not top_tokens_from_hidden(**changed(settings, mask=torch.zeros_like(inputs["mask"]))).any()


@pytest.mark.parametrize("k", [0, 12])
def test_a_number_of_top_tokens_beyond_the_vocabulary_is_rejected(k: int):
    inputs = random_inputs(4)
    with pytest.raises(ValueError, match=rf"\b{k}\b.*\b11\b"):
        top_tokens_from_hidden(inputs["hidden"], inputs["weight"], inputs["mask"], k=k)


def test_results_agree_with_token_logprobs_and_token_entropy():
    inputs = random_inputs(3)
    logits, mask = inputs["hidden"] @ inputs["weight"].T + inputs["bias"], inputs["mask"]
    expected = token_logprobs(logits, inputs["tokens"], temperature=0.9), token_entropy(logits, temperature=0.9)
    actual = logprobs_and_entropy_from_hidden(**inputs, temperature=0.9)
    assert_norm_close(actual, tuple(x.masked_fill(~mask, 0) for x in expected), rtol=FLOAT64_RTOL)


@pytest.mark.usefixtures("small_tiles")
def test_no_pass_allocates_more_than_the_inputs_or_a_tile():
    inputs = random_inputs(4, 4, 40, 2, 40)
    with Largest() as largest:
        gradients(torch.stack(logprobs_and_entropy_from_hidden(**inputs, softcap=5.0)).sum(), inputs)
    assert largest.elements == inputs["hidden"].numel() == 320  # weight: 80, tile: 12, logits: 6,400


@pytest.mark.usefixtures("small_tiles")
def test_masked_positions_change_neither_value_nor_gradient():
    inputs = random_inputs(5)
    choosing = torch.nn.functional.pad(inputs["mask"][:, 1:], (0, 1))
    hidden = inputs["hidden"].detach().masked_fill(~choosing[..., None], float("nan")).requires_grad_()
    dirty = changed(inputs, hidden=hidden, tokens=inputs["tokens"].masked_fill(~inputs["mask"], -100))
    clean_value, dirty_value = (
        sum(logprobs_and_entropy_from_hidden(**x), start=torch.tensor(0.0)) for x in (inputs, dirty)
    )
    assert_close(dirty_value, clean_value, rtol=0, atol=0)
    assert_close(gradients(dirty_value.sum(), dirty), gradients(clean_value.sum(), inputs), rtol=0, atol=0)


def test_a_split_batch_sums_to_the_full_batch():
    inputs = random_inputs(6)
    parts = [inputs | {name: inputs[name][rows] for name in ("hidden", "tokens", "mask")} for rows in ([0, 2], [1])]
    values = [logprobs_from_hidden(**part) for part in parts]
    assert_norm_close(torch.cat(values), logprobs_from_hidden(**inputs)[[0, 2, 1]], rtol=FLOAT64_RTOL)
    added = gradients(values[0].sum() + values[1].sum(), inputs)
    assert_norm_close(added, gradients(logprobs_from_hidden(**inputs).sum(), inputs), rtol=FLOAT64_RTOL)


@pytest.mark.usefixtures("small_tiles")
def test_an_excluded_token_has_logprob_minus_infinity_and_no_gradient():
    inputs = random_inputs(7, vocabulary=11)
    bias = torch.zeros(11, dtype=torch.float64)
    bias[:5] = -math.inf  # the entire first tile and a part of the second
    allowed = changed(inputs, tokens=inputs["tokens"] % 6, weight=inputs["weight"][5:], bias=bias[5:])
    excluding = changed(inputs, tokens=allowed["tokens"] + 5, bias=bias.requires_grad_())
    actual = logprobs_and_entropy_from_hidden(**excluding)
    assert_norm_close(actual, logprobs_and_entropy_from_hidden(**allowed), rtol=FLOAT64_RTOL)
    grads = gradients((actual[0] + actual[1]).sum(), excluding)
    assert all(x.isfinite().all() for x in grads) and not grads[1][:5].any()
    none = logprobs_from_hidden(**changed(excluding, tokens=torch.zeros_like(inputs["tokens"])))
    assert (none[:, 1:][inputs["mask"][:, 1:]] == -math.inf).all()


def test_extreme_logits_stay_finite():
    hidden, weight = torch.full((1, 2, 1), 1e4, requires_grad=True), torch.tensor([[1.0], [-1.0]], requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    logprobs, entropy = logprobs_and_entropy_from_hidden(hidden, weight, torch.tensor([[0, 1]]), mask)
    assert logprobs.tolist() == [[0.0, -2e4]] and entropy.tolist() == [[0.0, 0.0]]
    actual = torch.autograd.grad((logprobs + entropy).sum(), (hidden, weight))
    assert all(x.isfinite().all() for x in actual)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_frozen_inputs_receive_no_gradient(frozen: str):
    inputs = random_inputs(8)
    names = [name for name in ("hidden", "weight", "bias") if name != frozen]
    frozen_inputs = inputs | {frozen: inputs[frozen].detach()}
    actual, expected = (
        torch.autograd.grad(logprobs_from_hidden(**x).sum(), [inputs[n] for n in names])
        for x in (frozen_inputs, inputs)
    )
    assert_norm_close(actual, expected, rtol=FLOAT64_RTOL)


def test_a_detached_entropy_does_not_change_the_gradient():
    inputs = random_inputs(9)
    logprobs, entropy = logprobs_and_entropy_from_hidden(**inputs)
    assert not entropy.detach().requires_grad
    assert_norm_close(
        gradients(logprobs.sum(), inputs), gradients(logprobs_from_hidden(**inputs).sum(), inputs), rtol=FLOAT64_RTOL
    )
    (only_entropy,) = logprobs_and_entropy_from_hidden(**inputs)[1:]
    assert_norm_close(
        gradients(only_entropy.sum(), inputs), gradients(full(inputs)[1].sum(), inputs), rtol=FLOAT64_RTOL
    )


def test_bfloat16_agrees_with_float32_up_to_rounding():
    exact = random_inputs(10, 2, 9, 16, 50)
    low = {n: x.detach().bfloat16().requires_grad_() if x.is_floating_point() else x for n, x in exact.items()}
    same = {n: x.detach().float().requires_grad_() if x.is_floating_point() else x for n, x in low.items()}
    actual, expected = logprobs_and_entropy_from_hidden(**low), logprobs_and_entropy_from_hidden(**same)
    assert all(x.dtype == torch.float32 for x in actual)
    # The logits are rounded to bfloat16, in the forward pass and in the recomputation of the backward pass.
    rtol = reduction_rtol(torch.bfloat16, length=1, depth=2)
    assert_norm_close(actual, expected, rtol)
    grads = gradients(actual[0].sum(), low)
    assert all(x.dtype == torch.bfloat16 for x in grads)
    assert_norm_close([x.float() for x in grads], gradients(expected[0].sum(), same), rtol)


@pytest.mark.parametrize(("rows", "length"), [(0, 3), (2, 0), (2, 1), (2, 3)])
def test_an_empty_mask_gives_zeros_and_zero_gradients(rows: int, length: int):
    inputs = changed(random_inputs(11, rows, length), mask=torch.zeros(rows, length, dtype=torch.bool))
    logprobs, entropy = logprobs_and_entropy_from_hidden(**inputs)
    assert logprobs.equal(torch.zeros(rows, length)) and entropy.equal(logprobs)
    assert not any(x.any() for x in gradients((logprobs + entropy).sum(), inputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, r"temperature .*0\.0"),
        ({"softcap": -1.0}, r"softcap .*-1\.0"),
        ({"mask": torch.ones(3, 5)}, r"mask .*torch\.float32"),
        ({"tokens": torch.zeros(3, 4).long()}, r"tokens .*\[3, 4\]"),
        (
            {"hidden": torch.zeros(3, 4, 4)},
            r"hidden .*\[3, 4, 4\]",
        ),
        ({"weight": torch.zeros(11, 3)}, r"weight .*\[11, 3\]"),
        ({"bias": torch.zeros(10)}, r"bias .*\[10\]"),
        ({"weight": torch.zeros(11, 4)}, r"weight .*torch\.float32"),
    ],
)
def test_misuse_is_rejected(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        logprobs_from_hidden(**random_inputs(12) | change)


@pytest.mark.parametrize("num_candidates", [0, 2])
def test_a_known_number_of_targets_changes_no_result(num_candidates: int) -> None:
    inputs = random_inputs(3)
    if num_candidates:
        inputs["tokens"] = torch.stack([inputs["tokens"]] * num_candidates, dim=-1)
    num_targets = int(inputs["mask"][:, 1:].sum())
    expected, actual = (logprobs_and_entropy_from_hidden(**inputs, num_targets=n) for n in (None, num_targets))
    assert all(map(torch.equal, expected, actual))
    assert all(map(torch.equal, gradients(sum_of(expected), inputs), gradients(sum_of(actual), inputs)))
    states, weight, mask = (inputs[name] for name in ("hidden", "weight", "mask"))
    top = [top_tokens_from_hidden(states, weight, mask, k=2, num_targets=n) for n in (None, num_targets)]
    assert torch.equal(*top)


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")  # torch's own
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_compiled_tiles_have_the_same_results(
    monkeypatch: pytest.MonkeyPatch, head: Inputs, with_entropy: bool
) -> None:
    """Rows and vocabulary end with smaller tiles. Compiled and other tiles differ by the order of sums."""
    monkeypatch.setitem(module._TILE_SIDES, "cpu", (4, 8))
    function = logprobs_and_entropy_from_hidden if with_entropy else logprobs_from_hidden
    for seed in range(3):
        inputs = random_inputs(seed, rows=3 + seed, vocabulary=19 + seed)
        plain, compiled = (function(**inputs, **head, compiled=is_compiled) for is_compiled in (False, True))
        plain, compiled = (values if with_entropy else (values,) for values in (plain, compiled))
        assert_norm_close(compiled, plain, rtol=FLOAT64_RTOL)
        sums = (sum((values.sum() for values in each), start=torch.tensor(0.0)) for each in (compiled, plain))
        assert_norm_close(*(gradients(total, inputs) for total in sums), rtol=FLOAT64_RTOL)
