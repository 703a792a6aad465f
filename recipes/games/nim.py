"""Nim with two piles: short observations, the opponent, and the starts.

Players remove objects from one pile by turns, and whoever takes the last object wins. `[1 3]` removes three objects
from the second pile. A player who always makes the piles equal wins from every start.
"""

import itertools
import random
from collections.abc import Sequence
from functools import reduce
from operator import xor
from typing import Any

from flowrl.environments.base import Row
from flowrl.environments.textarena_adapter import TextArenaEnvironment

MAX_PILE = 7
OPPONENT_SKILL = 0.5
"""Probability of a perfect move of the opponent. Its other moves are random."""

Piles = tuple[int, int]


class Nim(TextArenaEnvironment):
    """A game from the piles of the row. The policy reads only the piles, such as `7 4`. Illegal moves lose."""

    def __init__(self, opponent: str = "recipes.games.nim:opponent") -> None:
        super().__init__("Nim-v0", opponent, max_illegal_moves=0, loss=0.0)

    def prepare(self, row: Row) -> None:
        self.game.initial_piles = list(row["piles"])

    def describe(self, text: str) -> str:
        return show(self.game.state.game_state["piles"])


def show(piles: Sequence[int]) -> str:
    """Returns the observation of the policy."""
    return " ".join(map(str, piles))


def opponent(environment: Any, rng: random.Random) -> str:  # Any: a game of textarena
    """Returns the move of the opponent: half of them are perfect, and the others random."""
    piles = environment.state.game_state["piles"]
    perfect = perfect_moves(piles)
    pile, quantity = rng.choice(perfect if perfect and rng.random() < OPPONENT_SKILL else moves(piles))
    return f"[{pile} {quantity}]"


def moves(piles: Sequence[int]) -> list[tuple[int, int]]:
    """Returns all legal moves (pile, quantity)."""
    return [(pile, quantity) for pile, size in enumerate(piles) for quantity in range(1, size + 1)]


def perfect_moves(piles: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the moves after which a perfect player wins. They make the exclusive or of the piles 0."""
    rest = reduce(xor, piles)
    return [(pile, size - (size ^ rest)) for pile, size in enumerate(piles) if size ^ rest < size]


def starts() -> Sequence[Piles]:
    """Returns all starts. The piles differ, because the first player of equal piles loses to a perfect opponent."""
    return list(itertools.permutations(range(1, MAX_PILE + 1), 2))
