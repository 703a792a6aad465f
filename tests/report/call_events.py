"""Call events for tests."""

from hypothesis import strategies as st

from flowrl.data.events import CallEvent


def call(role: str, start: int, end: int, *, rank: int = 0, device: str = "cpu:0", pool: str = "main") -> CallEvent:
    """Returns a call that arrives a microsecond after its submission; its start time is also its number."""
    return CallEvent(start, (), role, rank, 0, device, pool, "update", start - 1_000, start, start, end, end)


def timed(number: int, name: str, device: str, at: tuple[int, int, int, int, int], *inputs: int) -> CallEvent:
    """Returns a call with its five times: submitted, arrived, started, ended, finished."""
    role, method = name.split(".")
    return CallEvent(number, inputs, role, 0, 0, device, "main", method, *at)


STEP = [
    timed(1, "rollout.generate", "cpu:0", (0, 10, 12, 50, 55)),
    timed(2, "reward.score", "cpu:1", (5, 60, 61, 71, 72), 1),
    timed(3, "critic.values", "cpu:1", (6, 73, 75, 95, 96), 1),
    timed(4, "actor.update", "cpu:0", (7, 100, 104, 144, 145), 2, 3),
    timed(5, "actor.save", "cpu:0", (165, 170, 170, 180, 180)),
]
"""A step of 180 ns. Score and values read the responses, and the values queue behind the score on the same process. The
update reads both. The driver submits the save 20 ns after the update."""


@st.composite
def any_events(draw: st.DrawFn, *, one_clock: bool) -> list[CallEvent]:
    """Generates calls on three processes in any order with any inputs; times ascend if `one_clock`."""
    count = draw(st.integers(0, 8))
    events = []
    for number in draw(st.permutations(range(count))):
        moments = draw(st.lists(st.integers(0, 60), min_size=5, max_size=5))
        submitted, arrived, started, ended, finished = sorted(moments) if one_clock else moments
        inputs = draw(st.lists(st.integers(-1, 9), max_size=3, unique=True))
        device = draw(st.sampled_from(["cpu:0", "cpu:1", "cpu:2"]))
        events.append(timed(number, "a.m", device, (submitted, arrived, started, ended, finished), *inputs))
    return events
