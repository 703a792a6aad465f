"""Where roles run: pools of devices, and the map from role to pool."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PlainValidator, PositiveFloat, PositiveInt

from flowrl.config.base import Config, Device

ROLES = ("actor", "rollout", "reference", "critic", "reward")
_SHARE = re.compile(r"([1-9]\d*)/([1-9]\d*)")
_PART = re.compile(r"(?P<name>[^\[\]+:]+)(?:\[(?P<start>\d*):(?P<stop>\d*)\])?")


class PoolPart(NamedTuple):
    """Ranks `start` to `stop` (not included; None is the pool's end) of a pool."""

    pool: str
    start: int
    stop: int | None


def pool_parts(text: str) -> tuple[PoolPart, ...]:
    """What a role's `pool` names: `main`, `main[0:2]`, `policy+judges`. Raises `ValueError`."""
    found = [_PART.fullmatch(part.strip()) for part in text.split("+")]
    if not all(found):
        raise ValueError(
            f"{text!r} does not name pools: write a pool's name, some of its ranks as main[0:2], or several as a+b"
        )
    return tuple(
        PoolPart(part["name"].strip(), int(part["start"] or 0), int(part["stop"]) if part["stop"] else None)
        for part in found
        if part
    )


def _checked_parts(text: str) -> str:
    pool_parts(text)
    return text


class RolePlacement(Config):
    """A role's pool and how its ranks are laid out there; data parallelism takes what the sizes leave."""

    pool: Annotated[str, AfterValidator(_checked_parts)]
    """Where the role runs, one rank per device: a pool's name, some of its ranks (`main[0:2]`), or several (`a+b`)."""

    @property
    def parts(self) -> tuple[PoolPart, ...]:
        """The pools of the role, and which of their ranks."""
        return pool_parts(self.pool)

    tp: PositiveInt = 1
    """Tensor-parallel size: ranks that share each layer's weights."""

    sp: PositiveInt = 1
    """Sequence-parallel size: ranks that share each sequence."""

    pp: PositiveInt = 1
    """Pipeline-parallel size: ranks that share the stack of layers."""


def _read_role(value: object) -> RolePlacement:
    if isinstance(value, str):
        return RolePlacement(pool=value)
    if isinstance(value, Mapping | RolePlacement):
        return RolePlacement.model_validate(value)
    raise ValueError("a role is the name of its pool, or a mapping of pool, tp, sp and pp")


def _read_pool(value: object) -> tuple[int, ...] | str:
    if isinstance(value, str) and (value == "all" or _SHARE.fullmatch(value)):
        return value
    counts = tuple(value) if isinstance(value, list | tuple) else (value,)
    if isinstance(value, list | tuple) and all(type(count) is int and count >= 0 for count in counts):
        return tuple(count for count in counts if isinstance(count, int))
    raise ValueError("a pool is a list of devices per node like [8, 8], a share of every node like 1/2, or all")


Ranks = Annotated[tuple[NonNegativeInt, ...], Field(strict=False)]


class Placement(Config):
    """Pools and roles. Whether they fit a machine is for `flowrl.controller.placement.plan.plan` to say."""

    device: Device = "auto"
    """`cuda` gives each rank a GPU, `cpu` a process; `auto` is cuda where the machine has GPUs, else cpu."""

    pools: Mapping[str, Annotated[Sequence[int] | str, PlainValidator(_read_pool)]]
    """Its devices: a count per node (`[8, 8]`), a share of every node (`1/2`), or `all`. Pools never overlap."""

    roles: Mapping[str, Annotated[str | RolePlacement, BeforeValidator(_read_role)]]
    """The pool of each role: its name, or a mapping with parallel sizes too. Roles of one pool share its devices."""

    routes: Mapping[str, Annotated[tuple[Ranks, ...], Field(strict=False)]] | None = None
    """Who feeds whom, for `schedule.kind: async`: `{rollout: [[0], [0, 1]]}` names for each replica of the rollout the
    data-parallel ranks of the actor whose share of a step it answers. Null: any replica answers anything."""

    memory_gb: PositiveFloat | None = None
    """Memory of each device in 10^9 bytes, which a plan must fit into; null asks this machine, whose CPU slots share
    its memory."""

    def role(self, name: str) -> RolePlacement:
        """The placement of role `name`, which must be one of `roles`."""
        return _read_role(self.roles[name])


SINGLE = Placement(pools={"main": [1]}, roles=dict.fromkeys(ROLES, "main"))
"""Every role on one device."""
