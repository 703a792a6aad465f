"""The task: two-digit addition and subtraction, its three sets of problems, and the reward.

All 16,200 problems are dealt out once, by a seed: what is held out occurs in neither of the other two sets.
"""

import random
from dataclasses import dataclass
from typing import Any

NUM_HELD_OUT = 1_200
NUM_EXAMPLES = 2_000


@dataclass(frozen=True, order=True)
class Problem:
    """`first` and `second` are in [10, 99], `operator` is + or -."""

    first: int
    operator: str
    second: int

    @property
    def prompt(self) -> str:
        return f"{self.first}{self.operator}{self.second}"

    @property
    def answer(self) -> str:
        return str(self.first + self.second if self.operator == "+" else self.first - self.second)


@dataclass(frozen=True)
class Problems:
    """Three sets without a problem in common."""

    examples: tuple[Problem, ...]
    """For the warm start, where answers are shown."""

    prompts: tuple[Problem, ...]
    """For reinforcement learning, where answers are only scored."""

    held_out: tuple[Problem, ...]
    """For evaluation, before and after."""


def deal(seed: int) -> Problems:
    """The three sets for a seed: 2,000 examples, 1,200 held out, and the other 13,000 as prompts."""
    every = [Problem(a, operator, b) for operator in "+-" for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(every)
    held_out, examples = every[:NUM_HELD_OUT], every[NUM_HELD_OUT : NUM_HELD_OUT + NUM_EXAMPLES]
    return Problems(tuple(examples), tuple(every[NUM_HELD_OUT + NUM_EXAMPLES :]), tuple(held_out))


def score(prompt: str, response: str, answer: str, **columns: Any) -> float:
    """The training reward, in [0, 1]: half for the share of characters that stand right, half for a right answer."""
    longest = max(len(response), len(answer))
    right = sum(said == wanted for said, wanted in zip(response, answer, strict=False))
    return 0.5 * right / longest + 0.5 * exact(prompt, response, answer, **columns)


def exact(prompt: str, response: str, answer: str, **columns: Any) -> float:
    """The evaluation reward: 1.0 for the right answer, else 0.0."""
    return float(response == answer)
