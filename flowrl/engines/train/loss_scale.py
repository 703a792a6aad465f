"""The factor that keeps small gradients of float16 from becoming 0."""

from dataclasses import dataclass, replace

_GROWTH, _GROWTH_STEPS, _BACKOFF = 2.0, 2000, 0.5


@dataclass(frozen=True)
class LossScale:
    """A loss is multiplied by `factor` before its backward pass, and the gradients divided by it after.

    Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740, section 3.2, with the dynamic choice of the factor that
    torch and Apex use: doubled after 2,000 steps without an overflow, halved after one, whose step is left out.
    """

    factor: float = 2.0**16
    good_steps: int = 0
    """Steps since the factor was changed."""

    def after(self, *, overflowed: bool) -> "LossScale":
        """The scale of the next step."""
        if overflowed:
            return LossScale(max(self.factor * _BACKOFF, 1.0))
        if self.good_steps + 1 == _GROWTH_STEPS:
            return LossScale(self.factor * _GROWTH)
        return replace(self, good_steps=self.good_steps + 1)
