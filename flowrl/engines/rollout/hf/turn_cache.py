"""Keys and values of episodes between two turns. They occupy no slot of the decoder's cache."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

LayerStates = tuple[Tensor, Tensor]
"""Keys and values of one row in one layer, [H, C, D] each: heads, positions, head dimension."""


@dataclass(frozen=True)
class TurnCache:
    """Keys and values of an episode's tokens, copied when a turn ended."""

    tokens: tuple[int, ...]
    """The C tokens that have keys and values: all tokens of the episode except the last sampled one."""
    layers: Sequence[LayerStates]
    """Keys and values of each layer."""


class TurnCaches:
    """Caches of the episodes whose next turn has not begun.

    No cache is evicted to save memory. Whether a turn reuses a cache would then depend on timing, and keys and values
    of decode steps differ from those of a prefill in the last bit.
    """

    def __init__(self) -> None:
        self._caches: dict[str, TurnCache] = {}
        """Request id -> cache."""

    def __len__(self) -> int:
        return len(self._caches)

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values."""
        tensors = (states for cache in self._caches.values() for layer in cache.layers for states in layer)
        return sum(states.nbytes for states in tensors)

    def keep(self, request_id: str, cache: TurnCache) -> None:
        self._caches[request_id] = cache

    def take(self, request_id: str, history: tuple[int, ...]) -> TurnCache | None:
        """Removes the cache of an episode and returns it. Returns None if there is no cache, or if `history`, the
        tokens of the next turn's row, does not continue its tokens. A restarted episode is an example.
        """
        cache = self._caches.pop(request_id, None)
        if cache is None or history[: len(cache.tokens)] != cache.tokens:
            return None
        return cache

    def release(self, request_ids: Iterable[str]) -> None:
        """Drops the caches of these episodes. Ignores unknown ids."""
        for request_id in request_ids:
            self._caches.pop(request_id, None)

    def clear(self) -> None:
        """Drops all caches, because they belong to old weights."""
        self._caches.clear()
