"""Worker: the class whose registered methods run on every rank of a group."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from flowrl.controller.plan import Mesh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass
class WorkerContext:
    """What a worker knows of its place. Filled by the host before the worker's constructor runs."""

    role: str
    rank: int
    world_size: int
    local_rank: int
    node: int
    device: str
    mesh: Mesh
    process_group: "ProcessGroup | None" = None
    """All ranks of the role; None when it has one."""
    colocated: Mapping[str, "Worker"] = field(default_factory=dict)
    """The workers of the same process, by role."""


class Worker:
    """Inherit, take what you need in `__init__`, and mark the methods that the driver calls with `@register`."""

    collective: ClassVar[bool] = False
    """Whether the ranks talk to each other: they then get a process group, and a fair share of CPU threads."""

    context: WorkerContext

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def world_size(self) -> int:
        return self.context.world_size

    @property
    def device(self) -> str:
        """`cpu` or `cuda:N`."""
        return self.context.device

    @property
    def mesh(self) -> Mesh:
        return self.context.mesh

    def peer(self, role: str) -> "Worker | None":
        """The worker of another role in this process; None if that role lives elsewhere."""
        return self.context.colocated.get(role)
