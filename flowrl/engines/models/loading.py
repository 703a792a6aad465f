"""Models from and to folders that transformers reads.

Shape suffixes: B rows, L tokens of the longest row, V vocabulary.

Inputs are right-padded, and causal attention keeps tokens from seeing what stands after them, so no attention mask is
passed: the fastest attention kernels take none. Code in a folder is never run; only safetensors are read.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from flowrl.config import ModelConfig, UserError
from flowrl.data.atomic_folder import appears_whole
from flowrl.engines.models.lora import model_weights
from flowrl.engines.models.packing import Pack
from flowrl.engines.models.sequence_sharding import SharesRows, Stretches, run_backbone, run_head, whole_rows
from flowrl.engines.models.sharded_loading import empty_model

_VALUE_HEAD = "value_head.safetensors"
_SCORE = "score"
"""Name of the head of transformers' sequence-classification models."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


_logger = logging.getLogger(__name__)

LanguageModel = PreTrainedModel
"""A model of transformers with a head that gives logits."""


class ModelError(UserError):
    """A model folder is not what its role needs."""


def load_policy(config: ModelConfig, *, parts: bool = False) -> PreTrainedModel:
    """A causal language model in evaluation mode.

    Args:
        config: where it is.
        parts: for an engine that cuts the model, which then reads each rank's parts: weights stay on `meta` till then.
    Raises:
        ModelError: the folder has no such model, lacks weights, or its configuration has dropout.
    """
    return _load(AutoModelForCausalLM, config, "a causal language model", parts)


class CriticModel(SharesRows):
    """The backbone of a causal language model with a linear value head."""

    def __init__(self, backbone: PreTrainedModel, *, head: Literal["zero", "fresh"] = "zero", seed: int = 0) -> None:
        """A new value head is zero, or drawn by `seed` from N(0, 1 / (width + 1))."""
        super().__init__()
        self.backbone = backbone
        self.value_head = nn.Linear(hidden_width(backbone), 1, dtype=backbone.dtype)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        if head == "fresh":
            _draw_head(self.value_head, seed)

    def forward(self, input_ids_BL: Tensor, pack: Pack | None = None) -> Tensor:
        """The value of the state in which each token is chosen.

        Args:
            input_ids_BL: int64 [B, L], right-padded.
            pack: of these rows, to run them without padding.
        Returns: [B, L] in at least float32; column t is read from the hidden state at t - 1, column 0 is 0.
        """
        values_BL = _read_tokens(self.backbone, self.value_head, input_ids_BL, self.shared, pack)
        return nn.functional.pad(values_BL[:, :-1], (1, 0))


def hidden_width(backbone: PreTrainedModel) -> int:
    """The width of a backbone's last hidden states; OPT may project them to that of its embeddings."""
    settings = backbone.config.get_text_config().to_dict()
    return settings.get("word_embed_proj_dim") or backbone.config.get_text_config().hidden_size


