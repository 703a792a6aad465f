"""State machine of a rollout engine."""

import pytest

from flowrl.engines.rollout.base import TAGS, WEIGHTS, EngineState, RolloutError, ServingState


def test_commit_sets_the_version_once_all_weights_are_received():
    serving = ServingState()
    serving.begin(3, ["a", "b"])
    assert (serving.state, serving.version) == (EngineState.UPDATING, 0)
    serving.mark_received(["b", "unknown"])
    with pytest.raises(RolloutError, match=r"\b1\b.*\ba\b"):
        serving.check_complete()
    serving.mark_received(["a"])
    serving.check_complete()
    serving.commit()
    assert (serving.state, serving.version) == (EngineState.SERVING, 3)


def test_a_failed_or_aborted_update_breaks_the_engine_until_a_complete_one():
    serving = ServingState()
    serving.begin(3, ["a", "b"])
    with pytest.raises(KeyError), serving.mark_failed_on_error():
        raise KeyError
    assert (serving.state, serving.version) == (EngineState.BROKEN, 0)
    serving.begin(4, ["a"])
    serving.abort()
    with pytest.raises(RolloutError, match="broken"):
        serving.require(EngineState.SERVING, "generate")
    serving.begin(5, [])
    serving.commit()
    assert (serving.state, serving.version) == (EngineState.SERVING, 5)


def test_dropped_weights_break_the_engine_until_a_complete_update():
    serving = ServingState()
    serving.drop_weights()
    serving.asleep = TAGS
    with pytest.raises(RolloutError, match="asleep"):
        serving.begin(1, [])
    serving.asleep -= WEIGHTS
    serving.begin(1, ["a"])
    with pytest.raises(RolloutError, match="updating"):
        serving.drop_weights()
    serving.mark_received(["a"])
    serving.check_complete()
    serving.asleep = frozenset()
    serving.commit()
    assert (serving.state, serving.version) == (EngineState.SERVING, 1)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("commit", ()),
        ("abort", ()),
        ("tags_to_wake", (["kv_cache"],)),
    ],
)
def test_commit_and_abort_require_begin(method: str, arguments: tuple):
    with pytest.raises(RolloutError, match="serving"):
        getattr(ServingState(), method)(*arguments)


def test_a_completely_sleeping_engine_cannot_sleep():
    serving = ServingState()
    for asleep in (frozenset(), WEIGHTS):
        serving.asleep = asleep
        serving.check_sleep()
    serving.asleep = TAGS
    with pytest.raises(RolloutError, match="asleep"):
        serving.check_sleep()


def test_an_update_needs_the_weights_awake_and_generation_everything():
    serving = ServingState()
    serving.asleep = TAGS
    with pytest.raises(RolloutError, match="asleep"):
        serving.begin(1, [])
    assert serving.tags_to_wake(TAGS) == TAGS and serving.tags_to_wake(WEIGHTS) == WEIGHTS
    serving.asleep -= WEIGHTS
    assert serving.state is EngineState.ASLEEP
    serving.begin(1, [])
    assert serving.state is EngineState.UPDATING
    serving.asleep = TAGS
    assert serving.state is EngineState.ASLEEP
    with pytest.raises(RolloutError, match="asleep"):
        serving.commit()
    serving.asleep = frozenset({"kv_cache"})
    serving.commit()
    assert (serving.state, serving.version) == (EngineState.ASLEEP, 1)
    with pytest.raises(RolloutError, match="asleep"):
        serving.require(EngineState.SERVING, "generate")
    serving.asleep = frozenset()
    serving.require(EngineState.SERVING, "generate")
