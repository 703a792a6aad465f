import math

from flowrl.report.page.curve_data import curve_data


def test_metrics_of_different_steps_are_in_different_groups() -> None:
    records = [
        {"step": 0, "accuracy": 0.5},
        {"step": 1, "reward": 1.0, "elapsed_s": 2.0, "response_tokens": 10.0},
        {"step": 2, "reward": 2.0, "elapsed_s": 5.0, "response_tokens": 30.0, "accuracy": 0.75},
    ]
    groups = {tuple(group["metrics"]): group for group in curve_data(records)["groups"]}
    assert groups["accuracy",] == {
        "step": [0, 2],
        "time": [0, 5],
        "tokens": [0, 40],
        "metrics": {"accuracy": [0.5, 0.75]},
    }
    assert groups["response_tokens", "reward"]["metrics"]["reward"] == [1, 2]
    assert groups["response_tokens", "reward"]["tokens"] == [10, 40]


def test_a_long_curve_has_the_mean_and_the_range_of_buckets() -> None:
    records = [{"step": step, "reward": value} for step, value in enumerate([1.0, 3.0, 5.0, -1.0], start=1)]
    (group,) = curve_data(records, max_buckets=2)["groups"]
    assert group["step"] == [1.5, 3.5]
    assert (group["metrics"], group["low"], group["high"]) == (
        {"reward": [2, 2]},
        {"reward": [1, -1]},
        {"reward": [3, 5]},
    )
    assert "time" not in group and "tokens" not in group


def test_values_that_are_not_finite_are_left_out() -> None:
    (group,) = curve_data([{"step": 1, "kl": math.nan}, {"step": 2, "kl": 0.5}])["groups"]
    assert (group["step"], group["metrics"]) == ([2], {"kl": [0.5]})
