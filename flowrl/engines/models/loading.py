"""Loads models from `save_pretrained` folders and saves them in the same format.

Shape suffixes: B rows, L tokens of the longest row, l tokens of a sequence shard, D hidden size.

Inputs are right-padded. With causal attention, real tokens never attend to padding, so models run without an attention
mask. Code in a model folder is never executed. Weights are read only from safetensors files.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from flowrl.config import ModelConfig, UserError
from flowrl.data.dtypes import torch_dtype
from flowrl.data.folders.atomic_folder import write_atomically
from flowrl.data.input_paths import MAX_POSITIONS
from flowrl.engines.models.attention import Pack
from flowrl.engines.models.lora import model_weights
from flowrl.engines.models.parameters import check_finite
from flowrl.engines.models.sequence_sharding import (
    SequenceShardable,
    SequenceSharding,
    gather_sequence,
    run_backbone,
    run_head,
)
from flowrl.engines.models.sharded_loading import make_meta_model

_VALUE_HEAD = "value_head.safetensors"
_GENERATION_CONFIG = "generation_config.json"
_SCORE = "score"
"""Name of the head in transformers' sequence-classification models."""

_NEW_PAD_TOKEN = "<|pad|>"

_logger = logging.getLogger(__name__)

LanguageModel = PreTrainedModel
"""A transformers model whose head returns logits."""


class ModelError(UserError):
    """Raised if a model folder cannot be used for its role."""


def load_policy(config: ModelConfig, *, on_meta: bool = False) -> PreTrainedModel:
    """Loads a causal language model in evaluation mode.

    Args:
        config: path and dtype of the model. `dropout: 0` disables the model's dropout.
        on_meta: leaves the weights on the meta device. `FsdpEngine` then reads only this rank's shards.
    Raises ModelError if the folder has no causal language model, if weights are missing, or if the model has dropout
    that `config` does not disable.
    """
    return _load(AutoModelForCausalLM, config, "a causal language model", on_meta)


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
    return embeddings.weight.shape[0]


