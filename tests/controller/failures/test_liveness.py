"""A process that has ended is told once, by its name, and the one that takes its place is watched in turn."""

from flowrl.controller.failures.process_probe import Liveness
from tests.controller.failures.test_stacks import stuck


def test_ended_processes_are_told_once_and_their_successors_watched():
    liveness = Liveness()
    assert liveness.find_ended(["watched", "other"]) == []
    for _ in range(2):
        with stuck("in_python", "watched"), stuck("in_python", "other"):
            assert liveness.find_ended(["watched", "other"]) == []
            assert liveness.find_ended(["watched", "other"]) == []
        assert liveness.find_ended(["watched"]) == ["watched"]
        assert liveness.find_ended(["watched", "other"]) == ["other"]
        assert liveness.find_ended(["watched", "other"]) == []
