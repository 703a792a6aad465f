"""Loads models from `save_pretrained` folders.

Shape suffixes: B rows, L tokens of the longest row, l tokens of a sequence shard, D hidden size.

Inputs are right-padded. With causal attention, real tokens never attend to padding, so models run without an attention
mask. Code in a model folder is never executed. Weights are read only from safetensors files.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from flowrl.config import ModelConfig, ModelKind, UserError
from flowrl.data.dtypes import torch_dtype
from flowrl.data.folders.input_paths import MAX_POSITIONS
from flowrl.engines.models.adapters.saved_adapter import SavedAdapter
from flowrl.engines.models.attention import Pack, find_attention
from flowrl.engines.models.parameters import check_finite
from flowrl.engines.models.partial_loading import InitialWeights, WeightDifferences, compare_weights
from flowrl.engines.models.routing import experts_implementation, mixture_of
from flowrl.engines.models.sequence_sharding import (
    SequenceShardable,
    SequenceSharding,
    gather_sequence,
    run_backbone,
    run_head,
)
from flowrl.engines.models.sharded_loading import make_meta_model, read_weights

_VALUE_HEAD = "value_head.safetensors"
"""File of a critic's head in earlier versions."""
SCORE = "score"
"""Name of the head in transformers' sequence-classification models."""
_HEAD_WEIGHT = f"{SCORE}.weight"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Kind:
    """The class with which transformers loads a kind of model, and its name in messages."""

    auto: Any  # Any: transformers' Auto classes share no typed base
    description: str


_KINDS: Mapping[ModelKind, _Kind] = {
    "policy": _Kind(AutoModelForCausalLM, "a causal language model"),
    "critic": _Kind(AutoModel, "a language model"),
    "reward_model": _Kind(AutoModelForSequenceClassification, "a sequence-classification model"),
}

LanguageModel = PreTrainedModel
"""A transformers model whose head returns logits."""


class ModelError(UserError):
    """Raised if a model folder cannot be used for its role."""


def load_policy(config: ModelConfig, *, on_meta: bool = False, merges: bool = True) -> PreTrainedModel:
    """Loads a causal language model in evaluation mode.

    Args:
        config: path and dtype of the model. `dropout: 0` disables the model's dropout. With `strict: false`, missing
            weights get their initial values (`InitialWeights`), and unexpected weights are ignored.
        on_meta: leaves the weights on the meta device. `FsdpEngine` then reads only this rank's shards.
        merges: whether to merge the matrices of `config.adapter` into the weights. Its `modules_to_save`
            replace those of the model in any case.
    Raises ModelError if the folder has no causal language model, if it lacks weights or has unexpected weights and
    `config.strict` is true, or if the model has dropout that `config` does not disable. Raises LoraError if the adapter
    does not match the model.
    """
    return _load("policy", config, on_meta, merges=merges)


def max_positions(config: ModelConfig) -> int | None:
    """Returns the largest number of tokens of a row that a model supports, or None without a limit in its
    configuration. Raises ModelError if the model has no configuration.
    """
    settings = _read_config(config, "a language model").get_text_config().to_dict()
    return next((settings[name] for name in MAX_POSITIONS if name in settings), None)


def stored_dtype(path: Path) -> Literal["float32", "bfloat16"]:
    """Returns the dtype of the weights in the files of a model, bfloat16 for other 16-bit types.

    Raises ModelError if the model has no configuration.
    """
    dtype = _read_config(ModelConfig(path=path), "a causal language model").dtype
    return "bfloat16" if dtype in (torch.bfloat16, torch.float16) else "float32"


