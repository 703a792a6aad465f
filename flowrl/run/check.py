"""Implements `flowrl check`, which checks everything that a run needs, except the training itself."""

import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cached_property
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowrl.checkpoints.resume import RunComplete, is_resuming
from flowrl.checkpoints.run_folder import check_is_new, check_not_locked
from flowrl.config import (
    CheckFailed,
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
    RewardConfig,
    RewardModelConfig,
    RolloutRunConfig,
    RunConfig,
    ScoringModelConfig,
    UserError,
    find_tokenizer_role,
    models_of,
)
from flowrl.config.schedule import SyncSchedule
from flowrl.controller.errors import FlowError
from flowrl.controller.placement.plan import Plan
from flowrl.data.batch.batch import Batch
from flowrl.data.chat import Message
from flowrl.data.console import make_console
from flowrl.data.folders.private_folder import create_folder
from flowrl.data.preparation.prepared_folder import is_prepared
from flowrl.data.prompts import PromptStream
from flowrl.data.reading.json_values import to_json_value
from flowrl.data.reading.raw_rows import read_chunks
from flowrl.data.reading.reader import as_files
from flowrl.data.reading.row_problems import RowProblem
from flowrl.engines.models.loading import load_critic, load_policy, load_reward_model
from flowrl.memory.memory_estimate import explain_unknown_sizes
from flowrl.memory.memory_table import GB
from flowrl.memory.model_size import read_model_size
from flowrl.report.trackers.open_trackers import check_trackers
from flowrl.rewards.row_scorer import RowScorer
from flowrl.run.datasets import PtxText, SftExamples, read_prompts
from flowrl.run.datasets.tokenized_data import read_tokenizer
from flowrl.run.interrupt import Interrupted
from flowrl.run.preferences.preference_examples import PREFERENCE_ROLES, PreferenceExamples
from flowrl.run.preflight import (
    check_devices,
    check_functions,
    check_reward_heads,
    check_rollouts,
    check_vocabularies,
    find_path_problems,
    log_doubts,
    plan_run,
)

NUM_ROWS = 8
"""Number of rows that the reward function scores."""

MAX_STEP_PARAMETERS = 20_000_000
"""Largest number of parameters of all models together for which a step runs."""

_STEP_PROMPTS, _STEP_TOKENS = 2, 32
"""Number of prompts of the step, and the limit of its response length."""

_SHOWN_CHARACTERS = 60
"""Largest length of a prompt or answer in the table."""


class ChecksFailed(UserError):
    """Raised after all checks if at least one failed. The message has one line per problem."""


class _Skipped(Exception):
    """Raised by a check that does not apply. The message is the reason."""


