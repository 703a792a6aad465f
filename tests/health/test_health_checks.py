"""The values of health checks, computed by hand, and the thresholds at which they fire."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from flowrl.config import HealthConfig
from flowrl.health.health_checks import CHECKS
from flowrl.health.measurement import RunFacts
from tests.errors import missing_facts
from tests.health.records import STEPS, find, measure, records

ROLLOUT = RunFacts(max_response_tokens=20, prompts_per_step=10, gap_limit=0.05, gap_causes="stale weights")


class Case(NamedTuple):
    """Records with a known value of a check."""

    check: str
    rows: Sequence[Mapping[str, float]]
    value: float
    facts: RunFacts = ROLLOUT
    initial: Mapping[str, float] | None = None


def repeated(**values: float) -> list[dict[str, float]]:
    """Returns `STEPS` equal records."""
    return records(**{name: [value] * STEPS for name, value in values.items()})


REWARDS = [0.1, 0.1, 0.1, 0.1, 0.3, 0.3, 0.4, 0.4, 0.5, 0.5]

CASES = {
    # Best value 0.6, confirmed by 0.5, so 0.5 counts. The last two are 0.4 and 0.3: 20 % and 40 % below.
    "held_out_fall": Case(
        "held_out_fall",
        records(reward=REWARDS, accuracy=[None, 0.5, None, 0.6, None, 0.5, None, 0.4, None, 0.3]),
        0.2,
    ),
    # One evaluation after the initial one: half of the fall of 60 %.
    "held_out_fall of one set": Case(
        "held_out_fall",
        records(reward=REWARDS, accuracy__hard=[*[None] * 9, 0.2]),
        0.3,
        initial={"accuracy/hard": 0.5},
    ),
    # Loss on held-out examples: 1.0 is confirmed by 1.1; the last two are 1.32 and 1.65.
    "held_out_fall of a loss": Case(
        "held_out_fall",
        records(
            actor__loss=[2.0 - 0.1 * step for step in range(8)],
            validation_loss=[None, 1.0, None, 1.1, None, 1.32, None, 1.65],
        ),
        0.2,
    ),
    # Median of 8, 18, 19 and 20 is 18.5, plus 0.5 of the environment, of 20.
    "length_limit": Case(
        "length_limit", records(response_length=[8, 19, 18, 20], environment_length=[0.5] * 4), 19 / 20
    ),
    "truncation": Case("truncation", records(truncated_fraction=[0.5, 0.9, 0.7, 0.1]), 0.6),
    "repetition": Case("repetition", records(repetition=[0.5, 0.9, 0.7, 0.1]), 0.6),
    # First value 2.5, last median 0.1.
    "entropy_collapse": Case(
        "entropy_collapse", records(actor__entropy=[2.5, 2, 2, 1.5, 0.2, 0.1, 0.1, 0.05]), 0.1 / 2.5
    ),
    # A policy that breaks in its first steps: medians 0.01 and 6.5.
    "entropy_collapse at once": Case("entropy_collapse", records(actor__entropy=[1.0, 0.5, *[0.01] * 4]), 0.01),
    # The first step has no value, as after a skipped update.
    "kl_growth after a skipped step": Case("kl_growth", records(kl=[None, 0.5, 6.6, 6.4, 6.5, 6.5]), 6.5),
    "kl_growth at once": Case("kl_growth", records(kl=[0.0, 4.0, 6.6, 6.4, 6.5, 6.5]), 6.5),
    "kl_growth": Case("kl_growth", records(kl=[0.1, 0.2, 0.3, 0.4, 0.5, 1.0, 1.5, 2.0]), 1.25),
    "kl_growth of the loss": Case("kl_growth", records(actor__kl=[0.1] * 4 + [0.5, 1.0, 1.5, 2.0]), 1.25),
    "ratio_range": Case("ratio_range", records(actor__ratio=[1.0, 1.4, 1.2, 1.9]), 0.3),
    # Sampled ratios have the mean 1 although the policy changes.
    "ratio_range of large updates": Case(
        "ratio_range", records(actor__ratio=[1.01] * 4, actor__approx_kl=[0.1, 0.3, 0.2, 0.4]), 0.25
    ),
    "ratio_range of stale responses": Case("ratio_range", repeated(actor__ratio=1.1, correction__weight=0.4), 0.6),
    # Only the last step counts: 0.15 nats with a limit of 0.05.
    "logprob_gap": Case("logprob_gap", records(rollout_gap=[0.0, 0.15]), 3.0),
    "logprob_gap of the update": Case("logprob_gap", records(actor__rollout_gap=[0.0, 0.15]), 3.0),
    "gradient_spike": Case("gradient_spike", records(actor__grad_norm=[1, 3, 2, 2, 30]), 15.0),
    # The window has 16 steps. The 90 % quantile of the 15 steps before is the third largest norm, not a spike of 30.
    "gradient_spike after a spike": Case(
        "gradient_spike", records(actor__grad_norm=[1, 3, 2, 2, 30, *[2] * 14, 30]), 15
    ),
    # Most gradients of the steps before are 0. The median of the first four steps is 1.5.
    "gradient_spike after rare gradients": Case(
        "gradient_spike", records(actor__grad_norm=[2, 1, 2, 1, *[0] * 16, 6]), 4
    ),
    "gradient_spike of the critic": Case(
        "gradient_spike", records(actor__grad_norm=[1] * 5, critic__grad_norm=[2, 2, 2, 2, 8]), 4.0
    ),
    # Shares 0.5, 1, 1 and 0 of 10 groups.
    "no_signal": Case("no_signal", records(equal_scores_fraction=[0.5, 1, 1, 0]), 0.75),
    # 30 dropped groups, and 10 trained groups of which 2 have equal scores.
    "no_signal of dropped groups": Case(
        "no_signal", repeated(equal_scores_fraction=0.2, dropped_equal_scores=30), 32 / 40
    ),
    "no_signal with async": Case("no_signal", repeated(dropped_equal_scores=15, trained_groups=5), 15 / 20),
    "no_signal without groups": Case("no_signal", records(reward=[1, 0.5, 1, 1], reward_max=[1] * 4), 1.0),
    # 6 stale and 14 trained groups.
    "stale_share": Case("stale_share", records(dropped_stale=[0, 1, 2, 3], trained_groups=[5, 4, 3, 2]), 0.3),
    # Medians 0.9 of the actor and 0.96 of the rollout.
    "device_memory": Case(
        "device_memory",
        records(
            usage__actor__memory_fraction=[0.9, 0.9, 0.9, 0.99], usage__rollout__memory_fraction=[0.97, 0.95, 0.99, 0.1]
        ),
        0.96,
    ),
    "preemptions": Case("preemptions", records(usage__rollout__preemptions=[0.0, 0.5, 0.3, 0.1]), 0.2),
    # Medians 0.3 of the actor and 0.15 of the critic.
    "low_mfu": Case(
        "low_mfu",
        records(usage__actor__mfu=[0.2, 0.3, 0.3, 0.4], usage__critic__mfu=[0.1, 0.2, 0.1, 0.2]),
        0.15,
    ),
    # Pool a: actor and reward are busy in 60 % of the time. Pool b: the rollout in 20 %.
    "idle_devices": Case(
        "idle_devices",
        repeated(idle_actor=0.5, idle_reward=0.9, idle_rollout=0.8),
        0.8,
        RunFacts(devices={("actor", "reward"): "a", ("rollout",): "b"}),
    ),
    # Medians 0.3 of the actor and 0.6 of the critic.
    "dead_experts": Case(
        "dead_experts",
        records(actor__dead_experts=[0.1, 0.3, 0.3, 0.9], critic__dead_experts=[0.5, 0.6, 0.6, 0.7]),
        0.6,
    ),
    "value_function": Case("value_function", records(explained_variance=[0.9] * 8 + [-0.5, -0.1, 0.3, 0.5]), 0.1),
    "skipped_updates": Case("skipped_updates", records(critic__skipped_update=[1, 0, 1, 1]), 0.75),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_value(case: Case) -> None:
    measurement = measure(case.check, case.rows, case.facts, case.initial)
    assert measurement is not None and measurement.value == pytest.approx(case.value)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_check_fires_only_beyond_its_threshold(case: Case) -> None:
    (check,) = (check for check in CHECKS if check.name == case.check)
    measured = measure(case.check, case.rows, case.facts, case.initial)
    assert measured is not None
    margin = 0.001 if check.is_lower_bound else -0.001
    for threshold, is_found in ((measured.value + margin, True), (measured.value, False), (None, False)):
        disabled = {other.name: None for other in CHECKS}
        config = HealthConfig.model_validate({**disabled, "steps": STEPS, case.check: threshold})
        # The first steps of a case may be worse than its last one, so that only the last step counts.
        findings = find(config, case.rows, case.facts, case.initial)
        last = [finding for finding in findings if finding.last_step == len(case.rows)]
        assert [finding.check for finding in last] == [case.check] * is_found


def test_every_check_has_a_case_and_a_setting() -> None:
    names = [check.name for check in CHECKS]
    assert set(names) == {case.check for case in CASES.values()}
    assert names == [name for name in HealthConfig.model_fields if name not in ("steps", "stop_on", "record_on")]


@pytest.mark.parametrize("check", [check.name for check in CHECKS])
def test_nothing_is_measured_without_metrics(check: str) -> None:
    assert measure(check, [{"seconds": 1.0}] * 20, ROLLOUT, {"seconds": 1.0}) is None


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_that_are_not_finite_count_as_missing(case: Case) -> None:
    nan = [{name: float("nan") for name in row} for row in case.rows]
    assert measure(case.check, nan, case.facts) is None


NOT_TRAINED_ON_SCORES = RunFacts(prompts_per_step=10, trains_on_scores=False)


def test_equal_scores_are_no_problem_of_a_policy_that_is_not_trained_on_them() -> None:
    assert measure("no_signal", repeated(equal_scores_fraction=1.0), NOT_TRAINED_ON_SCORES) is None


def test_a_fall_of_the_accuracy_has_another_cause_in_a_policy_that_is_not_trained_on_scores() -> None:
    check = CASES["held_out_fall"]
    first, second = (measure("held_out_fall", check.rows, facts) for facts in (ROLLOUT, NOT_TRAINED_ON_SCORES))
    assert first is not None and second is not None and first.value == second.value
    assert "actor.optimizer.lr" in second.settings and second.remedy and not first.remedy


SINGLE_STEPS = {"logprob_gap", "gradient_spike", "held_out_fall"}
"""Checks that compare a single step or evaluation."""


@pytest.mark.parametrize(
    "case", [case for case in CASES.values() if case.check not in SINGLE_STEPS], ids=lambda case: case.check
)
def test_too_few_steps_measure_nothing(case: Case) -> None:
    assert measure(case.check, case.rows[: STEPS - 1], case.facts) is None


# Values far beyond the threshold.


@pytest.mark.parametrize(
    ("check", "rows"),
    [
        ("ratio_range", records(actor__ratio=[1.0], actor__logprob_change=[1.01])),
        ("ratio_range", records(actor__ratio=[0.49])),
        ("ratio_range", records(correction__weight=[0.49])),
        ("kl_growth", records(kl=[0.0, 5.1, 6.0])),
        ("kl_growth", records(actor__kl=[0.0, 5.1, 6.0])),
        ("entropy_collapse", records(actor__entropy=[1.0, 0.009])),
    ],
)
def test_a_value_beyond_five_times_the_threshold_is_a_finding_at_once(check: str, rows: list[dict[str, float]]) -> None:
    (finding,) = find(HealthConfig(steps=STEPS), rows)
    assert (finding.check, finding.step) == (check, len(rows)) and len(rows) < STEPS
    assert finding.threshold == getattr(HealthConfig(), check)
    assert ("0.2 x" if check == "entropy_collapse" else "5 x") in finding.message
    disabled = HealthConfig.model_validate({"steps": STEPS, check: None})
    assert find(disabled, rows) == []


@pytest.mark.parametrize(
    "rows",
    [
        records(actor__ratio=[0.51, 1.49], actor__logprob_change=[0.99, 0.99]),
        # One token of 100 has a ratio of 300, which is 5.7 nats.
        records(actor__ratio=[3.99] * 2, actor__approx_kl=[2.93] * 2, actor__logprob_change=[0.057] * 2),
        records(correction__weight=[0.51, 3.0]),
        records(kl=[0.0, 9.0, 0.0]),  # a single step, because the estimate has heavy tails
        records(actor__entropy=[2.0, 1.0, 0.01], reward=[0.1, 0.5, 1.0], reward_max=[1.0] * 3),  # solved
        records(kl=[9.0, 9.0, 9.0]),
        records(actor__entropy=[1.0, 0.011]),
    ],
)
def test_smaller_values_of_single_steps_are_no_findings(rows: list[dict[str, float]]) -> None:
    assert find(HealthConfig(steps=STEPS), rows) == []


def test_a_policy_that_no_longer_changes_after_its_first_update_is_found() -> None:
    """A huge learning rate saturates the policy, so that later ratios are 1 and their median is healthy."""
    rows = records(
        actor__ratio=[0.5] + [1.0] * 11, actor__approx_kl=[9.5] + [0.0] * 11, actor__logprob_change=[10.0] + [0.0] * 11
    )
    (finding,) = find(HealthConfig(steps=STEPS), rows)
    assert (finding.check, finding.step, finding.last_step, finding.value) == ("ratio_range", 1, 1, 50.0)


# Order of findings.


def test_the_findings_of_a_step_begin_with_the_probable_cause() -> None:
    rows = records(
        truncated_fraction=[0.9] * 5,
        equal_scores_fraction=[1.0] * 5,
        actor__entropy=[1.0, 0.02, 0.02, 0.02, 0.02],
        kl=[0.0, 2.0, 2.0, 2.0, 2.0],
        actor__ratio=[1.2] * 5,
        rollout_gap=[0.0, 0.0, 0.0, 0.0, 1.0],
    )
    findings = find(HealthConfig(steps=STEPS), rows, ROLLOUT)
    order = ["ratio_range", "kl_growth", "entropy_collapse", "truncation", "no_signal"]
    assert [(finding.check, finding.step) for finding in findings] == [
        *((check, STEPS) for check in order),
        ("logprob_gap", 5),
    ]


# Silence.


def test_a_fall_with_falling_rewards_is_no_finding() -> None:
    rows = records(reward=REWARDS[::-1], accuracy=[None, 0.6, None, 0.6, None, 0.5, None, 0.4, None, 0.3])
    measurement = measure("held_out_fall", rows)
    assert measurement is not None and measurement.value == 0


COLLAPSED = [None, None, None, 0.1, None, None, None, 0.05]
"""Held-out accuracies after an initial one of 0.5. They are 80 % and 90 % below it."""


def test_a_collapse_after_successful_training_is_a_finding() -> None:
    """The reward rises from 0.1 to 0.9 and falls to 0.2, which is more than in the first step."""
    rows = records(
        reward=[0.1, *[0.9] * 5, *[0.2] * 6],
        accuracy=[0.1, None, None, None, 0.8, 0.8, None, None, None, None, 0.2, 0.2],
    )
    (finding,) = find(HealthConfig(steps=STEPS), rows)
    assert (finding.check, finding.step, finding.value) == ("held_out_fall", 12, pytest.approx(0.75))


def test_half_of_a_collapse_counts_if_a_run_has_only_two_evaluations() -> None:
    rows = records(reward=[0.5, *[0.0] * 7], accuracy=[*[None] * 7, 0.05])
    (finding,) = find(HealthConfig(steps=STEPS), rows, initial={"accuracy": 0.5})
    assert (finding.check, finding.step, finding.value) == ("held_out_fall", 8, pytest.approx(0.45))


def test_a_collapse_on_held_out_and_training_prompts_is_a_finding() -> None:
    rows = records(reward=[0.5, 0.1, *[0.0] * 6], accuracy=COLLAPSED)
    (finding,) = find(HealthConfig(steps=STEPS), rows, initial={"accuracy": 0.5})
    assert (finding.check, finding.step, finding.setting) == ("held_out_fall", 4, "actor.optimizer.lr")
    assert finding.value == pytest.approx(0.8) and "learning rate" in finding.message


@pytest.mark.parametrize(
    "rows",
    [
        records(reward=[0.5, *[0.26] * 7], accuracy=COLLAPSED),
        records(reward=[0.5, *[0.0] * 7], accuracy=[None, None, None, 0.26, None, None, None, 0.1]),
        records(reward=[0.5, *[0.0] * 7], accuracy=COLLAPSED, reward_max=[5.0] * 8),  # 0.45 of at most 5
    ],
)
def test_less_than_a_collapse_of_both_metrics_is_no_finding(rows: list[dict[str, float]]) -> None:
    assert find(HealthConfig(steps=STEPS), rows, initial={"accuracy": 0.5}) == []


@pytest.mark.parametrize(
    ("accuracy", "worst", "best", "fall"),
    [
        # With the best score for the failed rewards of the last two, all evaluations have 0.5 or more.
        ([0.5, 0.5, 0.2, 0.2], [None, None, 0.1, 0.1], [None, None, 0.6, 0.5], 0.0),
        # With the worst score for failed rewards, the first two evaluations have 0.4. The last two have at most 0.3.
        ([0.8, 0.8, 0.2, 0.2], [0.4, 0.4, 0.1, 0.1], [0.9, 0.9, 0.3, 0.3], 0.25),
    ],
)
def test_a_fall_exists_for_all_possible_scores_of_failed_rewards(
    accuracy: list[float], worst: list[float | None], best: list[float | None], fall: float
) -> None:
    rows = records(
        reward=[0.1, 0.2, 0.3, 0.5],
        accuracy=accuracy,
        evaluation__failed_as_worst=worst,
        evaluation__failed_as_best=best,
    )
    measurement = measure("held_out_fall", rows)
    assert measurement is not None and measurement.value == pytest.approx(fall)


def test_a_single_bad_evaluation_is_no_finding() -> None:
    rows = records(reward=REWARDS, accuracy=[None, 0.5, None, 0.5, None, 0.5, None, 0.1, None, 0.5])
    measurement = measure("held_out_fall", rows)
    assert measurement is not None and measurement.value == 0
    assert measure("held_out_fall", rows[:8]).value == 0  # pyright: ignore[reportOptionalMemberAccess] (it is measured)


def test_the_held_out_fall_is_measured_only_in_steps_with_an_evaluation() -> None:
    case = CASES["held_out_fall"]
    assert measure("held_out_fall", [*case.rows, {"reward": 0.5}]) is None


@pytest.mark.parametrize(
    ("last", "is_solved"),
    [([0.92, 0.92, 0.92, 0.92], True), ([0.9, 0.9, 0.9, 0.9], False)],
)
def test_a_solved_task_needs_neither_entropy_nor_signal(last: list[float], is_solved: bool) -> None:
    """The reward was 0.1 in the first steps, and its largest value is 1: 90 % of the gain is a reward of 0.91. With a
    reward of 0.9, the share 1/9 of the gain is left.
    """
    rows = records(
        reward=[0.1] * 4 + last,
        reward_max=[0.5, 1.0] + [0.5] * 6,
        actor__entropy=[1.0] * 4 + [0.01] * 4,
        equal_scores_fraction=[0.0] * 4 + [1.0] * 4,
    )
    collapse, signal = measure("entropy_collapse", rows, ROLLOUT), measure("no_signal", rows, ROLLOUT)
    assert collapse is not None and signal is not None
    assert (collapse.value, signal.value) == ((1.0, 0.0) if is_solved else (pytest.approx(0.09), 1.0))


def test_progress_begins_at_the_smaller_one_of_the_first_reward_and_the_first_median() -> None:
    """Both are 0.5 and 1, in either order, so that 0.96 is 92 % of the way. A large first reward may be chance."""
    for first in ([1.0, 0.5, 0.5, 0.5], [0.5, 1.0, 1.0, 1.0]):
        rows = records(reward=[*first, *[0.96] * 4], reward_max=[1.0] * 8, actor__entropy=[1.0] * 4 + [0.01] * 4)
        measurement = measure("entropy_collapse", rows)
        assert measurement is not None and measurement.value == 1.0


def test_an_entropy_may_fall_in_proportion_to_the_unsolved_share() -> None:
    """A reward that rises from 0.2 to 0.8 of at most 1 leaves a quarter: an entropy of 4 % is 16 % of the expected one.
    A reward that falls makes no progress.
    """
    entropies, largest = [1.0] * 4 + [0.04] * 4, [1.0] * 8
    for reward, expected in ((0.8, 0.16), (0.1, 0.04)):
        rows = records(reward=[0.2] * 4 + [reward] * 4, reward_max=largest, actor__entropy=entropies)
        measurement = measure("entropy_collapse", rows)
        assert measurement is not None and measurement.value == pytest.approx(expected)
        assert ("75% of its way" in measurement.observation) == (reward == 0.8)


def test_a_constant_reward_solves_nothing() -> None:
    measurement = measure("no_signal", repeated(reward=1.0, reward_max=1.0, equal_scores_fraction=1.0), ROLLOUT)
    assert measurement is not None and measurement.value == 1.0


def test_a_kl_below_that_of_the_first_step_is_no_finding() -> None:
    measurement = measure("kl_growth", records(kl=[3.0] * 4 + [2.9] * 4))
    assert measurement is not None and measurement.value == 0


def test_a_gap_of_stale_responses_is_not_measured() -> None:
    assert measure("logprob_gap", [{"rollout_gap": 1.0, "staleness_max": 1.0}], ROLLOUT) is None


def test_the_value_function_has_time_to_learn() -> None:
    assert measure("value_function", [{"explained_variance": -1.0}] * (3 * STEPS - 1)) is None


def test_a_critic_gets_its_own_setting() -> None:
    config = HealthConfig(steps=STEPS)
    facts = RunFacts(settings=frozenset({"critic.optimizer.lr", "actor.optimizer.lr"}))
    (finding,) = find(config, records(actor__grad_norm=[1] * 5, critic__grad_norm=[1, 1, 1, 1, 30]), facts)
    assert finding.setting == "critic.optimizer.lr" and "critic/grad_norm" in finding.message


@pytest.mark.parametrize(
    ("shares", "is_frozen", "names_modules"),
    [
        ([1.0] * 5, True, True),
        ([1.0] * 5, False, False),
        ([0.3, 0.4, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], True, False),  # the responses have become longer
        ([0.8] * 5, True, False),
    ],
)
def test_a_policy_that_never_stops_under_lora(shares: list[float], is_frozen: bool, names_modules: bool) -> None:
    facts = RunFacts(
        settings=frozenset({"actor.lora.modules_to_save", "rollout.max_response_tokens"}), has_frozen_head=is_frozen
    )
    finding = find(HealthConfig(steps=STEPS), records(truncated_fraction=shares), facts)[-1]
    assert (finding.setting == "actor.lora.modules_to_save") is names_modules
    assert ("lm_head" in finding.message) is names_modules


@pytest.mark.parametrize("can_mask", [False, True])
def test_a_remedy_that_the_run_already_has_is_not_named(can_mask: bool) -> None:
    facts = RunFacts(can_mask_truncated=can_mask)
    (finding,) = find(HealthConfig(steps=STEPS), repeated(truncated_fraction=0.9), facts)
    missing = missing_facts(finding.message, "rollout.max_response_tokens", "algorithm.mask_truncated")
    assert missing == (set() if can_mask else {"algorithm.mask_truncated"})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"algorithm.kl_coef", "actor.kl_loss_coef", "actor.optimizer.lr"}, "algorithm.kl_coef"),
        ({"actor.kl_loss_coef", "actor.optimizer.lr"}, "actor.kl_loss_coef"),
        (set(), "actor.optimizer.lr"),
    ],
)
def test_a_finding_names_a_setting_of_the_run(settings: Any, expected: str) -> None:
    rows = records(kl=[0.1] * 4 + [5.0] * 4)
    (finding,) = find(HealthConfig(steps=STEPS), rows, RunFacts(settings=frozenset(settings)))
    assert (finding.check, finding.setting) == ("kl_growth", expected)


def test_dead_experts_name_the_expert_with_most_tokens() -> None:
    rows = records(actor__dead_experts=[0.6] * 4, actor__expert_load__0=[0.5] * 4, actor__expert_load__1=[3.5] * 4)
    measurement = measure("dead_experts", rows, RunFacts())
    assert measurement is not None
    assert not missing_facts(measurement.observation, "actor", "60", 1, "3.5")
