"""Rollout schedules: whether generation waits for training.

The staleness of a token is the number of policy updates between the weights that sampled it and the weights that are
trained on it.
"""

from typing import Annotated, Literal

from pydantic import NonNegativeInt, PositiveInt, model_validator

from flowrl.config.base import Member, OneOf


class ScheduleConfig(Member):
    """Base class of the schedules."""

    kind: str
    """Name of the schedule: `sync`, `one_step_off` or `async`."""

    @property
    def staleness(self) -> int:
        """The largest staleness that the schedule allows."""
        return 0

    @property
    def is_streaming(self) -> bool:
        """Whether replicas receive prompts one by one instead of one batch per step."""
        return False


class SyncSchedule(ScheduleConfig):
    """Generates the responses of a step, then trains on them. Staleness 0."""

    kind: Literal["sync"] = "sync"


class OneStepOffSchedule(ScheduleConfig):
    """Generates the responses of the next step while training on those of the current step. Staleness 1."""

    kind: Literal["one_step_off"] = "one_step_off"

    @property
    def staleness(self) -> int:
        return 1


class AsyncSchedule(ScheduleConfig):
    """Generates continuously on rollout replicas that have devices of their own."""

    kind: Literal["async"] = "async"
    max_staleness: NonNegativeInt = 1
    """Largest staleness of a response when it is trained on; 0 behaves like `sync`."""

    max_concurrent: PositiveInt | None = None
    """Prompts in flight over all replicas; null uses as many as max_staleness and the replicas allow."""

    overprovision: NonNegativeInt = 0
    """Prompts in flight beyond the need of a step, so that a step does not wait for stragglers. Responses that become
    too old are dropped and counted; long responses are dropped more often. At most the prompts of one step."""

    interrupt: bool = True
    """True: a replica loads new weights between two tokens. False: it finishes its responses first."""

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
