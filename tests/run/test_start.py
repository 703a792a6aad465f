"""What is refused before anything starts."""

from pathlib import Path

import pytest

from flowrl.config import (
    ActorConfig,
    ConfigError,
    EngineConfig,
    ModelConfig,
    OptimizerConfig,
    Placement,
    RolePlacement,
    RunConfig,
)
from flowrl.run.start import plan_run


class ActorRun(RunConfig):
    roles = ("actor",)

    actor: ActorConfig


def run_with(placement: Placement, strategy: str = "auto") -> ActorRun:
    engine = EngineConfig.model_validate({"strategy": strategy})
    actor = ActorConfig(model=ModelConfig(path=Path("m")), optimizer=OptimizerConfig(lr=1e-4), engine=engine)
    return ActorRun(output=Path("out"), steps=1, placement=placement, actor=actor)


def test_a_run_is_planned_on_a_stated_inventory() -> None:
    planned = plan_run(run_with(Placement(device="cuda", pools={"all": "all"}, roles={"actor": "all"})), [4, 4])
    assert planned.kind == "cuda" and planned.roles["actor"].mesh.dp == 8


def test_a_single_strategy_takes_one_rank() -> None:
    two = Placement(device="cpu", pools={"main": [2]}, roles={"actor": "main"})
    with pytest.raises(ConfigError, match=r"actor\.engine\.strategy is single, but pool main gives the role 2 ranks"):
        plan_run(run_with(two, "single"))


def test_a_parallel_size_that_no_strategy_has_is_refused() -> None:
    tensor = Placement(device="cpu", pools={"main": [2]}, roles={"actor": RolePlacement(pool="main", tp=2)})
    with pytest.raises(ConfigError, match=r"placement\.roles\.actor has tp 2"):
        plan_run(run_with(tensor))
