"""Settings of an LLM judge, which scores responses with a language model."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    PositiveInt,
    model_validator,
)

from flowrl.config.base import Dependency, FilePath, ImportName, Member, OneOf, Options
from flowrl.config.engines.rollout_engines import DEFAULT_ENGINE, EngineCapabilities, EngineName, get_capabilities
from flowrl.config.engines.vllm_settings import VllmConfig
from flowrl.config.model import ModelConfig
from flowrl.config.roles import RoleConfig, RolloutConfig
from flowrl.config.source import read_text

POINTWISE_PROMPT = """Rate how well the response answers the request.

[Request]
{prompt}

[Response]
{response}

Explain your assessment briefly. Then end with a rating from 1 (worst) to 10 (best) in this form: Rating: [[5]]"""
"""Prompt of a pointwise judge."""

PAIRWISE_PROMPT = """Compare how well two responses answer the same request. Ignore their order and their length.

[Request]
{prompt}

[Response A]
{response_a}

[Response B]
{response_b}

Explain your comparison briefly. Then end with [[A]] if response A is better, [[B]] if response B is better, or [[C]] if
they are equally good."""
"""Prompt of a pairwise judge."""

PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
"""Placeholder of a column in the prompt of a judge. Other braces are text."""


class VerdictConfig(Member):
    """Base class of the verdict parsers. Each returns a score, or a failure, for the text that a judge generates."""

    NOUN = "a verdict"

    kind: str
    """Name of the parser."""


def _check_pattern(pattern: str) -> str:
    """Returns a regular expression. Raises ValueError unless it is valid and has one group."""
    try:
        num_groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression ({error}): correct it") from error
    if num_groups != 1:
        raise ValueError(
            f"{pattern!r} has {num_groups} groups, but must have one, which is the verdict: mark other groups by (?:"
        )
    return pattern


Pattern = Annotated[str, AfterValidator(_check_pattern)]


class RatingVerdict(VerdictConfig):
    """A number on a scale. `low` gives the score 0, and `high` the score 1."""

    kind: Literal["rating"] = "rating"
    pattern: Pattern = r"Rating: \[\[(\d+(?:\.\d+)?)\]\]"
    """Regular expression with one group, the number. The last match in the text counts."""

    low: float = 1.0
    """Worst rating. It may be above `high`."""

    high: float = 10.0
    """Best rating. A number outside of the scale is a failure."""

    @model_validator(mode="after")
    def _check_scale(self) -> "RatingVerdict":
        if self.low == self.high:
            raise ValueError(f"low and high are both {self.low:g}: set the ends of a scale")
        return self


class ChoiceVerdict(VerdictConfig):
    """One of several words, each with a score."""

    kind: Literal["choice"] = "choice"
    pattern: Pattern = r"\[\[([A-C])\]\]"
    """Regular expression with one group, the word. The last match in the text counts."""

    choices: Annotated[Mapping[str, float], Field(min_length=2)] = Field(
        default_factory=lambda: {"A": 1.0, "B": 0.0, "C": 0.5}
    )
    """Score of each word. A word without a score is a failure. For a pairwise judge, this is the score of the first
    response: 1 if it is better, 0 if it is worse, and 0.5 for a tie.
    """


class CustomVerdict(VerdictConfig):
    """User function that receives the text and returns a score, or None for a failure."""

    kind: ImportName
    options: Options = Field(default_factory=dict)


AnyVerdict = Annotated[RatingVerdict | ChoiceVerdict | CustomVerdict, OneOf(allows_bare_name=True)]


class JudgeConfig(RoleConfig):
    """A judge: a language model that reads a prompt and one or two responses, and generates a verdict."""

    model: ModelConfig
    """Model of the judge. Its own tokenizer and chat template render the prompt."""

    engine: EngineName = DEFAULT_ENGINE
    """Engine that generates the verdicts: `hf`, `vllm`, or a user's engine, as in `rollout.engine`."""

    vllm: VllmConfig | None = None
    """Settings of the vLLM engine."""

    kind: Literal["pointwise", "pairwise"] = "pointwise"
    """`pointwise`: rates each response. `pairwise`: compares responses to the same prompt. Each comparison is judged in
    both orders, and the score of a response is its share of wins. A tie counts half.
    """

    prompt: str | None = Field(default=None, min_length=1)
    """Text of the user message. `{column}` stands for a column of the row, such as `{prompt}`, `{response}` or
    `{answer}`. A pairwise judge has `{response_a}` and `{response_b}` in place of `{response}`. Null uses a general
    prompt.
    """

    prompt_file: FilePath | None = None
    """File with the text of `prompt`."""

    system: str | None = Field(default=None, min_length=1)
    """System message; null uses none."""

    template: FilePath | None = None
    """Conversation template file of the judge (docs/data.md). Null uses `conversation_template.json` in the tokenizer's
    folder, or else the tokenizer's chat template.
    """

    verdict: AnyVerdict | None = None
    """Parser of the verdict: a name, or a mapping with its kind and its settings. Null: `rating` for a pointwise judge,
    `choice` for a pairwise judge.
    """

    max_comparisons: Annotated[int, Field(ge=2)] = 4
    """Largest number of other responses with which a pairwise judge compares a response."""

    compare_with: str | None = None
    """Column with a response to the prompt, such as `answer`. A pairwise judge compares each response only with this
    column. Null compares the responses to a prompt with each other.
    """

    max_response_tokens: PositiveInt = 512
    """Maximum number of tokens of a verdict with its explanation."""

    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy. Random numbers depend only on the seed, the prompt and the sample."""

    max_num_seqs: PositiveInt = 64
    """Maximum number of verdicts that one rank decodes concurrently."""

    DEPENDENCIES = (
        Dependency(
            ("compare_with", "max_comparisons"),
            lambda group: group.kind == "pairwise",
            "a pointwise judge compares no responses: set kind: pairwise, or remove it",
        ),
        Dependency(
            ("max_comparisons",),
            lambda group: group.compare_with is None,
            "compare_with is set, so each response has one comparison: remove compare_with or max_comparisons",
            is_error=False,
        ),
    )

    @model_validator(mode="after")
    def _check(self) -> "JudgeConfig":
        if self.prompt is not None and self.prompt_file is not None:
            raise ValueError("prompt and prompt_file are set together: set one of them")
        if self.prompt is not None:
            self.check_prompt(self.prompt)
        scores = self.applied_verdict.choices.values() if isinstance(self.applied_verdict, ChoiceVerdict) else ()
        if self.kind == "pairwise" and any(not 0 <= score <= 1 for score in scores):
            raise ValueError(
                "verdict.choices has a score outside of 0 to 1, which a pairwise judge cannot use: lower it"
            )
        _ = self.generation  # checks the settings of the engine
        return self

    def check_prompt(self, text: str) -> None:
        """Raises ValueError unless a prompt has the placeholders of the judge's responses."""
        names = set(PLACEHOLDER.findall(text))
        required = {"response"} if self.kind == "pointwise" else {"response_a", "response_b"}
        other = {"response", "response_a", "response_b"} - required
        for name in sorted(required - names):
            raise ValueError(f"prompt has no {{{name}}}, so a {self.kind} judge would not read the response: add it")
        for name in sorted(other & names):
            raise ValueError(
                f"prompt has {{{name}}}, which a {self.kind} judge does not fill: use "
                f"{' and '.join(f'{{{known}}}' for known in sorted(required))}"
            )

    def read_prompt(self) -> str:
        """Returns the text of the prompt. Raises ValueError if the file cannot be read or lacks a placeholder."""
        if self.prompt_file is None:
            return self.prompt or (POINTWISE_PROMPT if self.kind == "pointwise" else PAIRWISE_PROMPT)
        try:
            text = read_text(self.prompt_file)
        except (OSError, ValueError) as error:
            raise ValueError(f"prompt_file {self.prompt_file} cannot be read ({error}): correct the path") from error
        self.check_prompt(text)
        return text

    @property
    def applied_verdict(self) -> RatingVerdict | ChoiceVerdict | CustomVerdict:
        """Parser of the verdict, with the default of the kind of judge."""
        if self.verdict is not None:
            return self.verdict
        return RatingVerdict() if self.kind == "pointwise" else ChoiceVerdict()

    @property
    def capabilities(self) -> EngineCapabilities:
        """Capabilities of the engine."""
        return get_capabilities(self.engine)

    @property
    def needs_own_process(self) -> bool:
        return self.capabilities.own_process

    @property
    def max_judgments(self) -> int:
        """Largest number of verdicts per response, rounded up. Both responses of a comparison share its verdicts."""
        if self.kind == "pointwise":
            return 1
        return 2 if self.compare_with is not None else self.max_comparisons

    @property
    def functions(self) -> dict[str, str]:
        """Name of a setting -> user function."""
        verdict = self.applied_verdict
        return {"verdict": verdict.kind} if isinstance(verdict, CustomVerdict) else {}

    @property
    def files(self) -> dict[str, Path]:
        """Name of a setting -> file that influences verdicts. Files of the model are not included."""
        paths = {"prompt_file": self.prompt_file, "template": self.template}
        return {name: path for name, path in paths.items() if path is not None}

    @property
    def generation(self) -> RolloutConfig:
        """Settings of the engine, in the form of rollout settings. These do not allow temperature 0. A greedy judge
        therefore has temperature 1 in them, and sets temperature 0 in each request.
        """
        settings: dict[str, Any] = {
            "engine": self.engine,
            "vllm": self.vllm,
            "max_response_tokens": self.max_response_tokens,
            "temperature": self.temperature or 1.0,
            "max_num_seqs": self.max_num_seqs,
            "template": self.template,
        }
        return RolloutConfig(**settings)
