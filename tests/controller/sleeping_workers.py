"""Workers that sleep or wait for each other. Importable by Ray's processes."""

import time
from pathlib import Path

from tensordict import TensorDict

from flowrl.controller.worker import Dispatch, Worker, register
from flowrl.data.batch.tensordicts import make_tensordict, num_rows
from flowrl.data.metric import Metric, Sum


class Sleeping(Worker):
    """Sleeps for a second in each method."""

    @register(Dispatch.DP_COMPUTE_METRIC, blocking=False, reads=("x",))
    def update(self, table: TensorDict) -> dict[str, Metric]:
        time.sleep(1.0)
        return {"rows": Sum(num_rows(table))}

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("x",), writes=("y",))
    def values(self, table: TensorDict) -> TensorDict:
        time.sleep(1.0)
        return make_tensordict({"y": table["rows", "x"] + 1})


class Meeting(Worker):
    """Each method waits until the same method of the role `peer` has started, for at most a minute."""

    def __init__(self, folder: Path, peer: str | None) -> None:
        self.folder, self.peer_role = folder, peer

    def meet(self, method: str) -> None:
        (self.folder / f"{self.context.role}.{method}").touch()
        deadline = time.monotonic() + 60
        while self.peer_role is not None and not (self.folder / f"{self.peer_role}.{method}").exists():
            assert time.monotonic() < deadline, f"{self.peer_role}.{method} does not run at the same time"
            time.sleep(0.01)

    @register(Dispatch.DP_COMPUTE_METRIC, blocking=False, reads=("x",))
    def update(self, table: TensorDict) -> dict[str, Metric]:
        self.meet("update")
        return {"rows": Sum(num_rows(table))}

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("x",), writes=("y",))
    def values(self, table: TensorDict) -> TensorDict:
        self.meet("values")
        return make_tensordict({"y": table["rows", "x"] + 1})
