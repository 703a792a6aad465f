"""Nim with two piles: short observations, the opponent, and the starts.

Two players take turns to remove objects from one pile. Whoever takes the last object wins. `[1 3]` removes three
objects from the second pile. A player who always makes the piles equal wins from every start.
"""

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import xor

from flowrl.environments.base import ModelResponse, Observation, Row
from flowrl.environments.textarena_adapter import TextArenaEnvironment

MAX_PILE = 7
OPPONENT_SKILL = 0.5
"""Probability of a perfect move of the opponent. Its other moves are random."""

Piles = tuple[int, int]


_MOVE = re.compile(r"\[[0-9] [0-9]\]")
_PILE = re.compile(r"pile [0-9]+: ([0-9]+)")


class Nim(TextArenaEnvironment):
    """A game that starts with the piles of the row. The policy reads only the piles, such as `7 4`. An illegal move
    loses.
    """

    def __init__(self, opponent: str = "recipes.games.nim:opponent") -> None:
        super().__init__("Nim-v0", opponent, max_illegal_moves=0, loss=0.0)

    def prepare(self, row: Row) -> None:
        self.game.initial_piles = list(row["piles"])

    def describe(self, text: str) -> str:
        return show(read_piles(text))

    def step(self, response: ModelResponse) -> Observation:
        # The game accepts text around a move. An entropy bonus would make that text long.
        is_move = _MOVE.fullmatch(response.text) is not None
        return super().step(response if is_move else replace(response, text=""))


def read_piles(observation: str) -> list[int]:
    """Returns the piles in an observation of textarena."""
    return [int(size) for size in _PILE.findall(observation)]


def show(piles: Sequence[int]) -> str:
    """Returns the piles as the text that the policy reads, such as `7 4`."""
    return " ".join(map(str, piles))


def opponent(observation: str, rng: random.Random) -> str:
    """Returns the move of the opponent, which is perfect with probability `OPPONENT_SKILL` and otherwise random."""
    piles = read_piles(observation)
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
