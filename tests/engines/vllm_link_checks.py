"""Functions that tests of the GPU transports run with `group.run`; the test process never imports vLLM."""

import inspect
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flowrl.controller.worker import Worker
from flowrl.engines.rollout.base import RolloutError
from flowrl.engines.rollout.cuda_ipc import IpcSender, WeightMetadata

WEIGHTS = {
    "embed": torch.arange(6, dtype=torch.float32).view(2, 3),
    "norm": torch.ones(4, dtype=torch.bfloat16),
    "bias": torch.arange(4, dtype=torch.int64),
}


class Bare(Worker):
    """A worker without methods."""


class Loading:
    """Records the weights that vLLM's receivers load into a model."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, Tensor]] = []

    def load_weights(self, weights: Any) -> None:
        self.loaded += weights


def metadata() -> WeightMetadata:
    return WeightMetadata.of((name, weight.dtype, weight.shape) for name, weight in WEIGHTS.items())


def update_with_missing_dtype(worker: Worker) -> str:
    """Returns vLLM's error for metadata with a missing dtype."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo  # noqa: PLC0415 (as above)

    try:
        NCCLWeightTransferUpdateInfo(*WeightMetadata(("a", "b"), ("float32",), ((1,), (2,))).lists())
    except ValueError as error:
        return str(error)
    return ""


def unpack_bucket(worker: Worker) -> dict[str, Tensor]:
    """Returns the weights that vLLM unpacks from the buffer of a bucket."""
    from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor  # noqa: PLC0415 (as above)

    rebuild, arguments = IpcSender(torch.device("cpu")).share(WEIGHTS.items(), metadata()).handles["cpu"]
    names, dtype_names, shapes = metadata().lists()
    dtypes = [getattr(torch, name) for name in dtype_names]
    return dict(unpack_tensor(rebuild(*arguments), names, shapes, dtypes, metadata().sizes))


def transfer_ranks(worker: Worker, leads: int, num_replicas: int) -> tuple[list[int], dict[str, Any]]:
    """Returns the group ranks of all vLLM workers, and the fields of the init info."""
    from flowrl.engines.rollout.vllm.nccl_transfer import TransferGroup  # noqa: PLC0415 (only where vLLM is)

    link = TransferGroup(host="127.0.0.1", port=4321, world_size=1 + leads * num_replicas, buffer_bytes=1000)
    infos = [link.init_info(1 + leads * replica) for replica in range(num_replicas)]
    return [info.rank_offset + rank for info in infos for rank in range(leads)], asdict(infos[0])


def load_ipc_bucket(worker: Worker) -> list[tuple[str, Tensor]]:
    """Returns the weights that the transfer engine loads into a model from the buffer of a bucket."""
    from flowrl.engines.rollout.vllm.worker_extension import Tensors, TensorTransfer  # noqa: PLC0415 (as above)

    model: Any = Loading()
    config: Any = SimpleNamespace(parallel_config=None, model_config=None)
    transfer = TensorTransfer(config, config, torch.device("cpu"), model)
    sender = IpcSender(torch.device("cpu"))
    transfer.receive_weights(Tensors(sender.share(WEIGHTS.items(), metadata()), tied={"embed": ["head", "third"]}))
    transfer.shutdown()
    return model.loaded


def nccl_receiver(worker: Worker) -> tuple[int, tuple[str, ...]]:
    """Joins vLLM's NCCL receiver to a group without other ranks. Returns (buffer size, rank and config)."""
    transfer, ranks = join_nccl(SimpleNamespace(disabled=False))
    return transfer.nccl_receiver._engine.packed_buffer_size_bytes, ranks[0]


def errors_of_disabled_nccl(worker: Worker) -> list[str]:
    """Returns the errors of a receiver and of a sender whose communicator vLLM has disabled, because NCCL is missing.

    The sender and another rank meet at the port on which the sender's process listens.
    """
    from vllm.distributed.utils import StatelessProcessGroup  # noqa: PLC0415 (as above)

    from flowrl.engines.rollout.vllm.nccl_transfer import NcclSender, TransferGroup  # noqa: PLC0415

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    group = TransferGroup("127.0.0.1", port, 2, buffer_bytes=1000)
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(StatelessProcessGroup.create, "127.0.0.1", port, 1, 2)
        errors = [
            _rollout_error(lambda: join_nccl(SimpleNamespace(disabled=True))),
            _rollout_error(lambda: NcclSender(group, listener, torch.device("cpu"))),
        ]
        assert other.result().world_size == 2
    return errors


def _rollout_error(function: Callable[[], object]) -> str:
    try:
        function()
    except RolloutError as error:
        return str(error)
    return ""


def join_nccl(communicator: Any) -> tuple[Any, list[tuple[str, ...]]]:
    """Joins the transfer engine to a group. Returns (transfer engine, rank and config of each join)."""
    from vllm.distributed.weight_transfer import nccl_engine  # noqa: PLC0415 (as above)

    from flowrl.engines.rollout.vllm.nccl_transfer import TransferGroup  # noqa: PLC0415
    from flowrl.engines.rollout.vllm.worker_extension import TensorTransfer  # noqa: PLC0415

    ranks: list[Any] = []

    def join(info: Any, config: Any) -> Any:
        ranks.append((info.rank_offset, config))
        return communicator

    setattr(nccl_engine, "worker_init_process_group", join)  # noqa: B010 (vLLM's would wait for the other ranks)
    config: Any = SimpleNamespace(parallel_config="parallel", model_config=None)
    model: Any = Loading()
    transfer = TensorTransfer(config, config, torch.device("cpu"), model)
    transfer.nccl_receiver.join(TransferGroup("127.0.0.1", 4321, 5, buffer_bytes=1000), 3)
    return transfer, ranks


def signatures(worker: Worker) -> dict[str, list[str]]:
    """Returns the parameter names of the called vLLM functions."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator  # noqa: PLC0415 (as above)
    from vllm.distributed.utils import StatelessProcessGroup  # noqa: PLC0415
    from vllm.distributed.weight_transfer import packed_tensor  # noqa: PLC0415
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine  # noqa: PLC0415

    called = {
        "packed_nccl_broadcast_producer": packed_tensor.packed_nccl_broadcast_producer,
        "PyNcclCommunicator": PyNcclCommunicator,
        "create": StatelessProcessGroup.create,
    }
    called |= {
        name: getattr(NCCLWeightTransferEngine, name)
        for name in ("__init__", "init_transfer_engine", "receive_weights", "shutdown")
    }
    return {name: list(inspect.signature(function).parameters) for name, function in called.items()}


def precision_of_triton(worker: Worker) -> str | None:
    """Returns the precision of float32 products in Triton kernels that do not set it, such as vLLM's attention."""
    from triton import knobs  # noqa: PLC0415 (as above)

    import flowrl.engines.rollout.vllm.engine  # noqa: F401, PLC0415 (as above)

    return knobs.language.fp32_default
