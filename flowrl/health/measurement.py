"""The parts of a health check: a function that measures a window of steps, its meaning, and its remedy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flowrl.config import HealthCheck
from flowrl.health.step_window import StepWindow


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run that its metrics do not contain."""

    settings: frozenset[str] = frozenset()
    """Dotted keys of the run's settings."""

    max_response_tokens: int | None = None
    """Setting `rollout.max_response_tokens`; None without a rollout."""

    prompts_per_step: int | None = None
    """Number of groups of a step; None without a rollout."""

    trains_on_scores: bool = True
    """Whether the policy is trained on the scores. Otherwise, scores only measure the policy."""

    can_mask_truncated: bool = False
    """Whether `algorithm.mask_truncated` exists and is false."""

    has_frozen_head: bool = False
    """Whether the actor trains a LoRA adapter, and neither its head nor its embeddings."""

    gap_limit: float | None = None
    """Largest gap between rollout and trainer without a finding, in nats per token. If None, the gap is not checked."""

    gap_causes: str = ""
    """Likely causes of a gap above the limit."""

    devices: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    """Roles that share a device -> name of their pool. The names of several pools are joined by `+`."""


@dataclass(frozen=True)
class Measurement:
    """Value of a check at one step."""

    value: float
    observation: str
    """Start of the message: the measured quantity with its value."""
    role: str = "actor"
    """The trained role that has the value."""
    meaning: str = ""
    """Likely cause, as a clause. If empty, `Check.meaning` is used, and the same for `remedy` and `settings`."""
    remedy: str = ""
    settings: tuple[str, ...] = ()


Measure = Callable[[StepWindow, RunFacts], Measurement | None]

EXTREME = 5
"""Multiple of a threshold beyond which the value of a single step is a finding (`Check.measure_extreme`). The multiple
is large, so that noise of single steps causes no finding.
"""


@dataclass(frozen=True)
class Check:
    """A health check."""

    name: HealthCheck
    measure: Measure
    """Returns the value that is compared with the threshold after each step. For most checks, the value is the median
    of the last `health.steps` steps. Returns None if the run has not logged enough values yet.
    """
    meaning: str
    """Likely cause, as a clause."""
    remedy: str
    """Remedy. Empty for `logprob_gap` and `truncation`, because their remedies depend on the run."""
    settings: tuple[str, ...]
    """Settings to change. A finding names the first setting that the run has. `ROLE` stands for the trained role."""
    is_lower_bound: bool = False
    """If True, values below the threshold are findings. If False, values above the threshold are findings."""
    measure_extreme: Measure | None = None
    """Returns the value of the last step alone, for a check whose `measure` returns a median. If this value is far
    beyond the threshold (`EXTREME`), it is a finding even if the window is not full or the median is healthy. The
    reason is that the metric of a policy that breaks may be extreme only in the first step.
    """

    def measure_or_extreme(
        self, threshold: float, window: StepWindow, facts: RunFacts
    ) -> tuple[Measurement | None, float]:
        """Returns the value of the last step, and the multiple of the threshold to compare it with (usually 1)."""
        if self.measure_extreme is not None:
            multiple = 1 / EXTREME if self.is_lower_bound else EXTREME
            measurement = self.measure_extreme(window, facts)
            if measurement is not None and self.distance(measurement, multiple * threshold) > 0:
                return measurement, multiple
        return self.measure(window, facts), 1.0

    def distance(self, measurement: Measurement, limit: float) -> float:
        """Returns how far a value is beyond a limit. The distance is negative or 0 if the value is healthy."""
        return limit - measurement.value if self.is_lower_bound else measurement.value - limit

    def setting(self, measurement: Measurement, facts: RunFacts) -> str:
        """Returns the setting to change first."""
        names = [name.replace("ROLE", measurement.role) for name in measurement.settings or self.settings]
        return next((name for name in names if name in facts.settings), names[-1])