class CriticModel(SequenceShardable):
    """Backbone of a causal language model with a linear value head."""

    def __init__(self, backbone: PreTrainedModel, *, head: Literal["zero", "fresh"] = "zero", seed: int = 0) -> None:
        """Creates a value head with zero weights, or with random weights from N(0, 1 / (width + 1))."""
        super().__init__()
        self.backbone = backbone
        self.value_head = nn.Linear(hidden_width(backbone), 1, dtype=backbone.dtype)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        if head == "fresh":
            _draw_head(self.value_head, seed)

    def forward(self, input_ids_BL: Tensor, pack: Pack | None = None) -> Tensor:
        """Returns the value [B, L] of the state before each token. The value at position 0 is 0."""
        values_BL = _apply_head(self.backbone, self.value_head, input_ids_BL, self.sequence_sharding, pack)
        return nn.functional.pad(values_BL[:, :-1], (1, 0))


def hidden_width(backbone: PreTrainedModel) -> int:
    """Returns the width of a backbone's last hidden states. For some OPT models, it differs from `hidden_size`."""
    settings = backbone.config.get_text_config().to_dict()
    return settings.get("word_embed_proj_dim") or backbone.config.get_text_config().hidden_size


def num_embeddings(model: PreTrainedModel) -> int:
    """Returns the number of rows of the input embeddings. Token ids must be smaller."""
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding)
    return embeddings.num_embeddings  # not of the weight, which later pipeline stages lack