def _draw_head(head: nn.Linear, seed: int) -> None:
    """Of variance 1 / (width + 1), so that the outputs of normalised states vary by about 1 (Stiennon et al. 2020,
    arXiv 2009.01325, appendix B.1). The same on every rank, in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(head.weight.shape, generator=generator) * (head.in_features + 1) ** -0.5
    with torch.no_grad():
        head.weight.copy_(weight)


def load_critic(
    config: ModelConfig, *, head: Literal["zero", "fresh"] = "zero", seed: int = 0, parts: bool = False
) -> CriticModel:
    """A value model on the backbone of any causal language model; a folder written by `save_model` brings its head,
    and for another one `head` and `seed` say how it starts. `parts` as for `load_policy`.

    Raises:
        ModelError: as for `load_policy`.
    """
    critic = CriticModel(_load(AutoModel, config, "a language model", parts), head=head, seed=seed)
    saved = config.path / _VALUE_HEAD
    if saved.is_file():
        critic.value_head.load_state_dict(load_file(saved))
    return critic.eval()


class RewardModel(SharesRows):
    """A sequence-classification model with one label, read at the last token of each row."""

    def __init__(self, model: PreTrainedModel, head: nn.Linear) -> None:
        """`head` is a part of `model`."""
        super().__init__()
        self.model = model
        self._head_name = next(name for name, module in model.named_modules() if module is head)

    def forward(self, input_ids_BL: Tensor, lengths_B: Tensor, pack: Pack | None = None) -> Tensor:
        """One score per row.

        Args:
            input_ids_BL: int64 [B, L], right-padded.
            lengths_B: int64 [B], each at least 1.
            pack: of these rows, to run them without padding.
        Returns: [B] in at least float32.
        """
        head = self.model.get_submodule(self._head_name)
        assert isinstance(head, nn.Linear), "it was given as such"
        scores_BL = _read_tokens(self.model.base_model, head, input_ids_BL, self.shared, pack)
        # A row without tokens, which fills up a round, is read at its first place.
        return scores_BL.gather(1, (lengths_B - 1).clamp(min=0)[:, None]).squeeze(1)


def _read_tokens(
    backbone: nn.Module, head: nn.Linear, input_ids_BL: Tensor, shared: Stretches | None, pack: Pack | None
) -> Tensor:
    """What a head of one output reads from the hidden state at each token, [B, L] in at least float32."""
    ids_BL = input_ids_BL if pack is None else pack.flat(input_ids_BL)
    hidden_BlD = run_backbone(backbone, ids_BL, shared, pack)
    read_Bl = at_least_float32(run_head(head, hidden_BlD, shared).squeeze(-1))
    read_BL = whole_rows(read_Bl, ids_BL.shape[1], shared)
    return read_BL if pack is None else pack.rows(read_BL, input_ids_BL.shape)


def at_least_float32(values: Tensor) -> Tensor:
    """The same in float32, or in float64 where it is."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def load_reward_model(
    config: ModelConfig, *, head: Literal["from_model", "fresh"] = "from_model", seed: int = 0, parts: bool = False
) -> RewardModel:
    """A sequence-classification model with one label, in evaluation mode.

    Args:
        config: of such a model, or with a fresh head of any causal language model.
        head: the model's own, or a new one without bias, drawn by `seed` from N(0, 1 / (width + 1)).
        seed: of that draw.
        parts: as for `load_policy`.
    Raises:
        ModelError: the folder has no such model, lacks weights, or its configuration has dropout.
    """
    model = _load(
        AutoModelForSequenceClassification,
        config,
        "a sequence-classification model",
        parts,
        fresh=frozenset({f"{_SCORE}.weight"} if head == "fresh" else ()),
        num_labels=1,
    )
    score = dict(model.named_children()).get(_SCORE)
    if not isinstance(score, nn.Linear):
        raise ModelError(f"the model in {config.path} has no linear head named score; use a decoder with such a head")
    if head == "fresh":
        _draw_head(score, seed)
    return RewardModel(model, score).eval()


def save_model(
    model: PreTrainedModel | CriticModel | RewardModel, tokenizer_path: Path, folder: Path, *, wanted: bool = True
) -> None:
    """Writes a model and its tokenizer as a folder that transformers loads. The folder appears whole or not at all.

    An adapter is merged into what is written; the model keeps it apart. All ranks that hold parts of the model call it;
    those that are not wanted to write help with it.

    Raises:
        ModelError: the folder exists already.
        UserError: it cannot be written.
    """
    if wanted and folder.exists():  # a rank that comes late finds what another has written
        raise ModelError(f"{folder} exists already; a model is not written over another: name a new folder")
    weights, wholes = {}, {}
    for name, weight in model_weights(model).items():
        # One tensor for all names of a tied weight, which transformers then writes once.
        if id(weight.stored) not in wholes:
            whole = weight.whole()
            wholes[id(weight.stored)] = whole.cpu() if wanted else None
        weights[name] = wholes[id(weight.stored)]
    if not wanted:
        return
    heads = {name.removeprefix("value_head."): weights.pop(name) for name in list(weights) if "value_head." in name}
    saved, prefix = _language_model(model)
    with appears_whole(folder) as partial, _quiet():
        named = {name.removeprefix(prefix): weight for name, weight in weights.items()}
        saved.save_pretrained(partial, state_dict=named)
        AutoTokenizer.from_pretrained(tokenizer_path, local_files_only=True).save_pretrained(partial)
        if heads:
            save_file({name: weight.contiguous() for name, weight in heads.items()}, partial / _VALUE_HEAD)


def describe_model(model: PreTrainedModel, tokenizer_path: Path) -> dict[str, bytes]:
    """All files of a `save_pretrained` folder but the weights: name -> contents."""
    with TemporaryDirectory() as name, _quiet():
        model.config.save_pretrained(name)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(name)
        AutoTokenizer.from_pretrained(tokenizer_path, local_files_only=True).save_pretrained(name)
        return {path.name: path.read_bytes() for path in Path(name).iterdir() if path.is_file()}


