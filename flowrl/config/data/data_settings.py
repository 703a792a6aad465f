"""Settings of datasets: files, column mappings, policies for invalid rows, and the preparation of data."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from flowrl.config.base import Config, Dependency, FilePath
from flowrl.config.data.evaluation_settings import EvaluationConfig

TEMPLATE_FILE = "conversation_template.json"
"""Name of the conversation template file in the folder of a model."""

TooLong = Literal["refuse", "drop", "truncate"]
RefuseOrDrop = Literal["refuse", "drop"]
MessageKeys = Annotated[tuple[str, ...], Field(strict=False)]


class TaskConfig(Config):
    """Share and options of a task of reasoning-gym."""

    weight: PositiveFloat = 1.0
    """Share of the rows, relative to the weights of the other tasks."""

    options: Mapping[str, Any] = Field(default_factory=dict)  # Any: defined by the task
    """Options of the task's configuration class, such as `{min_terms: 3}`. flowrl sets `seed` and `size`."""

    @model_validator(mode="after")
    def _check(self) -> "TaskConfig":
        if reserved := [name for name in ("seed", "size") if name in self.options]:
            raise ValueError(f"options has {reserved[0]}: set `seed` or `rows` next to `reasoning_gym` instead")
        return self


def _from_weight(value: object) -> object:
    return {"weight": float(value)} if isinstance(value, int | float) and not isinstance(value, bool) else value


_AnyTask = Annotated[TaskConfig, BeforeValidator(_from_weight)]

MAX_GENERATED_ROWS, _MAX_SEED = 1_000_000, 999
_TEST_OFFSET = MAX_GENERATED_ROWS * (_MAX_SEED + 1)


