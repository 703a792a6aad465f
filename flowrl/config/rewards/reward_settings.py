"""Settings of the reward role: one source of scores, or a list of weighted components; and of HTTP services."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, JsonValue, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from flowrl.config.base import Config, Dependency, ImportName
from flowrl.config.rewards.environment_settings import FAILURE_RATE
from flowrl.config.rewards.judge_settings import JudgeConfig
from flowrl.config.roles import RoleConfig, ScoringModelConfig


class ServiceConfig(Config):
    """An HTTP service that scores rows. docs/rewards.md describes requests and responses."""

    url: str
    """Address to which batches of rows are sent, such as `http://127.0.0.1:8000/score`."""

    batch_size: PositiveInt = 32
    """Largest number of rows of a request."""

    timeout_s: PositiveFloat = 30.0
    """Seconds for one request, from the connection to the last byte of the response."""

    deadline_s: PositiveFloat = 300.0
    """Seconds for all attempts of a batch, including the pauses between attempts. After this time, the rows of the
    batch have failed."""

    retries: NonNegativeInt = 5
    """Number of retries after a failed connection, a timeout, a malformed response, or status 408, 425, 429, 500, 502,
    503 or 504. Pauses grow exponentially, with jitter, and are at least as long as the header `Retry-After` requires.
    """

    max_concurrent: PositiveInt = 8
    """Largest number of concurrent requests."""

    token_variable: str | None = None
    """Name of the environment variable with a token, which is sent as `Authorization: Bearer TOKEN`."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if not re.fullmatch(r"https?://[^\s/@]+(/\S*)?", url):
            raise ValueError(
                f"url is {url!r}, but must have the form http://HOST:PORT/PATH or https://HOST/PATH, without a password"
            )
        try:
            is_valid = urlsplit(url).port != 0
        except ValueError:  # a port that is no number or above 65535
            is_valid = False
        if not is_valid:
            raise ValueError(f"url is {url!r}, whose port is invalid: write a port from 1 to 65535, or none")
        return url


Names = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]

SINGLE = "reward"
"""Name of the only component of a reward that is not a list."""


class RewardSource(ScoringModelConfig):
    """A source of scores: a Python function, a reward model, a judge, or a remote service."""

    ALTERNATIVES = ("function", "model", "judge", "service")

    function: ImportName | None = None
    """Python function that scores a response: `module:function` or `path/file.py:function`. Its parameters name the
    columns that it receives, such as `response` and `answer`. It returns a number, may be async, and runs in a
    separate process (docs/rewards.md).
    """

    options: Mapping[str, JsonValue] = Field(default_factory=dict)
    """Additional keyword arguments of the function."""

    rows_per_call: PositiveInt | None = None
    """Largest number of rows per call of the function. The function then receives a list per column and returns a list
    of numbers. Null calls the function once per row.
    """

    judge: JudgeConfig | None = None
    """Language model that judges the responses."""

    service: ServiceConfig | None = None
    """HTTP service that scores the responses."""

    DEPENDENCIES = (
        *ScoringModelConfig.DEPENDENCIES,
        Dependency(
            ("options", "rows_per_call"),
            lambda group: group.function,
            "it applies only to functions: set function, or remove it",
        ),
    )

    def of_policy(self, tokenizer: Path, template: Path | None) -> Self:
        """Returns the settings with the policy's tokenizer and template in place of nulls. Settings without a reward
        model stay unchanged.
        """
        if self.model is None:
            return self
        template = self.policy_template or template
        return self.model_copy(
            update={"policy_tokenizer": self.policy_tokenizer or tokenizer, "policy_template": template}
        )

    @property
    def is_model(self) -> bool:
        """Whether a role of its own computes the scores, with a reward model or a judge."""
        return self.model is not None or self.judge is not None


class RewardComponent(RewardSource):
    """One of several rewards of a run."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    """Name of the reward, of its column and of its metrics: lower-case letters, digits and '_'."""

    weight: float = 1.0
    """Factor of this reward's score in the sum `scores`. 0 only records the score."""

    data_sources: Names | None = None
    """This reward scores only rows with one of these values in the column `data_source`. Null scores all rows."""

    def applies_to(self, data_source: str | None) -> bool:
        """Returns whether this reward scores rows with a data source."""
        return self.data_sources is None or data_source in self.data_sources


Components = Annotated[tuple[RewardComponent, ...], Field(strict=False, min_length=1)]


