"""Rollout schedules: whether and how generation overlaps with training.

The staleness of a token is the number of policy updates between two versions of the weights: the version that sampled
the token, and the version that is trained on it.
"""

from typing import Annotated, Literal

from pydantic import NonNegativeInt, PositiveInt, model_validator

from flowrl.config.base import Member, OneOf


class ScheduleConfig(Member):
    """Base class of the schedules."""

    NOUN = "a schedule"

    kind: str
    """Name of the schedule: `sync`, `one_step_off` or `async`."""

    @property
    def staleness(self) -> int:
        """The largest staleness that the schedule allows."""
        return 0

    @property
    def is_streaming(self) -> bool:
        """True if replicas receive prompts one by one, false if they receive one batch per step."""
        return False


class SyncSchedule(ScheduleConfig):
    """Generates the responses of a step, then trains on them. Staleness 0."""

    kind: Literal["sync"] = "sync"


class OneStepOffSchedule(ScheduleConfig):
    """Generates the responses of the next step while training on the responses of the current step. Staleness 1."""

    kind: Literal["one_step_off"] = "one_step_off"

    @property
    def staleness(self) -> int:
        return 1


class AsyncSchedule(ScheduleConfig):
    """Generates continuously on rollout replicas that have their own devices."""

    kind: Literal["async"] = "async"
    max_staleness: NonNegativeInt = 1
    """Largest staleness of a response at the time of training; 0 behaves like `sync`."""

    max_concurrent: PositiveInt | None = None
    """Maximum number of prompts in flight over all replicas; null derives it from max_staleness and the number of
    replicas.
    """

    overprovision: NonNegativeInt = 0
    """Additional prompts in flight, so that a step does not wait for stragglers. At most the prompts of one step.
    Responses that exceed max_staleness are dropped and counted. Long responses are dropped more often."""

    interrupt: bool = True
    """True: a replica loads new weights between two tokens of a response. False: the replica first finishes its
    responses.
    """

    concurrent_evaluation: bool | Literal["auto"] = "auto"
    """True: one replica keeps the weights of a step and generates the responses of its evaluation, while training
    continues. False: training waits for evaluations, which all replicas generate. `auto`: true if the replicas were
    idle for long enough since the last evaluation, so that the evaluation costs no time.
    """

    @model_validator(mode="after")
    def _check_overprovision(self) -> "AsyncSchedule":
        if self.overprovision and not self.max_staleness:
            raise ValueError(f"overprovision is {self.overprovision}, but max_staleness is 0: set overprovision: 0")
        return self

    @property
    def staleness(self) -> int:
        return self.max_staleness

    @property
    def is_streaming(self) -> bool:
        return self.max_staleness > 0


AnySchedule = Annotated[SyncSchedule | OneStepOffSchedule | AsyncSchedule, OneOf(default="sync")]
