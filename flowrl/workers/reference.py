"""Worker of the frozen reference policy, from which the KL divergence is measured."""

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torch import distributed

from flowrl.config import ModelConfig, ReferenceConfig
from flowrl.controller.placement.plan import Mesh
from flowrl.controller.worker import Dispatch, Worker, register
from flowrl.data.batch.tensordicts import lengths, make_tensordict, sum_tokens
from flowrl.data.chat import ChatTokenizer
from flowrl.engines.train.base import Outputs
from flowrl.workers.actor import Actor, policy_columns
from flowrl.workers.model_worker import ModelWorker, has_collective_forward, start_engine

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
        self._actor = self._find_base_actor(config.model)
        if self._actor is None:
            self.engine = start_engine(self, "policy", config)
        else:
            self.engine, self.offloads_when_idle = self._actor.engine, self._actor.offloads_when_idle
        self._num_embeddings = self.engine.num_embeddings

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
        the model has no embedding gets `UNKNOWN_LOGPROB`, and later tokens are conditioned on token 0 in its place.
        """
        known, is_unknown_T = self._replace_unknown(batch)
        values_T = self._logprobs(known).masked_fill(is_unknown_T, UNKNOWN_LOGPROB)
        return make_tensordict(tokens={"logprobs": values_T}, lengths=lengths(batch))

    def _logprobs(self, batch: TensorDict) -> torch.Tensor:
        columns = policy_columns(self.engine, batch, self.temperature, without_adapter=True)
        return columns["tokens", "logprobs"]

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
        values_B = sum_tokens(self._logprobs(known), tokens["response_mask"], lengths_B)
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
        outputs = Outputs(
            ("topk_ids", "topk_logprobs"),
            "response_mask" if "response_mask" in known["tokens"].keys() else None,  # noqa: SIM118 (a TensorDict)
            self.temperature,
            topk=k,
            num_tokens=self._num_tokens,
            without_adapter=True,
        )
        values = self.engine.forward(known, outputs)
        tokens = {"topk_ids": values["topk_ids"].int(), "topk_logprobs": values["topk_logprobs"]}
        return make_tensordict(tokens=tokens, lengths=lengths(batch))

    @cached_property
    def _num_tokens(self) -> int:
        """Largest token id of the tokenizer, plus 1."""
        return ChatTokenizer(self._tokenizer_path).num_ids

    def _replace_unknown(self, batch: TensorDict) -> tuple[TensorDict, torch.Tensor]:
        """Returns the batch with token 0 in place of tokens for which the model has no embedding.

        Also returns the mask [T] of the replaced tokens that have a log-probability. The mask excludes the first token
        of each row, and tokens outside `response_mask` if the batch has this column. Unknown tokens occur because a
        student may sample an unused embedding that the teacher lacks.
        """
        ids_T, lengths_B = batch["tokens", "input_ids"], lengths(batch)
        is_unknown_T = ids_T >= self._num_embeddings
        if not is_unknown_T.any():
            return batch, is_unknown_T
        tokens = dict(batch["tokens"].items()) | {"input_ids": ids_T.masked_fill(is_unknown_T, 0)}
        is_unknown_T = is_unknown_T & tokens.get("response_mask", torch.ones_like(is_unknown_T))
        is_unknown_T[(lengths_B.cumsum(0) - lengths_B)[lengths_B > 0]] = False
        return make_tensordict(tokens=tokens, lengths=lengths_B), is_unknown_T


class _CollectiveReference(Reference):
    collective, replicated, stateless = True, False, False
