"""Measures the peak memory of roles in separate processes, for comparison with their estimates.

python -m tests.memory.memory_points NAME [RANK FOLDER]

glibc caches freed memory in fragments, so the resident size of a process exceeds the size of its tensors. With
`MALLOC_MMAP_THRESHOLD_` (see `measure_growth`) it returns larger blocks at once.
"""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, distributed
from transformers import Qwen2Config, Qwen2ForCausalLM

from flowrl.config import EngineConfig, LoraConfig, OptimizerConfig, RolloutConfig
from flowrl.controller.placement.plan import Mesh
from flowrl.data.batch.tensordicts import make_tensordict
from flowrl.engines.models.adapters.lora import add_adapter
from flowrl.engines.models.loading import CriticModel
from flowrl.engines.parallel.rank_mesh import SINGLE_PROCESS, rank_mesh
from flowrl.engines.rollout.hf.engine import HfRollout
from flowrl.engines.rollout.response_tensors import make_requests
from flowrl.engines.train.base import Denominators, Outputs
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs, value_outputs
from flowrl.engines.train.microbatch import MicroBatch
from flowrl.memory.head_memory import Entropy
from flowrl.memory.model_size import ModelSize, model_size_from_config
from flowrl.memory.role_memory import RoleMemory, RoleModel, inference_role, training_role
from flowrl.memory.rollout_memory import RolloutBatch, RolloutLoad, hf_memory
from tests.engines.tiny import tokenizer

LENGTH, TOKENS = 256, 2048
ROWS, PROMPT, RESPONSE = 32, 480, 48


@dataclass(frozen=True)
class Point:
    """A role and its settings."""

    role: str = "actor"
    vocabulary: int = 4096
    entropy: Entropy = "value"
    engine: EngineConfig = field(default_factory=lambda: _engine())
    lora: LoraConfig | None = None
    dtype: str = "float32"
    tied: bool = True
    ranks: int = 1


def _engine(**settings) -> EngineConfig:
    return EngineConfig.model_validate({"max_tokens_per_microbatch": TOKENS, **settings})


POINTS: Mapping[str, Point] = {
    "all activations": Point(),
    "gradient checkpointing": Point(engine=_engine(gradient_checkpointing=True)),
    "large vocabulary": Point(vocabulary=32768),
    "large vocabulary, gradient checkpointing": Point(vocabulary=32768, engine=_engine(gradient_checkpointing=True)),
    "large vocabulary, untied": Point(vocabulary=32768, tied=False),
    "no entropy": Point(entropy="none"),
    "trained entropy": Point(entropy="gradient"),
    "large vocabulary, trained entropy": Point(vocabulary=32768, entropy="gradient"),
    "twice the tokens": Point(engine=_engine(max_tokens_per_microbatch=2 * TOKENS)),
    "bfloat16 model": Point(dtype="bfloat16"),
    "bfloat16 products": Point(engine=_engine(compute_dtype="bfloat16")),
    "critic": Point(role="critic"),
    "reference": Point(role="reference", vocabulary=32768),
    "LoRA": Point(lora=LoraConfig(rank=16)),
    "LoRA, large vocabulary": Point(lora=LoraConfig(rank=16), vocabulary=32768),
    "fsdp, 1 rank": Point(engine=_engine(strategy="fsdp")),
    "fsdp, 1 rank, bfloat16 products": Point(
        engine=_engine(strategy="fsdp", compute_dtype="bfloat16"), vocabulary=32768
    ),
    "fsdp, 2 ranks": Point(engine=_engine(strategy="fsdp"), ranks=2),
    "fsdp, 2 ranks, large vocabulary": Point(engine=_engine(strategy="fsdp"), ranks=2, vocabulary=32768),
    "fsdp, 2 ranks, gradient checkpointing": Point(
        engine=_engine(strategy="fsdp", gradient_checkpointing=True), ranks=2, vocabulary=32768
    ),
    "fsdp, 2 ranks, layers stay gathered": Point(engine=_engine(strategy="fsdp", reshard_after_forward=False), ranks=2),
    "rollout": Point(role="rollout"),
    "rollout, large vocabulary": Point(role="rollout", vocabulary=32768),
}


def config_of(point: Point, *, small: bool = False) -> Qwen2Config:
    """Returns the configuration of the point's model, or of a tiny model of the same architecture."""
    return Qwen2Config(
        hidden_size=32 if small else 384,
        intermediate_size=64 if small else 1152,
        num_hidden_layers=2 if small else 8,
        vocab_size=point.vocabulary,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=point.tied,
        max_position_embeddings=1024,
    )