def _draw_head(head: nn.Linear, seed: int) -> None:
    """Draws head weights with variance 1 / (width + 1), identical on every rank (arXiv 2009.01325, appendix B.1)."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(head.weight.shape, generator=generator) * (head.in_features + 1) ** -0.5
    with torch.no_grad():
        head.weight.copy_(weight)


def load_critic(
    config: ModelConfig, *, head: Literal["zero", "fresh"] = "zero", seed: int = 0, on_meta: bool = False
) -> CriticModel:
    """Loads a critic from any causal language model, in evaluation mode.

    Args:
        config: as in `load_policy`.
        head: initialization of the value head if the folder has none. A value head that `save_model` wrote is loaded
            instead.
        seed: seed of a fresh head.
        on_meta: see `load_policy`.
    Raises the errors of `load_policy`.
    """
    critic = CriticModel(_load(AutoModel, config, "a language model", on_meta), head=head, seed=seed)
    saved = config.path / _VALUE_HEAD
    if saved.is_file():
        weights = load_file(saved)
        for name, weight in weights.items():
            check_finite(weight, name, saved)
        critic.value_head.load_state_dict(weights)
    return critic.eval()


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
    config: ModelConfig, *, head: Literal["from_model", "fresh"] = "from_model", seed: int = 0, on_meta: bool = False
) -> RewardModel:
    """Loads a sequence-classification model with one label, in evaluation mode.

    Args:
        config: as in `load_policy`. A fresh head also allows any causal language model.
        head: "from_model" loads the model's head. "fresh" draws head weights from N(0, 1 / (width + 1)), without bias.
        seed: seed of a fresh head.
        on_meta: see `load_policy`.
    Raises the errors of `load_policy`.
    """
    model = _load(
        AutoModelForSequenceClassification,
        config,
        "a sequence-classification model",
        on_meta,
        fresh=frozenset({f"{_SCORE}.weight"} if head == "fresh" else ()),
        num_labels=1,
    )
    reward_model = _with_score(model, config.path)
    if head == "fresh":
        _draw_head(reward_model.head, seed)
    return reward_model.eval()


def _with_score(model: PreTrainedModel, path: Path) -> RewardModel:
    """Returns the reward model of a sequence-classification model. Raises ModelError if its head is unsuitable."""
    score = dict(model.named_children()).get(_SCORE)
    if not isinstance(score, nn.Linear):
        raise ModelError(f"the model in {path} has no linear head named score; use a decoder with such a head")
    return RewardModel(model, score)


Policy = PreTrainedModel
"""A causal language model."""

TrainedModel = Policy | CriticModel | RewardModel


def save_model(model: TrainedModel, tokenizer_path: Path, folder: Path, *, is_writer: bool = True) -> None:
    """Saves a model and its tokenizer to a folder that transformers can load. The folder is created atomically.

    Adapters are merged into the saved weights, but not in `model`. A reward model is saved with a pad token that never
    ends a row. All ranks of a sharded model must call this together. Only the rank with `is_writer` writes files.

    Raises ModelError if the folder already exists, and UserError if the folder cannot be written.
    """
    if is_writer and folder.exists():  # other ranks may arrive after the writer has finished
        raise ModelError(f"{folder} already exists and would be overwritten: choose a new folder")
    weights, full = {}, {}
    for name, weight in model_weights(model).items():
        # Tied names share one tensor, which transformers then saves once.
        if id(weight.stored) not in full:
            gathered = weight.gather()
            full[id(weight.stored)] = gathered.cpu() if is_writer else None
        weights[name] = full[id(weight.stored)]
    if not is_writer:
        return
    heads = {name.removeprefix("value_head."): weights.pop(name) for name in list(weights) if "value_head." in name}
    language_model, prefix = _inner_model(model)
    with write_atomically(folder) as partial, _quiet():
        state_dict = {name.removeprefix(prefix): weight for name, weight in weights.items()}
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, local_files_only=True)
        if isinstance(model, RewardModel):
            _save_reward_model(language_model, state_dict, tokenizer, partial)
        else:
            language_model.save_pretrained(partial, state_dict=state_dict)
        tokenizer.save_pretrained(partial)
        if heads:
            save_file({name: weight.contiguous() for name, weight in heads.items()}, partial / _VALUE_HEAD)


def _save_reward_model(
    model: PreTrainedModel,
    state_dict: dict[str, Tensor],
    tokenizer: Any,  # Any: as in flowrl.data.chat
    folder: Path,
) -> None:
    """Saves a sequence classifier with the pad token of `_set_pad_token`, which the tokenizer also gets."""
    _set_pad_token(tokenizer)
    _add_embedding(model, state_dict, tokenizer.pad_token_id)
    model.save_pretrained(folder, state_dict=state_dict)
    config = deepcopy(model.config)  # the model continues to train with its own config
    text = config.get_text_config()
    text.pad_token_id = tokenizer.pad_token_id
    text.vocab_size = max(text.vocab_size, tokenizer.pad_token_id + 1)
    config.save_pretrained(folder)


def _set_pad_token(tokenizer: Any) -> None:  # Any: as in flowrl.data.chat
    """Sets a pad token that is never the last token of a row: bos if it differs from eos, otherwise a new token.

    Many tokenizers use eos as the pad token. transformers would then skip the final eos, which `RewardModel` scores.
    Other pad tokens are replaced, too, because a conversation template may end a response with them.
    """
    bos = tokenizer.bos_token
    tokenizer.add_special_tokens({"pad_token": bos if bos and bos != tokenizer.eos_token else _NEW_PAD_TOKEN})


def _add_embedding(model: PreTrainedModel, state_dict: dict[str, Tensor], token: int) -> None:
    """Adds zero rows to the input embeddings in `state_dict`, if they lack a row for the token."""
    embeddings = model.get_input_embeddings()
    name = next(f"{name}.weight" for name, module in model.named_modules() if module is embeddings)
    if (num_missing := token + 1 - len(state_dict[name])) > 0:
        state_dict[name] = nn.functional.pad(state_dict[name], (0, 0, 0, num_missing))


def describe_model(model: TrainedModel) -> dict[str, bytes]:
    """Returns the files that `save_model` writes, except those of weights and tokenizer, as name -> contents."""
    model, _ = _inner_model(model)
    with TemporaryDirectory() as name, _quiet():
        model.config.save_pretrained(name)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(name)
        return _files_in(name)


def describe_tokenizer(path: Path) -> dict[str, bytes]:
    """Returns the files of a tokenizer, as name -> contents."""
    with TemporaryDirectory() as name, _quiet():
        AutoTokenizer.from_pretrained(path, local_files_only=True).save_pretrained(name)
        return _files_in(name)


def _files_in(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def build_policy(description: Path, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """Builds a causal language model from the files of `describe_model` and from full weights. Does not copy the
    weights.

    Raises ModelError if the weights do not match the model.
    """
    return _build(AutoModelForCausalLM, description, weights)


def build_critic(description: Path, weights: Mapping[str, Tensor]) -> CriticModel:
    """Builds a critic. The arguments and errors are those of `build_policy`."""
    head, prefix = "value_head.", "backbone."
    backbone = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
    critic = CriticModel(_build(AutoModel, description, backbone))
    trained = {name.removeprefix(head): weight for name, weight in weights.items() if name.startswith(head)}
    critic.value_head.load_state_dict(trained, assign=True)
    return critic


def build_reward_model(description: Path, weights: Mapping[str, Tensor]) -> RewardModel:
    """Builds a reward model. The arguments and errors are those of `build_policy`."""
    return _with_score(_build(AutoModelForSequenceClassification, description, weights), description)


def _build(auto: Any, description: Path, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    with _quiet(), torch.device("meta"):
        model = auto.from_config(AutoConfig.from_pretrained(description, local_files_only=True))
    if (description / _GENERATION_CONFIG).is_file():  # it may have more end tokens than the configuration
        model.generation_config = GenerationConfig.from_pretrained(description, local_files_only=True)
    mismatch = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    missing = [name for name, weight in model.named_parameters() if weight.is_meta]
    if missing or mismatch.unexpected_keys:
        names = ", ".join((missing or mismatch.unexpected_keys)[:3])
        raise ModelError(f"the weights do not match the model described in {description}: see {names}")
    return model


def _inner_model(model: TrainedModel) -> tuple[PreTrainedModel, str]:
    """Returns the transformers model inside `model`, and the prefix that `model` adds to weight names."""
    if isinstance(model, PreTrainedModel):
        return model, ""
    return (model.backbone, "backbone.") if isinstance(model, CriticModel) else (model.model, "model.")


def _load(
    auto: Any,  # Any: one of transformers' Auto classes, which share no typed base
    config: ModelConfig,
    kind: str,
    on_meta: bool,
    fresh: frozenset[str] = frozenset(),
    **settings: Any,  # Any: of a configuration
) -> PreTrainedModel:
    """Loads a model of the transformers class `auto`. Weights named in `fresh` may be missing in the files."""
    if (config.path / "adapter_config.json").is_file():
        raise ModelError(f"{config.path} is an adapter, not {kind}: merge it into its model first")
    if config.dropout is not None:
        settings |= dict.fromkeys(_dropout_settings(_read_config(config, kind)), 0.0)
    model = None
    if on_meta:
        # If this fails, `_load_full` reports the error.
        with suppress(OSError, ValueError, SafetensorError), _quiet():
            model = make_meta_model(auto, config.path, torch_dtype(config.dtype), fresh, **settings)
    if model is None:
        model = _load_full(auto, config, kind, fresh, settings)
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
    return model.eval()


def _read_config(config: ModelConfig, kind: str) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(
            str(config.path), trust_remote_code=False, local_files_only=config.path.is_dir()
        )
    except (OSError, ValueError) as error:
        raise _load_error(config.path, kind, error) from error


def _load_full(
    auto: Any, config: ModelConfig, kind: str, fresh: frozenset[str], settings: Mapping[str, Any]
) -> PreTrainedModel:
    try:
        with _quiet():
            model, report = auto.from_pretrained(
                str(config.path),
                dtype=torch_dtype(config.dtype),
                attn_implementation="sdpa",
                use_safetensors=True,
                trust_remote_code=False,
                # A local folder is never looked up on the Hub.
                local_files_only=config.path.is_dir(),
                output_loading_info=True,
                **settings,
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise _load_error(config.path, kind, error) from error
    except RuntimeError as error:  # shapes of weights; transformers has no class for it
        if "mismatched" not in str(error):
            raise
        raise ModelError(
            f"{kind} cannot be loaded from {config.path}: shapes of its weights differ from its config.json; use a "
            "complete directory written by save_pretrained"
        ) from error
    missing = sorted(set(report["missing_keys"]) - fresh)
    if missing:
        raise _missing_weights_error(config.path, kind, missing)
    for name, weight in model.named_parameters():
        if name not in fresh:
            check_finite(weight, name, config.path)
    return model


def _load_error(path: Path, kind: str, error: Exception) -> ModelError:
    reason = str(error).split("\n")[0]
    if "custom code" in reason:
        reason = (
            "it needs custom code, which is never run; choose a family of docs/models.md, or a copy of the model in "
            "transformers' own format"
        )
    return ModelError(f"{kind} cannot be loaded from {path}: {reason}")


def _missing_weights_error(path: Path, kind: str, missing: Sequence[str]) -> ModelError:
    is_head = missing[0].startswith(_SCORE)
    fix = "train its head first, or set head: fresh to try out a program" if is_head else "use a complete folder"
    return ModelError(f"{path} is not {kind}: it lacks the weights {', '.join(missing[:3])}; {fix}")


def has_attention_softcap(model: PreTrainedModel) -> bool:
    """Returns whether the model softcaps its attention logits, as Gemma 2 does."""
    return bool(model.config.get_text_config().to_dict().get("attn_logit_softcapping"))


def _dropout_settings(config: PreTrainedConfig) -> dict[str, float]:
    """Returns the nonzero dropout probabilities in a model configuration, by name."""
    return {
        name: value
        for name, value in config.get_text_config().to_dict().items()
        if ("dropout" in name or name.endswith(("_pdrop", "layerdrop")))
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
def _quiet() -> Iterator[None]:
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
