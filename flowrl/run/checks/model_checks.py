"""Checks that read all data, build models without weights, and train one small step. Used by `flowrl check`."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing, redirect_stderr, redirect_stdout
from functools import cached_property
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

from flowrl.config import (
    CheckpointConfig,
    CriticConfig,
    DataConfig,
    DataFile,
    DatasetConfig,
    EngineConfig,
    ModelConfig,
    ModelRoleConfig,
    OnPolicyConfig,
    Placement,
    PtxConfig,
    ReportConfig,
    RewardModelConfig,
    RolloutRunConfig,
    RunConfig,
    ScoringModelConfig,
    find_tokenizer_role,
    models_of,
)
from flowrl.config.schedule import SyncSchedule
from flowrl.data.batch.batch import Batch
from flowrl.data.chat import Message
from flowrl.data.folders.private_folder import create_folder
from flowrl.data.preparation.prepared_folder import is_prepared
from flowrl.data.prompts import PromptStream
from flowrl.data.reading.json_values import to_json_value
from flowrl.data.reading.raw_rows import read_chunks
from flowrl.data.reading.reader import as_files
from flowrl.data.reading.row_problems import RowProblem
from flowrl.engines.models.loading import load_critic, load_policy, load_reward_model
from flowrl.memory.model_size import read_model_size
from flowrl.rewards.row_scorer import RowScorer
from flowrl.run.checks.check_list import Check, CheckSkipped, Level
from flowrl.run.checks.checked_run import CheckedRun
from flowrl.run.datasets import PtxText, SftExamples, read_prompts
from flowrl.run.datasets.tokenized_data import read_tokenizer
from flowrl.run.preferences.preference_examples import PREFERENCE_ROLES, PreferenceExamples

NUM_ROWS = 8
"""Number of prompts whose responses are scored, and of rows that are copied for the small step."""

MAX_STEP_PARAMETERS = 20_000_000
"""Largest total number of parameters of all models. If they have more, the small step is skipped."""

_STEP_PROMPTS, _STEP_TOKENS = 2, 32
"""Number of prompts of the small step, and the largest length of its responses in tokens."""

_SHOWN_CHARACTERS = 60
"""Largest length of a prompt or answer in the table."""


class LoadedRun(CheckedRun):
    """A run with its training function and its data."""

    def __init__(self, config: RunConfig, import_train: Callable[[], Callable[..., Any] | None]) -> None:
        super().__init__(config)
        self._import_train = import_train
        self.scores: list[tuple[str, str, str, str]] = []
        """For each scored row: prompt, answer, score of the answer, and score of an empty response."""

    @cached_property
    def train(self) -> Callable[..., Any]:
        """Training function of the recipe, which runs the small step. Raises CheckSkipped if the recipe has none."""
        train = self._import_train()
        if train is None:
            raise CheckSkipped("the recipe has no function `train` next to its config class")
        return train

    @cached_property
    def prompts(self) -> tuple[PromptStream, dict[str, Batch]]:
        assert isinstance(self.config, RolloutRunConfig)
        return read_prompts(self.config)

    @property
    def encoder(self) -> ModelConfig:
        """Model whose tokenizer encodes the data. Raises CheckSkipped if the recipe has no trained role."""
        encoder = models_of(self.config).get(find_tokenizer_role(self.config) or "")
        if encoder is None or encoder.model is None:
            raise CheckSkipped("the recipe has no trained role")
        return encoder.model


def import_recipe(run: LoadedRun) -> str:
    """Imports the training function, and returns its module and name."""
    return f"{run.train.__module__}:{run.train.__name__}"


def load_models(run: LoadedRun) -> str:
    """Builds every local model without weights, and compares the weights' names and shapes with the files. Returns the
    model sizes as text. Raises CheckSkipped if all models are on the Hub.
    """
    sizes = {}
    for role, value in models_of(run.config).items():
        if value.model is None or not value.model.path.is_dir():
            continue
        _load_without_weights(value)
        size = read_model_size(value.model.path)
        sizes[role] = "unknown size" if size is None else f"{size.parameters / 1e6:.2g} M"
    if not sizes:
        raise CheckSkipped("the models are on the Hub, and are downloaded when the run starts")
    return ", ".join(f"{role} {size}" for role, size in sizes.items()) + " parameters"


def load_tokenizer(run: LoadedRun) -> str:
    """Loads the tokenizer, and renders a message with its chat template. Returns the sizes of both as text."""
    data = next((value for _, value in run.config if isinstance(value, DataConfig)), None)
    tokenizer = read_tokenizer(run.encoder, data)
    num_tokens = len(tokenizer.encode_prompt([Message("user", "")]))
    return f"{len(tokenizer)} tokens; the chat template adds {num_tokens} to a prompt"


def read_data(run: LoadedRun) -> str:
    """Reads all rows, and returns their numbers as text. Raises CheckSkipped if the recipe has no data settings."""
    config = run.config
    if isinstance(config, RolloutRunConfig):
        train, test = run.prompts
        counts = [f"{len(train)} training prompts", f"{sum(map(len, test.values()))} evaluation prompts"]
        if isinstance(config, OnPolicyConfig) and config.ptx is not None:
            counts.append(f"{len(PtxText(config))} sequences of text")
        return ", ".join(counts)
    if preferences := [role for role in models_of(config).values() if isinstance(role, PREFERENCE_ROLES)]:
        assert isinstance(config, DatasetConfig)
        examples, held_out = PreferenceExamples.read(config.data, preferences[0])
        rows = "training pairs" if examples.is_paired else "labeled training responses"
        return f"{len(examples)} {rows}, {sum(map(len, held_out.values())) // 2} for evaluation"
    counts = [
        f"{len(SftExamples(files, run.encoder, max_tokens=value.max_prompt_tokens, data=value))} rows of "
        f"{', '.join(file.source.name for file in as_files(files))}"
        for value in dict(config).values()
        if isinstance(value, DataConfig)
        for files in (value.training_files, *value.evaluation_files.values())
    ]
    if not counts:
        raise CheckSkipped("the recipe has no data settings")
    return ", ".join(counts)


def score_answers(run: LoadedRun) -> str:
    """Scores two responses to each of the first prompts: the answer of the row and an empty text. Returns a summary.
    Raises CheckSkipped if the reward has no function.
    """
    config = run.config
    reward = config.reward_settings if isinstance(config, RolloutRunConfig) else None
    if reward is None or not reward.has_functions:
        has_model = reward is not None and reward.has_models
        raise CheckSkipped(
            "the reward is a model, which the check step runs" if has_model else "the recipe has no reward function"
        )
    train, test = run.prompts
    with closing(RowScorer(reward.model_copy(update={"on_failure": "stop"}), workers=1)) as scorer:
        run.scores = _score_answers(scorer, train.evaluation_rows(NUM_ROWS))
        for prompts in test.values() if reward.evaluation is not None else ():
            _score_answers(scorer, _first_rows(prompts), evaluation=True)
    names = dict.fromkeys(function for _, function in reward.functions())
    has_answers = any(score for _, _, score, _ in run.scores)
    if has_answers and all(float(score or 0) <= float(empty) for _, _, score, empty in run.scores):
        return "no answer scores higher than an empty response: see the table"
    return f"{' and '.join(names)} scored {len(run.scores)} rows"


def train_step(run: LoadedRun) -> str:
    """Runs one step of the recipe in this process, in a temporary folder, and returns its time as text. Raises
    CheckSkipped if the models are too large or their size is unknown.
    """
    sizes = [read_model_size(value.model.path) for value in models_of(run.config).values() if value.model]
    if any(size is None for size in sizes):
        raise CheckSkipped("the size of a model is unknown")
    total = sum(size.parameters for size in sizes if size is not None)
    if total > MAX_STEP_PARAMETERS:
        limit = MAX_STEP_PARAMETERS // 1_000_000
        raise CheckSkipped(f"the models have {total / 1e6:.0f} M parameters, and a step runs up to {limit} M")
    begun_s = time.monotonic()
    # The output of the step is discarded.
    with create_folder("check") as folder, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        run.train(small_config(run.config, folder))
    return f"one inline step on {_STEP_PROMPTS} prompts or rows took {time.monotonic() - begun_s:.1f} s"


def _first_rows(prompts: Batch) -> list[dict[str, Any]]:
    """Returns the values of the first rows of a batch."""
    payload = prompts.rows(slice(NUM_ROWS)).payload()
    columns = {name: values if isinstance(values, list) else values.tolist() for name, values in payload.rows.items()}
    return [{name: values[i] for name, values in columns.items()} for i in range(payload.num_rows)]


def _score_answers(
    scorer: RowScorer, rows: Sequence[dict[str, Any]], *, evaluation: bool = False
) -> list[tuple[str, str, str, str]]:
    """Returns one row per prompt: the prompt, the answer, and the scores of the answer and of an empty response."""
    # A response is always text, whatever the type of the answer column is.
    answers = [str(row["answer"]) if isinstance(row["answer"], str | int | float) else None for row in rows]
    inputs = [
        {key: value for key, value in row.items() if key not in ("prompt_ids", "prompt_id", "group")}
        | {"response": response, "tagged_response": response}
        for row, answer in zip(rows, answers, strict=True)
        for response in ((answer, "") if answer is not None else ("",))
    ]
    futures = [scorer.submit(row, evaluation=evaluation) for row in inputs]
    values = [future.result().values for future in futures]
    scores = iter(f"{row['scores'] if 'scores' in row else sum(row.values()):g}" for row in values)
    return [
        (_shorten(row["prompt"]), _shorten(row["answer"]), "" if answer is None else next(scores), next(scores))
        for row, answer in zip(rows, answers, strict=True)
    ]


def _load_without_weights(role: ModelRoleConfig) -> None:
    assert role.model is not None
    if isinstance(role, CriticConfig):
        load_critic(role.model, head=role.head, seed=role.head_seed, on_meta=True)
    elif isinstance(role, ScoringModelConfig | RewardModelConfig):
        load_reward_model(role.model, head=role.head, seed=role.head_seed, on_meta=True)
    else:
        load_policy(role.model, on_meta=True)


def _shorten(value: object) -> str:
    text = "" if value is None else str(value).replace("\n", " ")
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def small_config(config: RunConfig, folder: Path) -> RunConfig:
    """Returns the config of one small step on the CPU of this process. Copies the first rows of the data into `folder`,
    where the step also writes its output.
    """
    changes: dict[str, Any] = {
        "output": folder / "run",
        "resume": "never",
        "backend": "inline",
        "address": None,
        "devices": None,
        "placement": Placement(
            device="cpu", pools={"main": [1]}, roles=dict.fromkeys(config.roles, "main")
        ),
        "steps": 1,
        "evaluate_every": 0,
        "checkpoint": CheckpointConfig(),
        "record": (),
        "health": config.health.model_copy(update={"record_on": (), "stop_on": ()}),
        "report": ReportConfig(tensorboard=False, rollouts=None),
    }  # fmt: skip
    for name, value in config:
        if isinstance(value, EngineConfig):
            changes[name] = _local_engine(value)
        elif isinstance(value, ModelRoleConfig):
            changes[name] = value.model_copy(update={"engine": _local_engine(value.engine)})
        elif isinstance(value, DataConfig):
            others = {"test": None, "tests": {}, "evaluation_rows": None}
            train = _copy_first_rows(value.train, folder / f"{name}.jsonl")
            changes[name] = value.model_copy(update={"train": train, **others})
        elif isinstance(value, PtxConfig):
            few = {
                "data": _copy_first_rows(value.data, folder / f"{name}.jsonl"),
                "batch_size": min(value.batch_size, _STEP_PROMPTS),
            }
            changes[name] = value.model_copy(update=few)
    if isinstance(config, OnPolicyConfig):
        changes["ppo_epochs"] = 1
    if isinstance(config, RolloutRunConfig):
        num_rows = min(_STEP_PROMPTS, config.prompts_per_step) * config.samples_per_prompt
        changes |= {"batch_size": num_rows, "minibatch_size": num_rows, "schedule": SyncSchedule()}
        max_tokens = min(_STEP_TOKENS, config.rollout.max_response_tokens)
        changes["rollout"] = config.rollout.in_one_process().model_copy(update={"max_response_tokens": max_tokens})
    elif "batch_size" in type(config).model_fields:
        changes["batch_size"] = _STEP_PROMPTS
    return config.model_copy(update=changes)


def _copy_first_rows(files: Path | tuple[DataFile, ...], copy: Path) -> tuple[DataFile, ...]:
    """Copies the first rows of the first file as JSON lines, and returns the copy. If the first file is a prepared
    folder, returns the folder itself, because a run reads only the rows that it uses.
    """
    file = as_files(files)[0]
    if is_prepared(file.source):
        return (file,)
    rows = (row for chunk in read_chunks(file, rows_per_chunk=NUM_ROWS) for row in chunk.rows)
    # A JSON object may have several lines.
    lines = [row.replace(b"\n", b" ") if isinstance(row, bytes) else _to_json(row) for row in islice(rows, NUM_ROWS)]
    copy.write_bytes(b"\n".join(lines))
    return (DataFile(path=copy, columns=file.columns),)


def _to_json(row: Any) -> bytes:  # Any: a row of a table or of a JSON array, or a RowProblem
    return json.dumps(None if isinstance(row, RowProblem) else row, default=to_json_value).encode()


def _local_engine(engine: EngineConfig) -> EngineConfig:
    """Returns settings of the included engine, with the values of `engine` that apply to one process on a CPU."""
    return EngineConfig(
        compute_dtype=engine.compute_dtype,
        gradient_checkpointing=engine.gradient_checkpointing,
        packing=engine.packing,
        max_tokens_per_microbatch=engine.max_tokens_per_microbatch,
    )


MODEL_CHECKS = tuple(
    Check(row, level, function, arguments=lambda run: (run,))
    for row, level, function in (
        ("recipe", Level.MODELS, import_recipe),
        ("models", Level.MODELS, load_models),
        ("tokenizer", Level.MODELS, load_tokenizer),
        ("data", Level.MODELS, read_data),
        ("reward", Level.MODELS, score_answers),
        ("step", Level.STEP, train_step),
    )
)
"""All checks of the levels MODELS and STEP."""
