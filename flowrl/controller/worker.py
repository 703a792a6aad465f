"""Worker: base class of the classes whose registered methods run on every rank of a group."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from flowrl.controller.placement.plan import Mesh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass
class WorkerContext:
    """Rank, device and peers of a worker. The host sets it before it runs the worker's constructor."""

    role: str
    rank: int
    world_size: int
    local_rank: int
    node: int
    device: str
    mesh: Mesh
    process_group: "ProcessGroup | None" = None
    """Process group of all ranks of the role; None for a single rank."""
    colocated: Mapping[str, "Worker"] = field(default_factory=dict)
    """Role -> worker, for all workers of this process."""
    aligned_roles: frozenset[str] = frozenset()
    """Colocated roles whose ranks equal this role's ranks in every process."""
    address: str = "127.0.0.1"
    """Address at which other processes of the run reach this process."""
    replaced: bool = False
    """Whether this process replaces a lost one."""
    num_tp_devices: int = 1
    """Number of tensor-parallel devices that a dedicated process uses; its peers have no process of the role."""
    can_offload: bool = False
    """Whether other processes share the device and the worker can offload for them (`can_offload_device`)."""


class Worker:
    """Base class of workers. Subclasses mark the methods that the driver calls with `@register`."""

    collective: ClassVar[bool] = False
    """Whether the ranks communicate with each other; they then get a process group."""

    replicated: ClassVar[bool] = False
    """Whether every rank holds a full copy of the model and needs no other rank. The inline backend makes one rank."""

    stateless: ClassVar[bool] = False
    """Whether a lost process can be replaced. All state of the worker must come from its constructor's arguments and
    from the last calls of its methods registered with `replay`."""

    context: WorkerContext

    @classmethod
    def select_class(cls, mesh: Mesh, *args: Any, **kwargs: Any) -> "type[Worker]":  # Any: the constructor's
        """Returns the class to construct for a mesh and the constructor's arguments.

        Subclasses override it to return a collective variant, for example for sharded models.
        """
        return cls

    @classmethod
    def can_offload_device(cls, device: str, *args: Any, **kwargs: Any) -> bool:  # Any: the constructor's
        """Returns whether a worker with these arguments can free a device (`cpu` or `cuda:N`) for other processes."""
        return False

    @property
    def rank(self) -> int:
        """Rank within the role."""
        return self.context.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the role."""
        return self.context.world_size

    @property
    def device(self) -> str:
        """Torch device of the worker: `cpu` or `cuda:N`."""
        return self.context.device

    @property
    def mesh(self) -> Mesh:
        """Parallel dimensions of the role."""
        return self.context.mesh

    def peer(self, role: str) -> "Worker | None":
        """Returns the worker of another role in this process; None if there is none."""
        return self.context.colocated.get(role)

    @property
    def weight_owners(self) -> "tuple[Worker, ...]":
        """Workers of this process whose weights this worker uses."""
        return ()

    def offload(self, *, keep_weights: bool) -> None:
        """Frees device memory for another role or process.

        `keep_weights` is True if the other role uses this worker's weights.
        """

    def onload(self) -> None:
        """Restores the device memory before a call of this worker, or of a worker that uses its weights."""

    def onload_parts(self, parts: tuple[str, ...]) -> None:
        """Restores only these parts of the device memory, for a method registered with `memory`."""
        self.onload()

    def run_function(self, fn: Callable, **arguments: Any) -> Any:  # Any: the function's own
        """Runs `fn(self, ...)` for `group.run`, which prefixes the names of its arguments with `of_`."""
        return fn(self, **{name.removeprefix("of_"): value for name, value in arguments.items()})