class DataFile(Config):
    """One data source, with its weight and column mapping: a file, or rows that reasoning-gym generates."""

    ALTERNATIVES = ("path", "reasoning_gym")

    path: FilePath | None = None
    """JSON lines (`.jsonl`, also `.gz` and `.zst`), a JSON array, parquet, arrow, a folder of such files, a folder that
    `flowrl data prepare` created, or a dataset on the Hugging Face Hub, such as `openai/gsm8k`.
    """

    reasoning_gym: Mapping[str, _AnyTask] | None = None
    """Tasks of reasoning-gym instead of a file, with their weights, such as `{leg_counting: 0.5, basic_arithmetic:
    {weight: 0.5, options: {max_terms: 3}}}` (docs/rewards.md). Needs the extra `rewards`.
    """

    rows: Annotated[int, Field(gt=0, le=MAX_GENERATED_ROWS)] = 1000
    """Number of rows of `reasoning_gym`, over all tasks."""

    seed: Annotated[int, Field(ge=0, le=_MAX_SEED)] = 0
    """Seed of the rows of `reasoning_gym`. Rows of different seeds or splits are generated from different numbers."""

    system: str | None = None
    """System message of rows of `reasoning_gym`: text, or the name of a system prompt of that package. The prompt
    `default` requests the answer between <answer> and </answer>. Null adds no message.
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
    """Split of a dataset on the Hub, or of a folder that `datasets` saved. For `reasoning_gym`, `train` or the held-out
    split `test`.
    """

    DEPENDENCIES = (
        Dependency(
            ("rows", "seed", "system"),
            lambda group: group.reasoning_gym is not None,
            "it is a setting of reasoning_gym: remove it",
        ),
    )

    @model_validator(mode="after")
    def _check_source(self) -> "DataFile":
        if self.reasoning_gym is None:
            return self
        if not self.reasoning_gym:
            raise ValueError("reasoning_gym has no task: name one, such as {leg_counting: 1}")
        if self.subset is not None:
            raise ValueError(f"subset is {self.subset}, but reasoning_gym has no subsets: remove it")
        if self.split not in ("train", "test"):
            raise ValueError(f"split is {self.split}, but reasoning_gym has the splits train and test")
        return self

    @property
    def source(self) -> Path:
        """Path of the file. For generated rows, `reasoning_gym:` and the names of the tasks, for messages."""
        if self.path is not None:
            return self.path
        first = list(self.reasoning_gym or ())
        return Path(f"reasoning_gym:{','.join(first[:3])}{',...' if len(first) > 3 else ''}")

    @property
    def first_seed(self) -> int:
        """Seed of the first row of each task. The seeds of other values of `seed` and `split` do not overlap."""
        return self.seed * MAX_GENERATED_ROWS + (_TEST_OFFSET if self.split == "test" else 0)


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
    if isinstance(files, Path):
        return {key: files}
    return {f"{key}.{i}.path": file.path for i, file in enumerate(files) if file.path is not None}


def generated_of(key: str, files: Path | tuple[DataFile, ...]) -> tuple[str, ...]:
    """Returns the keys of all settings `reasoning_gym`. `key` is the key of the setting with all files."""
    sources = () if isinstance(files, Path) else files
    return tuple(f"{key}.{i}.reasoning_gym" for i, file in enumerate(sources) if file.reasoning_gym is not None)


class EvaluationSet(Config):
    """A named set of evaluation data, with settings of its own."""

    files: Files
    """Evaluation data: a path, or a list of files with their settings, as in `train`."""

    every: NonNegativeInt | None = None
    """Number of steps between evaluations of this set; null is `evaluate_every`. With a number above 0, the set is also
    evaluated before the first step and after the last step. 0 never evaluates it.
    """

    rows: PositiveInt | None = None
    """Number of rows, from the start of the files; null is `evaluation_rows`."""

    evaluation: EvaluationConfig | None = None
    """Samples and temperature of this set, in recipes that generate responses; null is `evaluation` of the run."""


def _from_files(value: object) -> object:
    return value if isinstance(value, Mapping | EvaluationSet) else {"files": value}


_AnySet = Annotated[EvaluationSet, BeforeValidator(_from_files)]


class DifficultyConfig(Config):
    """Selection of training prompts by their success: the mean score of a prompt's responses (docs/data.md)."""

    column: str | None = None
    """Column of the dataset with the initial success of each prompt, such as a pass rate from 0 to 1. It counts as a
    measurement. If this setting or the value of a row is null, the success is unknown before the first measurement.
    """

    min: float | None = None
    """Smallest success of a prompt that is used; null sets no limit."""

    max: float | None = None
    """Largest success of a prompt that is used; null sets no limit."""

    revisit: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Probability that a prompt outside of [min, max] is used instead of skipped. The new measurement may return it to
    the range. 0 never uses it again.
    """

    candidates: Annotated[int, Field(ge=2)] = 8
    """Number of prompts from which `order: curriculum` selects each prompt. More candidates select more informative
    prompts, but repeat them more often.
    """

    @model_validator(mode="after")
    def _check(self) -> "DifficultyConfig":
        low, high = self.bounds
        if low > high:
            raise ValueError(f"min is {low:g}, above max, {high:g}: swap them")
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest success of the prompts that are used."""
        return (-math.inf if self.min is None else self.min, math.inf if self.max is None else self.max)

    @property
    def is_filter(self) -> bool:
        """Whether prompts are skipped by their success."""
        return self.min is not None or self.max is not None


