"""Settings of the health checks: one threshold per check."""

from typing import Annotated, Literal

from annotated_types import Gt, Le
from pydantic import Field, PositiveFloat, PositiveInt

from flowrl.config.base import Config

HealthCheck = Literal[
    "skipped_updates",
    "logprob_gap",
    "gradient_spike",
    "ratio_range",
    "value_function",
    "kl_growth",
    "entropy_collapse",
    "repetition",
    "length_limit",
    "truncation",
    "no_signal",
    "held_out_fall",
    "stale_share",
    "idle_devices",
]
"""Names of the health checks, in the order of causes (`CHECKS`). Each name is also the setting of the check's
threshold.
"""

HealthChecks = Annotated[tuple[HealthCheck, ...], Field(strict=False)]
"""A list of names of health checks."""

Share = Annotated[float, Gt(0), Le(1)]


class HealthConfig(Config):
    """Thresholds of the health checks (docs/observability.md). Null disables a check. A finding changes no result."""

    steps: PositiveInt = 10
    """Number of steps whose median most checks compare with their threshold. These checks need the values of this many
    steps, so that a single noisy step has no effect. Three checks also find a value far beyond the threshold at once
    (docs/observability.md).
    """

    skipped_updates: Share | None = 0.5
    """Share of the last `steps` steps in which an update was skipped."""

    logprob_gap: PositiveFloat | None = 1.0
    """Mean gap between the log-probabilities of rollout and trainer, as a multiple of `rollout.gap_warning`."""

    gradient_spike: PositiveFloat | None = 10.0
    """Gradient norm of a step, as a multiple of the 90 % quantile of the steps before it. Norms below the median of the
    first steps count as this median.
    """

    ratio_range: PositiveFloat | None = 0.1
    """Distance from 1 of the mean ratio of new to old probabilities, or of the mean importance weight of stale
    responses. Also the estimated KL between the policies before and after an update, in nats per token.
    """

    value_function: float | None = 0.02
    """Smallest explained variance of the critic, after the first 3 x `steps` steps. A critic that predicts a constant
    has 0.
    """

    kl_growth: PositiveFloat | None = 1.0
    """KL of the policy to the reference in nats per token, if it is larger than in the first step."""

    entropy_collapse: Share | None = 0.05
    """Smallest entropy of the policy, as a fraction of its entropy in the first step. It does not apply to a policy
    whose reward has almost reached the largest reward so far.
    """

    repetition: Share | None = 0.5
    """Share of n-grams of the responses that occur earlier in the same response."""

    length_limit: Share | None = 0.95
    """Mean response length, as a fraction of `rollout.max_response_tokens`."""

    truncation: Share | None = 0.5
    """Share of responses that reached the length limit."""

    no_signal: Share | None = 0.9
    """Share of groups, trained or dropped, whose scores are all equal. It does not apply to a policy whose reward has
    almost reached the largest reward so far.
    """

    held_out_fall: PositiveFloat | None = 0.2
    """Fall of the held-out `accuracy` below its best value, as a fraction of this value, while the training `reward`
    rises. Also the rise of `validation_loss` above its best value, while the training loss falls. A fall of more than
    half counts if the training metric has become worse by more than half as well.
    """

    stale_share: Share | None = 0.2
    """Share of the generated groups that are dropped because they are too stale."""

    idle_devices: Share | None = 0.8
    """Share of the time during which a device runs no call."""

    record_on: HealthChecks = ()
    """Names of checks. After the first finding of each of them, the next step is recorded for `flowrl replay`."""

    stop_on: HealthChecks = ()
    """Names of checks whose findings end the run. The run then completes the current step, saves a checkpoint if
    `checkpoint.every` is set, and exits with code 2.
    """