class RewardConfig(RewardSource):
    """The reward: a function, a reward model, a judge, a service, or a list of these with names and weights.

    `reward: [{name: ..., weight: ..., function: ...}, ...]` is short for `reward: {components: [...]}`.
    """

    ALTERNATIVES = ("function", "model", "judge", "service", "components")

    components: Components | None = None
    """Several rewards. The score of a response is the sum of weight times score. The score of each reward is also a
    column with the name of the reward.
    """

    evaluation: ImportName | Components | None = None
    """User function, or a list of rewards, that scores responses in evaluations. Null uses the training reward."""

    workers: PositiveInt = 2
    """Number of processes that call reward functions, over all ranks of the role."""

    timeout_s: PositiveFloat = 60.0
    """Timeout of one call of a reward function in seconds. After the timeout, the process is killed and replaced."""

    retries: NonNegativeInt = 0
    """Number of times that a failed call is repeated, in a different process."""

    memory_mb: PositiveFloat | None = None
    """Largest memory of a process that calls reward functions, in MB (10^6 bytes). Null sets no limit."""

    network: bool = False
    """Whether reward functions can use the network. docs/rewards.md lists the systems that cannot block it."""

    max_concurrent: PositiveInt = 16
    """Largest number of concurrent calls of an async function in one process."""

    on_failure: Literal["stop", "zero", "drop"] = "stop"
    """Treatment of a row whose reward failed: an exception, a timeout, a lost process, no verdict, or a result that is
    not a finite number. `stop` ends the run. `zero`: the score is 0, which is better than a negative score. `drop`: the
    row is not trained, and neither is a group with fewer than two remaining rows. In an evaluation, the row has no
    score with `zero` and `drop`.
    """

    max_failure_rate: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Largest share of responses with a failed reward, in a step or evaluation set. A run with a larger share saves its
    state and stops. `on_failure: stop` ends a run at the first failure.
    """

    DEPENDENCIES = (*RewardSource.DEPENDENCIES, FAILURE_RATE)

    @classmethod
    def unsupported_settings(cls) -> Mapping[str, str]:
        reason = "a model is supported only in components: set function, or add the model to components with weight 0"
        return {f"evaluation.{name}": reason for name in ("judge", *ScoringModelConfig.model_fields)}

    @model_validator(mode="before")
    @classmethod
    def _expand_list(cls, settings: Any) -> Any:  # Any: the settings of the file
        return {"components": settings} if isinstance(settings, list | tuple) else settings

    @model_validator(mode="after")
    def _check_names(self) -> "RewardConfig":
        for setting in ("components", "evaluation"):
            value = getattr(self, setting)
            counts = Counter(component.name for component in value or () if isinstance(component, RewardComponent))
            if repeated := [name for name, count in counts.items() if count > 1]:
                raise ValueError(f"{setting} has the name {repeated[0]} twice: give each reward a name of its own")
        if self.judge is not None and self.evaluation is not None:
            raise ValueError("evaluation is set together with judge: name the judge in components instead")
        return self

    def roles(self, name: str) -> dict[str, RoleConfig]:
        """Returns the role `name` for functions, and one role `name_COMPONENT` for each model in `components`."""
        if self.components is None:
            return {name: self.judge or self}
        models = {f"{name}_{part.name}": part.judge or part for part in self.components if part.is_model}
        return {**({name: self} if self.has_functions else {}), **models}

    def role_keys(self, name: str) -> dict[str, str]:
        if self.components is None:
            return {name: f"{name}.judge" if self.judge else name}
        keys = {
            f"{name}_{part.name}": f"{name}.components.{i}{'.judge' if part.judge else ''}"
            for i, part in enumerate(self.components)
            if part.is_model
        }
        return {**({name: name} if self.has_functions else {}), **keys}

    def with_roles(self, name: str, roles: Mapping[str, RoleConfig]) -> RoleConfig:
        if self.components is None:
            return self.model_copy(update={"judge": roles[name]}) if self.judge else roles[name]
        parts = []
        for part in self.components:
            value = roles.get(f"{name}_{part.name}", part)
            parts.append(part.model_copy(update={"judge": value}) if part.judge else value)
        return self.model_copy(update={"components": tuple(parts)})

    def of_policy(self, tokenizer: Path, template: Path | None) -> Self:
        """Returns the settings with the policy's tokenizer and template in place of nulls, for all reward models."""
        if self.components is None:
            return super().of_policy(tokenizer, template)
        return self.model_copy(
            update={"components": tuple(part.of_policy(tokenizer, template) for part in self.components)}
        )

    @property
    def has_functions(self) -> bool:
        """Whether the role calls functions."""
        return any(not part.is_model for part in (*self.training_components, *self.evaluation_components))

    @property
    def training_components(self) -> tuple[RewardComponent, ...]:
        """The rewards of training. A reward that is not a list is one component with the name `reward`."""
        if self.components is not None:
            return self.components
        fields = {name: getattr(self, name) for name in RewardSource.model_fields}
        return (RewardComponent.model_construct(name=SINGLE, **fields),)  # the fields are valid

    @property
    def evaluation_components(self) -> tuple[RewardComponent, ...]:
        """The rewards of evaluations."""
        if isinstance(self.evaluation, str):
            return (RewardComponent(name=SINGLE, function=self.evaluation),)
        return self.training_components if self.evaluation is None else self.evaluation

    @property
    def has_models(self) -> bool:
        """Whether models compute some of the scores in training."""
        return any(part.is_model for part in self.training_components)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of a scored batch with one number per row: `scores`, and one for each reward of a list."""
        return ("scores", *(part.name for part in self.components or ()))

    def function_columns(self, *, evaluation: bool = False) -> tuple[str, ...]:
        """Returns the columns that functions compute, in training or in an evaluation. `scores` is included if no
        reward is a model.
        """
        if evaluation and self.evaluation is not None:
            parts = () if isinstance(self.evaluation, str) else self.evaluation
            return ("scores", *(part.name for part in parts))
        functions = tuple(part.name for part in self.components or () if not part.is_model)
        return functions if self.has_models else ("scores", *functions)

    def functions(self) -> Iterator[tuple[str, str]]:
        """Yields the key of each setting that names a function, and the function."""
        if self.function is not None:
            yield "function", self.function
        for i, part in enumerate(self.components or ()):
            if part.function is not None:
                yield f"components.{i}.function", part.function
        if isinstance(self.evaluation, str):
            yield "evaluation", self.evaluation
            return
        for i, part in enumerate(self.evaluation or ()):
            if part.function is not None:
                yield f"evaluation.{i}.function", part.function
