"""Counts the operations of a micro-batch of training: aten calls, synchronizations with the host, and copies to a GPU.

python -m tests.benchmarks.operations [--layers N]

The model has the layers, heads and tiles of the head of Qwen2.5-1.5B, but is narrow: the counts do not depend on the
width. Counted are the operations from the first of a micro-batch on the device to the first of the next one. The rows
have one length: attention over rows of different lengths is one call on a GPU, but one call per length on the CPU, on
which this program runs.

Synchronizations are operations that make the host wait for a GPU: reading a value (`item`, `tolist`, `float`), and
operations whose result has as many elements as a mask has true ones. Copies are those of the tensors of a micro-batch,
which are sent together, and of tensors that are created from Python numbers.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2Config, Qwen2ForCausalLM

from flowrl.algorithms.hidden_logprobs import _OTHER_TILE_SIDES, _TILE_SIDES
from flowrl.config import ActorConfig, EngineConfig, ModelConfig, OptimizerConfig
from flowrl.data.batch.tensordicts import make_tensordict
from flowrl.devices.device import packed_size
from flowrl.engines.train.base import Outputs
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs
from flowrl.engines.train.microbatch import MicroBatch
from flowrl.workers import Actor
from flowrl.workers.losses.configured_losses import policy_loss
from flowrl.workers.losses.loss import BoundLoss
from tests.benchmarks.measure import read_arguments

LAYERS, HEADS, KEY_VALUE_HEADS, VOCABULARY = 28, 12, 2, 151_936
"""Layout of Qwen2.5-1.5B."""

ROWS, LENGTH = 4, 32
"""Rows of a micro-batch, and tokens of a row."""

READS, MASKED = {"_local_scalar_dense"}, {"nonzero", "masked_select", "_unique2", "unique_consecutive"}
"""Names of operations that make the host wait: those that read a value, and those with a result of unknown size."""

NAMES = ("aten calls", "synchronizations", "copies to the device", "bytes to the device")
"""Names of the counts."""

COPIES = {"tolist", "cpu", "numpy"}
"""Names of methods of tensors that copy a tensor to the host."""

CASES: Mapping[str, Mapping[str, object]] = {
    "update, float32": {},
    "update, autocast to bfloat16": {"compute_dtype": "bfloat16"},
    "update, bfloat16 and checkpointing": {"compute_dtype": "bfloat16", "gradient_checkpointing": True},
}
"""Name -> settings of the engine."""

LOGPROBS = "logprobs, autocast to bfloat16"


class HostReads(TorchFunctionMode):
    """Counts the methods that copy a tensor to the host. On the CPU, they call no operation."""

    def __init__(self, operations: "Operations") -> None:
        super().__init__()
        self._operations = operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: torch's
        if self._operations.is_enabled and getattr(func, "__name__", "") in COPIES:
            self._operations.counts["synchronizations"] += 1
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Counts the operations that run while it is enabled."""

    def __init__(self) -> None:
        super().__init__()
        self.is_enabled = False
        self.counts: Counter[str] = Counter(dict.fromkeys(NAMES, 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: torch's
        if self.is_enabled:
            name = func.overloadpacket.__name__
            self.counts["aten calls"] += 1
            if name in READS or name in MASKED or (name.startswith("index") and _has_mask(args)):
                self.counts["synchronizations"] += 1
            if name == "lift_fresh":
                self.counts["copies to the device"] += 1
                self.counts["bytes to the device"] += args[0].nbytes
        return func(*args, **(kwargs or {}))

    def add_transfer(self, micro: MicroBatch) -> None:
        """Adds the copy of a micro-batch to a GPU."""
        tensors = [leaf for leaf in tree_leaves(vars(micro)) if isinstance(leaf, Tensor)]
        tensors += [] if micro.pack is None else micro.pack.tensors
        self.counts["copies to the device"] += 1
        self.counts["bytes to the device"] += packed_size(tensors)


def _has_mask(args: Any) -> bool:  # Any: the arguments of an operation
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices)


def rows(num_micros: int) -> Any:
    """Returns the rows of `num_micros` micro-batches. The second half of a row is trained."""
    num_rows = ROWS * num_micros
    num_tokens = num_rows * LENGTH
    mask_T = (torch.arange(num_tokens) % LENGTH) >= LENGTH // 2
    values = {name: torch.full((num_tokens,), -1.0) for name in ("old_logprobs", "advantages", "rollout_logprobs")}
    ids_T = torch.randint(100, (num_tokens,), generator=torch.Generator().manual_seed(0))
    tokens = {"input_ids": ids_T, "response_mask": mask_T, **values}
    return make_tensordict({}, tokens, torch.full((num_rows,), LENGTH), num_rows)


class CountedEngine(FsdpEngine):
    """Counts the operations of the first micro-batch of each pass over a batch."""

    operations: Operations
    num_micros = 0

    def _to_device(self, micro: MicroBatch, outputs: Outputs) -> MicroBatch:
        self.operations.is_enabled = False  # what follows runs on the host
        on_device = super()._to_device(micro, outputs)
        self.num_micros += 1
        if self.num_micros == 1:
            self.operations.is_enabled = True
            self.operations.add_transfer(on_device)
        return on_device


def make_engine(num_layers: int, settings: Mapping[str, object]) -> CountedEngine:
    torch.manual_seed(0)
    # As many tiles as the vocabulary has on a GPU.
    num_tiles = -(-VOCABULARY // _OTHER_TILE_SIDES[1])
    config = Qwen2Config(
        vocab_size=num_tiles * _TILE_SIDES["cpu"][1],
        hidden_size=8 * HEADS,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        tie_word_embeddings=True,
    )
    engine = EngineConfig.model_validate({"max_tokens_per_microbatch": ROWS * LENGTH, **settings})
    counted = CountedEngine(PolicyModel(Qwen2ForCausalLM(config)), policy_outputs, OptimizerConfig(lr=1e-3), engine)
    counted.operations = Operations()
    return counted


def count_update(num_layers: int, settings: Mapping[str, object]) -> Counter[str]:
    """Returns the counts of a micro-batch of the policy loss with a KL term."""
    config = ActorConfig(model=ModelConfig(path=Path("unused")), optimizer=OptimizerConfig(lr=1e-3))
    bound = BoundLoss.of(policy_loss(config), {"response_mask": torch.bool}, Actor.COMPUTED, temperature=1.0)
    engine = make_engine(num_layers, settings)
    with engine.operations, HostReads(engine.operations):
        engine.forward_backward(rows(2), bound, bound.outputs)
    return engine.operations.counts


def count_logprobs(num_layers: int, settings: Mapping[str, object]) -> Counter[str]:
    """Returns the counts of a micro-batch of log-probabilities without a gradient."""
    engine = make_engine(num_layers, settings)
    with engine.operations, HostReads(engine.operations):
        engine.forward(rows(2), Outputs(("logprobs",), "response_mask"))
    return engine.operations.counts


def measure(num_layers: int = LAYERS) -> Iterator[tuple[str, Counter[str]]]:
    """Yields the counts of each case by its name."""
    for name, settings in CASES.items():
        yield name, count_update(num_layers, settings)
    yield LOGPROBS, count_logprobs(num_layers, {"compute_dtype": "bfloat16"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=LAYERS)
    arguments = read_arguments(parser, layers=2)
    sys.stdout.write(f"| {arguments.layers} layers | {' | '.join(NAMES)} |\n|---|{'---|' * len(NAMES)}\n")
    for case, counts in measure(arguments.layers):
        sys.stdout.write(f"| {case} | {' | '.join(f'{counts[name]:,}' for name in NAMES)} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
