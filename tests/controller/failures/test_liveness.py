"""A process that has ended is told once, by its name, and the one that takes its place is watched in turn."""

from flowrl.controller.failures.liveness import Liveness
from tests.controller.failures.test_stacks import stuck


def test_ended_processes_are_told_once_and_their_successors_watched():
    pulse = Liveness()
    assert pulse.ended(["watched", "other"]) == []
    for _ in range(2):
        with stuck("in_python", "watched"), stuck("in_python", "other"):
            assert pulse.ended(["watched", "other"]) == []
            assert pulse.ended(["watched", "other"]) == []
        assert pulse.ended(["watched"]) == ["watched"]
        assert pulse.ended(["watched", "other"]) == ["other"]
        assert pulse.ended(["watched", "other"]) == []