def _draw_head(head: nn.Linear, seed: int) -> None:
    """Draws head weights with variance 1 / (width + 1), identical on every rank (arXiv 2009.01325, appendix B.1)."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(head.weight.shape, generator=generator) * (head.in_features + 1) ** -0.5
    with torch.no_grad():
        head.weight.copy_(weight)


def load_critic(
    config: ModelConfig,
    *,
    head: Literal["zero", "fresh"] = "zero",
    seed: int = 0,
    on_meta: bool = False,
    merges: bool = True,
) -> CriticModel:
    """Loads a critic from any causal language model, in evaluation mode.

    Args:
        config: as in `load_policy`.
        head: initialization of the value head if the folder has none. The head of an exported critic, or of a
            sequence-classification model with one label, is loaded instead.
        seed: seed of a fresh head.
        on_meta, merges: see `load_policy`.
    Raises the errors of `load_policy`, and ModelError if the folder has a head with several outputs.
    """
    critic = CriticModel(_load("critic", config, on_meta, merges=merges), head=head, seed=seed)
    weights = _read_head(config, critic.value_head.in_features)
    with torch.no_grad():
        if "weight" in weights:
            critic.value_head.weight.copy_(weights["weight"])
            critic.value_head.bias.copy_(weights.get("bias", torch.zeros(1)))
    return critic.eval()


def _read_head(config: ModelConfig, width: int) -> dict[str, Tensor]:
    """Returns `weight` and `bias` of the head with one output in the files of a model or its adapter, if they exist.

    transformers' own heads have no bias. Exported critics have one.
    """
    path, names = config.path, (_HEAD_WEIGHT, f"{SCORE}.bias")
    if (path / _VALUE_HEAD).is_file():
        raise ModelError(
            f"{path} has the value head of a critic in {_VALUE_HEAD}, a format of earlier versions: export the critic "
            f"again with flowrl export --role critic"
        )
    weights = read_weights(path, names)
    if config.adapter is not None:
        saved = SavedAdapter.read(config.adapter).tensors
        weights |= {name: (saved[name], str(config.adapter)) for name in names if name in saved}
    for name, (weight, file) in weights.items():
        if weight.shape not in (torch.Size((1, width)), torch.Size((1,))):
            raise ModelError(
                f"{file} has the head {name} of shape {list(weight.shape)}, but a critic or a reward model has one "
                f"output per token: use a model without this head"
            )
    return {name.removeprefix(f"{SCORE}."): weight for name, (weight, _) in weights.items()}


class RewardModel(SequenceShardable):
    """A sequence-classification model with one label. It scores each row at its last token."""

    def __init__(self, model: PreTrainedModel, head: nn.Linear) -> None:
        super().__init__()
        self.model = model
        self._head_name = next(name for name, module in model.named_modules() if module is head)

    @property
    def head(self) -> nn.Linear:
        """Linear layer that computes the score."""
        head = self.model.get_submodule(self._head_name)
        assert isinstance(head, nn.Linear)
        return head

    @property
    def language_model(self) -> PreTrainedModel:
        """The model without its head."""
        backbone = self.model.base_model
        assert isinstance(backbone, PreTrainedModel)
        return backbone

    def forward(self, input_ids_BL: Tensor, lengths_B: Tensor, pack: Pack | None = None) -> Tensor:
        """Returns one score per row, [B], in at least float32."""
        scores_BL = _apply_head(self.model.base_model, self.head, input_ids_BL, self.sequence_sharding, pack)
        # The empty row of a dummy micro-batch has length 0, so its score is read at index 0.
        return scores_BL.gather(1, (lengths_B - 1).clamp(min=0)[:, None]).squeeze(1)


def _apply_head(
    backbone: nn.Module, head: nn.Linear, input_ids_BL: Tensor, sharding: SequenceSharding | None, pack: Pack | None
) -> Tensor:
    """Returns the output of a head with one output at each token, [B, L] in at least float32."""
    ids_BL = input_ids_BL if pack is None else pack.pack(input_ids_BL)
    hidden_BlD = run_backbone(backbone, ids_BL, sharding, pack)
    outputs_Bl = at_least_float32(run_head(head, hidden_BlD, sharding).squeeze(-1))
    outputs_BL = gather_sequence(outputs_Bl, ids_BL.shape[1], sharding)
    return outputs_BL if pack is None else pack.unpack(outputs_BL, input_ids_BL.shape)


def at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def load_reward_model(
    config: ModelConfig,
    *,
    head: Literal["from_model", "fresh"] = "from_model",
    seed: int = 0,
    on_meta: bool = False,
    merges: bool = True,
) -> RewardModel:
    """Loads a sequence-classification model with one label, in evaluation mode.

    Args:
        config: as in `load_policy`. A fresh head also allows any causal language model.
        head: "from_model" loads the model's head. "fresh" draws head weights from N(0, 1 / (width + 1)), without bias.
        seed: seed of a fresh head.
        on_meta, merges: see `load_policy`.
    Raises the errors of `load_policy`.
    """
    model = _load("reward_model", config, on_meta, has_fresh_head=head == "fresh", merges=merges)
    score = dict(model.named_children()).get(SCORE)
    if not isinstance(score, nn.Linear):
        raise ModelError(f"the model in {config.path} has no linear head named score; use a decoder with such a head")
    if head == "fresh":
        _draw_head(score, seed)
    elif (bias := _read_head(config, score.in_features).get("bias")) is not None:
        score.bias = nn.Parameter(bias.to(model.dtype))
    return RewardModel(model, score).eval()


Policy = PreTrainedModel
"""A causal language model."""

TrainedModel = Policy | CriticModel | RewardModel


def describe_model(model: TrainedModel) -> dict[str, bytes]:
    """Returns the files of a model's folder except those of weights and tokenizer, as name -> contents."""
    model, _ = inner_model(model)
    with TemporaryDirectory() as name, quiet_transformers():
        model.config.save_pretrained(name)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(name)
        return read_files(name)


