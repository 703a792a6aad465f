"""Causal language model that returns token log-probabilities and entropies instead of logits.

Shape suffixes: B rows, L tokens of the longest row, l tokens of a sequence shard, D hidden size, V vocabulary.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from flowrl.algorithms import (
    logprobs_and_entropy_from_hidden,
    logprobs_from_hidden,
    token_entropy,
    token_logprobs,
)
from flowrl.engines.models.attention import Pack
from flowrl.engines.models.loading import LanguageModel
from flowrl.engines.models.sequence_sharding import (
    SequenceShardable,
    gather_sequence,
    head_weights,
    local_targets,
    run_backbone,
    run_head,
)
from flowrl.engines.train.microbatch import MicroBatch

_TILED_FROM = 8192
"""Vocabulary size from which logits are computed in tiles. For smaller vocabularies, a single pass is faster."""


def policy_logprobs(model: nn.Module, micro: MicroBatch, *, temperature: float) -> Tensor:
    """Returns the log-probability [B, L] of each token given the previous tokens. It is 0 at position 0."""
    return model(micro.input_ids, micro.mask, temperature, pack=micro.pack)[0]


class PolicyModel(SequenceShardable):
    """Wraps a language model without changing it. A rollout can therefore share the language model."""

    def __init__(self, language_model: LanguageModel) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(
        self,
        input_ids_BL: Tensor,
        mask_BL: Tensor,
        temperature: float = 1.0,
        entropy: Literal["none", "value", "gradient"] = "none",
        pack: Pack | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the log-probability of each token given the previous tokens, and the entropy of the distribution.

        Args:
            input_ids_BL: right-padded token ids, int64 [B, L].
            mask_BL: tokens to compute, bool [B, L]. Results at other tokens are undefined.
            temperature: sampling temperature of the rollout, > 0.
            entropy: "none" returns zeros, "value" a detached entropy, and "gradient" a differentiable entropy.
            pack: packed layout of the rows. None for padded rows.
        Returns: a tuple (logprobs, entropy), each [B, L] in at least float32 and 0 at position 0.
        """
        if pack is None:
            return self._run_rows(input_ids_BL, mask_BL, temperature, entropy, None)
        # In a pack, the token before a row's first token belongs to another row.
        mask_1T = pack.pack(mask_BL) & (pack.positions_T > 0)
        flat = self._run_rows(pack.pack(input_ids_BL), mask_1T, temperature, entropy, pack)
        logprobs_BL, entropy_BL = (pack.unpack(x_1T, input_ids_BL.shape)[:, 1:] for x_1T in flat)
        return nn.functional.pad(logprobs_BL, (1, 0)), nn.functional.pad(entropy_BL, (1, 0))

    def _run_rows(
        self, input_ids_BL: Tensor, mask_BL: Tensor, temperature: float, entropy: str, pack: Pack | None
    ) -> tuple[Tensor, Tensor]:
        hidden_BlD = run_backbone(self.language_model.base_model, input_ids_BL, self.sequence_sharding, pack)
        if self.sequence_sharding is None:
            return self._reduce(hidden_BlD, input_ids_BL, mask_BL, temperature, entropy)
        # The last state of a sequence shard predicts the first token of the next shard.
        hidden_BlD = nn.functional.pad(hidden_BlD, (0, 0, 0, 1))
        targets_Bl, mask_Bl = (local_targets(x_BL, self.sequence_sharding) for x_BL in (input_ids_BL, mask_BL))
        shards = self._reduce(hidden_BlD, targets_Bl, mask_Bl, temperature, entropy)
        length = input_ids_BL.shape[1]
        logprobs_BL, entropy_BL = (
            gather_sequence(x_Bl[:, 1:], length, self.sequence_sharding)[:, :-1] for x_Bl in shards
        )
        return nn.functional.pad(logprobs_BL, (1, 0)), nn.functional.pad(entropy_BL, (1, 0))

    def _reduce(
        self, hidden_BlD: Tensor, targets_Bl: Tensor, mask_Bl: Tensor, temperature: float, entropy: str
    ) -> tuple[Tensor, Tensor]:
        head = self.language_model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        settings = self.language_model.config.get_text_config()
        softcap = getattr(settings, "final_logit_softcapping", None)
        if len(head.weight) < _TILED_FROM:
            logits_BlV = run_head(head, hidden_BlD, self.sequence_sharding)
            if softcap is not None:
                logits_BlV = softcap * torch.tanh(logits_BlV / softcap)
            return _from_logits(logits_BlV, targets_Bl, temperature, entropy)
        weight, bias = head_weights(head, self.sequence_sharding)
        weights = (weight, targets_Bl, mask_Bl)
        options = {"bias": bias, "temperature": temperature, "softcap": softcap}
        if entropy == "none":
            logprobs_Bl = logprobs_from_hidden(hidden_BlD, *weights, **options)
            return logprobs_Bl, torch.zeros_like(logprobs_Bl)
        logprobs_Bl, entropy_Bl = logprobs_and_entropy_from_hidden(hidden_BlD, *weights, **options)
        return logprobs_Bl, entropy_Bl if entropy == "gradient" else entropy_Bl.detach()


def _from_logits(logits_BlV: Tensor, targets_Bl: Tensor, temperature: float, entropy: str) -> tuple[Tensor, Tensor]:
    logprobs_Bl = token_logprobs(logits_BlV, targets_Bl, temperature=temperature)
    if entropy == "none":
        return logprobs_Bl, torch.zeros_like(logprobs_Bl)
    with torch.set_grad_enabled(entropy == "gradient" and torch.is_grad_enabled()):
        return logprobs_Bl, token_entropy(logits_BlV, temperature=temperature)
