"""The protocols that the capabilities of an engine require."""

from dataclasses import replace

import pytest

from flowrl.config.engines.rollout_engines import ENGINES
from flowrl.engines.rollout.base import check_engine_class, find_missing_methods
from flowrl.engines.rollout.hf.engine import HfRollout
from tests.engines.rollout.scripted_engine import IncompleteEngine, ScriptedEngine
from tests.errors import rejects


class AmbitiousEngine(ScriptedEngine):
    """Declares capabilities for which it has no methods."""

    capabilities = replace(ScriptedEngine.capabilities, sleep=True, gpu_transports=("nccl",))


def test_the_transformers_engine_implements_the_protocols_of_its_capabilities() -> None:
    assert HfRollout.capabilities is ENGINES["hf"] and find_missing_methods(HfRollout) == []


@pytest.mark.parametrize("name", ["ScriptedEngine", "DedicatedEngine", "BatchEngine"])
def test_a_complete_engine_is_accepted(name: str) -> None:
    check_engine_class(f"tests.engines.rollout.scripted_engine:{name}")


def test_missing_methods_follow_from_the_capabilities() -> None:
    assert find_missing_methods(AmbitiousEngine) == ["asleep", "sleep", "wake", "join_transfer_group"]
    core = {"start", "version", "state", "generate", "begin_update", "receive", "commit", "abort_update"}
    missing = set(find_missing_methods(IncompleteEngine))  # pyright: ignore[reportArgumentType] (it is incomplete)
    assert missing == core | {"compare_weights", "load_from", "num_running", "add", "poll", "abort"}


def test_an_incomplete_engine_is_rejected_with_the_names_of_its_missing_methods() -> None:
    with rejects(__name__, "AmbitiousEngine", "asleep", "join_transfer_group"):
        check_engine_class(f"{__name__}:AmbitiousEngine")