def model_of(described: Path, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """A causal language model from its description and weights, which become its own; tied weights once.

    Raises:
        ModelError: the weights are not those of such a model.
    """
    with _quiet(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(described, local_files_only=True))
    unfit = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    lacking = [name for name, weight in model.named_parameters() if weight.is_meta]
    if lacking or unfit.unexpected_keys:
        names = ", ".join((lacking or unfit.unexpected_keys)[:3])
        raise ModelError(f"the weights do not fit the model described in {described}: see {names}")
    return model


def _language_model(model: PreTrainedModel | CriticModel | RewardModel) -> tuple[PreTrainedModel, str]:
    """The model of transformers in one of ours, and what its weights' names begin with there."""
    if isinstance(model, PreTrainedModel):
        return model, ""
    return (model.backbone, "backbone.") if isinstance(model, CriticModel) else (model.model, "model.")


def _load(
    auto: Any,  # Any: one of transformers' Auto classes, which share no typed base
    config: ModelConfig,
    wanted: str,
    parts: bool,
    fresh: frozenset[str] = frozenset(),
    **settings: Any,  # Any: of a configuration
) -> PreTrainedModel:
    """Weights named in `fresh` need not be there."""
    if (config.path / "adapter_config.json").is_file():
        raise ModelError(f"{config.path} holds an adapter, and {wanted} is needed: merge it into its model first")
    model = _load_empty(auto, config, fresh, settings) if parts else None
    if model is None:
        model = _load_whole(auto, config, wanted, fresh, settings)
        if parts:
            _logger.warning(
                "every rank loads %s whole before it is cut: its files name or shape weights otherwise than %s does",
                config.path,
                type(model).__name__,
            )
    _refuse_dropout(model, config.path)
    _refuse_scaled_logits(model, config.path)
    if caps_attention(model):
        # torch's own kernel would leave the cap out, without a word.
        model.set_attn_implementation("eager")
    return model.eval()


def _load_empty(
    auto: Any, config: ModelConfig, fresh: frozenset[str], settings: Mapping[str, Any]
) -> PreTrainedModel | None:
    try:
        with _quiet():
            return empty_model(auto, config.path, _DTYPES[config.dtype], fresh, **settings)
    except (OSError, ValueError, SafetensorError):
        # The whole load says what is wrong.
        return None


def _load_whole(
    auto: Any, config: ModelConfig, wanted: str, fresh: frozenset[str], settings: Mapping[str, Any]
) -> PreTrainedModel:
    try:
        with _quiet():
            model, report = auto.from_pretrained(
                str(config.path),
                dtype=_DTYPES[config.dtype],
                attn_implementation="sdpa",
                use_safetensors=True,
                trust_remote_code=False,
                # A path that is a folder is never looked up anywhere else.
                local_files_only=config.path.is_dir(),
                output_loading_info=True,
                **settings,
            )
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).split("\n")[0]
        if "custom code" in reason:
            reason = (
                "it brings code of its own to run, which is never done; choose a family of docs/models.md, or a copy "
                "of the model in transformers' own format"
            )
        raise ModelError(f"{wanted} cannot be loaded from {config.path}: {reason}") from error
    missing = sorted(set(report["missing_keys"]) - fresh)
    if missing:
        raise _lacking(config.path, wanted, missing)
    return model


def _lacking(path: Path, wanted: str, missing: Sequence[str]) -> ModelError:
    is_head = missing[0].startswith(_SCORE)
    fix = "train its head first, or try a program with head: fresh" if is_head else "give a folder that has them"
    return ModelError(f"{path} is not {wanted}: it lacks the weights {', '.join(missing[:3])}; {fix}")


def caps_attention(model: PreTrainedModel) -> bool:
    """Whether the model bounds its attention's logits, as Gemma 2 does."""
    return bool(model.config.get_text_config().to_dict().get("attn_logit_softcapping"))


def _refuse_dropout(model: PreTrainedModel, path: Path) -> None:
    settings = model.config.get_text_config().to_dict()
    found = [
        f"{name} is {value}"
        for name, value in settings.items()
        if ("dropout" in name or name.endswith(("_pdrop", "layerdrop")))
        # Of a head that GPT-2 has for multiple choice, and none of our models.
        and name != "summary_first_dropout"
        and isinstance(value, float)
        and value > 0
    ]
    if found:
        raise ModelError(
            f"{', '.join(found)} in {path}/config.json; with dropout the policy that is trained is not the one that "
            f"sampled: set {'it' if len(found) == 1 else 'each'} to 0.0"
        )


def _refuse_scaled_logits(model: PreTrainedModel, path: Path) -> None:
    """Log-probabilities are taken from hidden states and the head's weights, without the model's own last lines."""
    settings = model.config.get_text_config().to_dict()
    for name in ("logit_scale", "logits_scaling"):
        if settings.get(name, 1.0) not in (None, 1.0):
            raise ModelError(
                f"{name} is {settings[name]} in {path}/config.json, which is not supported: choose a model without it"
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and load reports: what matters of those is checked and raised here."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
