"""One class per role: its model and what it does with a batch."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from flowrl.config.base import Aggregation, Config, ImportName, KlKind, TokenIds
from flowrl.config.model import EngineConfig, ModelConfig, OptimizerConfig


class ActorConfig(Config):
    """The policy that is trained, and its loss."""

    model: ModelConfig
    """Weights the policy starts from."""

    optimizer: OptimizerConfig
    """How its weights are updated."""

    engine: EngineConfig = EngineConfig()
    """How it runs."""

    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """Probability ratios below 1 - clip_low get no gradient (PPO)."""

    clip_high: NonNegativeFloat = 0.2
    """Probability ratios above 1 + clip_high get no gradient (PPO)."""

    dual_clip: float | None = Field(default=None, gt=1)
    """Bound on the loss of a token with negative advantage, as a multiple of the advantage; null is off."""

    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus in the loss."""

    kl_loss_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the reference in the loss; 0 leaves it out."""

    kl_loss_kind: KlKind = "k3"
    """Estimator of that KL."""

    aggregation: Aggregation = "token_mean"
    """How per-token losses become one number: over tokens, or over rows of token sums or means."""

    aggregation_scale: PositiveFloat | None = None
    """Tokens by which `seq_mean_token_sum_norm` divides a row's sum, commonly the longest response."""

    @model_validator(mode="after")
    def _check(self) -> "ActorConfig":
        needs_scale = self.aggregation == "seq_mean_token_sum_norm"
        if needs_scale and self.aggregation_scale is None:
            raise ValueError("aggregation seq_mean_token_sum_norm divides by aggregation_scale: set it")
        if not needs_scale and self.aggregation_scale is not None:
            raise ValueError(f"aggregation {self.aggregation} does not use aggregation_scale: remove it")
        return self


class CriticConfig(Config):
    """The value model that is trained."""

    model: ModelConfig
    """Weights of the backbone; the value head starts at zero."""

    optimizer: OptimizerConfig
    """How its weights are updated."""

    engine: EngineConfig = EngineConfig()
    """How it runs."""

    value_clip: PositiveFloat | None = 0.2
    """New values further than this from the old ones get no gradient; null is off."""


class ReferenceConfig(Config):
    """The frozen policy from which the KL is measured."""

    model: ModelConfig
    """Its weights, commonly those the actor starts from."""

    engine: EngineConfig = EngineConfig()
    """How it runs."""


class RewardConfig(Config):
    """What scores a response: a Python function or a model with a scalar head."""

    function: ImportName | None = None
    """`module:function`, called with prompt, response, answer and the row's other columns; returns a float."""

    evaluation: ImportName | None = None
    """`module:function` that scores held-out responses; null uses what trains."""

    model: ModelConfig | None = None
    """A sequence-classification model with one label."""

    engine: EngineConfig = EngineConfig()
    """How the model runs."""

    @model_validator(mode="after")
    def _check(self) -> "RewardConfig":
        if (self.function is None) == (self.model is None):
            found = "both" if self.function else "neither"
            raise ValueError(f"{found} of function and model is set: a reward is exactly one of them")
        return self


class RolloutConfig(Config):
    """How the actor's weights answer prompts."""

    engine: Literal["hf"] = "hf"
    """`hf`: transformers with a KV cache, on any device."""

    max_response_tokens: PositiveInt
    """A response is cut off here, its stop token included, and marked `truncated`."""

    temperature: PositiveFloat = 1.0
    """Divides the logits before sampling; training uses the same. Evaluation is greedy whatever this is."""

    top_k: NonNegativeInt = 0
    """Sample among this many likeliest tokens; 0 is all."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample among the likeliest tokens that together hold this probability; 1 is all."""

    stop_ids: Annotated[tuple[TokenIds, ...], Field(strict=False)] = ()
    """Token sequences that end a response and stay in it, besides the model's end-of-sequence token."""

    max_rows: PositiveInt = 256
    """Rows that one rank generates at once. Changes time and memory, never the tokens."""

    @model_validator(mode="after")
    def _check(self) -> "RolloutConfig":
        if not all(self.stop_ids):
            raise ValueError("stop_ids has an empty sequence, which would end every response at once: remove it")
        return self
