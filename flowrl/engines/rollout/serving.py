"""What a rollout engine can do now: answer, or take weights, one or the other. Never answer from a mixture."""

import enum
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from flowrl.engines.rollout.responses import RolloutError

WEIGHTS = frozenset({"weights"})
PARTS = WEIGHTS | {"kv_cache"}
"""What sleeps and wakes, as vLLM calls it."""


class State(enum.Enum):
    """What the engine can do now."""

    SERVING = "serving"
    UPDATING = "updating"
    ASLEEP = "asleep"
    """Something of it is away from the device."""
    BROKEN = "broken"
    """An update ended in the middle: some weights are new and some old, until a whole update has come."""


_NEXT = {
    State.SERVING: "begin an update first",
    State.UPDATING: "commit or abort the update first",
    State.ASLEEP: "wake it up first",
    State.BROKEN: "its weights are partly new: give it a whole version",
}
"""What makes a state end."""


class Serving:
    """The state of an engine, and the version of the weights that it serves."""

    def __init__(self) -> None:
        self.version = 0
        self.asleep: frozenset[str] = frozenset()
        """The `PARTS` that are away from the device."""
        self._awake = State.SERVING
        """The state but for sleep, in the middle of which an update may be."""
        self._next_version = 0
        self._missing: set[str] = set()
        """Weights that an update has not brought yet."""

    @property
    def state(self) -> State:
        """To take weights an engine needs no keys and values."""
        return self._seen(PARTS if self._awake is State.SERVING else WEIGHTS)

    def expect(self, state: State, doing: str, needs: Collection[str] = PARTS) -> None:
        """Raises RolloutError in any other state, and where one of the parts that `doing` needs is asleep."""
        found = self._seen(needs)
        if found is not state:
            raise RolloutError(f"the rollout engine is {found.value} and cannot {doing}; {_NEXT[found]}")

    def _seen(self, needs: Collection[str]) -> State:
        return State.ASLEEP if self.asleep.intersection(needs) else self._awake

    # Updates.

    def check_begin(self) -> None:
        """Raises RolloutError while an update is running, or asleep."""
        broken = self._awake is State.BROKEN
        self.expect(State.BROKEN if broken else State.SERVING, "take weights", WEIGHTS)

    def begin(self, version: int, names: Collection[str]) -> None:
        """An update to a version begins, which is to bring the weights of these names. Raises as `check_begin`."""
        self.check_begin()
        self._next_version = version
        self._missing = set(names)
        self._awake = State.UPDATING

    def expect_update(self, doing: str) -> None:
        """Raises RolloutError where no update has begun, or its weights are asleep."""
        self.expect(State.UPDATING, doing, WEIGHTS)

    def took(self, names: Collection[str]) -> None:
        """Some of them have come."""
        self._missing.difference_update(names)

    def check_whole(self) -> None:
        """Raises RolloutError where some have not."""
        if self._missing:
            names = ", ".join(sorted(self._missing)[:3])
            raise RolloutError(
                f"the update brought no {names} ({len(self._missing)} missing); send every part of it, in order"
            )

    def commit(self) -> None:
        """All of it has come."""
        self.expect_update("commit weights")
        self.version = self._next_version
        self._awake = State.SERVING

    def abort(self) -> None:
        """It will not come."""
        self.expect_update("give up an update")
        self._awake = State.BROKEN

    @contextmanager
    def mark_failed_on_error(self) -> Iterator[None]:
        """Whatever fails in here leaves the weights mixed."""
        try:
            yield
        except BaseException:
            self._awake = State.BROKEN
            raise

    # Sleep.

    def check_sleep(self) -> None:
        """Raises RolloutError where nothing of it is awake."""
        if self.asleep == PARTS:
            self.expect(self._awake, "sleep")

    def waking(self, parts: Collection[str]) -> frozenset[str]:
        """Those of these parts that are asleep. Raises RolloutError where none is."""
        coming = self.asleep.intersection(parts)
        if not coming:
            wanted = " and ".join(sorted(parts))
            raise RolloutError(
                f"the rollout engine is {self.state.value} and cannot wake up {wanted}: nothing sleeps there"
            )
        return coming
