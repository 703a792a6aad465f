"""Which prompts a run reads."""

from pydantic import PositiveInt, model_validator

from flowrl.config.base import Config, FilePath


class DataConfig(Config):
    """JSON-lines files of conversations; `docs/batch.md` has the row format."""

    train: FilePath
    """File of training rows."""

    test: FilePath | None = None
    """File of held-out rows; null means that nothing is evaluated."""

    max_prompt_tokens: PositiveInt
    """A longer prompt is refused by file and line before the run starts."""

    evaluation_rows: PositiveInt | None = None
    """Held-out rows that an evaluation reads, from the top of the file; null is all."""

    shuffle: bool = True
    """Read the training rows in a new order on every pass, drawn from the run's seed; false keeps the file's."""

    @model_validator(mode="after")
    def _check(self) -> "DataConfig":
        if self.evaluation_rows is not None and self.test is None:
            raise ValueError(f"evaluation_rows is {self.evaluation_rows}, but there is no test file: set test")
        return self
