"""A causal language model that answers with the log-probabilities of tokens instead of logits.

Shape suffixes: B rows, L the longest row, l a rank's stretch of it, D hidden size, V vocabulary.
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
from flowrl.engines.models.loading import LanguageModel
from flowrl.engines.models.packing import Pack
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
"""Vocabularies from here on never have their logits in memory at once; smaller ones fit, and that is faster."""


def policy_logprobs(model: nn.Module, micro: MicroBatch, *, temperature: float) -> Tensor:
    """Log-probability [B, L] of every token of a micro-batch given those before it; 0 at position 0."""
    return model(micro.input_ids, micro.mask, temperature, pack=micro.pack)[0]


class PolicyModel(SequenceShardable):
    """What the actor trains and the reference runs. The language model stays usable by others."""

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
        """Log-probability of every token given those before it, and the entropy of what it was drawn from.

        Args:
            input_ids_BL: int64 [B, L], right-padded.
            mask_BL: bool [B, L], the tokens that are wanted; what stands elsewhere in the results is no result.
            temperature: > 0, that of the rollout.
            entropy: whether it is wanted, and trained on.
            pack: of these rows, to run them without padding.
        Returns: both [B, L], in at least float32; 0 at position 0, and all of an entropy that is not wanted.
        """
        if pack is None:
            return self._of_rows(input_ids_BL, mask_BL, temperature, entropy, None)
        # Nothing comes before a row's first token, though in a pack the end of another row stands there.
        wanted_1T = pack.pack(mask_BL) & (pack.positions_T > 0)
        found = self._of_rows(pack.pack(input_ids_BL), wanted_1T, temperature, entropy, pack)
        logprobs_BL, entropy_BL = (pack.unpack(x_1T, input_ids_BL.shape)[:, 1:] for x_1T in found)
        return nn.functional.pad(logprobs_BL, (1, 0)), nn.functional.pad(entropy_BL, (1, 0))

    def _of_rows(
        self, input_ids_BL: Tensor, mask_BL: Tensor, temperature: float, entropy: str, pack: Pack | None
    ) -> tuple[Tensor, Tensor]:
        hidden_BlD = run_backbone(self.language_model.base_model, input_ids_BL, self.sequence_sharding, pack)
        if self.sequence_sharding is None:
            return self._reduce(hidden_BlD, input_ids_BL, mask_BL, temperature, entropy)
        # A stretch's last state chooses the token after it, so that its targets are one longer.
        hidden_BlD = nn.functional.pad(hidden_BlD, (0, 0, 0, 1))
        targets_Bl, wanted_Bl = (local_targets(x_BL, self.sequence_sharding) for x_BL in (input_ids_BL, mask_BL))
        found = self._reduce(hidden_BlD, targets_Bl, wanted_Bl, temperature, entropy)
        length = input_ids_BL.shape[1]
        logprobs_BL, entropy_BL = (
            gather_sequence(x_Bl[:, 1:], length, self.sequence_sharding)[:, :-1] for x_Bl in found
        )
        return nn.functional.pad(logprobs_BL, (1, 0)), nn.functional.pad(entropy_BL, (1, 0))

    def _reduce(
        self, hidden_BlD: Tensor, targets_Bl: Tensor, wanted_Bl: Tensor, temperature: float, entropy: str
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
        weights = (weight, targets_Bl, wanted_Bl)
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
