"""Settings of PTX: language modeling on text in policy updates."""

from pathlib import Path
from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt, model_validator

from flowrl.config.base import Config
from flowrl.config.data.data_settings import DataFile, Files, as_data_files, generated_of, paths_of


class PtxConfig(Config):
    """Language modeling on text in every policy update (PPO-ptx), which preserves the policy's ability to model
    this text. Each optimizer step combines the policy loss with the cross-entropy of a batch of text.
    """

    data: Files
    """Conversations as for SFT, or plain text, for example with the keys `source` and `Target`. A path, or a list of
    files with their settings, as in `data.train`. The template and the policies for invalid rows are those of `data`.
    """

    form: Literal["add", "mix"] = "add"
    """`add`: policy loss + coef * cross-entropy. `mix`: (1 - coef) * policy loss + coef * cross-entropy."""

    coef: NonNegativeFloat
    """Weight of the cross-entropy; with `mix` at most 1."""

    batch_size: PositiveInt
    """Sequences of text per optimizer step, over all ranks."""

    max_tokens: PositiveInt
    """Maximum number of tokens of a sequence. `data.too_long` selects the treatment of longer sequences."""

    @model_validator(mode="after")
    def _check(self) -> "PtxConfig":
        if self.form == "mix" and self.coef > 1:
            raise ValueError(f"coef is {self.coef:g}, but form mix needs at most 1: lower it, or set form: add")
        return self

    @property
    def training_files(self) -> tuple[DataFile, ...]:
        """Files of the text."""
        return as_data_files(self.data)

    def files(self, group: str) -> dict[str, Path]:
        """Returns the path of each file by the key of its setting. `group` is the key of this settings group."""
        return paths_of(f"{group}.data", self.data)

    def generated(self, group: str) -> tuple[str, ...]:
        """Returns the keys of all settings `reasoning_gym`. `group` is the key of this settings group."""
        return generated_of(f"{group}.data", self.data)
