"""Rendezvous: creates process groups through a TCP store on rank 0, at a free port."""

import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_store: object | None = None


def join_process_group(address: tuple[str, int], rank: int, world_size: int, kind: str) -> tuple[str, int] | None:
    """Joins the process group of a failure group (processes that fail together), and returns None.

    With rank 0 and port 0, opens the TCP store instead and returns its address. All ranks then join with this address.
    """
    from torch.distributed import (  # noqa: PLC0415 (only collective roles need torch)
        PrefixStore,  # pyright: ignore[reportPrivateImportUsage] (as TCPStore)
        TCPStore,  # pyright: ignore[reportPrivateImportUsage] (documented there, but not re-exported)
        init_process_group,
    )

    from flowrl.devices.device import COLLECTIVE_TIMEOUT  # noqa: PLC0415 (imports torch)

    global _store
    host, port = address
    if rank == 0 and port == 0:
        # TCPStore itself would listen on all interfaces.
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        _store = TCPStore(
            host,
            port,
            None,
            True,
            COLLECTIVE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            use_libuv=True,
        )
        return host, port
    store = _store if rank == 0 else TCPStore(host, port, None, False, COLLECTIVE_TIMEOUT, wait_for_workers=False)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    prefixed = PrefixStore("hosts", store)  # pyright: ignore[reportArgumentType] (the TCPStore made above)
    init_process_group(backend, store=prefixed, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
    return None


def role_process_group(ranks: Sequence[int]) -> "ProcessGroup | None":
    """Creates the process group of a role, as a subgroup of the process group that `join_process_group` joined.

    `ranks` are the ranks of the role's processes in the joined process group. All processes of the joined group must
    call this function, in the same order of roles. Returns None in processes without the role.
    """
    from torch import distributed  # noqa: PLC0415 (only collective roles need torch)

    from flowrl.devices.device import COLLECTIVE_TIMEOUT  # noqa: PLC0415 (imports torch)

    group = distributed.new_group(list(ranks), timeout=COLLECTIVE_TIMEOUT)
    return group if isinstance(group, distributed.ProcessGroup) else None
