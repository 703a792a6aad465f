"""Settings of the placement: pools of devices, and the pool of each role."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Protocol

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PlainValidator, PositiveFloat, PositiveInt

from flowrl.config.base import Config, Device

ROLES = ("actor", "rollout", "reference", "teacher", "critic", "reward", "environment")
_SHARE = re.compile(r"([1-9]\d*)/([1-9]\d*)")
_PART = re.compile(r"(?P<name>[^\[\]+:]+)(?:\[(?P<start>\d*):(?P<stop>\d*)\])?")


class PoolPart(NamedTuple):
    """Part of a pool: the ranks from `start` up to, but not including, `stop`. None stands for the end of the pool."""

    pool: str
    start: int
    stop: int | None


def pool_parts(text: str) -> tuple[PoolPart, ...]:
    """Parses the setting `pool` of a role, such as `main`, `main[0:2]` or `policy+judges`.

    Raises: ValueError if the text has another form.
    """
    matches = [_PART.fullmatch(part.strip()) for part in text.split("+")]
    if not all(matches):
        raise ValueError(f"{text!r} is not a pool: use a name, a range of ranks like main[0:2], or several like a+b")
    parts = (match.groupdict() for match in matches if match)
    return tuple(
        PoolPart(p["name"].strip(), int(p["start"] or 0), int(p["stop"]) if p["stop"] else None) for p in parts
    )


def _checked_pool(text: str) -> str:
    pool_parts(text)
    return text


class RolePlacement(Config):
    """A role's pool and its parallel sizes. The data-parallel size is the number of ranks divided by tp, sp and pp."""

    pool: Annotated[str, AfterValidator(_checked_pool)]
    """Pool of the role: a name, a range of ranks (`main[0:2]`), or several pools (`a+b`). The role has one rank per
    device.
    """

    @property
    def parts(self) -> tuple[PoolPart, ...]:
        """The parsed `pool`: each pool that the role uses, with the range of the pool's ranks."""
        return pool_parts(self.pool)

    tp: PositiveInt = 1
    """Tensor-parallel size: number of ranks over which each layer's weights are sharded."""

    sp: PositiveInt = 1
    """Sequence-parallel size: number of ranks over which each sequence is sharded."""

    pp: PositiveInt = 1
    """Pipeline-parallel size: number of stages over which the layers are distributed. Not for hf rollouts."""


@dataclass(frozen=True)
class ReplicaSizes:
    """Parallel sizes of the devices that one dedicated process of a role uses."""

    tp: int = 1
    """Number of devices over which the weights of each layer are sharded."""
    pp: int = 1
    """Number of stages over which the layers are distributed."""

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in (("tp", self.tp), ("pp", self.pp)) if size > 1)


ONE_DEVICE = ReplicaSizes()


class Follower(Protocol):
    """A process of a replica on several nodes, on a node other than the node of the role's process. It ends with the
    role's process.
    """

    def run(self, function: Callable[..., object], *arguments: object) -> Callable[[], object]:
        """Starts `function(address, *arguments)` in this process. `address` is the IP address of the process's node.

        Returns a function that waits for the end of the call and returns the result. The returned function raises the
        error of the call, or RuntimeError if the process was lost.
        """
        ...


def _read_role(value: object) -> RolePlacement:
    if isinstance(value, str):
        return RolePlacement(pool=value)
    if isinstance(value, Mapping | RolePlacement):
        return RolePlacement.model_validate(value)
    raise ValueError("a role must be the name of its pool, or a mapping of pool, tp, sp and pp")


def _read_pool(value: object) -> tuple[int, ...] | str:
    if isinstance(value, str) and (value == "all" or _SHARE.fullmatch(value)):
        return value
    if isinstance(value, list | tuple) and all(type(count) is int and count >= 0 for count in value):
        return tuple(value)
    raise ValueError(
        "a pool must be a list of device counts per node like [8, 8], a share of every node like 1/2, or all"
    )


Ranks = Annotated[tuple[NonNegativeInt, ...], Field(strict=False)]


class Placement(Config):
    """Pools and roles. `flowrl.controller.placement.plan.plan` checks whether they fit the machine."""

    device: Device = "auto"
    """Device type: `cuda` (a device is a GPU), `cpu` (a device is a process on the CPU), or `auto`. `auto` selects cuda
    if the machine has GPUs, otherwise cpu.
    """

    pools: Mapping[str, Annotated[Sequence[int] | str, PlainValidator(_read_pool)]]
    """Devices of each pool: a count per node (`[8, 8]`), a fraction of each node (`1/2`), or `all`. Pools do not
    overlap.
    """

    roles: Mapping[str, Annotated[str | RolePlacement, BeforeValidator(_read_role)]]
    """Pool of each role: a name, or a mapping with parallel sizes. Roles in the same pool are colocated."""

    routes: Mapping[str, Annotated[tuple[Ranks, ...], Field(strict=False)]] | None = None
    """Fixed routes from rollout replicas to actor ranks, for schedule async. `{rollout: [[0], [0, 1]]}` lists, for each
    replica, the data-parallel actor ranks that it generates for. Null: every replica generates for all ranks."""

    memory_gb: PositiveFloat | None = None
    """Memory per device in GB (10^9 bytes), for the memory check. Null uses the memory of the smallest GPU of this
    machine. With device cpu, null uses the host memory, which all processes of a node share.
    """

    def role(self, name: str) -> RolePlacement:
        """Returns the placement of role `name`, which must be in `roles`."""
        return _read_role(self.roles[name])


SINGLE = Placement(pools={"main": [1]}, roles=dict.fromkeys(ROLES, "main"))
"""Every role on one device."""
