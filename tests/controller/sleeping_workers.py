"""Workers that sleep. Importable by Ray's processes."""

import time

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
