"""When a run saves what it can go on from, and how much of it is kept."""

from pydantic import NonNegativeInt, PositiveInt, model_validator

from flowrl.config.base import Config


class CheckpointConfig(Config):
    """Checkpoints lie in `checkpoints/` of the output folder; `resume: auto` goes on from the newest."""

    every: NonNegativeInt = 0
    """Steps between checkpoints; the last step has one too, and the one after which Ctrl-C ends the run. 0 is none."""

    keep_last: PositiveInt | None = 2
    """Newest checkpoints that are kept; null keeps all."""

    keep_best: NonNegativeInt = 0
    """Best checkpoints that are kept besides: by held-out accuracy where evaluate_every is set, else by the step's
    reward, else by its loss."""

    asynchronous: bool = True
    """Write while training goes on, from a copy of the state in host memory; false waits until all is written."""

    @model_validator(mode="after")
    def _check(self) -> "CheckpointConfig":
        if self.keep_best and not self.every:
            raise ValueError(f"keep_best is {self.keep_best}, but every is 0, so nothing is saved: set every")
        return self
