"""One class per role: its model and what it does with a batch."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from flowrl.config.algorithm.choice import OWN, Aggregation, ChoiceConfig, KlKind, Options, known_name
from flowrl.config.base import Config, ImportName, TokenIds
from flowrl.config.model import EngineConfig, LoraConfig, ModelConfig, OptimizerConfig

_CLIPS: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2}
_COVARIANCE: dict[str, Any] = {"cov_fraction": 2e-4}

LOSSES: dict[str, dict[str, Any]] = {
    "ppo": _CLIPS | {"dual_clip": None},
    "decoupled_ppo": _CLIPS | {"dual_clip": None, "max_weight": None},
    "sapo": {"temperature_positive": 1.0, "temperature_negative": 1.05},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "gspo_token": {"clip_low": 3e-4, "clip_high": 4e-4},
    "gmpo": {"clip_low": 0.4, "clip_high": 0.4},
    "reinforce": {},
    "gpg": {},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},
    "dppo_tv": {"delta_low": 0.15, "delta_high": 0.15, "max_ratio": None},
    "dppo_kl": {"delta_low": 0.05, "delta_high": 0.05, "max_ratio": None},
    "clip_cov": _CLIPS | _COVARIANCE | {"cov_low": 1.0, "cov_high": 5.0},
    "kl_cov": _COVARIANCE | {"cov_kl_coef": 1.0, "cov_kl_kind": "abs"},
    OWN: {"loss_options": {}},
}
"""Policy loss -> its settings with their defaults. The names are those of flowrl/algorithms/registry.py."""


class ActorConfig(ChoiceConfig):
    """The policy that is trained, and its loss. A setting of another loss is refused, not ignored."""

    CHOICE: ClassVar[str] = "loss"
    CHOICES: ClassVar[Mapping[str, Mapping[str, Any]]] = LOSSES

    model: ModelConfig
    """Weights the policy starts from."""

    optimizer: OptimizerConfig
    """How its weights are updated."""

    lora: LoraConfig | None = None
    """Trains an adapter and no other weight; null trains all of them."""

    engine: EngineConfig = EngineConfig()
    """How it runs."""

    loss: Annotated[str, AfterValidator(known_name("policy loss", [name for name in LOSSES if name != OWN]))] = "ppo"
    """Policy loss, see docs/algorithms.md; `module:function` is your own."""

    clip_low: float | None = Field(default=None, ge=0, le=1)
    """ppo, decoupled_ppo, clip_cov: ratios below 1 - clip_low get no gradient, usually 0.2; cispo: bounds the weight, 1
    is no bound; gspo, gspo_token: of the row's mean ratio, usually 3e-4; gmpo: of the log-ratio, usually 0.4."""

    clip_high: NonNegativeFloat | None = None
    """The same above 1; usually 0.2, for cispo 4 (weights to 5, arXiv 2510.13786), gspo 4e-4, gmpo 0.4."""

    dual_clip: float | None = Field(default=None, gt=1)
    """ppo, decoupled_ppo: bound on the loss of a token with negative advantage, as a multiple of the advantage; null is
    off."""

    max_weight: PositiveFloat | None = None
    """decoupled_ppo: tokens whose proximal over behaviour ratio is larger are left out; null keeps all."""

    temperature_positive: PositiveFloat | None = None
    """sapo: how fast the gate closes for tokens with positive advantage; usually 1."""

    temperature_negative: PositiveFloat | None = None
    """sapo: the same for the others; usually 1.05."""

    delta_low: NonNegativeFloat | None = None
    """dppo_tv, dppo_kl: divergence above which a token with negative advantage is not pushed further down, as a
    difference of probabilities (usually 0.15) or in nats (usually 0.05)."""

    delta_high: NonNegativeFloat | None = None
    """dppo_tv, dppo_kl: the same for positive advantage and up."""

    max_ratio: PositiveFloat | None = None
    """dppo_tv, dppo_kl: bound on a token's weight; null is off."""

    cov_fraction: float | None = Field(default=None, ge=0, le=1)
    """clip_cov, kl_cov: share of a step's tokens that are treated apart; usually 2e-4."""

    cov_low: float | None = None
    """clip_cov: smallest covariance of a token that is, in nats times the advantage's unit; usually 1."""

    cov_high: float | None = None
    """clip_cov: the largest; usually 5."""

    cov_kl_coef: NonNegativeFloat | None = None
    """kl_cov: weight of their KL to the old policy, in units of the advantage per nat; usually 1."""

    cov_kl_kind: Literal["abs", "k2", "k3"] | None = None
    """kl_cov: estimator of that KL; usually abs."""

    loss_options: Options | None = None
    """module:function: its keyword arguments."""

    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus in the loss."""

    kl_loss_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the reference in the loss; 0 leaves it out."""

    kl_loss_kind: KlKind = "k3"
    """Estimator of that KL; `module:function` is your own."""

    kl_loss_gradient: Literal["k1", "k2", "k3", "abs"] | None = None
    """Straight-through: the estimator that gives the gradient of that KL; null is kl_loss_kind itself."""

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
        if self.kl_loss_gradient is not None and ":" in self.kl_loss_kind:
            raise ValueError(f"kl_loss_gradient does nothing for kl_loss_kind {self.kl_loss_kind}: remove it")
        if self.cov_low is not None and self.cov_high is not None and self.cov_low > self.cov_high:
            raise ValueError(f"cov_low is {self.cov_low:g}, above cov_high, {self.cov_high:g}: swap them")
        return self


