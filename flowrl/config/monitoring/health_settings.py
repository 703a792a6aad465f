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
    "dead_experts",
    "kl_growth",
    "entropy_collapse",
    "repetition",
    "length_limit",
    "truncation",
    "no_signal",
    "held_out_fall",
    "device_memory",
    "preemptions",
    "stale_share",
    "idle_devices",
    "low_mfu",
]
"""Names of the health checks, causes before their effects (`CHECKS`). Each name is also the setting of the check's
threshold.
"""

HealthChecks = Annotated[tuple[HealthCheck, ...], Field(strict=False)]
"""A list of names of health checks."""

Share = Annotated[float, Gt(0), Le(1)]


class HealthConfig(Config):
    """Limits of the health checks (docs/observability.md). A value beyond its limit is a finding. Findings do not
    change training, except that `stop_on` ends the run. Null disables a check.
    """

    steps: PositiveInt = 10
    """Number of steps whose median most checks compare with their limit. These checks need the values of this many
    steps, so that a single noisy step has no effect. Three checks report a value far beyond the limit sooner
    (docs/observability.md).
    """

    skipped_updates: Share | None = 0.5
    """Largest share of the last `steps` steps in which an update is skipped."""

    logprob_gap: PositiveFloat | None = 1.0
    """Largest mean difference between log-probabilities of rollout and trainer, in units of `rollout.gap_warning`."""

    gradient_spike: PositiveFloat | None = 10.0
    """Largest gradient norm of a step, as a multiple of the 90 % quantile of the steps before it. Norms below the
    median of the first steps count as this median.
    """

    ratio_range: PositiveFloat | None = 0.1
    """Largest distance from 1 of the mean ratio of new to old probabilities, and of the mean importance weight of stale
    responses. Also the largest estimated KL between the policies before and after an update, in nats per token.
    """

    value_function: float | None = 0.02
    """Smallest explained variance of the critic. The check begins after 3 x `health.steps` steps. A critic that
    predicts the same value for all tokens has an explained variance of 0.
    """

    dead_experts: Share | None = 0.5
    """Largest share of the experts of a mixture of experts that receive no token in a step (`ROLE/dead_experts`)."""

    kl_growth: PositiveFloat | None = 1.0
    """Largest KL of the policy to the reference in nats per token. A KL below that of the first step is no finding."""

    entropy_collapse: Share | None = 0.05
    """Smallest entropy of the policy, as a fraction of its entropy in the first step. It is multiplied by the share of
    the task that is not solved yet, and does not apply to a policy whose mean reward has almost reached the largest
    reward of any response so far.
    """

    repetition: Share | None = 0.5
    """Largest share of n-grams that repeat an earlier n-gram of the same response."""

    length_limit: Share | None = 0.95
    """Largest mean response length, relative to `rollout.max_response_tokens`."""

    truncation: Share | None = 0.5
    """Largest share of responses that are truncated at the length limit."""

    no_signal: Share | None = 0.9
    """Largest share of groups, trained or dropped, whose scores are all equal. It does not apply to a policy whose
    mean reward has almost reached the largest reward of any response so far.
    """

    held_out_fall: PositiveFloat | None = 0.2
    """Largest fall of the held-out `accuracy` below its best value, as a fraction of this value, while the training
    `reward` rises. Also the largest rise of `validation_loss` above its best value, while the training loss falls. If
    the training metric does not improve, only a collapse is a finding: the held-out metric has lost more than half of
    its best value, and the training metric more than half of the better one of its values in the first step and at
    the best evaluation. A held-out reward must also have lost at least a tenth of the largest reward of any response.
    """

    device_memory: Share | None = 0.95
    """Largest share of a GPU's memory that is in use at the peak of a role (`usage/ROLE/memory_fraction`)."""

    preemptions: PositiveFloat | None = 0.1
    """Largest number of interruptions per response because vLLM's KV cache was full."""

    stale_share: Share | None = 0.2
    """Largest share of the generated groups that are dropped because they are too stale."""

    idle_devices: Share | None = 0.8
    """Largest share of the time during which a device runs no call."""

    low_mfu: Share | None = 0.1
    """Smallest model FLOPs utilization of a role in its forward and backward passes (`usage/ROLE/mfu`). It is only
    measured on GPUs with a known peak, and with `report.peak_tflops`.
    """

    record_on: HealthChecks = ()
    """Names of checks. After the first finding of each of them, the next step is recorded for `flowrl replay`."""

    stop_on: HealthChecks = ()
    """Names of checks whose findings end the run. The run then completes the current step, saves a checkpoint if
    `checkpoint.every` is set, and exits with code 2.
    """