@dataclass
class _Checks:
    """The checks of a config, in the order in which they run. Each returns a description of what it found."""

    config: RunConfig
    import_train: Callable[[], Callable[..., Any] | None]
    """Imports the training function of the recipe, which runs the step. Returns None if there is none."""
    problems: list[str] = field(default_factory=list)
    scores: list[tuple[str, str, str, str]] = field(default_factory=list)
    """Prompt, answer, score of the answer and score of an empty response, of the rows that the reward scored."""

    REQUIRED: ClassVar[dict[str, tuple[str, ...]]] = {
        "models": ("files",),
        "tokenizer": ("files",),
        "data": ("functions", "files", "tokenizer"),
        "reward": ("functions", "data"),
        "memory": ("placement",),
        "step": ("recipe", "functions", "files", "models", "tokenizer", "data", "reward", "placement"),
    }
    """Check -> checks without which it cannot run."""

    def output(self) -> str:
        """Checks that the output folder can be used. Changes nothing in it."""
        folder = self.config.output
        check_not_locked(folder)
        try:
            if is_resuming(self.config):
                return f"the run continues in {folder}"
        except RunComplete as complete:
            return str(complete)
        check_is_new(folder)
        return f"{folder} is free"

    def recipe(self) -> str:
        """Imports the training function."""
        if self._train is None:
            raise _Skipped("the recipe has no function `train` next to its config class")
        return f"{self._train.__module__}:{self._train.__name__}"

    def functions(self) -> str:
        check_functions(self.config)
        check_trackers(self.config.report)
        check_rollouts(self.config)
        rewards = [value for _, value in self.config if isinstance(value, RewardConfig)]
        names = dict.fromkeys(function for reward in rewards for _, function in reward.functions())
        return ", ".join(names) or "no user function"

    def files(self) -> str:
        problems = list(find_path_problems(self.config))
        if problems:
            self.problems += problems
            raise _Failed
        return f"{len(models_of(self.config))} roles, and all data files"

    def models(self) -> str:
        """Reads the config of every model, and compares names and shapes of its weights with its files."""
        check_reward_heads(self.config)
        sizes = {}
        for role, value in models_of(self.config).items():
            if value.model is None or not value.model.path.is_dir():
                continue
            _load_without_weights(value)
            size = read_model_size(value.model.path)
            sizes[role] = "unknown size" if size is None else f"{size.parameters / 1e6:.2g} M"
        if not sizes:
            raise _Skipped("the models are on the Hub, and are downloaded when the run starts")
        return ", ".join(f"{role} {size}" for role, size in sizes.items()) + " parameters"

    def tokenizer(self) -> str:
        """Loads the tokenizer, renders a message with its chat template, and compares its ids with all models."""
        data = next((value for _, value in self.config if isinstance(value, DataConfig)), None)
        check_vocabularies(self.config)
        tokenizer = read_tokenizer(self._encoder, data)
        num_tokens = len(tokenizer.encode_prompt([Message("user", "")]))
        return f"{len(tokenizer)} tokens; the chat template adds {num_tokens} to a prompt"

    def data(self) -> str:
        """Reads all rows."""
        config = self.config
        if isinstance(config, RolloutRunConfig):
            train, test = self._prompts
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
            f"{len(SftExamples(files, self._encoder, max_tokens=value.max_prompt_tokens, data=value))} rows of "
            f"{', '.join(file.source.name for file in as_files(files))}"
            for value in dict(config).values()
            if isinstance(value, DataConfig)
            for files in (value.training_files, *value.evaluation_files.values())
        ]
        if not counts:
            raise _Skipped("the recipe has no data settings")
        return ", ".join(counts)

    def reward(self) -> str:
        """Scores the reference answer and an empty response of the first rows."""
        config = self.config
        reward = config.reward_settings if isinstance(config, RolloutRunConfig) else None
        if reward is None or not reward.has_functions:
            has_model = reward is not None and reward.has_models
            raise _Skipped(
                "the reward is a model, which the check step runs" if has_model else "the recipe has no reward function"
            )
        train, test = self._prompts
        with closing(RowScorer(reward.model_copy(update={"on_failure": "stop"}), workers=1)) as scorer:
            self.scores = _score_answers(scorer, train.evaluation_rows(NUM_ROWS))
            for prompts in test.values() if reward.evaluation is not None else ():
                _score_answers(scorer, _first_rows(prompts), evaluation=True)
        names = dict.fromkeys(function for _, function in reward.functions())
        has_answers = any(score for _, _, score, _ in self.scores)
        if has_answers and all(float(score or 0) <= float(empty) for _, _, score, empty in self.scores):
            return "no answer scores higher than an empty response: see the table"
        return f"{' and '.join(names)} scored {len(self.scores)} rows"

    def placement(self) -> str:
        if self.config.address is not None and self.config.devices is None:
            raise _Skipped(f"the devices of the cluster at {self.config.address} are unknown: set devices")
        planned = self._plan
        log_doubts(self.config, planned)
        devices = {location for role in planned.roles.values() for slot in role.slots for location in slot.node_devices}
        return f"{len(planned.roles)} roles; number of {planned.kind} devices: {len(devices)}"

    def memory(self) -> str:
        config = self.config
        fitted = check_devices(config, self._plan, is_local=config.address is None)
        devices, budget = fitted.devices, fitted.budget
        if not all(device.is_known for device in devices):
            raise _Skipped("; ".join(explain_unknown_sizes(config)))
        available = budget.per_device or budget.per_node
        limit = "an unknown amount" if available is None else f"{available / GB:.1f} GB"
        share = "device" if budget.per_device is not None else "node"
        return f"at most {max(d.peak[0] for d in devices) / GB:.1f} GB per device; each {share} has {limit}"

    def step(self) -> str:
        """Runs one step of the recipe in this process, in a temporary folder."""
        sizes = [read_model_size(value.model.path) for value in models_of(self.config).values() if value.model]
        if any(size is None for size in sizes):
            raise _Skipped("the size of a model is unknown")
        total = sum(size.parameters for size in sizes if size is not None)
        if total > MAX_STEP_PARAMETERS:
            limit = MAX_STEP_PARAMETERS // 1_000_000
            raise _Skipped(f"the models have {total / 1e6:.0f} M parameters, and a step runs up to {limit} M")
        if self._train is None:
            raise _Skipped("the recipe has no function `train` next to its config class")
        begun_s = time.monotonic()
        with create_folder("check") as folder, _silent():
            self._train(small_config(self.config, folder))
        return f"one inline step on {_STEP_PROMPTS} prompts or rows took {time.monotonic() - begun_s:.1f} s"

    @cached_property
    def _train(self) -> Callable[..., Any] | None:
        return self.import_train()

    @cached_property
    def _prompts(self) -> tuple[PromptStream, dict[str, Batch]]:
        assert isinstance(self.config, RolloutRunConfig)
        return read_prompts(self.config)

    @cached_property
    def _plan(self) -> Plan:
        return plan_run(self.config)

    @property
    def _encoder(self) -> ModelConfig:
        """Model whose tokenizer encodes the data."""
        encoder = models_of(self.config).get(find_tokenizer_role(self.config) or "")
        if encoder is None or encoder.model is None:
            raise _Skipped("the recipe has no trained role")
        return encoder.model