def read_files(folder: Path | str) -> dict[str, bytes]:
    """Returns the files of a folder, as name -> contents."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def inner_model(model: TrainedModel) -> tuple[PreTrainedModel, str]:
    """Returns the transformers model inside `model`, and the prefix that `model` adds to weight names."""
    if isinstance(model, PreTrainedModel):
        return model, ""
    return (model.backbone, "backbone.") if isinstance(model, CriticModel) else (model.model, "model.")


def _load(
    kind: ModelKind, config: ModelConfig, on_meta: bool, *, has_fresh_head: bool = False, merges: bool
) -> PreTrainedModel:
    """Loads the transformers model of a kind. The caller draws a fresh head, which the files may lack."""
    model, fresh = None, frozenset({_HEAD_WEIGHT} if has_fresh_head else ())
    adapter = None if config.adapter is None else SavedAdapter.read(config.adapter)
    if adapter is not None and not merges:
        adapter = adapter.without_matrices()
    if on_meta:
        differences = find_differences(kind, config, has_fresh_head=has_fresh_head)
        _check_differences(differences, kind, config, has_fresh_head=has_fresh_head)
        settings, dtype = _model_settings(kind, config), torch_dtype(config.dtype)
        # If this fails, `_load_full` reports the error.
        with suppress(OSError, ValueError, SafetensorError), quiet_transformers():
            model = make_meta_model(
                _KINDS[kind].auto, config.path, dtype, fresh, differences.missing, adapter, **settings
            )
    if model is None:
        model = _load_full(kind, config, fresh)
        if adapter is not None:
            adapter.merge_into(model)
        if on_meta:
            _logger.warning(
                "every rank loads all weights of %s before sharding, because names or shapes in its files differ from "
                "those of %s",
                config.path,
                type(model).__name__,
            )
    _check_dropout(model.config, config.path)
    _check_logit_scale(model.config, config.path)
    if has_attention_softcap(model):
        # torch's own attention kernel would ignore the softcap.
        model.set_attn_implementation("eager")
    if (implementation := experts_implementation(model.dtype)) is not None and mixture_of(model) is not None:
        model.set_experts_implementation(implementation)
    return model.eval()


def find_differences(kind: ModelKind, config: ModelConfig, *, has_fresh_head: bool = False) -> WeightDifferences:
    """Returns the weights that only a model or only its files have. Reads only the headers of the files.

    Excludes heads in the files that a critic or a reward model replaces, and its own head if it is fresh. Raises
    ModelError if the folder has no such model.
    """
    _, differences = _load_and_compare(kind, config, has_fresh_head=has_fresh_head, device_map="meta")
    return differences


def _load_and_compare(
    kind: ModelKind, config: ModelConfig, *, has_fresh_head: bool, device_map: Literal["meta"] | None = None
) -> tuple[PreTrainedModel, WeightDifferences]:
    """Loads a model with transformers. Returns the model, and the result of `find_differences`.

    With `device_map: meta`, all weights of the model are on the meta device, and no weights are read.
    """
    model, report = _from_pretrained(kind, config, device_map)
    report["missing_keys"] -= {_HEAD_WEIGHT} if has_fresh_head else set()
    if config.adapter is not None:
        report["missing_keys"] -= SavedAdapter.read(config.adapter).weights(model).keys()
    return model, compare_weights(model, report, ignores_heads=kind != "policy")


def _check_differences(
    differences: WeightDifferences, kind: ModelKind, config: ModelConfig, *, has_fresh_head: bool
) -> None:
    """Raises ModelError if a model cannot be loaded from files with these differences."""
    problem = f"{config.path} is not {_KINDS[kind].description}, because it {differences.describe()}"
    if _HEAD_WEIGHT in differences.missing:
        raise ModelError(f"{problem}: train its head first, or set head: fresh to try out a program")
    if differences.missing and kind == "reward_model" and not has_fresh_head:
        raise ModelError(f"{problem}, and scores of untrained weights are meaningless: use a complete folder")
    if differences and config.strict:
        raise ModelError(
            f"{problem}: use a complete folder, or set model.strict: false to initialize missing weights and ignore "
            f"unexpected ones"
        )


def _model_settings(kind: ModelKind, config: ModelConfig) -> dict[str, Any]:  # Any: of a configuration
    """Returns the settings that override the configuration of a model."""
    settings: dict[str, Any] = {"num_labels": 1} if kind == "reward_model" else {}
    if config.dropout is not None:
        settings |= dict.fromkeys(_dropout_settings(_read_config(config, _KINDS[kind].description)), 0.0)
    return settings


def _read_config(config: ModelConfig, kind: str) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(
            str(config.path), trust_remote_code=False, local_files_only=config.path.is_dir()
        )
    except (OSError, ValueError) as error:
        raise _load_error(config.path, kind, error) from error


def _load_full(kind: ModelKind, config: ModelConfig, fresh: frozenset[str]) -> PreTrainedModel:
    model, differences = _load_and_compare(kind, config, has_fresh_head=bool(fresh))
    _check_differences(differences, kind, config, has_fresh_head=bool(fresh))
    if differences.missing:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        # transformers has already initialized missing buffers, for which it uses no random numbers.
        InitialWeights(model).fill(model, [name for name in differences.missing if name in parameters])
    for name, weight in model.named_parameters():
        if name not in fresh:
            check_finite(weight, name, config.path)
    return model


def _from_pretrained(
    kind: ModelKind, config: ModelConfig, device_map: Literal["meta"] | None
) -> tuple[PreTrainedModel, dict[str, set[str]]]:
    """Returns the model, and transformers' report with the names of missing and unexpected weights."""
    description, settings = _KINDS[kind].description, _model_settings(kind, config)
    try:
        # The random numbers of the process do not depend on the weights that a file lacks.
        with quiet_transformers(), torch.random.fork_rng(devices=[]):
            return _KINDS[kind].auto.from_pretrained(
                str(config.path),
                dtype=torch_dtype(config.dtype),
                attn_implementation=find_attention(_KINDS[kind].auto, _read_config(config, description)),
                use_safetensors=True,
                trust_remote_code=False,
                # A local folder is never looked up on the Hub.
                local_files_only=config.path.is_dir(),
                output_loading_info=True,
                device_map=device_map,
                **settings,
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise _load_error(config.path, description, error) from error
    except RuntimeError as error:  # transformers has no class for errors of weights
        if "mismatched" in str(error):
            problem = "shapes of its weights differ from its config.json"
        elif "conversion" in str(error):
            problem = "it lacks some of the weights that transformers combines to one, such as those of experts"
        else:
            raise
        raise ModelError(
            f"{description} cannot be loaded from {config.path}: {problem}; use a complete directory written by "
            "save_pretrained"
        ) from error


def _load_error(path: Path, kind: str, error: Exception) -> ModelError:
    reason = str(error).split("\n")[0]
    if "custom code" in reason:
        reason = (
            "it needs custom code, which is never run; choose a family of docs/models.md, or a copy of the model in "
            "transformers' own format"
        )
    return ModelError(f"{kind} cannot be loaded from {path}: {reason}")


def has_attention_softcap(model: PreTrainedModel) -> bool:
    """Returns whether the model softcaps its attention logits, as Gemma 2 does."""
    return bool(model.config.get_text_config().to_dict().get("attn_logit_softcapping"))


def _dropout_settings(config: PreTrainedConfig) -> dict[str, float]:
    """Returns the nonzero dropout probabilities in a model configuration, by name."""
    return {
        name: value
        for name, value in config.get_text_config().to_dict().items()
        if ("dropout" in name or name.endswith(("_pdrop", "layerdrop", "jitter_noise")))
        # A setting of GPT-2's multiple-choice head, which no role uses.
        and name != "summary_first_dropout"
        and isinstance(value, float)
        and value > 0
    }


def _check_dropout(config: PreTrainedConfig, path: Path) -> None:
    dropout = _dropout_settings(config)
    if dropout:
        settings = ", ".join(f"{name} is {value}" for name, value in dropout.items())
        raise ModelError(
            f"{settings} in {path}/config.json, but with dropout the trained policy differs from the sampling policy: "
            f"set model.dropout: 0, which overrides the file"
        )


def _check_logit_scale(config: PreTrainedConfig, path: Path) -> None:
    """Raises ModelError if the model scales its logits. The scale would be lost, because log-probabilities are computed
    from hidden states and head weights.
    """
    settings = config.get_text_config().to_dict()
    for name in ("logit_scale", "logits_scaling"):
        if settings.get(name, 1.0) not in (None, 1.0):
            raise ModelError(
                f"{name} is {settings[name]} in {path}/config.json, which is not supported: choose a model without it"
            )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hides the messages and progress bars of transformers inside the `with` block."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
