"""Functions that tests of the GPU transports run with `group.run`; the test process never imports vLLM."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flowrl.controller.worker import Worker
from flowrl.engines.rollout.cuda_ipc import IpcSender
from flowrl.engines.rollout.weight_metadata import WeightMetadata

WEIGHTS = {
    "embed": torch.arange(6, dtype=torch.float32).view(2, 3),
    "norm": torch.ones(4, dtype=torch.bfloat16),
    "bias": torch.arange(4, dtype=torch.int64),
}


class Bare(Worker):
    """A worker without methods."""


class Loading:
    """Records the weights that are loaded into a model."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, Tensor]] = []

    def load_weights(self, weights: Any) -> None:
        self.loaded += weights


def metadata() -> WeightMetadata:
    return WeightMetadata.of((name, weight.dtype, weight.shape) for name, weight in WEIGHTS.items())


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


def precision_of_triton(worker: Worker) -> str | None:
    """Returns the precision of float32 products in Triton kernels that do not set it, such as vLLM's attention."""
    from triton import knobs  # noqa: PLC0415 (as above)

    import flowrl.engines.rollout.vllm.engine  # noqa: F401, PLC0415 (as above)

    return knobs.language.fp32_default