class _Failed(Exception):
    """Raised by a check that has added its problems."""


NAMES = (
    "output", "recipe", "functions", "files", "models", "tokenizer", "data", "reward", "placement", "memory", "step"
)  # fmt: skip
"""Names of all checks, in order."""


def check_config(
    config: RunConfig,
    import_train: Callable[[], Callable[..., Any] | None],
    locate: Callable[[str], str] = str,
    console: Console | None = None,
) -> None:
    """Runs all checks. Prints each result when its check ends, and then the scores of a few rows. Writes nothing into
    the output folder.

    Args:
        config: the config of the run.
        import_train: imports the training function of its recipe, which runs one small step. None skips the step.
        locate: adds file and line to a message about a setting.
        console: where to print.
    Raises:
        ChecksFailed: a check failed. Its message has one line per problem.
        Interrupted: Ctrl-C, or SIGTERM during the small step. The message names the check.
    """
    console = console or make_console()
    checks = _Checks(config, import_train)
    results: dict[str, tuple[str, str]] = {}
    for name in NAMES:
        with _name_check_on_interrupt(name), console.status(f"checking {name}"):
            results[name] = _run_check(checks, name, {other for other in results if results[other][0] in _FAILED})
        console.print(_format_result(name, *results[name]))
    if checks.scores:
        _print_scores(checks.scores, console)
    if problems := list(dict.fromkeys(checks.problems)):
        located = [locate(problem) for problem in problems]
        raise ChecksFailed(located[0] if len(located) == 1 else "\n  ".join([f"{len(located)} problems:", *located]))


@contextmanager
def _name_check_on_interrupt(name: str) -> Iterator[None]:
    """Replaces an interruption during the block by `Interrupted` with a message that names the check."""
    try:
        yield
    except KeyboardInterrupt as error:
        number = error.exit_code - 128 if isinstance(error, Interrupted) else signal.SIGINT
        raise Interrupted(number, f"interrupted while checking {name}") from None


def _format_result(name: str, state: str, text: str) -> Table:
    """Formats the result of a check. On a narrow terminal, the text wraps within its column."""
    row = Table.grid(padding=(0, 2, 0, 0))
    for width in (max(map(len, NAMES)), max(map(len, ("skipped", *_FAILED)))):
        row.add_column(min_width=width, no_wrap=True)
    row.add_row(Text(name), Text(state), Text(text))
    return row


_FAILED = ("failed", "not run")
"""States of a check without which other checks cannot run."""


def _run_check(checks: _Checks, name: str, failed: Set[str]) -> tuple[str, str]:
    """Runs a check and returns its state and a description."""
    if missing := [other for other in checks.REQUIRED.get(name, ()) if other in failed]:
        return "not run", f"needs {', '.join(missing)}"
    try:
        return "ok", getattr(checks, name)()
    except _Skipped as reason:
        return "skipped", str(reason)
    except _Failed:
        return "failed", "see below"
    except (UserError, FlowError, CheckFailed) as error:
        checks.problems.append(str(error).strip())
        return "failed", "see below"


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


def small_config(config: RunConfig, folder: Path) -> RunConfig:
    """Returns the config of one small step on the CPU of this process. It reads and writes files in `folder`."""
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
        "report": ReportConfig(plots=False, tensorboard=False, rollouts=None),
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
    """Copies the first rows of the first file as JSON lines, and returns the copy. Returns a prepared folder as it is,
    because a run reads only those of its rows that it uses.
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
    """Returns the settings that also apply to one process on a CPU."""
    return EngineConfig(
        compute_dtype=engine.compute_dtype,
        gradient_checkpointing=engine.gradient_checkpointing,
        packing=engine.packing,
        max_tokens_per_microbatch=engine.max_tokens_per_microbatch,
    )


@contextmanager
def _silent() -> Iterator[None]:
    """Discards the output of the step."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        yield


def _print_scores(scores: list[tuple[str, str, str, str]], console: Console) -> None:
    table = Table()
    for name in ("prompt", "answer", "score of the answer", "score of an empty response"):
        table.add_column(name)
    for row in scores:
        table.add_row(*map(Text, row))
    console.print(table)


def _shorten(value: object) -> str:
    text = "" if value is None else str(value).replace("\n", " ")
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
