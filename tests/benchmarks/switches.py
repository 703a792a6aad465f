"""Counts the bytes that an idle role copies to host memory: `python -m tests.benchmarks.switches [--layers N]`.

The roles leave their device (`engine.offload: idle`) after a forward pass, and after an optimizer step. A CPU with a
memory of its own stands for a GPU, because the bytes do not depend on the device.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from flowrl.config import EngineConfig, LoraConfig, OptimizerConfig
from flowrl.devices import device as devices
from flowrl.engines.models.adapters.lora import add_adapter
from flowrl.engines.train.base import Outputs
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs
from tests.benchmarks.measure import read_arguments
from tests.devices.test_host_copies import CountingDevice
from tests.engines.strategies import POLICY, policy_loss
from tests.engines.tables import table

ROLES: Mapping[str, tuple[bool, LoraConfig | None]] = {
    "actor": (True, None),
    "actor with LoRA": (True, LoraConfig(rank=8)),
    "reference": (False, None),
}
"""Name of a role -> whether it is trained, and its adapter."""


def make_engine(num_layers: int, *, is_trained: bool, lora: LoraConfig | None) -> FsdpEngine:
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": num_layers}
    config = Qwen2Config(**sizes, num_attention_heads=8, num_key_value_heads=2, vocab_size=8000)
    model = Qwen2ForCausalLM(config)
    if lora is not None:
        add_adapter(model, lora)
    optimizer = OptimizerConfig(lr=1e-4) if is_trained else None
    return FsdpEngine(PolicyModel(model), policy_outputs, optimizer, EngineConfig(offload="idle"))


def copied_mb(device: CountingDevice, engine: FsdpEngine, work: Callable[[FsdpEngine], object]) -> float:
    """Returns the megabytes that the engine copies to host memory when it leaves its device after some work."""
    for _ in range(2):  # the first time, everything is copied
        work(engine)
        device.copied = 0
        engine.offload()
        engine.onload()
    return device.copied / 1e6


def compute(engine: FsdpEngine) -> None:
    engine.forward(table(4), Outputs(("logprobs",), "response_mask"))


def train(engine: FsdpEngine) -> None:
    engine.update(table(4), policy_loss, POLICY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    arguments = read_arguments(parser, layers=2)
    torch.manual_seed(0)
    device = CountingDevice(devices._CPU)
    devices._CPU = device  # pyright: ignore[reportAttributeAccessIssue] (its memory counts as that of a GPU)
    sys.stdout.write("| role | weights | copied after a forward pass | after an optimizer step |\n|---|---|---|---|\n")
    for name, (is_trained, lora) in ROLES.items():
        engine = make_engine(arguments.layers, is_trained=is_trained, lora=lora)
        weights = sum(weight.nbytes for weight in engine.model.parameters()) / 1e6
        after_pass = copied_mb(device, engine, compute)
        after_step = f"{copied_mb(device, engine, train):.1f}" if is_trained else "none"
        sys.stdout.write(f"| {name} | {weights:.1f} | {after_pass:.1f} | {after_step} |\n")


if __name__ == "__main__":
    main()