def estimated(point: Point) -> RoleMemory:
    """Returns the estimated memory of one rank."""
    size = model_size_from_config(config_of(point).to_dict())
    assert isinstance(size, ModelSize)
    if point.role == "rollout":
        return hf_memory(RolloutLoad(size, 4, _rollout_config(), RolloutBatch(ROWS, ROWS, PROMPT), "cpu"))
    model = RoleModel(
        size=size,
        engine=point.engine,
        mesh=Mesh(pp=1, dp=point.ranks, sp=1, tp=1),
        device_type="cpu",
        param_bytes=2 if point.dtype == "bfloat16" else 4,
        is_policy=point.role != "critic",
        max_length=LENGTH,
        lora=point.lora,
    )
    if point.role == "reference":
        return inference_role(model, None, "logprobs")
    return training_role(model, None, point.entropy, copies_checkpoints=False)


def estimated_peak(point: Point) -> int:
    """Returns the estimated bytes of the resident state plus the largest call."""
    memory = estimated(point)
    return memory.resident + max(call.total for call in memory.calls)


def measure_growth(name: str, *, free_at_once: bool = True) -> int:
    """Runs a point in new processes and returns the largest growth of a rank in bytes.

    Args:
        free_at_once: whether glibc returns freed blocks at once, so that the resident size follows the tensors.
    """
    environment = {**os.environ, "PYTHONPATH": "."}
    environment.pop("MALLOC_MMAP_THRESHOLD_", None)
    if free_at_once:
        environment["MALLOC_MMAP_THRESHOLD_"] = str(2**16)
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.memory.memory_points", name]
        processes = [
            subprocess.Popen([*command, str(rank), folder], env=environment, stdout=subprocess.PIPE, text=True)
            for rank in range(POINTS[name].ranks)
        ]
        outputs = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes), f"{name} failed"
    return max(int(output.splitlines()[-1]) for output in outputs)


def _rollout_config() -> RolloutConfig:
    return RolloutConfig(max_response_tokens=RESPONSE)


def _rows(num_rows: int, length: int, vocabulary: int):
    total = num_rows * length
    mask_T = torch.arange(total) % length > 0
    ids_T = torch.randint(2, vocabulary, (total,))
    return make_tensordict({}, {"input_ids": ids_T, "response_mask": mask_T}, torch.full((num_rows,), length), num_rows)


def _policy_loss(entropy: Entropy) -> Callable:
    def loss(values: Mapping[str, Tensor], micro: MicroBatch, counts: Denominators):
        objective_BL = values["logprobs"]
        if entropy == "gradient":
            objective_BL = objective_BL + 0.01 * values["entropy"]
        return -objective_BL.sum() / counts.tokens, {}

    return loss


def _value_loss(values: Mapping[str, Tensor], micro: MicroBatch, counts: Denominators):
    return values["values"].square().sum() / counts.tokens, {}


def run(point: Point, config: Qwen2Config, mesh=SINGLE_PROCESS) -> None:
    """Builds the point's model and runs its largest call."""
    dtype = torch.bfloat16 if point.dtype == "bfloat16" else torch.float32
    model = Qwen2ForCausalLM(config).to(dtype)  # pyright: ignore[reportArgumentType] (transformers narrows `to`)
    if point.role == "rollout":
        rollout = HfRollout(model, tokenizer(), _rollout_config())
        prompts = [[2 + (row + i) % 20 for i in range(PROMPT)] for row in range(ROWS)]
        indices = torch.arange(ROWS)
        rollout.generate(make_requests(prompts, indices, indices, seed=0))
        return
    if point.lora is not None:
        add_adapter(model, point.lora)
    is_critic = point.role == "critic"
    module, compute = (CriticModel(model.model), value_outputs) if is_critic else (PolicyModel(model), policy_outputs)
    del model
    is_trained = point.role != "reference"
    engine = FsdpEngine(module, compute, OptimizerConfig(lr=1e-4) if is_trained else None, point.engine, mesh=mesh)
    rows = _rows(point.engine.max_tokens_per_microbatch // LENGTH, LENGTH, point.vocabulary)
    if not is_trained:
        engine.forward(rows, Outputs(("logprobs",), "response_mask"))
        return
    loss, outputs = _value_loss, Outputs(("values",), "response_mask")
    if not is_critic:
        names = ("logprobs",) if point.entropy == "none" else ("logprobs", "entropy")
        detached = ("entropy",) if point.entropy == "value" else ()
        loss, outputs = _policy_loss(point.entropy), Outputs(names, "response_mask", detached=detached)
    for table in (_rows(1, 8, point.vocabulary), rows):
        engine.update(table, loss, outputs)


def main(name: str, rank: int, folder: str) -> None:
    """Prints the growth of this process's peak memory in bytes, after a tiny model has loaded all code."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    point, mesh = POINTS[name], SINGLE_PROCESS
    is_sharded = point.engine.strategy == "fsdp"
    if is_sharded:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/s", rank=rank, world_size=point.ranks)
        mesh = rank_mesh(distributed.group.WORLD, device="cpu")
    run(point, config_of(point, small=True), mesh)
    gc.collect()
    # Resets the peak (VmHWM) on Linux.
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    run(point, config_of(point), mesh)
    sys.stdout.write(f"{_memory('VmHWM') - before}\n")
    if is_sharded:
        distributed.destroy_process_group()


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
