"""Settings of the runs of `echo_run`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.configs import quickstart_settings
from tests.run.echo_run import EchoConfig, placed
from tests.small_task import prepare_small


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "data"
    prepare_small(folder)
    return folder


@pytest.fixture
def config(task: Path, tmp_path: Path) -> Callable[..., EchoConfig]:
    def make(**changes: Any) -> EchoConfig:
        settings = quickstart_settings(
            task,
            tmp_path / "out",
            placement=placed(1),
            steps=4,
            batch_size=4,
            minibatch_size=2,
            rollout={"max_response_tokens": 1},
            algorithm={"estimator": "grpo"},
        )
        settings["data"]["evaluation_rows"] = 3
        settings["report"] = {}
        return EchoConfig.model_validate(settings | changes)

    return make
