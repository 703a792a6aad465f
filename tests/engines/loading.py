"""Program of the ranks of the loading tests: sharded loading, full loading, and their memory."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from flowrl.config import EngineConfig, LoraConfig, ModelConfig, UserError
from flowrl.engines.models.adapters.lora import adapter_state, add_adapter, save_adapter
from flowrl.engines.models.adapters.saved_adapter import SavedAdapter
from flowrl.engines.models.loading import load_critic, load_policy, load_reward_model
from flowrl.engines.models.weights import export_weights
from flowrl.engines.parallel.rank_mesh import RankMesh, rank_mesh
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp on 2": (2, {}),
    "fsdp on 4": (4, {}),
    "hybrid on 2 x 2": (4, {"shard_ranks": 2}),
    "tp on 2": (2, {"tp": 2}),
    "tp x fsdp on 2 x 2": (4, {"tp": 2}),
}
"""Name -> ranks, and how they are laid out."""

LORA = LoraConfig(rank=4)
SAVED = LoraConfig(rank=4, modules_to_save=("embed_tokens",))
"""Settings of the adapters in files."""

IDS = torch.randint(2, 32, (2, 9), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([9, 4])


def models(folder: Path, on_meta: bool) -> dict[str, nn.Module]:
    """Loads models of every kind: the critic with a saved head, the reward model with a fresh one."""
    policy, critic = ModelConfig(path=folder / "policy"), ModelConfig(path=folder / "critic", dtype="bfloat16")
    adapted, adapted_critic = load_policy(policy, on_meta=on_meta), load_critic(critic, on_meta=on_meta)
    add_adapter(adapted, LORA)
    add_adapter(adapted_critic.backbone, LORA)
    saved, saved_tied = (ModelConfig(path=folder / name) for name in ("adapter", "tied adapter"))
    continued = load_policy(saved_tied, on_meta=on_meta, merges=False)
    add_adapter(continued, SAVED)
    SavedAdapter.read(folder / "tied adapter").continue_in(continued)
    return {
        "policy that continues an adapter": PolicyModel(continued),
        "policy with a merged adapter": PolicyModel(load_policy(saved, on_meta=on_meta)),
        "tied policy with a merged adapter": PolicyModel(load_policy(saved_tied, on_meta=on_meta)),
        "critic with a merged adapter": load_critic(
            saved.model_copy(update={"dtype": "bfloat16"}), head="fresh", on_meta=on_meta
        ),
        "policy with an adapter": PolicyModel(adapted),
        "critic with an adapter": adapted_critic,
        "tied policy": PolicyModel(load_policy(ModelConfig(path=folder / "tied"), on_meta=on_meta)),
        "policy": PolicyModel(load_policy(policy, on_meta=on_meta)),
        "critic": load_critic(critic, on_meta=on_meta),
        "fresh critic": load_critic(policy, head="fresh", on_meta=on_meta),
        "reward": load_reward_model(policy, head="fresh", seed=3, on_meta=on_meta),
        "policy with experts": PolicyModel(load_policy(ModelConfig(path=folder / "mixtral"), on_meta=on_meta)),
        "critic with experts": load_critic(ModelConfig(path=folder / "qwen3_moe"), head="fresh", on_meta=on_meta),
        "policy with experts and a buffer": PolicyModel(
            load_policy(ModelConfig(path=folder / "deepseek", dtype="bfloat16"), on_meta=on_meta)
        ),
    }


def write_adapter(base: Path, folder: Path) -> None:
    """Saves an adapter whose matrices and complete weights are all changed."""
    model = load_policy(ModelConfig(path=base))
    add_adapter(model, SAVED)
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    save_adapter(model, base, folder)


def first_output(model: nn.Module, name: str) -> Tensor:
    """Returns the output of a model for two rows."""
    with torch.no_grad():
        if "policy" in name:
            return model(IDS, torch.ones_like(IDS, dtype=torch.bool))[0]
        return model(IDS, LENGTHS) if name == "reward" else model(IDS)


def main(rank: int, folder: Path, ranks: int, meshes: set[str]) -> None:
    """Joins the other ranks, loads models in shards on the named meshes, and writes their outputs and weights."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    groups = {size: distributed.new_group(list(range(size))) for size in (4, 2) if size <= ranks}
    results = {}
    for mesh_name, (size, layout) in MESHES.items():
        if rank >= size or mesh_name not in meshes:
            continue
        group = groups[size]
        assert isinstance(group, distributed.ProcessGroup)
        mesh = rank_mesh(group, device="cpu", **layout)
        config = EngineConfig(strategy="fsdp", shard_ranks=layout.get("shard_ranks"))
        for name, model in models(folder, on_meta=True).items():
            assert any(parameter.is_meta for parameter in model.parameters())
            engine = FsdpEngine(model, policy_outputs, None, config, mesh=mesh)
            results[mesh_name, name] = first_output(engine.model, name), _weights(model)
    torch.save(results, folder / f"{rank}.pt")
    distributed.destroy_process_group()


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns all full weights, and those of the adapter separately."""
    return {name: torch.from_numpy(array) for name, array in export_weights(model).items()} | adapter_state(model)


def expected(folder: Path) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    """Returns the outputs and weights of fully loaded models."""
    return {name: (first_output(model, name), _weights(model)) for name, model in models(folder, on_meta=False).items()}


def load_experts(rank: int, folder: Path, output: Path) -> None:
    """Loads a mixture of experts in shards, and writes "loaded" or the layer of the weight that is not finite."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{output}/store", rank=rank, world_size=2)
    mesh = rank_mesh(distributed.group.WORLD, device="cpu")
    text = "loaded"
    try:
        policy = PolicyModel(load_policy(ModelConfig(path=folder), on_meta=True))
        FsdpEngine(policy, policy_outputs, None, EngineConfig(strategy="fsdp"), mesh=mesh)
    except UserError as error:
        text = next(word for word in str(error).split() if word.startswith("model.layers"))[:14]
    (output / f"{rank}.txt").write_text(text)
    distributed.destroy_process_group()


def growth(mesh: RankMesh, folder: Path, on_meta: bool, lora: bool) -> int:
    """Returns the growth of the peak memory of this process while it loads and shards a policy."""
    # Resets the peak on Linux.
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    policy = load_policy(ModelConfig(path=folder), on_meta=on_meta)
    if lora:
        add_adapter(policy, LORA)
    FsdpEngine(PolicyModel(policy), policy_outputs, None, EngineConfig(strategy="fsdp"), mesh=mesh)
    return memory("VmHWM") - before


def memory(name: str) -> int:
    """Returns a memory figure of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measure(rank: int, folder: Path, small: Path, large: Path, on_meta: bool, lora: bool) -> None:
    """Writes the memory that one of two ranks uses for a large model, after a small one has loaded all code."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = rank_mesh(distributed.group.WORLD, device="cpu")
    growth(mesh, small, on_meta, lora)
    (folder / f"{rank}.txt").write_text(str(growth(mesh, large, on_meta, lora)))
    distributed.destroy_process_group()
