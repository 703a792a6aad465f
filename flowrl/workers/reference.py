"""Worker of the frozen reference policy, to which the KL divergence is measured."""

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torch import distributed, nn

from flowrl.config import ModelConfig, ReferenceConfig
from flowrl.controller.placement.plan import Mesh
from flowrl.controller.worker import Dispatch, Worker, register
from flowrl.data.batch.tensordicts import lengths, make_tensordict
from flowrl.data.chat import ChatTokenizer
from flowrl.engines.models.loading import load_policy
from flowrl.engines.models.lora import adapter_disabled
from flowrl.engines.train.engine import TrainEngine, is_sharded
from flowrl.engines.train.microbatch import MicroBatch
from flowrl.workers.actor import Actor
from flowrl.workers.model_worker import ModelWorker, build_rank_mesh, has_collective_forward
from flowrl.workers.policy_model import PolicyModel, policy_logprobs, response_logprobs

if TYPE_CHECKING:
    from flowrl.workers.groups import ReferenceGroup


UNKNOWN_LOGPROB = -20.0
"""Log-probability of a token for which the reference has no embedding. It is finite, so that losses stay finite."""


class Reference(ModelWorker["ReferenceGroup"]):
    """Worker that computes log-probabilities with a frozen causal language model.

    If an actor in the same process trains a LoRA adapter on the same model, the reference loads no weights. It then
    runs the actor's engine with the adapter disabled.
    """

    replicated = stateless = True

    def __init__(self, config: ReferenceConfig) -> None:
        self.temperature = config.temperature or 1.0
        self._tokenizer_path = config.model.tokenizer_path
        mesh = build_rank_mesh(self, config.engine)
        self._actor = self._find_base_actor(config.model)
        self.engine = (
            TrainEngine(
                PolicyModel(load_policy(config.model, on_meta=is_sharded(config.engine, mesh))),
                None,
                config.engine,
                mesh=mesh,
                device=torch.device(self.device),
            )
            if self._actor is None
            else self._actor.engine
        )
        policy = self.engine.model
        assert isinstance(policy, PolicyModel)
        self._num_embeddings = policy.num_embeddings

    def _find_base_actor(self, model: ModelConfig) -> Actor | None:
        """Returns the actor in this process if the reference can use the actor's base model instead of loading `model`.

        Returns None on all ranks of the reference if this is impossible on any of these ranks.
        """
        peer = self.find_peer(Actor)
        actor = peer if peer is not None and peer.can_replace_reference(model, self) else None
        group = self.context.process_group
        if group is not None:
            votes = torch.tensor(int(actor is not None), device=self.device)
            distributed.all_reduce(votes, distributed.ReduceOp.MIN, group=group)
            actor = actor if votes else None
        return actor

    @property
    def weight_owners(self) -> tuple[Worker, ...]:
        return () if self._actor is None else (self._actor,)

    def offload(self, *, keep_weights: bool) -> None:
        if self._actor is None:
            super().offload(keep_weights=keep_weights)

    @classmethod
    def select_class(cls, mesh: Mesh, config: ReferenceConfig, **_: Any) -> type[Worker]:  # Any: the constructor's
        """Returns the subclass with `collective = True` if several ranks must run a forward pass together. Such ranks
        cannot be restarted separately.
        """
        return _CollectiveReference if has_collective_forward(mesh, config.engine) else cls

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        blocking=False,
        reads=("input_ids", "response_mask?"),
        writes=("logprobs",),
        balance="tokens",
    )
    def logprobs(self, batch: TensorDict) -> TensorDict:
        """Returns the log-probability `[T]` of each token under the reference model.

        If the batch has the column `response_mask`, the result is 0 for tokens outside of the mask. A token for which
        the model has no embedding gets `UNKNOWN_LOGPROB`, and later tokens are conditioned on token 0 instead.
        """
        known, is_unknown_T = self._replace_unknown(batch)
        with adapter_disabled(self.engine.model):
            values_T = self.engine.evaluate(known, partial(policy_logprobs, temperature=self.temperature))
        values_T = values_T.masked_fill(is_unknown_T, UNKNOWN_LOGPROB)
        return make_tensordict(tokens={"logprobs": values_T}, lengths=lengths(batch))

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        blocking=False,
        reads=("input_ids", "response_mask"),
        writes=("response_logprobs",),
        balance="tokens",
    )
    def response_logprobs(self, batch: TensorDict) -> TensorDict:
        """Returns the log-probability of each row's response, `[B]`, summed over the tokens of `response_mask`.

        Tokens for which the model has no embedding are treated as in `logprobs`.
        """
        known, is_unknown_T = self._replace_unknown(batch)
        tokens, lengths_B = dict(known["tokens"].items()), lengths(batch)
        tokens["response_mask"] = tokens["response_mask"] & ~is_unknown_T
        known = make_tensordict(tokens=tokens, lengths=lengths_B)
        with adapter_disabled(self.engine.model):
            values_B = self.engine.evaluate_rows(known, partial(response_logprobs, temperature=self.temperature))
        rows_T = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)
        values_B = values_B + UNKNOWN_LOGPROB * rows_T[is_unknown_T].bincount(minlength=len(lengths_B))
        return make_tensordict({"response_logprobs": values_B})

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        blocking=False,
        reads=("input_ids", "response_mask?"),
        writes=("topk_ids", "topk_logprobs"),
        balance="tokens",
    )
    def topk(self, batch: TensorDict, k: int) -> TensorDict:
        """Returns the `k` most likely tokens of each position and their log-probabilities, each `[T, k]`, for
        distillation.

        The tokens at position t are predictions of token t. Both columns are 0 at position 0, and outside
        `response_mask` if the batch has this column. Only tokens of the tokenizer are candidates, because another model
        with the same tokenizer may have fewer unused embeddings. The log-probabilities are not renormalized.
        """
        known, _ = self._replace_unknown(batch)
        topk = partial(_topk, k=k, num_tokens=self._num_tokens, temperature=self.temperature)
        with adapter_disabled(self.engine.model):
            values_TK2 = self.engine.evaluate(known, topk)
        if not len(values_TK2):
            values_TK2 = values_TK2.new_zeros(0, k, 2)
        tokens = {"topk_ids": values_TK2[..., 0].int(), "topk_logprobs": values_TK2[..., 1].contiguous()}
        return make_tensordict(tokens=tokens, lengths=lengths(batch))

    @cached_property
    def _num_tokens(self) -> int:
        """Largest token id of the tokenizer, plus 1."""
        return ChatTokenizer(self._tokenizer_path).num_ids

    def _replace_unknown(self, batch: TensorDict) -> tuple[TensorDict, torch.Tensor]:
        """Returns the batch with token 0 in place of tokens for which the model has no embedding.

        Also returns the mask [T] of those among them that have a log-probability: tokens of `response_mask`, if the
        batch has this column, except the first token of each row. A student may sample one of its unused embeddings,
        which the teacher does not have.
        """
        ids_T, lengths_B = batch["tokens", "input_ids"], lengths(batch)
        is_unknown_T = ids_T >= self._num_embeddings
        if not is_unknown_T.any():
            return batch, is_unknown_T
        tokens = dict(batch["tokens"].items()) | {"input_ids": ids_T.masked_fill(is_unknown_T, 0)}
        is_unknown_T = is_unknown_T & tokens.get("response_mask", torch.ones_like(is_unknown_T))
        is_unknown_T[(lengths_B.cumsum(0) - lengths_B)[lengths_B > 0]] = False
        return make_tensordict(tokens=tokens, lengths=lengths_B), is_unknown_T


def _topk(model: nn.Module, micro: MicroBatch, *, k: int, num_tokens: int, temperature: float) -> torch.Tensor:
    mask_BL = micro.tokens.get("response_mask", micro.mask)
    output = model(micro.input_ids, mask_BL, temperature, pack=micro.pack, topk=k, num_tokens=num_tokens)
    # One tensor, because `evaluate` returns one. Ids up to 2^24 are exact in float32.
    values_BLK2 = torch.stack([output.topk_ids.to(output.topk_logprobs.dtype), output.topk_logprobs], dim=-1)
    return values_BLK2.masked_fill(~mask_BL[..., None, None], 0)


class _CollectiveReference(Reference):
    collective, replicated, stateless = True, False, False
