"""Settings of an evaluation on held-out prompts."""

from pydantic import NonNegativeFloat, PositiveInt, model_validator

from flowrl.config.base import Config, Dependency, ImportName


class EvaluationConfig(Config):
    """Evaluation on held-out prompts."""

    samples: PositiveInt = 1
    """Responses per prompt. With k > 1, `accuracy` is the mean over all responses (mean@k), and `accuracy_best@k` the
    mean over prompts of the best score.
    """

    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""

    pass_score: float = 1.0
    """Smallest score of a correct response. With k > 1 samples, `accuracy_pass@k` is the share of prompts with a
    correct response.
    """

    extract_answer: ImportName | None = None
    """Function that receives a response and returns its final answer as text, or None. With k > 1 samples,
    `accuracy_majority@k` is the score of the most frequent answer to each prompt. Null omits this metric.
    """

    DEPENDENCIES = (
        Dependency(
            ("extract_answer",),
            lambda group: group.samples > 1,
            "samples is 1, so there is no majority: raise samples, or remove it",
            is_error=False,
        ),
    )

    @model_validator(mode="after")
    def _check(self) -> "EvaluationConfig":
        if self.samples > 1 and not self.temperature:
            raise ValueError(
                f"samples is {self.samples}, but temperature is 0, so all responses to a prompt are equal: raise "
                "temperature, or set samples: 1"
            )
        return self
