"""Worker: the class whose registered methods run on every rank of a group."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from flowrl.controller.placement.plan import Mesh

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
    twins: frozenset[str] = frozenset()
    """Roles whose ranks are in the same processes as this role's, each with the same number."""
    address: str = "127.0.0.1"
    """Where other processes of the run reach this one."""
    replaced: bool = False
    """Whether the process took a lost one's place."""
    leads: int = 1
    """Devices of the node that this process leads, for a role with processes of its own."""
    yields: bool = False
    """Whether it will be told to leave its device to other processes, as `can_offload_device` has said that it can."""


class Worker:
    """Inherit, take what you need in `__init__`, and mark the methods that the driver calls with `@register`."""

    collective: ClassVar[bool] = False
    """Whether the ranks talk to each other: they then get a process group."""

    replicated: ClassVar[bool] = False
    """Whether every rank holds a copy of the same model, and talks to no other: the inline backend then makes one."""

    stateless: ClassVar[bool] = False
    """Whether another process can take a lost one's place: the constructor's arguments, and the last call of each
    method registered with `replay=True`, make up all that it holds."""

    context: WorkerContext

    @classmethod
    def on(cls, mesh: Mesh, *args: Any, **kwargs: Any) -> "type[Worker]":  # Any: the constructor's
        """The class that is made on these ranks for the constructor's arguments: this one, or a variant of it whose
        ranks talk."""
        return cls

    @classmethod
    def can_offload_device(cls, device: str, *args: Any, **kwargs: Any) -> bool:  # Any: the constructor's
        """Whether a worker made with these arguments gives its memory on a device (`cpu` or `cuda:N`) away, by
        `offload`, where other processes use that device too."""
        return False

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

    @property
    def lenders(self) -> "tuple[Worker, ...]":
        """Workers of this process whose weights this one's methods use."""
        return ()

    def offload(self, *, keep_weights: bool) -> None:
        """Makes room on the device for another role of this process, which perhaps uses this one's weights, or for
        another process."""

    def onload(self) -> None:
        """Comes back: a method of this worker is about to be called, or of one that uses its weights."""

    def onload_parts(self, parts: tuple[str, ...]) -> None:
        """Comes back for a method that needs these parts only (`memory` of `register`); those that are there stay."""
        self.onload()

    def run_function(self, fn: Callable, **arguments: Any) -> Any:  # Any: the function's own
        """What `group.run` calls: `fn(self, ...)`, its arguments named `of_` and their own name."""
        return fn(self, **{name.removeprefix("of_"): value for name, value in arguments.items()})
