"""Worker: base class of workers. `register` declares the methods that the driver may call."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal

from typing_extensions import TypeVar

from flowrl.config import ONE_DEVICE, Follower, ReplicaSizes
from flowrl.controller.placement.plan import Mesh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from flowrl.controller.group import WorkerGroup

Method = TypeVar("Method", bound=Callable)
Peer = TypeVar("Peer", bound="Worker")

GroupType = TypeVar("GroupType", bound="WorkerGroup", default="WorkerGroup", covariant=True)
"""Type of the group of a worker class, with the methods that the driver can call; see docs/controller.md."""
Rows = Literal["same", "unknown"] | int
Reads = tuple[str, ...] | Mapping[str, tuple[str, ...]] | None

_ATTRIBUTE = "__flowrl_contract__"


class Dispatch:
    """Names of the built-in dispatch modes. `register_dispatch_mode` creates others."""

    ONE_TO_ALL = "one_to_all"
    """Every rank gets the same arguments. The result is a list with one entry per rank."""
    ALL_TO_ALL = "all_to_all"
    """Every argument is a list with one entry per rank. The result is a list with one entry per rank."""
    ALL_TO_ONE = "all_to_one"
    """Every rank gets the same arguments. The result is that of rank 0."""
    RANK_ZERO = "rank_zero"
    """Only rank 0 is called. The result is that of rank 0."""
    DP_COMPUTE = "dp_compute"
    """Every argument is a list with one entry per data-parallel rank. The result is a list of the same length."""
    DP_COMPUTE_PROTO = "dp_compute_proto"
    """Batches are split by rows over the data-parallel ranks. The result is a `Batch`, without waiting."""
    COLLECT = "collect"
    """Every rank gets the same arguments and returns rows. The result is a `Batch` of all rows, without waiting."""
    DP_COMPUTE_METRIC = "dp_compute_metric"
    """Batches are split by rows. The result is one dictionary of metrics, merged over ranks."""


@dataclass(frozen=True)
class Contract:
    """Declaration of a registered method. `register` documents the fields."""

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
    groups: str | None = None
    resolve: "Callable[..., Contract] | None" = None
    evicts: bool = True

    def get_reads(self, parameter: str) -> tuple[str, ...] | None:
        """Returns the columns that the method reads from a batch parameter; None means all columns."""
        return self.reads.get(parameter, ()) if isinstance(self.reads, Mapping) else self.reads


Arguments = dict[str, Any]
"""Parameter name -> argument."""
Scatter = Callable[[Mesh, Contract, Arguments], Sequence[Arguments | None]]
Gather = Callable[[Mesh, Sequence], Any]


@dataclass(frozen=True)
class DispatchMode:
    """A named pair of scatter and gather functions."""

    name: str
    scatter: Scatter
    gather: Gather | None
    """None if the result is a `Batch` with the rows of the data-parallel leaders."""


def register(
    dispatch_mode: str | DispatchMode,
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
    groups: str | None = None,
    resolve: Callable[..., Contract] | None = None,
    evicts: bool = True,
) -> Callable[[Method], Method]:
    """Marks a worker method as callable from the driver.

    Args:
        dispatch_mode: a name in `Dispatch`, or the result of `register_dispatch_mode`.
        blocking: whether `group.method(...)` waits for the result. `group.method.submit(...)` never waits.
        reads: columns of batch arguments that are sent to workers; None means all. `"name?"` is an optional column, and
            `"*"` means all dataset columns (columns not listed in docs/batch.md). A mapping declares columns per
            parameter.
        writes: columns that a `DP_COMPUTE_PROTO` or `COLLECT` method returns. With None, the driver waits for the
            result and reads its columns.
        rows: number of rows that a `DP_COMPUTE_PROTO` or `COLLECT` method returns: the "same" as the input, an integer
            multiple of the input, or "unknown". `COLLECT` requires "unknown".
        balance: splits the input into equal numbers of rows or of tokens. For tokens, the driver waits for row lengths.
        replay: whether a call sets state of a `stateless` worker. A replacement process repeats the last such call. If
            several calls set one state, `replay` is the name of the parameter that counts these calls from 0.
        timeout_s: timeout of a call in seconds; None uses the default of the cluster.
        memory: parts of the worker's device memory that the method needs (see `Worker.onload_parts`). None means all
            parts. `()` means none, so no other worker is offloaded for the call.
        resend: whether a call is retried if its process is lost and replaced. Set False if the method is not
            idempotent or needs state that is lost with the process. Callers then get `ProcessLost`; the run continues.
        groups: row column of integers. Rows with the same value are sent to the same data-parallel rank. The driver
            waits for the column if there are several ranks.
        resolve: `(contract, worker class, arguments of the call, settings) -> contract`, for columns or groups that
            depend on the arguments. `settings` is the result of `Worker.call_settings`. The driver calls it before it
            sends a call. It may raise `ContractError`.
        evicts: whether the call first evicts other processes from the devices of the worker. Set False if the call
            reads the device memory of these processes. The next call with `evicts` evicts them.
    Raises:
        ValueError: the dispatch mode is unknown, the declaration is inconsistent, or the method has `*args`.
    """
    mode = _mode_name(dispatch_mode)
    contract = Contract(
        mode, blocking, reads, writes, rows, balance, replay, timeout_s, memory, resend, groups, resolve, evicts
    )
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


def _mode_name(mode: object) -> str:
    if isinstance(mode, DispatchMode):
        return mode.name
    names = {name: value for name, value in vars(Dispatch).items() if name.isupper()}
    if mode not in names.values():
        raise ValueError(
            f"@register requires a dispatch mode, but got {mode!r}: use Dispatch.{', Dispatch.'.join(names)}, or the "
            f"result of register_dispatch_mode"
        )
    return str(mode)


def _check(contract: Contract) -> None:
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
    if contract.memory == () and not contract.evicts:
        raise ValueError("memory=() uses no device memory, so the call evicts no process; remove evicts=False")
    if returns_batch and contract.writes == ():
        raise ValueError("writes=() declares a batch without columns; name columns, or use a mode without a batch")


def get_contract(method: Callable) -> Contract | None:
    """Returns the declaration of a registered method; None if the method is not registered."""
    return vars(method).get(_ATTRIBUTE) if hasattr(method, "__dict__") else None


def get_registered_methods(cls: type) -> dict[str, tuple[Callable, Contract]]:
    """Returns name -> (function, contract) of the registered methods of a worker class and its base classes."""
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
    """Rank, device and peers of a worker, available in its constructor."""

    role: str
    rank: int
    world_size: int
    local_rank: int
    node: int
    device: str
    mesh: Mesh
    process_group: "ProcessGroup | None" = None
    """Process group of the ranks of the role; None if the role has one rank."""
    colocated: Mapping[str, "Worker"] = field(default_factory=dict)
    """Role -> worker, for the workers of this process."""
    aligned_roles: frozenset[str] = frozenset()
    """Colocated roles that have the same rank as this role in every process."""
    address: str = "127.0.0.1"
    """IP address of this process for other processes of the run."""
    replaced: bool = False
    """Whether this process replaces a lost process."""
    replica: ReplicaSizes = ONE_DEVICE
    """Parallel sizes of the devices of a dedicated process. Only one of them has a process of the role."""
    followers: Sequence[Follower] = ()
    """Processes on the other nodes of the replica, in the order of their nodes in it."""
    can_offload: bool = False
    """Whether the worker can offload its device memory for other processes on the same device."""
    usage: dict[str, float] = field(default_factory=dict)
    """What the worker has used and done since the last `pop_usage`, by the names of `CallEvent.usage`."""

    def add_usage(self, **amounts: float) -> None:
        """Adds amounts to `usage`."""
        for name, amount in amounts.items():
            self.usage[name] = self.usage.get(name, 0) + amount


class Worker(Generic[GroupType]):
    """Base class of workers. Subclasses decorate the methods that the driver calls with `@register`.

    A subclass of `Worker["JudgeGroup"]` declares `JudgeGroup` as the type of its worker group, for type checkers and
    editors. `flowrl stubs` writes that type.
    """

    collective: ClassVar[bool] = False
    """Whether the ranks of the role communicate, which requires a process group."""

    replicated: ClassVar[bool] = False
    """Whether every rank holds a full copy of the model and works alone. The inline backend then uses one rank."""

    stateless: ClassVar[bool] = False
    """Whether a lost process can be replaced: the constructor arguments and the last calls of methods registered with
    `replay` determine all state of the worker."""

    context: WorkerContext

    @classmethod
    def select_class(cls, mesh: Mesh, *args: Any, **kwargs: Any) -> "type[Worker]":  # Any: the constructor's
        """Returns the class to construct, such as a collective variant for sharded models. Default: this class."""
        return cls

    @classmethod
    def needs_process_group(cls, mesh: Mesh, *args: Any, **kwargs: Any) -> bool:  # Any: the constructor's
        """Returns whether workers with these arguments need a process group. Default: if several ranks communicate."""
        return cls.collective and mesh.size > 1

    @classmethod
    def can_offload_device(cls, device: str, *args: Any, **kwargs: Any) -> bool:  # Any: the constructor's
        """Returns whether a worker with these arguments can offload from a device that other processes share."""
        return False

    @classmethod
    def shares_model(cls, *args: Any, **kwargs: Any) -> bool:  # Any: the constructor's
        """Returns whether other workers in the process can use the model of a worker with these arguments."""
        return True

    @classmethod
    def call_settings(cls, *args: Any, **kwargs: Any) -> Any:  # Any: the constructor's; the result is for `resolve`
        """Returns the settings on which contracts of calls depend, for `register(resolve=...)`. The driver calls it
        once per group. Default: the first argument of the constructor, also if the constructor of a subclass passes
        `*args` and `**kwargs` to that of its base class.
        """
        if args:
            return args[0]
        for base in cls.__mro__:
            first = [*inspect.signature(base.__init__).parameters.values()][1:2]
            if first and first[0].kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
                return kwargs.get(first[0].name)
        return None

    @classmethod
    def user_functions(cls, *args: Any, **kwargs: Any) -> tuple[str, ...]:  # Any: the constructor's
        """Returns the names of the user's functions that a worker with these arguments calls. The error message for an
        ended process names them if the cause is known.
        """
        return ()

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def world_size(self) -> int:
        return self.context.world_size

    @property
    def device(self) -> str:
        """Torch device of the worker: `cpu` or `cuda:N`."""
        return self.context.device

    @property
    def mesh(self) -> Mesh:
        return self.context.mesh

    def peer(self, role: str) -> "Worker | None":
        """Returns the worker of another role in this process; None if the role has no worker here."""
        return self.context.colocated.get(role)

    def find_peer(self, cls: type[Peer]) -> Peer | None:
        """Returns the worker of another role in this process with a class; None if there is none.

        Of several, returns that of the role `actor`, or else the one that was created first.
        """
        peers = [worker for worker in self.context.colocated.values() if isinstance(worker, cls)]
        return min(peers, key=lambda worker: worker.context.role != "actor", default=None)

    @property
    def weight_owners(self) -> "tuple[Worker, ...]":
        """Workers in this process whose weights this worker uses."""
        return ()

    def offload(self, *, keep_weights: bool) -> None:
        """Frees device memory for another worker. With `keep_weights`, the other worker uses these weights."""

    def onload(self) -> None:
        """Restores offloaded memory before a call to this worker or to a worker that uses this worker's weights."""

    def onload_parts(self, parts: tuple[str, ...]) -> None:
        """Restores these parts of the offloaded memory before a method registered with `memory`.

        The base class restores all memory.
        """
        self.onload()

    def pop_usage(self) -> dict[str, float]:
        """Returns what the worker has used and done since the last call of `pop_usage`. The report of a call has it."""
        usage = dict(self.context.usage)
        self.context.usage.clear()
        return usage

    def close(self) -> None:
        """Releases processes and connections. Called only with the backend `inline`, where the process continues."""

    def ping(self) -> None:
        """Returns None, which shows that the process runs calls (`group.keep_alive`)."""

    def run_function(self, fn: Callable, **arguments: Any) -> Any:  # Any: the function's own
        """Runs `fn(self, ...)` for `group.run`. Argument names have the prefix `of_`."""
        return fn(self, **{name.removeprefix("of_"): value for name, value in arguments.items()})
