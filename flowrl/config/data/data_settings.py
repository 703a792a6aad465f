"""Settings of datasets: files, column mappings, policies for invalid rows, and the preparation of data."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from flowrl.config.base import Config, FilePath

TEMPLATE_FILE = "conversation_template.json"
"""Name of the conversation template file in the folder of a model."""

TooLong = Literal["refuse", "drop", "truncate"]
RefuseOrDrop = Literal["refuse", "drop"]


class DataFile(Config):
    """One data source, with its weight and column mapping."""

    path: FilePath
    """JSON lines (`.jsonl`, also `.gz` and `.zst`), a JSON array, parquet, arrow, a folder of such files, a folder that
    `flowrl data prepare` created, or a dataset on the Hugging Face Hub, such as `openai/gsm8k`.
    """

    weight: PositiveFloat = 1.0
    """Occurrences of each row per epoch. With 0.5, an epoch has half of the rows, and the next epoch the other half."""

    columns: Mapping[str, str] = Field(default_factory=dict)
    """Maps a field to its name in the file, such as `{prompt: input_text, answer: meta.solution}`. Dots select nested
    fields. Rows with a known shape (docs/data.md) need no mapping.
    """

    subset: str | None = None
    """Subset (configuration) of a dataset on the Hub."""

    split: str = "train"
    """Split of a dataset on the Hub, or of a folder that `datasets` saved."""


def _from_path(value: object) -> object:
    return {"path": value} if isinstance(value, str | Path) else value


_AnyFile = Annotated[DataFile, BeforeValidator(_from_path)]
Files = FilePath | Annotated[tuple[_AnyFile, ...], Field(strict=False, min_length=1)]
"""One path, or a list of files with their settings."""


def as_data_files(files: Path | tuple[DataFile, ...]) -> tuple[DataFile, ...]:
    """Returns the files with their settings."""
    return (DataFile(path=files),) if isinstance(files, Path) else files


def paths_of(key: str, files: Path | tuple[DataFile, ...]) -> dict[str, Path]:
    """Returns the path of each file by the key of its setting. `key` is the key of the setting with all files."""
    return {key: files} if isinstance(files, Path) else {f"{key}.{i}.path": file.path for i, file in enumerate(files)}


class DataConfig(Config):
    """Training and evaluation data. `docs/data.md` describes file formats and row shapes."""

    train: Files
    """Training data: a path, or a list of files with their settings, such as
    `[{path: a.jsonl, weight: 2, columns: {prompt: input_text}}, {path: openai/gsm8k, subset: main, split: train}]`.
    """

    test: Files | None = None
    """Evaluation data. Without it and `tests`, there is no evaluation."""

    tests: Mapping[str, Files] = Field(default_factory=dict)
    """Additional evaluation data by name. The names of their metrics end with `/NAME`."""

    max_prompt_tokens: PositiveInt
    """Maximum number of tokens of a prompt, of an SFT example, or of a prompt plus one response of a preference pair.
    `too_long` selects the treatment of longer rows.
    """

    too_long: TooLong = "refuse"
    """Rows with more than max_prompt_tokens. `refuse`: raise an error with file and line before the run starts.
    `drop`: drop the row. `truncate`: drop the first turns of a prompt, or the end of a response.
    """

    trailing_assistant: RefuseOrDrop = "refuse"
    """Prompts that end with the assistant. `refuse`: raise an error. `drop`: remove the last message."""

    strict: bool = True
    """Stop at the first invalid row, with file and line. False drops invalid rows, and logs the number of dropped rows
    per reason.
    """

    template: FilePath | None = None
    """Conversation template file (docs/data.md). Null uses `conversation_template.json` in the model's folder if it
    exists, and otherwise the tokenizer's chat template.
    """

    evaluation_rows: PositiveInt | None = None
    """Number of rows per evaluation file, from its start; null uses all rows."""

    shuffle: bool = True
    """Shuffle the training rows in every epoch, with the run's seed. False keeps the order of the file."""

    @model_validator(mode="after")
    def _check(self) -> "DataConfig":
        if self.evaluation_rows is not None and not self.evaluation_files:
            raise ValueError(f"evaluation_rows is {self.evaluation_rows}, but there is no test file: set test")
        if wrong := [name for name in self.tests if not re.fullmatch(r"[\w.-]+", name)]:
            raise ValueError(f"tests has the name {wrong[0]!r}: use letters, digits, '_', '-' and '.'")
        return self

    @property
    def evaluation_files(self) -> dict[str, Path | tuple[DataFile, ...]]:
        """Evaluation files by name. The name of `test` is empty."""
        return ({} if self.test is None else {"": self.test}) | dict(self.tests)

    @property
    def training_files(self) -> tuple[DataFile, ...]:
        """Training files."""
        return as_data_files(self.train)

    def files(self, group: str) -> dict[str, Path]:
        """Returns the path of each file by the key of its setting. `group` is the key of this settings group."""
        settings: dict[str, Path | tuple[DataFile, ...]] = {f"{group}.train": self.train}
        if self.test is not None:
            settings[f"{group}.test"] = self.test
        settings |= {f"{group}.tests.{name}": files for name, files in self.tests.items()}
        return {key: path for name, files in settings.items() for key, path in paths_of(name, files).items()}


