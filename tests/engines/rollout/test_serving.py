"""The states of an engine, without an engine."""

import pytest

from flowrl.engines.rollout.responses import RolloutError
from flowrl.engines.rollout.serving import PARTS, WEIGHTS, Serving, State


def test_a_version_is_served_when_all_of_it_has_come():
    serving = Serving()
    serving.begin(3, ["a", "b"])
    assert (serving.state, serving.version) == (State.UPDATING, 0)
    serving.took(["b", "tied to it"])
    with pytest.raises(RolloutError, match=r"the update brought no a \(1 missing\); send every part of it"):
        serving.check_whole()
    serving.took(["a"])
    serving.check_whole()
    serving.commit()
    assert (serving.state, serving.version) == (State.SERVING, 3)


def test_what_fails_in_an_update_or_is_given_up_leaves_it_broken_until_a_whole_one():
    serving = Serving()
    serving.begin(3, ["a", "b"])
    with pytest.raises(KeyError), serving.mark_failed_on_error():
        raise KeyError
    assert (serving.state, serving.version) == (State.BROKEN, 0)
    serving.begin(4, ["a"])
    serving.abort()
    with pytest.raises(RolloutError, match="is broken and cannot generate; its weights are partly new"):
        serving.expect(State.SERVING, "generate")
    serving.begin(5, [])
    serving.commit()
    assert (serving.state, serving.version) == (State.SERVING, 5)


@pytest.mark.parametrize(
    ("method", "arguments", "doing"),
    [
        ("commit", (), "commit weights"),
        ("abort", (), "give up an update"),
        ("waking", (["kv_cache"],), "wake up kv_cache"),
    ],
)
def test_what_has_not_begun_does_not_end(method: str, arguments: tuple, doing: str):
    with pytest.raises(RolloutError, match=f"the rollout engine is serving and cannot {doing}"):
        getattr(Serving(), method)(*arguments)


def test_what_sleeps_whole_does_not_sleep_again():
    serving = Serving()
    for asleep in (frozenset(), WEIGHTS):
        serving.asleep = asleep
        serving.check_sleep()
    serving.asleep = PARTS
    with pytest.raises(RolloutError, match="is asleep and cannot sleep; wake it up first"):
        serving.check_sleep()


def test_to_take_weights_it_needs_its_weights_awake_and_to_answer_all_of_it():
    serving = Serving()
    serving.asleep = PARTS
    with pytest.raises(RolloutError, match="is asleep and cannot take weights; wake it up first"):
        serving.begin(1, [])
    assert serving.waking(PARTS) == PARTS and serving.waking(WEIGHTS) == WEIGHTS
    serving.asleep -= WEIGHTS
    assert serving.state is State.ASLEEP
    serving.begin(1, [])
    assert serving.state is State.UPDATING
    serving.asleep = PARTS
    assert serving.state is State.ASLEEP
    with pytest.raises(RolloutError, match="is asleep and cannot commit weights"):
        serving.commit()
    serving.asleep = frozenset({"kv_cache"})
    serving.commit()
    assert (serving.state, serving.version) == (State.ASLEEP, 1)
    with pytest.raises(RolloutError, match="is asleep and cannot generate"):
        serving.expect(State.SERVING, "generate")
    serving.asleep = frozenset()
    serving.expect(State.SERVING, "generate")
