"""How processes that talk find each other: one store on the first of them, whose port nobody has to pick beforehand."""

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_TIMEOUT = timedelta(minutes=30)
_store: object | None = None


def join_process_group(address: tuple[str, int], rank: int, world_size: int, kind: str) -> tuple[str, int] | None:
    """Joins the process group of a host set.

    Rank 0 is called with the interface to listen on and port 0; it returns at once with the address for the others, and
    the group forms when they have joined (`role_process_group` waits for it).
    """
    from torch.distributed import (  # noqa: PLC0415 (only collective roles need torch)
        PrefixStore,  # pyright: ignore[reportPrivateImportUsage] (as TCPStore)
        TCPStore,  # pyright: ignore[reportPrivateImportUsage] (documented there, but not re-exported)
        init_process_group,
    )

    global _store
    host, port = address
    if rank == 0 and port == 0:
        # The listening socket is ours, so that it is bound to one interface and its port is never free in between.
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        _store = TCPStore(
            host, port, None, True, _TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
        )
        return host, port
    store = _store if rank == 0 else TCPStore(host, port, None, False, _TIMEOUT, wait_for_workers=False)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    prefixed = PrefixStore("hosts", store)  # pyright: ignore[reportArgumentType] (the TCPStore made above)
    init_process_group(backend, store=prefixed, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    return None


def role_process_group(ranks: Sequence[int]) -> "ProcessGroup | None":
    """A communicator of one role's own, so that roles of one process never wait on each other's traffic.

    Every process of the host set calls it, with the ranks (in the set) of the role's processes, in the same order of
    roles; one that is not among them gets None.
    """
    from torch import distributed  # noqa: PLC0415 (only collective roles need torch)

    group = distributed.new_group(list(ranks))
    return group if isinstance(group, distributed.ProcessGroup) else None
