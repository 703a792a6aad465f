"""Products of two-digit numbers: the tool, the reward, and disjoint sets of problems."""

import random
from collections.abc import Sequence

NUM_HELD_OUT = 600

Problem = tuple[int, int]
"""Two factors from 10 to 99."""


def multiply(a: int, b: int) -> int:
    """Multiplies two integers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b


def score(response: str, answer: str) -> float:
    """Returns 1.0 for the correct answer, otherwise 0.0. It is the reward, and the measure of evaluations."""
    return float(response == answer)


def deal(seed: int) -> tuple[Sequence[Problem], Sequence[Problem]]:
    """Returns 7,500 training problems and 600 held-out problems. Problems with equal factors are in the same set."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    generator = random.Random(seed)
    generator.shuffle(pairs)
    problems: list[Problem] = []
    num_training = 90 * 90 - NUM_HELD_OUT
    held_out: list[Problem] = []
    for a, b in pairs:
        both = dict.fromkeys([(a, b), (b, a)])
        (held_out if len(held_out) + len(both) <= NUM_HELD_OUT else problems).extend(both)
    assert len(problems) == num_training
    generator.shuffle(problems)
    return problems, held_out