class CriticConfig(Config):
    """The value model that is trained."""

    model: ModelConfig
    """Weights of the backbone, a causal language model's, or of a critic that was saved with its value head."""

    head: Literal["zero", "fresh"] = "zero"
    """How a value head starts that the model does not bring: at zero, or drawn from N(0, 1 / (width + 1))."""

    head_seed: NonNegativeInt = 0
    """Keys that draw."""

    optimizer: OptimizerConfig
    """How its weights are updated."""

    lora: LoraConfig | None = None
    """Trains an adapter and the value head and no other weight; null trains all of them."""

    engine: EngineConfig = EngineConfig()
    """How it runs."""

    value_clip: PositiveFloat | None = 0.2
    """New values further than this from the old ones get no gradient; null is off."""


class ReferenceConfig(Config):
    """The frozen policy from which the KL is measured. Beside an actor with an adapter, of the same model, it is the
    actor without it, and runs by the actor's engine."""

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

    head: Literal["from_model", "fresh"] = "from_model"
    """`from_model` is a trained head, without which a model is refused. `fresh` puts an untrained one, drawn from
    N(0, 1 / (width + 1)), on any causal language model: its scores mean nothing, and serve to try a program."""

    head_seed: NonNegativeInt = 0
    """Keys that draw."""

    engine: EngineConfig = EngineConfig()
    """How the model runs."""

    @model_validator(mode="after")
    def _check(self) -> "RewardConfig":
        if (self.function is None) == (self.model is None):
            found = "both" if self.function else "neither"
            raise ValueError(f"{found} of function and model is set: a reward is exactly one of them")
        if self.function is not None and self.head == "fresh":
            raise ValueError("head is fresh, but the reward is a function, which has none: remove head")
        return self


class TransferConfig(Config):
    """How new weights reach a rollout that is not in the actor's processes."""

    via: Literal["auto", "object_store", "cuda_ipc", "nccl"] = "auto"
    """`auto` chooses by where the two run, see docs/weight_transfer.md: for vllm cuda_ipc on the actor's own GPUs and
    nccl on others, object_store for all else."""

    chunk_mb: PositiveFloat = 500.0
    """Weights that travel at once, in MB of 10^6 bytes; a weight that is larger travels alone. Between GPUs that is
    about what an update needs on each side beside the model; the object store holds all parts of the last version."""


class VllmConfig(Config):
    """What vLLM is given. Changes time and memory."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of its weights and activations; null is the model's. Weights are cast before they travel."""

    kv_cache_gb: PositiveFloat = 1.0
    """Memory for keys and values, in GB of 10^9 bytes, on each of the devices of a replica. Rows that it does not hold
    wait."""

    max_model_len: PositiveInt | None = None
    """Longest row, prompt and response; null is the model's own limit, or what kv_cache_gb holds where that is less."""

    prefix_caching: bool = True
    """Rows whose prompts begin alike share the computation of that."""

    graphs: bool = True
    """On GPUs, record kernels as CUDA graphs and compile: slower to start, faster to decode."""

    sleep: bool | None = None
    """Where other roles use its devices, leave them while those work: weights move to the memory of the host, keys and
    values are dropped. Those leave theirs while it works where their engine has offload: idle. null is yes on GPUs; on
    the CPU, where all memory is the host's, it moves nothing. With schedule.kind async it cannot leave
    them: false lets others use them even so."""


