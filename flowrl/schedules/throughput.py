"""How long makers take for a group, as measured: which of them is too slow to be given one."""

from collections.abc import Iterable
from dataclasses import dataclass, field

LAST = 1 / 8
"""What the last time counts in the mean of a maker's."""

TIMES_SLOWER = 2.0
"""A maker that takes at most so many times as long as the others is as good as they: so much is chance."""

TRIES_AFTER = 50.0
"""A maker that was given nothing for so many times as long as it takes is given a group again: it may be faster."""


@dataclass
class _Maker:
    mean_s: float = 0.0
    """From when a group is given until it is finished."""
    num: int = 0
    """Groups that were finished."""
    begun_s: dict[int, float] = field(default_factory=dict)
    """Groups that it works on -> when each was given."""
    idle_s: float = 0.0
    """When it last finished one."""


class Throughput:
    """The times of makers, by a clock that its owner tells. Without one all makers are alike."""

    def __init__(self, makers: int) -> None:
        self._makers = [_Maker() for _ in range(makers)]
        self._now_s: float | None = None

    def tick(self, now_s: float) -> None:
        """It is so late, in seconds since any moment."""
        self._now_s = now_s

    def given(self, rank: int, group: int) -> None:
        """A maker has begun with a group."""
        if self._now_s is not None:
            self._makers[rank].begun_s[group] = self._now_s

    def left(self, rank: int, group: int) -> None:
        """A maker has given a group up."""
        self._makers[rank].begun_s.pop(group, None)

    def finished(self, rank: int, group: int) -> None:
        """A maker has done a group."""
        maker = self._makers[rank]
        begun_s = maker.begun_s.pop(group, None)
        if begun_s is None or self._now_s is None:
            return
        took_s = self._now_s - begun_s
        maker.num += 1
        maker.mean_s += (took_s - maker.mean_s) * max(LAST, 1 / maker.num)
        maker.idle_s = self._now_s

    def lost(self, rank: int) -> None:
        """Another process has taken a maker's place."""
        self._makers[rank] = _Maker()

    def seconds(self, rank: int) -> float | None:
        """That a maker takes for a group: the mean, in which one that it works on for longer than that counts as the
        last; None while that is not known."""
        maker = self._makers[rank]
        if self._now_s is None or not (maker.num or maker.begun_s):
            return None
        age_s = self._now_s - min(maker.begun_s.values(), default=self._now_s)
        return maker.mean_s + max(0.0, age_s - maker.mean_s) * max(LAST, 1 / (maker.num + 1))

    def is_too_slow(self, rank: int, others: Iterable[int], groups: float) -> bool:
        """Whether a maker would finish one group only after the others had done all of these, so that they would wait
        for it.

        Args:
            others: the makers that there are beside it.
            groups: how many there are to do until nothing more may be begun, for each that a maker works on at once.
        """
        own_s, theirs_s = self.seconds(rank), [self.seconds(other) for other in others]
        known_s = [each for each in theirs_s if each]
        if own_s is None or not known_s or len(known_s) < len(theirs_s):
            return False
        maker = self._makers[rank]
        assert self._now_s is not None
        if not maker.begun_s and self._now_s - maker.idle_s > TRIES_AFTER * own_s:
            return False
        per_s = sum(1 / each for each in known_s)
        return own_s > TIMES_SLOWER * len(known_s) / per_s and own_s > groups / per_s
