"""What a schedule is held to, what it has makers do, and what it tells of groups."""

from collections.abc import Mapping
from dataclasses import dataclass

from flowrl.config import OnPolicyConfig


@dataclass(frozen=True)
class Rules:
    """What a schedule is held to. All counts are of groups."""

    groups_per_step: int
    max_staleness: int
    max_concurrent: int | None = None
    """Running at once over all makers; None is no bound."""
    overprovision: int = 0
    """Admitted beyond what staleness allows; a step may leave so many behind."""
    interrupt: bool = True
    """Whether a maker takes new weights while it is working."""
    slots: int = 1
    """That one maker works on at once."""
    whole_batches: bool = False
    """A step's groups are given out together, when none is running; without regard to `slots` and `max_concurrent`."""
    total: int | None = None
    """That the run trains, those before a resume too; None is no end."""
    lanes: tuple[tuple[int, ...], ...] | None = None
    """For each trainer the makers that feed it, each with an equal part of the step; None: any maker feeds any."""


def rules_of(config: OnPolicyConfig, lanes: tuple[tuple[int, ...], ...] | None = None) -> Rules:
    """The rules of a schedule whose makers stream; runs of whole batches have no scheduler.

    Args:
        lanes: for each data-parallel rank of the actor the replicas of the rollout that feed it.
    """
    schedule = config.schedule
    return Rules(
        groups_per_step=config.prompts_per_step,
        max_staleness=schedule.staleness,
        max_concurrent=schedule.max_concurrent,
        overprovision=schedule.overprovision or 0,
        interrupt=bool(schedule.interrupt),
        slots=max(1, config.rollout.max_num_seqs // config.samples_per_prompt),
        total=config.steps * config.prompts_per_step,
        lanes=lanes,
    )


@dataclass(frozen=True)
class Give:
    """The maker begins with the groups."""

    maker: int
    groups: tuple[int, ...]


@dataclass(frozen=True)
class Update:
    """The maker takes the weights of the version, after what it was given before and before what it is given next."""

    maker: int
    version: int


@dataclass(frozen=True)
class Abort:
    """The maker leaves the groups unfinished: they were dropped."""

    maker: int
    groups: tuple[int, ...]


Action = Give | Update


@dataclass(frozen=True)
class Taken:
    """The groups of a step."""

    version: int
    """Of the weights that the step trains."""
    groups: tuple[int, ...]
    """In the order of admission; with lanes, lane after lane."""
    staleness: tuple[int, ...]
    """Of each group: that version minus the one its maker had when it was given."""


REASONS = ("stale", "refused")
"""Why a run drops groups: too old for any step to come, because a step with overprovision left them behind; or the engine
refuses the prompt."""


@dataclass(frozen=True)
class Counts:
    """Where all groups are: admitted = waiting + running + complete + trained + the sum of dropped."""

    admitted: int
    waiting: int
    running: int
    complete: int
    """Not trained yet: the depth of the buffer."""
    trained: int
    dropped: Mapping[str, int]
    """By reason; `REASONS` are always there."""
