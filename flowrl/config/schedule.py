"""When responses are generated, next to the training of earlier ones."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt, model_validator

from flowrl.config.algorithm.choice import ChoiceConfig

SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {},
    "one_step_off": {},
    "async": {"max_staleness": 1, "max_concurrent": None, "overprovision": 0, "interrupt": True},
}
"""Schedule -> its settings with their defaults."""


class ScheduleConfig(ChoiceConfig):
    """Whether generation waits for training. Staleness is the number of updates that the policy had between the weights
    that sampled a token and those that are trained on it."""

    CHOICE: ClassVar[str] = "kind"
    CHOICES: ClassVar[Mapping[str, Mapping[str, Any]]] = SCHEDULES

    kind: Literal["sync", "one_step_off", "async"] = "sync"
    """`sync` generates a step's responses and then trains on them; `one_step_off` generates those of the next step
    meanwhile, staleness 1; `async` has each replica of the rollout, on devices of its own, generate all the time."""

    max_staleness: NonNegativeInt | None = None
    """async: no response is older than so many updates when it is trained on; usually 1, and 0 is the same as sync."""

    max_concurrent: PositiveInt | None = None
    """async: prompts that are worked on at once, over all replicas; null is as many as max_staleness admits and the
    replicas take."""

    overprovision: NonNegativeInt | None = None
    """async: prompts in flight beyond what the steps need, so that a step goes without its slowest; those that grow too
    old are dropped and counted, and long responses with them. At most the prompts of a step; usually 0."""

    interrupt: bool | None = None
    """async: true gives a replica new weights between two tokens of what it is working on, and each token keeps the
    version that sampled it; false lets it finish first. Usually true."""

    @model_validator(mode="after")
    def _check_redundancy(self) -> "ScheduleConfig":
        if self.overprovision and not self.max_staleness:
            raise ValueError(
                f"overprovision is {self.overprovision}, but max_staleness is 0, at which a prompt that a step goes without "
                f"is too old for the next one: set overprovision: 0, or max_staleness: 1 or more"
            )
        return self

    @property
    def staleness(self) -> int:
        """The most updates that there may be between a response and its training."""
        return {"sync": 0, "one_step_off": 1}.get(self.kind, self.max_staleness or 0)

    @property
    def streams(self) -> bool:
        """Whether replicas are given prompts one by one, and not a step's together."""
        return self.kind == "async" and self.staleness > 0
