"""Settings of runs whose length is a number of passes over the training file."""

from typing import Any, ClassVar, Self

from pydantic import NonNegativeInt, PositiveInt, model_validator

from flowrl.config.roles import TrainedConfig
from flowrl.config.run import DatasetConfig, SettingValues


class EpochConfig(DatasetConfig):
    """Settings of recipes that train on a file for a number of epochs. A step is one optimizer update."""

    LENGTH_SETTINGS: ClassVar[tuple[str, ...]] = ("epochs", "steps")

    steps: NonNegativeInt = 0
    """Number of training steps. 0 derives it from `epochs`. If both are set, the run ends at whichever comes first."""

    epochs: PositiveInt | None = None
    """Passes over the training file. Null uses `steps`. After reading the file, a run replaces `epochs` by `steps`,
    also in its config.yaml.
    """

    @model_validator(mode="after")
    def _check_length(self) -> "EpochConfig":
        if not self.steps and self.epochs is None:
            raise ValueError("steps and epochs are unset, so the run has no length: set epochs, or steps")
        return self

    @classmethod
    def count_updates(cls, settings: SettingValues) -> int | None:
        """Returns the number of steps, because a step is one update. None if it is unknown before the data is read."""
        return settings["steps"] or None

    @classmethod
    def is_length_known(cls, settings: SettingValues) -> bool:
        """Returns whether the number of steps is known before the data is read."""
        # Without both, the length is missing, which `_check_length` reports.
        return settings["epochs"] is None and bool(settings["steps"])

    @property
    def can_end_early(self) -> bool:
        """Whether `epochs` may end the run before `steps`."""
        return self.epochs is not None

    def with_steps(self, num_rows: int) -> Self:
        """Returns the settings with the number of steps that `epochs` passes over `num_rows` rows take.

        The last step of a pass may have fewer rows than `batch_size`. A null `optimizer.total_steps` becomes the number
        of steps.
        """
        if self.epochs is None:
            return self
        steps = self.epochs * -(-num_rows // self.batch_size)
        steps = min(self.steps, steps) if self.steps else steps
        changes: dict[str, Any] = {"steps": steps, "epochs": None}
        for name, role in self:
            if isinstance(role, TrainedConfig):
                changes[name] = role.model_copy(update={"optimizer": role.optimizer.with_end(steps)})
        return self.model_copy(update=changes)
