"""Plans of runs on one GPU of 80 GB."""

from pathlib import Path

from flowrl.config import load
from flowrl.memory.memory_estimate import DeviceMemory, estimate_memory, read_sizes
from flowrl.memory.role_memory import CallMemory, RoleMemory
from recipes.grpo.config import GRPOConfig
from tests.configs import plan_run

ROOT = Path(__file__).parents[2]


def grpo(model: str, *settings: str) -> GRPOConfig:
    """Returns a run of a published model on one GPU of 80 GB, colocated with vLLM."""
    values = [
        f"actor.model.path={model}",
        "actor.engine.compute_dtype=bfloat16",
        "actor.engine.gradient_checkpointing=true",
        "rollout.engine=vllm",
        "rollout.vllm.dtype=bfloat16",
        "placement=single",
        "placement.device=cuda",
        "placement.memory_gb=80",
    ]
    return load(ROOT / "recipes/grpo/arithmetic.yaml", [*values, *settings], GRPOConfig)


def only_device(config: GRPOConfig) -> DeviceMemory:
    (device,) = estimate_memory(config, plan_run(config, [1]), read_sizes(config))
    return device


def memory_of(device: DeviceMemory, role: str) -> RoleMemory:
    memory = device.roles[role]
    assert memory is not None
    return memory


def call_of(memory: RoleMemory, name: str) -> CallMemory:
    (call,) = (call for call in memory.calls if call.name == name)
    return call