class RolloutConfig(Config):
    """How the actor's weights answer prompts."""

    engine: Literal["hf", "vllm"] = "hf"
    """`hf`: transformers with a KV cache, on any device, in the actor's processes if it is placed there. `vllm`: vLLM,
    always in processes of its own; needs the extra `vllm`."""

    vllm: VllmConfig | None = None
    """Settings of engine vllm."""

    quantization: Literal["int8", "int4", "fp8"] | None = None
    """Keeps the matrices of the rollout's layers in so few bits, quantised anew at each update: less memory, and faster
    where the device multiplies such numbers, for responses of a slightly other policy than the one that is trained,
    which `algorithm.correction` must weigh. Null leaves them as they are. `hf` has int8, `vllm` what docs/rollout.md
    lists for the device."""

    transfer: TransferConfig = TransferConfig()
    """How new weights get there."""

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

    max_num_seqs: PositiveInt = 256
    """Rows that one rank generates at once; fewer than 16 take the memory of 16. Changes time and memory, never the
    tokens."""

    check_weights: Literal["sampled", "complete", "off"] = "sampled"
    """After each update of weights from another process, compare what is served with the actor's: a few columns of some
    of them, others each time; all of all of them, which takes several times as long as the transfer; or nothing."""

    check: Literal["warn", "strict", "off"] = "warn"
    """What a `rollout_gap` above gap_warning does: a line with the likely causes, or the end of the run; or nothing."""

    gap_warning: PositiveFloat | None = None
    """Mean distance between rollout and trainer, in nats per token; null is 0.001 in float32, 0.05 in 16 bits and 0.1
    quantised."""

    @model_validator(mode="after")
    def _check(self) -> "RolloutConfig":
        if not all(self.stop_ids):
            raise ValueError("stop_ids has an empty sequence, which would end every response at once: remove it")
        if self.engine != "vllm" and self.vllm is not None:
            raise ValueError(f"vllm has settings of engine vllm, and engine is {self.engine}: remove them")
        if self.engine == "hf" and self.quantization not in (None, "int8"):
            raise ValueError(
                f"quantization is {self.quantization}, but engine hf quantises to int8 only: set quantization: int8, "
                f"or engine: vllm"
            )
        if self.engine == "vllm" and self.temperature < 0.01:
            raise ValueError(
                f"temperature is {self.temperature:g}, and vLLM samples at 0.01 or more: set it so, or engine: hf"
            )
        if self.engine != "vllm" and self.transfer.via in ("cuda_ipc", "nccl"):
            raise ValueError(
                f"transfer.via is {self.transfer.via}, which vLLM alone receives, and engine is {self.engine}: set "
                f"transfer.via: auto, or engine: vllm"
            )
        return self

    def leaves_devices(self, *, gpus: bool) -> bool:
        """Whether it leaves its devices while other roles use them, as `VllmConfig.sleep` says; `gpus`: what they are.
        `hf` is in one process with those roles, and stays."""
        if self.engine != "vllm":
            return False
        sleep = None if self.vllm is None else self.vllm.sleep
        return gpus if sleep is None else sleep

    @property
    def sent_dtype(self) -> str | None:
        """The type that weights are cast to before they travel; None leaves them as they are."""
        return None if self.vllm is None else self.vllm.dtype


def int4_on_cpu(role: str) -> str:
    """Why a rollout in int4 is refused where the devices are CPU slots."""
    return (
        f"{role}.quantization is int4, which vLLM multiplies on GPUs only, but placement.device is cpu: set "
        f"{role}.quantization: int8"
    )


def models_of(config: Config) -> dict[str, tuple[str, ActorConfig | CriticConfig | ReferenceConfig | RewardConfig]]:
    """Role -> (what its keys begin with, its settings), of a run's roles that have a model or may have one.

    A recipe that trains one model may have `model`, `optimizer`, `engine` and `lora` at the top: they are the actor's.
    """
    kinds = ActorConfig | CriticConfig | ReferenceConfig | RewardConfig
    found: dict[str, tuple[str, Any]] = {n: (f"{n}.", value) for n, value in config if isinstance(value, kinds)}
    top = {type(value): value for _, value in config}
    if ModelConfig in top and OptimizerConfig in top and "actor" not in found:
        actor = ActorConfig(
            model=top[ModelConfig],
            optimizer=top[OptimizerConfig],
            engine=top.get(EngineConfig, EngineConfig()),
            lora=top.get(LoraConfig),
        )
        found["actor"] = ("", actor)
    return found
