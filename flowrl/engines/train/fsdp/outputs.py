"""The outputs of each kind of model for a micro-batch. A causal language model returns log-probabilities and entropies
instead of logits.

Shape suffixes: B rows, L tokens of the longest row, l tokens of a sequence shard, D hidden size, V vocabulary, K
candidate tokens of a position.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from flowrl.algorithms import (
    candidate_logprobs,
    logprobs_and_entropy_from_hidden,
    logprobs_from_hidden,
    token_entropy,
    token_logprobs,
    top_tokens_from_hidden,
)
from flowrl.config import UserError
from flowrl.engines.models.attention import Pack
from flowrl.engines.models.loading import LanguageModel, num_embeddings
from flowrl.engines.models.sequence_sharding import (
    SequenceShardable,
    gather_sequence,
    head_weights,
    local_targets,
    run_backbone,
    run_head,
)
from flowrl.engines.train.base import Outputs
from flowrl.engines.train.microbatch import MicroBatch

_TILED_FROM = 8192
"""Vocabulary size from which logits are computed in tiles. For smaller vocabularies, a single pass is faster."""


class PolicyOutput(NamedTuple):
    """Results of a forward pass. All results except ids and hidden states have at least float32. All except hidden
    states are 0 at position 0.
    """

    logprobs: Tensor
    """Log-probability of each token given the previous tokens, [B, L]."""
    entropy: Tensor
    """Entropy of the distribution of each token, [B, L]. Zeros if it is not requested."""
    topk_ids: Tensor | None = None
    """Candidate tokens of each position, int64 [B, L, K]. None unless requested."""
    topk_logprobs: Tensor | None = None
    """Log-probabilities of the candidate tokens, [B, L, K]. None unless requested."""
    hidden: Tensor | None = None
    """Last hidden states, [B, L, D], in the dtype of the model. None unless requested."""

    def convert_tokens(self, convert: Callable[[Tensor], Tensor]) -> "PolicyOutput":
        """Applies a function to all outputs except the hidden states, and returns the new outputs."""
        candidates = (None if x is None else convert(x) for x in (self.topk_ids, self.topk_logprobs))
        return PolicyOutput(convert(self.logprobs), convert(self.entropy), *candidates, hidden=self.hidden)


@dataclass(frozen=True)
class _Request:
    """The outputs to compute, and the settings of the distribution."""

    temperature: float
    entropy: Literal["none", "value", "gradient"]
    topk: int
    num_tokens: int
    has_hidden: bool
    num_targets: int | None


class PolicyModel(SequenceShardable):
    """Wraps a language model without changing it. A rollout can therefore share the language model."""

    def __init__(self, language_model: LanguageModel) -> None:
        super().__init__()
        self.language_model = language_model
        self.compiles_head = False
        """Whether the operations of the head on a tile of the logits are compiled."""

    def forward(
        self,
        input_ids_BL: Tensor,
        mask_BL: Tensor,
        temperature: float = 1.0,
        entropy: Literal["none", "value", "gradient"] = "none",
        pack: Pack | None = None,
        *,
        topk: Tensor | int = 0,
        num_tokens: int | None = None,
        has_hidden: bool = False,
        num_targets: int | None = None,
    ) -> PolicyOutput:
        """Returns the log-probability of each token given the previous tokens, and other requested outputs.

        Args:
            input_ids_BL: right-padded token ids, int64 [B, L].
            mask_BL: tokens to compute, bool [B, L]. Results at other tokens are undefined.
            temperature: sampling temperature of the rollout, > 0.
            entropy: "none" returns zeros, "value" a detached entropy, and "gradient" a differentiable entropy.
            pack: packed layout of the rows. None for padded rows.
            topk: candidate tokens whose log-probabilities are computed. Either their ids, int64 [B, L, K], or the
                number of most likely tokens of this model. 0 computes none.
            num_tokens: only ids below `num_tokens` are candidates for the most likely tokens. None allows all ids.
            has_hidden: whether to return hidden states.
            num_targets: number of tokens in the mask, except the first token of each row. None reads the number from
                the device.
        """
        ids_BLK, num_top = (topk, 0) if isinstance(topk, Tensor) else (None, topk)
        num_ids = num_embeddings(self.language_model)
        num_tokens = min(num_tokens or num_ids, num_ids)
        if self.sequence_sharding is not None:
            num_targets = None  # a sequence shard has only some of the targets
        request = _Request(temperature, entropy, num_top, num_tokens, has_hidden, num_targets)
        if pack is None:
            return self._run_rows(input_ids_BL, mask_BL, ids_BLK, request, None)
        # In a pack, the token before a row's first token belongs to another row.
        mask_1T = pack.pack(mask_BL) & (pack.positions_T > 0)
        ids_1TK = None if ids_BLK is None else pack.pack(ids_BLK)
        flat = self._run_rows(pack.pack(input_ids_BL), mask_1T, ids_1TK, request, pack)
        shape = input_ids_BL.shape
        output = flat.convert_tokens(lambda x_1T: _shift(pack.unpack(x_1T, shape)[:, 1:]))
        return output._replace(hidden=None if flat.hidden is None else pack.unpack(flat.hidden, shape))

    def _run_rows(
        self, input_ids_BL: Tensor, mask_BL: Tensor, ids_BLK: Tensor | None, request: _Request, pack: Pack | None
    ) -> PolicyOutput:
        sharding = self.sequence_sharding
        hidden_BlD = run_backbone(self.language_model.base_model, input_ids_BL, sharding, pack)
        if sharding is None:
            output = self._reduce(hidden_BlD, input_ids_BL, mask_BL, ids_BLK, request)
            return output._replace(hidden=hidden_BlD if request.has_hidden else None)
        # The last state of a sequence shard predicts the first token of the next shard.
        next_BlD = nn.functional.pad(hidden_BlD, (0, 0, 0, 1))
        targets_Bl, mask_Bl = (local_targets(x_BL, sharding) for x_BL in (input_ids_BL, mask_BL))
        ids_BlK = None if ids_BLK is None else local_targets(ids_BLK, sharding)
        shards = self._reduce(next_BlD, targets_Bl, mask_Bl, ids_BlK, request)
        length = input_ids_BL.shape[1]
        output = shards.convert_tokens(lambda x_Bl: _shift(gather_sequence(x_Bl[:, 1:], length, sharding)[:, :-1]))
        return output._replace(hidden=gather_sequence(hidden_BlD, length, sharding) if request.has_hidden else None)

    def _reduce(
        self, hidden_BlD: Tensor, targets_Bl: Tensor, mask_Bl: Tensor, ids_BlK: Tensor | None, request: _Request
    ) -> PolicyOutput:
        head = self.language_model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        if request.topk > request.num_tokens:
            raise UserError(
                f"{request.topk} most likely tokens are requested of a model with a vocabulary of {request.num_tokens} "
                f"tokens: request at most {request.num_tokens}"
            )
        settings = self.language_model.config.get_text_config()
        softcap = getattr(settings, "final_logit_softcapping", None)
        if len(head.weight) < _TILED_FROM:
            logits_BlV = run_head(head, hidden_BlD, self.sequence_sharding)
            if softcap is not None:
                logits_BlV = softcap * torch.tanh(logits_BlV / softcap)
            return _from_logits(logits_BlV, targets_Bl, ids_BlK, request)
        weight, bias = head_weights(head, self.sequence_sharding)
        if request.topk:
            top, top_bias = weight[: request.num_tokens], None if bias is None else bias[: request.num_tokens]
            ids_BlK = top_tokens_from_hidden(
                hidden_BlD,
                top,
                mask_Bl,
                k=request.topk,
                bias=top_bias,
                softcap=softcap,
                num_targets=request.num_targets,
            )
        # One pass computes the log-probabilities of the tokens and of all candidates.
        tokens = targets_Bl if ids_BlK is None else torch.cat([targets_Bl[..., None], ids_BlK], dim=-1)
        weights = (weight, tokens, mask_Bl)
        options = {
            "bias": bias,
            "temperature": request.temperature,
            "softcap": softcap,
            "num_targets": request.num_targets,
            "compiled": self.compiles_head,
        }
        if request.entropy == "none":
            logprobs = logprobs_from_hidden(hidden_BlD, *weights, **options)
            entropy_Bl = torch.zeros_like(mask_Bl, dtype=logprobs.dtype)
        else:
            logprobs, entropy_Bl = logprobs_and_entropy_from_hidden(hidden_BlD, *weights, **options)
            entropy_Bl = entropy_Bl if request.entropy == "gradient" else entropy_Bl.detach()
        if ids_BlK is None:
            return PolicyOutput(logprobs, entropy_Bl)
        return PolicyOutput(logprobs[..., 0], entropy_Bl, ids_BlK, logprobs[..., 1:])


def _shift(values_Bl: Tensor) -> Tensor:
    """Adds a position with value 0 before the first position of [B, l, ...]."""
    return nn.functional.pad(values_Bl, (*[0, 0] * (values_Bl.dim() - 2), 1, 0))


def _from_logits(logits_BlV: Tensor, targets_Bl: Tensor, ids_BlK: Tensor | None, request: _Request) -> PolicyOutput:
    temperature = request.temperature
    logprobs_Bl = token_logprobs(logits_BlV, targets_Bl, temperature=temperature)
    if request.topk:
        ids_BlK = _shift(logits_BlV.detach()[:, :-1, : request.num_tokens].topk(request.topk).indices)
    topk_BlK = None if ids_BlK is None else candidate_logprobs(logits_BlV, ids_BlK, temperature=temperature)
    if request.entropy == "none":
        return PolicyOutput(logprobs_Bl, torch.zeros_like(logprobs_Bl), ids_BlK, topk_BlK)
    with torch.set_grad_enabled(request.entropy == "gradient" and torch.is_grad_enabled()):
        entropy_Bl = token_entropy(logits_BlV, temperature=temperature)
    return PolicyOutput(logprobs_Bl, entropy_Bl, ids_BlK, topk_BlK)


Compute = Callable[[nn.Module, MicroBatch, Outputs], Mapping[str, Tensor]]
"""Type of a function that returns the outputs of a model for a micro-batch. Values at tokens outside `Outputs.mask` are
undefined.
"""


def policy_outputs(model: nn.Module, micro: MicroBatch, outputs: Outputs) -> dict[str, Tensor]:
    """Returns the outputs of a `PolicyModel`."""
    names = outputs.names
    topk = 0
    if "topk_logprobs" in names or "topk_ids" in names:
        topk = outputs.topk if isinstance(outputs.topk, int) else micro.tokens[outputs.topk].long()
    output = model(
        micro.input_ids,
        outputs.mask_of(micro),
        outputs.temperature,
        "none" if "entropy" not in names else "value" if "entropy" in outputs.detached else "gradient",
        micro.pack,
        topk=topk,
        num_tokens=outputs.num_tokens,
        has_hidden="hidden" in names,
        num_targets=micro.num_targets,
    )
    return {name: getattr(output, name) for name in names}


def value_outputs(model: nn.Module, micro: MicroBatch, outputs: Outputs) -> dict[str, Tensor]:
    """Returns the values of a `CriticModel`."""
    return {"values": model(micro.input_ids, micro.pack)}


def score_outputs(model: nn.Module, micro: MicroBatch, outputs: Outputs) -> dict[str, Tensor]:
    """Returns the scores of a `RewardModel`."""
    return {"scores": model(micro.input_ids, micro.lengths, micro.pack)}