class RowsConfig(Config):
    """Settings of `flowrl data check` and `flowrl data show`, which select and tokenize rows."""

    files: Annotated[tuple[_AnyFile, ...], Field(strict=False, min_length=1)]
    """Files to read. Weights are ignored: set them in the run that reads the prepared folder."""

    tokenizer: FilePath | None = None
    """Folder of the model or tokenizer, or a Hub name. `flowrl data check` also works without it."""

    kind: Literal["prompts", "sft", "preference", "kto", "text"] | None = None
    """Kind of training: prompts for reinforcement learning, responses for SFT, preference pairs, single labeled
    responses (KTO), or plain text. Null infers it from the first row.
    """

    template: FilePath | None = None
    """Conversation template file. It is created from the tokenizer if it does not exist. Null uses the template in
    the tokenizer's folder.
    """

    turns: Literal["all", "last"] = "all"
    """Responses of an SFT conversation that enter the loss: all, or only the last."""

    strict: bool = False
    """Stop at the first invalid row, with file and line. Length and duplicate filters still drop rows."""

    max_tokens: PositiveInt | None = None
    """Maximum number of tokens of a row, or of each side of a preference pair. Null sets no limit."""

    min_tokens: NonNegativeInt = 0
    """Minimum number of tokens of a row."""

    min_response_tokens: NonNegativeInt = 0
    """Minimum number of trained tokens of a row, or of each side of a preference pair."""

    max_response_tokens: PositiveInt | None = None
    """Maximum number of trained tokens of a row, or of each side of a preference pair. Null sets no limit."""

    too_long: TooLong = "drop"
    """Rows above max_tokens. `refuse`: stop with file and line. `drop`: drop the row. `truncate`: drop the first
    turns of a prompt, or the end of a response.
    """

    trailing_assistant: RefuseOrDrop = "drop"
    """Prompts that end with the assistant. `refuse`: drop the row, or stop in strict mode. `drop`: remove the last
    message.
    """

    duplicates: Literal["keep", "drop"] = "drop"
    """Rows whose messages equal those of an earlier row."""

    near_duplicates: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Minimum similarity (Jaccard index of word 5-grams) of near duplicates, such as 0.8. A near duplicate of an
    earlier row is dropped. Null disables the detection, which takes several times as long as all other steps.
    """

    max_row_mb: PositiveFloat = 8.0
    """Largest JSON line, in MB. A larger line is dropped."""


class PreparationConfig(RowsConfig):
    """Settings of `flowrl data prepare`."""

    tokenizer: FilePath  # pyright: ignore[reportGeneralTypeIssues] (settings are named, so it may be required)
    """Folder of the model or tokenizer, or a Hub name."""

    output: FilePath
    """Folder to create. It contains `arrow/`, `jsonl/`, `manifest.json` and `conversation_template.json`."""

    rows_per_shard: PositiveInt = 100_000
    """Rows per file of the prepared folder."""

    processes: PositiveInt = 1
    """Number of processes that parse and tokenize. The result does not depend on it."""
