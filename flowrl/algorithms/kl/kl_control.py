"""Controllers of the KL penalty coefficient. Each controller is a frozen dataclass; its `update` returns a new
controller.

All fields are plain numbers. A checkpoint stores `dataclasses.asdict(control)`, and `AdaptiveKlControl(**state)`
restores it. Only `coef` changes during a run.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from flowrl.algorithms.registry import PositiveFloat, kl_controls

MAX_RELATIVE_ERROR = 0.2
"""Bound on the relative error (kl / target - 1) in one update."""


@dataclass(frozen=True)
class FixedKlControl:
    """Keeps the coefficient constant. `coef` is in score units per nat. Raises ValueError if it is negative."""

    coef: float

    def __post_init__(self) -> None:
        _check_coef(self.coef)

    def update(self, kl: float, num_rows: int) -> "FixedKlControl":
        """Returns this controller unchanged."""
        return self


@dataclass(frozen=True)
class AdaptiveKlControl:
    """Adjusts the coefficient so that the KL approaches a target (proportional control in log space).

        error = clip(kl / target - 1, -0.2, 0.2)
        coef <- coef (1 + error num_rows / horizon)

    Args:
        coef: > 0, initial coefficient in score units per nat.
        target: > 0, target KL in nats. `target` and the `kl` of `update` must have the same unit: nats per row (as in
            the paper) or nats per token.
        horizon: > 0, number of rows, usually 10000. A larger horizon slows the adjustment. If the error is clipped, an
            update with num_rows = horizon changes the coefficient by 20 %.
    Raises: ValueError for a setting out of range.

    Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2, with the factor 1 + K error and K = 0.1. Here K
    is num_rows / horizon, as in the published code. The change per row therefore does not depend on the batch size.
    """

    coef: float
    target: float = field(kw_only=True)
    horizon: float = field(default=10_000.0, kw_only=True)

    def __post_init__(self) -> None:
        _check_coef(self.coef)
        if self.coef == 0:
            raise ValueError("coef is 0, but an adaptive coefficient must start above 0")
        for name, value in (("target", self.target), ("horizon", self.horizon)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}, but must be above 0 and finite")

    def update(self, kl: float, num_rows: int) -> "AdaptiveKlControl":
        """Returns the controller for the next step.

        Args:
            kl: mean KL of this step, in the same unit as `target`.
            num_rows: number of rows of this step, >= 0.
        Raises: ValueError if kl is NaN, or num_rows is negative or so large that the coefficient could become 0.
        """
        if math.isnan(kl):
            raise ValueError("kl is NaN: check the log-probabilities for NaN")
        if not 0 <= num_rows < self.horizon / MAX_RELATIVE_ERROR:
            raise ValueError(
                f"num_rows is {num_rows}, but with horizon {self.horizon:g} num_rows must be in "
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


@kl_controls.register("fixed")
def fixed_kl(coef: float) -> FixedKlControl:
    """Keeps `kl_coef` constant."""
    return FixedKlControl(coef)


def _check_horizon(horizon: float, batch_size: int) -> None:
    # A step changes the coefficient by at most a fraction of 0.2 * batch_size / horizon, which must stay below 1.
    if batch_size >= 5 * horizon:
        raise ValueError(
            f"algorithm.kl_control.horizon is {horizon:g}, at most a fifth of batch_size, {batch_size}, so one step "
            f"could reduce the coefficient to 0: set it to {batch_size} or more"
        )


@kl_controls.register("adaptive", checks=(_check_horizon,))
def adaptive_kl(coef: float, *, target: PositiveFloat, horizon: PositiveFloat = 10_000.0) -> AdaptiveKlControl:
    """Adjusts `kl_coef` so that the measured KL approaches a target (`AdaptiveKlControl`).

    Args:
        coef: initial coefficient.
        target: Target KL in nats per response token, estimated with kl_kind.
        horizon: Number of sequences. A step with `horizon` sequences changes the coefficient by at most 20 %. A larger
            horizon slows the adjustment.
    """
    return AdaptiveKlControl(coef, target=target, horizon=horizon)


def _check_coef(coef: float) -> None:
    if not 0 <= coef < math.inf:
        raise ValueError(f"coef is {coef}, but must be 0 or more and finite: a negative value would reward divergence")
