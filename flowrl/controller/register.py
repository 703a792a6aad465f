"""`@register`: which methods of a worker the driver may call, how arguments are split, and which columns travel."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

Method = TypeVar("Method", bound=Callable)
Rows = Literal["same", "unknown"] | int
Reads = tuple[str, ...] | Mapping[str, tuple[str, ...]] | None

_ATTRIBUTE = "__flowrl_contract__"


class Dispatch:
    """The names of the built-in dispatch modes; `register_dispatch_mode` adds others."""

    ONE_TO_ALL = "one_to_all"
    """The same arguments to every rank; a list with one result per rank back."""
    ALL_TO_ALL = "all_to_all"
    """Every argument is a list with one entry per rank; a list back."""
    ALL_TO_ONE = "all_to_one"
    """The same arguments to every rank, which may talk to each other; rank 0's result back."""
    RANK_ZERO = "rank_zero"
    """Rank 0 alone; its result back."""
    DP_COMPUTE = "dp_compute"
    """Every argument is a list with one entry per data-parallel rank; such a list of results back."""
    DP_COMPUTE_PROTO = "dp_compute_proto"
    """Batches are split by rows over the data-parallel ranks; a `Batch` back, at once."""
    COLLECT = "collect"
    """The same arguments to every rank, which has rows of its own to give; a `Batch` of them back, at once."""
    DP_COMPUTE_METRIC = "dp_compute_metric"
    """Batches are split by rows; the ranks' metrics come back as one dictionary, each merged by its own reduction."""


@dataclass(frozen=True)
class Contract:
    """What `register` declares of a method."""

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

    def reads_of(self, parameter: str) -> tuple[str, ...] | None:
        """The columns that a batch parameter reads; None is all of them. `name?` travels when it is there."""
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
        dispatch_mode: a name in `Dispatch`, or one given to `register_dispatch_mode`.
        blocking: whether `group.method(...)` waits; `group.method.submit(...)` never does.
        reads: columns that the method's batches bring along; only these travel. None is all of them, `"name?"` comes
            when the batch has it, `"*"` is the dataset's own columns: those that docs/batch.md does not name. A mapping
            gives them per parameter, for a method of several batches.
        writes: columns of the table that a `DP_COMPUTE_PROTO` or `COLLECT` method returns. None: whatever it returns
            (the driver then waits for the call to know).
        rows: rows of that table: as many as came in, this multiple of them, or "unknown", which those of `COLLECT` are.
        balance: split rows into equal counts, or into equal sums of tokens (the driver then waits for the lengths).
        replay: the last call gives a `stateless` worker its state. A state that comes in several calls has a parameter
            that numbers them from 0 on, whose name this is: the last call of number 0 and those after it give it.
        timeout_s: seconds that a call may run; None is the cluster's limit.
        memory: what the method needs of the worker's device memory, where others take turns with it: parts that
            `Worker.onload_parts` knows; none, so that nobody makes room for it; None is all.
        resend: whether a call whose process is lost is made again on the one that takes its place. False is for what
            must not run twice, or means nothing to a process that has forgotten what it was given before: whoever asks
            for the result is told by `ProcessLost`, and the run goes on.
    Raises:
        ValueError: the declaration contradicts itself, or the method's parameters have no names to travel under.
    """

    contract = Contract(dispatch_mode, blocking, reads, writes, rows, balance, replay, timeout_s, memory, resend)
    _check(contract)

    def mark(method: Method) -> Method:
        parameters = inspect.signature(method).parameters
        if isinstance(replay, str) and replay not in parameters:
            raise ValueError(f"{method.__qualname__} has no parameter {replay!r}, by which replay numbers its calls")
        for parameter in parameters.values():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                raise ValueError(
                    f"{method.__qualname__} takes *{parameter.name}; arguments travel by name: give each one"
                )
        setattr(method, _ATTRIBUTE, contract)
        return method

    return mark


def _check(contract: Contract) -> None:
    """Raises ValueError for what contradicts itself."""
    rows, replay, timeout_s = contract.rows, contract.replay, contract.timeout_s
    returns_batch = contract.mode in (Dispatch.DP_COMPUTE_PROTO, Dispatch.COLLECT)
    if contract.balance == "tokens" and rows != "same":
        raise ValueError(f"balance='tokens' restores the order of rows, which needs rows='same', not {rows!r}")
    if contract.mode == Dispatch.COLLECT and rows != "unknown":
        raise ValueError(f"rows={rows!r} counts by the rows that come in, and with collect none do: set 'unknown'")
    if returns_batch and replay:
        raise ValueError("replay is of methods that give every rank the same state, which one of split rows does not")
    if replay and not contract.resend:
        raise ValueError("replay has a call made again where its process is lost, and resend=False does not: drop one")
    if timeout_s is not None and timeout_s <= 0:
        raise ValueError(f"timeout_s={timeout_s:g} gives a call no time; give seconds, or None for the cluster's limit")
    if returns_batch and contract.writes == ():
        raise ValueError(
            "writes=() promises a batch without columns; name some, or choose a mode that returns no batch"
        )


def contract_of(method: Callable) -> Contract | None:
    """What `register` declared of a method; None if it did not."""
    return vars(method).get(_ATTRIBUTE) if hasattr(method, "__dict__") else None


def registered_methods(cls: type) -> dict[str, tuple[Callable, Contract]]:
    """Name -> (function, contract) of every registered method of a worker class, inherited ones too."""
    found = {}
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            if callable(member) and (contract := contract_of(member)) is not None:
                found[name] = (member, contract)
            elif name in found:
                del found[name]
    return found
