"""Controllers of the KL penalty coefficient: frozen dataclasses with a pure update.

All fields are plain numbers: `dataclasses.asdict(control)` is what a checkpoint keeps, and `AdaptiveKlControl(**state)`
brings it back. Only `coef` ever changes, so a run that is resumed with other settings takes that one number over with
`dataclasses.replace(control, coef=...)`.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

MAX_RELATIVE_ERROR = 0.2
"""Bound on the relative error that one update uses."""


@dataclass(frozen=True)
class FixedKlControl:
    """Keeps the coefficient constant.

    Arguments:
        coef: >= 0, in score units per nat.
    Raises: ValueError on a coef below 0.
    """

    coef: float

    def __post_init__(self) -> None:
        _check_coef(self.coef)

    def update(self, kl: float, num_rows: int) -> "FixedKlControl":
        """The same state; what was measured is not looked at."""
        return self


@dataclass(frozen=True)
class AdaptiveKlControl:
    """Adjusts the coefficient so that the KL approaches a target (proportional control in log space).

        error = clip(kl / target - 1, -0.2, 0.2)
        coef <- coef (1 + error num_rows / horizon)

    Arguments:
        coef: > 0, in score units per nat: where it starts.
        target: > 0, in nats, of the same kind as the measured KL: the sum over a row's tokens as in the paper, or the
            token mean.
        horizon: > 0, in rows: over so many rows a clipped error changes the coefficient by 20 %. 10000 is usual.
    Raises: ValueError on a setting outside its range.

    Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2, where the factor is 1 + K error with K = 0.1.
    Deviation: K is num_rows / horizon, as in the code published with that paper, so that the batch size does not set
    the speed.
    """

    coef: float
    target: float = field(kw_only=True)
    horizon: float = field(default=10_000.0, kw_only=True)

    def __post_init__(self) -> None:
        _check_coef(self.coef)
        if self.coef == 0:
            raise ValueError("coef is 0, from which an adaptive coefficient never moves: start above 0")
        for name, value in (("target", self.target), ("horizon", self.horizon)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}, it must be above 0 and finite")

    def update(self, kl: float, num_rows: int) -> "AdaptiveKlControl":
        """The state after a step.

        Arguments:
            kl: mean KL that was measured on the step's rows, in nats.
            num_rows: >= 0, how many rows these were.
        Raises: ValueError if kl is not a number, or num_rows is negative or so large against the horizon that a step
            could bring the coefficient to 0.
        """
        if math.isnan(kl):
            raise ValueError(
                "kl is NaN, the coefficient cannot follow it: look for what made the log-probabilities NaN"
            )
        if not 0 <= num_rows < self.horizon / MAX_RELATIVE_ERROR:
            raise ValueError(
                f"num_rows is {num_rows}, with horizon {self.horizon:g} it must be in "
                f"[0, {self.horizon / MAX_RELATIVE_ERROR:g}): raise the horizon"
            )
        error = min(max(kl / self.target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        return replace(self, coef=self.coef * (1 + error * num_rows / self.horizon))


@runtime_checkable
class KlControl(Protocol):
    """Protocol of KL controllers: the current coefficient, and an update that returns the next controller."""

    @property
    def coef(self) -> float: ...

    def update(self, kl: float, num_rows: int) -> "KlControl": ...


def _check_coef(coef: float) -> None:
    if not 0 <= coef < math.inf:
        raise ValueError(f"coef is {coef}, it must be 0 or more and finite: a negative one would reward drifting away")
