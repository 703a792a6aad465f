"""Functions that tests of the GPU transports run with `group.run`; the test process never imports vLLM."""

import inspect
from dataclasses import asdict, fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flowrl.controller.worker import Worker

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


def describe_weights(worker: Worker) -> dict[str, Any]:
    from flowrl.engines.rollout.vllm.gpu_transfer import WeightMetadata  # noqa: PLC0415 (only where vLLM is)

    actual = WeightMetadata.of((name, weight.dtype, weight.shape) for name, weight in WEIGHTS.items())
    return {**asdict(actual), "lists": actual.lists()}


def ipc_bucket(handles: dict[str, tuple]) -> Any:
    from flowrl.engines.rollout.vllm.gpu_transfer import IpcBucket, WeightMetadata  # noqa: PLC0415 (as above)

    weights = WeightMetadata.of((name, weight.dtype, weight.shape) for name, weight in WEIGHTS.items())
    return IpcBucket(weights, tuple(weight.nbytes for weight in WEIGHTS.values()), handles)


def merge_buckets(worker: Worker) -> dict[str, Any]:
    """Returns vLLM's update info of a bucket on the GPUs of three ranks."""
    buckets = [ipc_bucket({f"GPU-{rank}": ("opens", rank)}) for rank in range(3)]
    return asdict(buckets[0].merged(buckets).update_info())


def update_with_missing_dtype(worker: Worker) -> str:
    """Returns vLLM's error for metadata with a missing dtype."""
    from flowrl.engines.rollout.vllm.gpu_transfer import IpcBucket, WeightMetadata  # noqa: PLC0415 (as above)

    try:
        IpcBucket(WeightMetadata(("a", "b"), ("float32",), ((1,), (2,))), (4, 8), {}).update_info()
    except ValueError as error:
        return str(error)
    return ""


def unpack_bucket(worker: Worker) -> dict[str, Tensor]:
    """Returns the weights that vLLM unpacks from the buffer of a bucket."""
    from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor  # noqa: PLC0415 (as above)

    info = ipc_bucket({}).update_info()
    buffer = torch.cat([weight.view(-1).view(torch.uint8) for weight in WEIGHTS.values()])
    dtypes = [getattr(torch, name) for name in info.dtype_names]
    return dict(unpack_tensor(buffer, info.names, info.shapes, dtypes, info.tensor_sizes))


def transfer_ranks(worker: Worker, leads: int, num_replicas: int) -> tuple[list[int], dict[str, Any]]:
    """Returns the group ranks of all vLLM workers, and the fields of the init info."""
    from flowrl.engines.rollout.vllm.gpu_transfer import TransferGroup  # noqa: PLC0415 (as above)

    link = TransferGroup(host="127.0.0.1", port=4321, world_size=1 + leads * num_replicas, buffer_bytes=1000)
    infos = [link.init_info(1 + leads * replica) for replica in range(num_replicas)]
    return [info.rank_offset + rank for info in infos for rank in range(leads)], asdict(infos[0])


def load_ipc_bucket(worker: Worker) -> tuple[bool, bool, dict[str, Tensor], str]:
    """Loads a bucket with vLLM's IPC receiver: (is packed, closes buffers, loaded weights, error without a GPU)."""
    from flowrl.engines.rollout.vllm.worker_extension import Tensors, TensorTransfer  # noqa: PLC0415 (as above)

    model: Any = Loading()
    config: Any = SimpleNamespace(parallel_config=None, model_config=None)
    transfer = TensorTransfer(config, config, torch.device("cpu"), model)
    error_message = ""
    try:
        transfer.receive_weights(Tensors(ipc_bucket({}), tied={"embed": ["head", "third"]}))
    except (AssertionError, RuntimeError, ValueError) as error:
        error_message = str(error)
    receiver = transfer.receivers._ipc
    receiver.model.load_weights(WEIGHTS.items())
    transfer.shutdown()
    return receiver.packed, callable(receiver._packed_importer.close), dict(model.loaded), error_message


def nccl_receiver(worker: Worker) -> tuple[str, int, tuple[str, ...]]:
    """Sets up vLLM's NCCL receiver without joining: (error of an update, buffer size, rank and config)."""
    from vllm.distributed.weight_transfer import nccl_engine  # noqa: PLC0415 (as above)

    from flowrl.engines.rollout.vllm.gpu_transfer import TransferGroup, WeightMetadata  # noqa: PLC0415
    from flowrl.engines.rollout.vllm.worker_extension import Tensors, TensorTransfer  # noqa: PLC0415

    ranks: list[Any] = []
    joins = "worker_init_process_group"  # it would wait for the other ranks
    setattr(nccl_engine, joins, lambda info, config: ranks.append((info.rank_offset, config)))
    config: Any = SimpleNamespace(parallel_config="parallel", model_config=None)
    model: Any = Loading()
    transfer = TensorTransfer(config, config, torch.device("cpu"), model)
    transfer.receivers.join(TransferGroup("127.0.0.1", 4321, 5, buffer_bytes=1000), 3)
    try:
        transfer.receive_weights(Tensors(WeightMetadata(("a",), ("float32",), ((1,),))))
    except RuntimeError as error:
        return str(error), transfer.receivers._nccl.packed_buffer_size_bytes, ranks[0]
    return "", 0, ()


def signatures(worker: Worker) -> dict[str, list[str]]:
    """Returns the parameter names of the called vLLM functions and the field names of their results."""
    from vllm.distributed.weight_transfer import ipc_engine, nccl_engine, packed_tensor  # noqa: PLC0415 (as above)
    from vllm.distributed.weight_transfer.nccl_common import trainer_init  # noqa: PLC0415

    called = {
        "packed_ipc_producer": packed_tensor.packed_ipc_producer,
        "packed_nccl_broadcast_producer": packed_tensor.packed_nccl_broadcast_producer,
        "trainer_init": trainer_init,
    }
    for kind in (ipc_engine.IPCWeightTransferEngine, nccl_engine.NCCLWeightTransferEngine):
        called |= {
            f"{kind.__name__}.{name}": getattr(kind, name)
            for name in ("__init__", "init_transfer_engine", "receive_weights", "shutdown")
        }
    actual = {name: list(inspect.signature(function).parameters) for name, function in called.items()}
    return actual | {"PackedIpcChunk": [field.name for field in fields(packed_tensor.PackedIpcChunk)]}


def keys_of_trainer_init(worker: Worker) -> set[str]:
    """Returns the keys that vLLM reads from the actor's init info."""
    from vllm.distributed.weight_transfer import nccl_common  # noqa: PLC0415 (as above)

    read = set[str]()

    class Read(dict):
        def __getitem__(self, key: str) -> Any:
            read.add(key)
            return super().__getitem__(key)

    def stop(*_: Any) -> None:
        raise InterruptedError

    nccl_common.torch = SimpleNamespace(accelerator=SimpleNamespace(current_device_index=stop))  # pyright: ignore
    try:
        nccl_common.trainer_init(Read(master_address="127.0.0.1", master_port=1, world_size=2))
    except InterruptedError:
        pass
    finally:
        nccl_common.torch = torch  # pyright: ignore
    return read
