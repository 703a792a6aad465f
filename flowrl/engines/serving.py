"""What a rollout engine can do now: answer, or take weights, one or the other. Never answer from a mixture."""

import enum
from collections.abc import Iterator
from contextlib import contextmanager

from flowrl.engines.responses import RolloutError


class State(enum.Enum):
    """What the engine can do now."""

    SERVING = "serving"
    UPDATING = "updating"
    ASLEEP = "asleep"
    BROKEN = "broken"
    """An update ended in the middle: some weights are new and some old, until a whole update has come."""


NEXT = {
    State.SERVING: "begin first",
    State.UPDATING: "commit or abort the update first",
    State.ASLEEP: "wake it up first",
    State.BROKEN: "its weights are partly new: give it a whole version",
}
"""What makes a state end."""


class Serving:
    """State of an engine, and the version of the weights that it serves."""

    def __init__(self) -> None:
        self.state = State.SERVING
        self.version = 0
        self._next_version = 0

    def expect(self, state: State, doing: str) -> None:
        """Raises RolloutError in any other state."""
        if self.state is not state:
            raise RolloutError(f"the rollout engine is {self.state.value} and cannot {doing}; {NEXT[self.state]}")

    def begin(self, version: int) -> None:
        """An update to a version begins. Raises RolloutError while one is running, or asleep."""
        if self.state is not State.BROKEN:
            self.expect(State.SERVING, "take weights")
        self._next_version = version
        self.state = State.UPDATING

    def commit(self) -> None:
        """All of it has come."""
        self.expect(State.UPDATING, "commit weights")
        self.version = self._next_version
        self.state = State.SERVING

    def abort(self) -> None:
        """It will not come."""
        self.expect(State.UPDATING, "give up an update")
        self.state = State.BROKEN

    @contextmanager
    def or_broken(self) -> Iterator[None]:
        """Whatever fails in here leaves the weights mixed."""
        try:
            yield
        except BaseException:
            self.state = State.BROKEN
            raise
