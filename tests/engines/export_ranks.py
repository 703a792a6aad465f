"""Rank processes of the export tests: load sharded models, train them and save checkpoints."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, distributed

from flowrl.config import EngineConfig, LoraConfig, ModelConfig, OptimizerConfig
from flowrl.engines.checkpoint.engine_checkpoint import EngineCheckpoints
from flowrl.engines.checkpoint.export import describe_export
from flowrl.engines.checkpoint.model_folder import save_model
from flowrl.engines.models.adapters.lora import add_adapter
from flowrl.engines.models.loading import CriticModel, load_critic, load_policy
from flowrl.engines.parallel.rank_mesh import SINGLE_PROCESS, RankMesh, rank_mesh
from flowrl.engines.train.base import Outputs
from flowrl.engines.train.fsdp.engine import FsdpEngine, is_sharded
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs, value_outputs
from tests.engines.strategies import POLICY, VALUES, critic_loss, policy_loss
from tests.engines.tables import table

LORA = LoraConfig(rank=4, alpha=8.0)
START = "start"
"""Folder of the initial model."""


@dataclass(frozen=True)
class Case:
    """A parallelism of two ranks."""

    settings: dict
    tp: int = 1
    lora: LoraConfig | None = None


CASES = {
    "ddp": Case({"strategy": "ddp"}),
    "fsdp": Case({"strategy": "fsdp"}),
    "tp": Case({}, tp=2),
    "an adapter, ddp": Case({"strategy": "ddp"}, lora=LORA),
    "an adapter, fsdp": Case({"strategy": "fsdp"}, lora=LORA),
    "an adapter, tp": Case({}, tp=2, lora=LORA),
}


def policy_engine(case: Case, folder: Path, mesh: RankMesh) -> FsdpEngine:
    engine = _engine(case, mesh)
    model = load_policy(ModelConfig(path=folder / START), on_meta=is_sharded(engine, mesh))
    if case.lora is not None:
        add_adapter(model, case.lora)
    return FsdpEngine(PolicyModel(model), policy_outputs, OptimizerConfig(lr=1e-2), engine, mesh=mesh)


def critic_engine(case: Case, folder: Path, mesh: RankMesh) -> FsdpEngine:
    engine = _engine(case, mesh)
    model = load_critic(ModelConfig(path=folder / START), head="fresh", on_meta=is_sharded(engine, mesh))
    if case.lora is not None:
        add_adapter(model.backbone, case.lora)
    return FsdpEngine(model, value_outputs, OptimizerConfig(lr=1e-2), engine, mesh=mesh)


def _engine(case: Case, mesh: RankMesh) -> EngineConfig:
    return EngineConfig.model_validate({} if mesh is SINGLE_PROCESS else case.settings)


def values(engine: FsdpEngine) -> Tensor:
    """Returns the values of a fixed batch."""
    return engine.forward(table(3), Outputs(("values",)))["values"]


def main(rank: int, folder: Path) -> None:
    """Trains a policy and a critic for two steps in every case, and saves checkpoints and exported models."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {}
    for name, case in CASES.items():
        mesh = rank_mesh(distributed.group.WORLD, device="cpu", tp=case.tp)
        policy, critic = policy_engine(case, folder, mesh), critic_engine(case, folder, mesh)
        for step in range(2):
            policy.update(table(5, seed=step), policy_loss, POLICY)
            critic.update(table(5, seed=step), critic_loss, VALUES)
        assert isinstance(policy.model, PolicyModel)
        language_model = policy.model.language_model
        assert isinstance(critic.model, CriticModel)
        for role, engine, model in (("actor", policy, language_model), ("critic", critic, critic.model)):
            files = describe_export(engine.describe_model(), ModelConfig(path=folder / START), case.lora)
            _save(engine, folder / name / role, files)
            save_model(model, folder / START, folder / name / f"saved-{role}", is_writer=rank == 0)
        results[name] = values(critic)
    torch.save(results, folder / f"{rank}.pt")
    distributed.destroy_process_group()


def _save(engine: FsdpEngine, folder: Path, extra_files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    distributed.barrier()
    checkpoints = EngineCheckpoints(engine)
    checkpoints.save(folder, asynchronous=True, extra_files=extra_files)
    checkpoints.result()