class DataConfig(Config):
    """Training and evaluation data. `docs/data.md` describes file formats and row shapes."""

    train: Files
    """Training data: a path, or a list of files with their settings, such as
    `[{path: a.jsonl, weight: 2, columns: {prompt: input_text}}, {path: openai/gsm8k, subset: main, split: train}]`.
    Rows of reasoning-gym are also a source: `{reasoning_gym: {leg_counting: {weight: 1, options: {max_animals: 3}}},
    rows: 1000, system: default}`.
    """

    test: Files | None = None
    """Evaluation data. Without it and `tests`, there is no evaluation."""

    tests: Mapping[str, _AnySet] = Field(default_factory=dict)
    """Additional evaluation sets by name. A set is a path, a list of files, or a mapping with its own settings, such as
    `{easy: easy.jsonl, hard: {files: hard.jsonl, every: 50}}`. The names of their metrics end with `/NAME`.
    """

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

    ignored_message_keys: MessageKeys = ()
    """Keys of turns that are not read, such as `[language, timestamp]`. A row with another unknown key is invalid. Do
    not list keys with text that the model should read or generate.
    """

    strict: bool = True
    """Stop at the first invalid row, with file and line. False drops invalid rows, and logs the number of dropped rows
    per reason.
    """

    template: FilePath | None = None
    """Conversation template file (docs/data.md). Null uses `conversation_template.json` in the model's folder if it
    exists, and otherwise the tokenizer's chat template.
    """

    evaluation_rows: PositiveInt | None = None
    """Number of rows per evaluation set, from its start; null uses all rows."""

    order: Literal["file", "shuffle", "curriculum"] = "shuffle"
    """Order of the training rows. `shuffle`: a new random order in every epoch, from the run's seed. `file`: the order
    of the file. `curriculum`: prompts whose measured success is close to 1/2 are used more often.
    """

    difficulty: DifficultyConfig = DifficultyConfig()
    """Selection of training prompts by their success: a filter, and the settings of `order: curriculum`."""

    DEPENDENCIES = (
        Dependency(("evaluation_rows",), lambda group: group.evaluation_files, "there is no test file: set test"),
        Dependency(
            ("difficulty.column",),
            lambda group: group.needs_success,
            "no setting uses it: set difficulty.min or difficulty.max, or order: curriculum",
        ),
        Dependency(
            ("difficulty.candidates",),
            lambda group: group.order == "curriculum",
            "only the curriculum selects among candidates: set order: curriculum, or remove it",
        ),
        Dependency(
            ("difficulty.revisit",),
            lambda group: group.difficulty.is_filter,
            "no prompt is skipped: set difficulty.min or difficulty.max, or remove it",
        ),
    )

    @model_validator(mode="after")
    def _check(self) -> "DataConfig":
        if wrong := [name for name in self.tests if not re.fullmatch(r"[\w.-]+", name)]:
            raise ValueError(f"tests has the name {wrong[0]!r}: use letters, digits, '_', '-' and '.'")
        return self

    @property
    def needs_success(self) -> bool:
        """Whether training prompts are selected by their measured success."""
        return self.order == "curriculum" or self.difficulty.is_filter

    @property
    def evaluation_sets(self) -> dict[str, EvaluationSet]:
        """Evaluation sets by name. The name of `test` is empty."""
        return ({} if self.test is None else {"": EvaluationSet(files=self.test)}) | dict(self.tests)

    @property
    def evaluation_files(self) -> dict[str, Path | tuple[DataFile, ...]]:
        """Files of each evaluation set by name. The name of `test` is empty."""
        return {name: held_out.files for name, held_out in self.evaluation_sets.items()}

    def num_evaluation_rows(self, name: str) -> int | None:
        """Returns the maximum number of rows of an evaluation set; None is unlimited."""
        own = self.evaluation_sets[name].rows
        return self.evaluation_rows if own is None else own

    @property
    def training_files(self) -> tuple[DataFile, ...]:
        """Training files."""
        return as_data_files(self.train)

    def files(self, group: str) -> dict[str, Path]:
        """Returns the path of each file by the key of its setting. `group` is the key of this settings group."""
        return {key: path for name, files in self._settings(group) for key, path in paths_of(name, files).items()}

    def generated(self, group: str) -> tuple[str, ...]:
        """Returns the keys of all settings `reasoning_gym`. `group` is the key of this settings group."""
        return tuple(key for name, files in self._settings(group) for key in generated_of(name, files))

    def _settings(self, group: str) -> Iterator[tuple[str, Path | tuple[DataFile, ...]]]:
        """Yields the key and the value of each setting with files."""
        yield f"{group}.train", self.train
        if self.test is not None:
            yield f"{group}.test", self.test
        yield from ((f"{group}.tests.{name}", held_out.files) for name, held_out in self.tests.items())


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

    ignored_message_keys: MessageKeys = ()
    """Keys of turns that are not read, such as `[language, timestamp]`. A row with another unknown key is invalid. Do
    not list keys with text that the model should read or generate.
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
