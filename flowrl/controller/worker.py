"""Worker: base class of worker classes. `register` declares which of their methods the driver may call."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from flowrl.controller.placement.plan import Mesh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Method = TypeVar("Method", bound=Callable)
Rows = Literal["same", "unknown"] | int
Reads = tuple[str, ...] | Mapping[str, tuple[str, ...]] | None

_ATTRIBUTE = "__flowrl_contract__"


class Dispatch:
    """Names of the built-in dispatch modes. `register_dispatch_mode` adds others."""

    ONE_TO_ALL = "one_to_all"
    """Every rank gets the same arguments; returns a list with one result per rank."""
    ALL_TO_ALL = "all_to_all"
    """Every argument is a list with one entry per rank; returns a list with one result per rank."""
    ALL_TO_ONE = "all_to_one"
    """Every rank gets the same arguments; returns the result of rank 0."""
    RANK_ZERO = "rank_zero"
    """Only rank 0 is called; returns its result."""
    DP_COMPUTE = "dp_compute"
    """Every argument is a list with one entry per data-parallel rank; returns a list of the same length."""
    DP_COMPUTE_PROTO = "dp_compute_proto"
    """Batches are split by rows over the data-parallel ranks; returns a `Batch` without waiting."""
    COLLECT = "collect"
    """Every rank gets the same arguments and returns rows; returns a `Batch` of all rows without waiting."""
    DP_COMPUTE_METRIC = "dp_compute_metric"
    """Batches are split by rows; returns one dictionary of metrics, each merged over ranks by its own reduction."""


@dataclass(frozen=True)
class Contract:
    """The declaration of a registered method. `register` documents the fields."""

    mode: str
    blocking: bool = True
    reads: Reads = None
    writes: tuple[str, ...] | None = None
    rows: Rows = "same"
    balance: Literal["rows", "tokens"] = "rows"
    replay: bool | str = False
    timeout_s: float | None = None
    memory: tuple[str, ...] | None = None
    resend: bool = True

    def get_reads(self, parameter: str) -> tuple[str, ...] | None:
        """Returns the columns that a batch parameter reads; None is all columns."""
        return self.reads.get(parameter, ()) if isinstance(self.reads, Mapping) else self.reads


def register(
    dispatch_mode: str,
    *,
    blocking: bool = True,
    reads: Reads = None,
    writes: tuple[str, ...] | None = None,
    rows: Rows = "same",
    balance: Literal["rows", "tokens"] = "rows",
    replay: bool | str = False,
    timeout_s: float | None = None,
    memory: tuple[str, ...] | None = None,
    resend: bool = True,
) -> Callable[[Method], Method]:
    """Marks a worker method as callable from the driver.

    Args:
        dispatch_mode: a name in `Dispatch`, or one added by `register_dispatch_mode`.
        blocking: whether `group.method(...)` waits for the result. `group.method.submit(...)` never waits.
        reads: columns of the batch arguments that are sent; None sends all. `"name?"` is sent if the batch has it, and
            `"*"` stands for all columns of the dataset, which are those not listed in docs/batch.md. A mapping declares
            the columns per parameter.
        writes: columns that a `DP_COMPUTE_PROTO` or `COLLECT` method returns. With None, the driver waits for the
            result to learn them.
        rows: rows that such a method returns: "same" as the input, an integer multiple of it, or "unknown". `COLLECT`
            requires "unknown".
        balance: split the input into equal numbers of rows, or of tokens. For tokens the driver waits for the lengths.
        replay: whether the last call sets the state of a `stateless` worker, so that a replacement process has to
            replay it. If several calls set one state, this is the name of the parameter that counts them from 0.
        timeout_s: seconds that a call may run; None is the cluster's limit.
        memory: parts of the worker's device memory that the method needs, as `Worker.onload_parts` names them. None is
            all parts. `()` is none, so that no other worker is offloaded.
        resend: whether a call is sent again if its process is lost and replaced. Set False if the method is not
            idempotent, or depends on lost process state: the caller gets `ProcessLost`, and the run continues.
    Raises:
        ValueError: the declaration contradicts itself, or the method has parameters without names.
    """

    contract = Contract(dispatch_mode, blocking, reads, writes, rows, balance, replay, timeout_s, memory, resend)
    _check(contract)

    def mark(method: Method) -> Method:
        parameters = inspect.signature(method).parameters
        if isinstance(replay, str) and replay not in parameters:
            raise ValueError(f"replay={replay!r} names no parameter of {method.__qualname__}; name the call's index")
        for parameter in parameters.values():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                raise ValueError(
                    f"{method.__qualname__} takes *{parameter.name}, but arguments are sent by name; name each one"
                )
        setattr(method, _ATTRIBUTE, contract)
        return method

    return mark


def _check(contract: Contract) -> None:
    """Raises ValueError if the declaration contradicts itself."""
    rows, replay, timeout_s = contract.rows, contract.replay, contract.timeout_s
    returns_batch = contract.mode in (Dispatch.DP_COMPUTE_PROTO, Dispatch.COLLECT)
    if contract.balance == "tokens" and rows != "same":
        raise ValueError(f"balance='tokens' requires rows='same' to restore the row order, not rows={rows!r}")
    if contract.mode == Dispatch.COLLECT and rows != "unknown":
        raise ValueError(f"rows={rows!r} refers to input rows, which collect does not have; set rows='unknown'")
    if returns_batch and replay:
        raise ValueError(f"replay requires a mode that sends the same state to every rank, not {contract.mode}")
    if replay and not contract.resend:
        raise ValueError("replay sends a call again and resend=False forbids it; remove one of them")
    if timeout_s is not None and timeout_s <= 0:
        raise ValueError(f"timeout_s={timeout_s:g} must be positive, or None for the cluster's limit")
    if returns_batch and contract.writes == ():
        raise ValueError("writes=() declares a batch without columns; name columns, or use a mode without a batch")


def get_contract(method: Callable) -> Contract | None:
    """Returns the declaration of a registered method; None for other methods."""
    return vars(method).get(_ATTRIBUTE) if hasattr(method, "__dict__") else None


def get_registered_methods(cls: type) -> dict[str, tuple[Callable, Contract]]:
    """Returns name -> (function, contract) of all registered methods of a worker class, including inherited ones."""
    methods = {}
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            if callable(member) and (contract := get_contract(member)) is not None:
                methods[name] = (member, contract)
            elif name in methods:
                del methods[name]
    return methods


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
