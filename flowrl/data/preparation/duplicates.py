"""Detects rows that equal an earlier row, exactly or nearly."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from flowrl.data.messages import Conversation
from flowrl.data.reading.raw_rows import import_library

_NUM_PERMUTATIONS = 128
_NGRAM_WORDS = 5


def contents(row: Conversation) -> str:
    """Returns the concatenated texts of a row, with separators for roles and responses. Excludes the columns."""
    turns = [f"{message.role}\x1e{message.content}" for message in (*row.messages, *row.chosen)]
    rejected = [message.content for message in row.rejected]
    return "\x1f".join([*turns, "\x1d", *rejected, *(row.text or ()), str(row.label)])


def row_key(row: Conversation) -> int:
    """Returns a 64-bit hash of the texts of a row. A million different rows have a collision with probability 3e-8."""
    return int.from_bytes(hashlib.blake2b(contents(row).encode(), digest_size=8).digest())


class SeenKeys:
    """Set of the keys of all earlier rows, with 8 bytes per key."""

    def __init__(self) -> None:
        self._levels: list[np.ndarray] = []
        """Sorted arrays, each more than twice as large as the next."""

    def add(self, keys: np.ndarray) -> np.ndarray:
        """Adds keys (uint64). Returns a mask of the new keys. Of equal new keys, only the first is in the mask."""
        unique, first = np.unique(keys, return_index=True)
        is_known = np.zeros(len(unique), dtype=bool)
        for level in self._levels:
            index = np.minimum(np.searchsorted(level, unique), len(level) - 1)
            is_known |= level[index] == unique
        is_new = np.zeros(len(keys), dtype=bool)
        is_new[first[~is_known]] = True
        added = unique[~is_known]
        while self._levels and len(self._levels[-1]) <= 2 * len(added):
            added = np.concatenate([self._levels.pop(), added])
            added.sort()
        if len(added):
            self._levels.append(added)
        return is_new


def signature(row: Conversation) -> np.ndarray:
    """Returns the MinHash signature (uint64 [128]) of the word 5-grams of a row."""
    sketch = import_library("datasketch", "near_duplicates")
    hashing = import_library("xxhash", "near_duplicates")
    words = contents(row).lower().split()
    grams = {" ".join(words[i : i + _NGRAM_WORDS]) for i in range(max(len(words) - _NGRAM_WORDS + 1, 1))}
    minhash = sketch.MinHash(_NUM_PERMUTATIONS, hashfunc=hashing.xxh32_intdigest)
    minhash.update_batch([gram.encode() for gram in sorted(grams)])
    return minhash.hashvalues


class NearDuplicates:
    """Locality-sensitive index of the signatures of all kept rows. Its memory grows with the number of rows."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        sketch: Any = import_library("datasketch", "near_duplicates")
        self._sketch = sketch
        self._index = sketch.MinHashLSH(threshold=threshold, num_perm=_NUM_PERMUTATIONS)
        self._signatures: list[np.ndarray] = []

    def add(self, signatures: Sequence[np.ndarray], is_candidate: np.ndarray) -> np.ndarray:
        """Adds the signatures of candidate rows. Returns a mask of the candidates without a similar earlier row."""
        is_new = np.zeros(len(signatures), dtype=bool)
        for index, values in enumerate(signatures):
            if not is_candidate[index]:
                continue
            minhash = self._sketch.MinHash(_NUM_PERMUTATIONS)
            minhash.hashvalues = values
            similar = self._index.query(minhash)
            if any(np.mean(self._signatures[key] == values) >= self._threshold for key in similar):
                continue
            self._index.insert(len(self._signatures), minhash, check_duplication=False)
            self._signatures.append(values)
            is_new[index] = True
        return is_new
