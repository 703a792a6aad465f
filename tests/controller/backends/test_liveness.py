"""An ended process is returned once, and its replacement is monitored."""

from flowrl.controller.backends.ray_backend import Liveness
from tests.controller.host.test_stacks import stuck


def test_ended_processes_are_returned_once_and_replacements_are_monitored():
    liveness = Liveness()
    assert liveness.find_ended(["watched", "other"]) == []
    for _ in range(2):
        with stuck("in_python", "watched"), stuck("in_python", "other"):
            assert liveness.find_ended(["watched", "other"]) == []
            assert liveness.find_ended(["watched", "other"]) == []
        assert liveness.find_ended(["watched"]) == ["watched"]
        assert liveness.find_ended(["watched", "other"]) == ["other"]
        assert liveness.find_ended(["watched", "other"]) == []
