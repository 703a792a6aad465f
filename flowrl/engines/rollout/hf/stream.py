"""Requests of the hf engine: those that wait, those that decode, and those that are answered."""

import time
from collections import deque
from collections.abc import Iterable, Sequence

from flowrl.engines.rollout.hf.decoder import Decoder, Row
from flowrl.engines.rollout.requests import Prompt, Response, refuse_running

_JOIN_SHARE = 8
"""Waiting rows join when one in so many places is free: a prefill costs about half a step, however few it is of."""


class Stream:
    """Requests in the order in which they came, of which so many decode at a time."""

    def __init__(self, decoder: Decoder, max_num_seqs: int) -> None:
        self._decoder, self._max_rows = decoder, max_num_seqs
        self._names: dict[str, None] = {}
        """Of the requests that are not answered, in order."""
        self._waiting: deque[Row] = deque()

    @property
    def num_running(self) -> int:
        """Requests that are not answered."""
        return len(self._names)

    def add(self, prompts: Sequence[Prompt]) -> None:
        """Takes requests. Raises RolloutError for a name that one has already."""
        refuse_running([prompt.name for prompt in prompts], self._names)
        self._names.update(dict.fromkeys(prompt.name for prompt in prompts))
        self._waiting.extend(Row(prompt, Response(prompt.name)) for prompt in prompts)

    def poll(self, version: int, timeout_s: float | None = None) -> list[Response]:
        """Works until a response is finished, or for so long, and gives those that are; nothing running gives none.

        Args:
            version: of the weights.
            timeout_s: seconds after which no step begins; None is until one is finished.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        finished: list[Response] = []
        while self._names and not finished:
            self._join()
            finished = [row.answer for row in self._decoder.step(version)]
            for answer in finished:
                del self._names[answer.name]
            if deadline is not None and time.monotonic() >= deadline:
                break
        return finished

    def abort(self, names: Iterable[str]) -> None:
        """Drops requests; one that is not running is none."""
        dropped = {name for name in names if name in self._names}
        for name in dropped:
            del self._names[name]
        self._decoder.drop(dropped)
        self._waiting = deque(row for row in self._waiting if row.prompt.name not in dropped)

    def pause(self, version: int) -> None:
        """Before the weights change, of which it was this version: rows go on from the tokens that they have said, and
        their keys and values are computed anew."""
        places = {name: place for place, name in enumerate(self._names)}
        rows = self._decoder.leave(version)
        self._waiting.extendleft(sorted(rows, key=lambda row: places[row.prompt.name], reverse=True))

    def _join(self) -> None:
        """Has rows that wait join, where there are places for them."""
        room = self._max_rows - self._decoder.num_rows
        if self._waiting and room >= min(len(self._waiting), max(1, self._max_rows // _JOIN_SHARE)):
            self._decoder.join([self._waiting.popleft() for _ in range(min(room, len(self._waiting)))])
        self._decoder.shrink()
