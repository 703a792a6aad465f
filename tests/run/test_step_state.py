"""What one step hands to the next, against values computed by hand."""

import json
import math
from dataclasses import asdict

import pytest
import torch

from flowrl.algorithms import AdaptiveKlControl, FixedKlControl, RewardMoments
from flowrl.config import AdvantageConfig, UserError
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.block import LocalRef
from flowrl.run.advantages import batch_metrics, estimate_advantages
from flowrl.run.step_state import AlgorithmState, Carried, carries, first_state, next_state

NORMALIZED = AdvantageConfig.model_validate({"estimator": "rloo", "shaping": [{"kind": "normalize_rewards"}]})


def batch(scores: list[float]) -> Batch:
    rows = {"scores": torch.tensor(scores), "group": [0] * len(scores)}
    return Batch.from_columns(
        rows=rows, tokens={"response_mask": torch.ones(len(scores), dtype=torch.bool)}, lengths=[1] * len(scores)
    )


def test_most_algorithms_carry_nothing() -> None:
    config = AdvantageConfig(estimator="grpo")
    state = first_state(config)
    assert not carries(config) and next_state(batch([1.0]), config, state) is state


def test_moments_grow_from_step_to_step() -> None:
    state = first_state(NORMALIZED)
    assert state == AlgorithmState(FixedKlControl(0.0), moments=(RewardMoments(),))
    state = next_state(batch([0.0, 4.0]), NORMALIZED, state)
    found = estimate_advantages(batch([2.0, 2.0]), NORMALIZED, state)
    # 0, 4, 2, 2: variance 8 / 3.
    assert found.get("shaped_scores").tolist() == pytest.approx([2 / (8 / 3) ** 0.5] * 2)
    state = next_state(batch([2.0, 2.0]), NORMALIZED, state)
    assert isinstance(state, LocalRef) and state.get().moments == (RewardMoments(4, 2.0, 8.0),)


def test_a_state_is_plain_numbers() -> None:
    state = AlgorithmState(AdaptiveKlControl(0.5, target=1.0), (RewardMoments(4, 2.0, 8.0),))
    assert json.loads(json.dumps(asdict(state))) == {
        "kl_control": {"coef": 0.5, "target": 1.0, "horizon": 10_000.0},
        "moments": [{"count": 4, "mean": 2.0, "sum_of_squares": 8.0}],
    }


def test_a_recipe_without_a_state_is_told() -> None:
    with pytest.raises(UserError, match=r"this recipe keeps no state: pass Carried\.now"):
        estimate_advantages(batch([1.0, 2.0]), NORMALIZED)


OWN = "tests.algorithms.own_functions"


def steered(**control: object) -> AdvantageConfig:
    return AdvantageConfig.model_validate({"estimator": "rloo", "kl_coef": 0.5, "kl_control": control})


def with_kl(kl: list[float]) -> Batch:
    """Rows of a prompt and a response token each; what the prompts hold is no KL."""
    tokens = {
        "response_mask": torch.tensor([False, True] * len(kl)),
        "old_logprobs": torch.tensor([x for one in kl for x in (9.0, one - 2.0)]),
        "ref_logprobs": torch.tensor([x for one in kl for x in (0.0, -2.0)]),
        "rollout_logprobs": torch.zeros(2 * len(kl)),
    }
    rows = {"scores": torch.tensor([1.0] * len(kl)), "group": [0] * len(kl), "truncated": torch.zeros(len(kl))}
    return Batch.from_columns(rows=rows, tokens=tokens, lengths=[2] * len(kl))


def test_a_coefficient_is_that_of_the_steps_before() -> None:
    config = steered(kind="adaptive", target=0.2, horizon=20.0)
    state = first_state(config)
    # KL 1 and 0: mean 0.5 is far above 0.2, so a step of 2 rows raises the coefficient by 0.2 * 2 / 20.
    rows = with_kl([1.0, 0.0])
    assert estimate_advantages(rows, config, state).get("token_rewards").tolist() == [0, 0.5, 0, 1]
    state = next_state(rows, config, state)
    second = estimate_advantages(rows, config, state)
    assert second.get("token_rewards").tolist() == pytest.approx([0, 1 - 0.51, 0, 1])
    assert batch_metrics(second, state).get()["kl_coef"].result() == pytest.approx(0.51)
    # 0.1 is half the target: an error of -0.5 counts as -0.2.
    state = next_state(with_kl([0.1, 0.1]), config, state)
    assert isinstance(state, LocalRef) and state.get().kl_control.coef == pytest.approx(0.51 * 0.98)


def test_rows_without_a_response_do_not_count() -> None:
    config = steered(kind="adaptive", target=0.2, horizon=20.0)
    rows = with_kl([1.0, 0.0])
    rows["response_mask"] = Batch.from_columns(tokens={"x": torch.tensor([False] * 4)}, lengths=[2, 2])
    state = next_state(rows, config, first_state(config))
    assert isinstance(state, LocalRef) and state.get().kl_control.coef == 0.5


def test_the_measured_kl_is_of_the_kind_of_the_penalty() -> None:
    config = AdvantageConfig.model_validate(
        {"estimator": "rloo", "kl_coef": 0.5, "kl_kind": "k2", "kl_control": {"kind": f"{OWN}:LastKl"}}
    )
    state = next_state(with_kl([2.0, 0.0]), config, first_state(config))
    # k2 is 2 and 0.
    assert isinstance(state, LocalRef) and state.get().kl_control.coef == 1.0


def test_a_fixed_coefficient_is_no_state() -> None:
    config = steered(kind="fixed")
    assert not carries(config) and first_state(config).kl_control == FixedKlControl(0.5)
    assert first_state(AdvantageConfig(estimator="grpo")).kl_control.coef == 0


def test_a_control_of_ones_own_that_is_none_is_told() -> None:
    with pytest.raises(UserError, match=r"NoControl gives a NoControl without coef or update\(kl, num_rows\)"):
        first_state(steered(kind=f"{OWN}:NoControl"))


def test_a_kl_that_is_not_a_number_ends_the_run() -> None:
    config = steered(kind="adaptive", target=0.2)
    with pytest.raises(ValueError, match="kl is NaN"):
        next_state(with_kl([math.nan]), config, first_state(config))


def test_what_is_carried_goes_on_from_a_saved_state() -> None:
    carried, again = Carried(NORMALIZED), Carried(NORMALIZED)
    carried.advance(batch([0.0, 4.0]))
    again.restore(json.loads(json.dumps(carried.state())))
    for one in (carried, again):
        one.advance(batch([2.0, 2.0]))
    assert again.state() == carried.state()
    assert carried.state()["moments"][0]["count"] == 4


def test_an_adaptive_coefficient_goes_on_where_it_was() -> None:
    control = {"kind": "adaptive", "target": 0.1, "horizon": 100}
    config = AdvantageConfig.model_validate({"estimator": "rloo", "kl_coef": 0.5, "kl_control": control})
    again = Carried(config)
    saved = Carried(config).state()
    again.restore(saved | {"kl_control": saved["kl_control"] | {"coef": 0.25}})
    assert isinstance(again.now, AlgorithmState)
    assert again.now.kl_control == AdaptiveKlControl(0.25, target=0.1, horizon=100)
