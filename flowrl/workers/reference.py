"""Reference: the frozen policy from which the KL is measured."""

from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import distributed

from flowrl.config import ModelConfig, ReferenceConfig
from flowrl.controller.placement.plan import Mesh
from flowrl.controller.worker import Dispatch, Worker, register
from flowrl.data.batch.tensordicts import lengths, make_tensordict
from flowrl.engines.models.loading import load_policy
from flowrl.engines.models.lora import adapter_disabled
from flowrl.engines.train.engine import TrainEngine, is_sharded
from flowrl.workers.actor import Actor
from flowrl.workers.model_worker import ModelWorker
from flowrl.workers.policy_model import PolicyModel, policy_logprobs
from flowrl.workers.role_mesh import mesh_of, shares_model


class Reference(ModelWorker):
    """A causal language model that nothing changes; `temperature` as the actor's.

    In one process with an actor that trains an adapter on the same model it is the actor without its adapter: it holds
    no weights, and runs by the actor's engine.
    """

    replicated = stateless = True

    def __init__(self, config: ReferenceConfig, *, temperature: float = 1.0) -> None:
        self.temperature = temperature
        mesh = mesh_of(self, config.engine)
        self._actor = self._actor_beside(config.model)
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

    def _actor_beside(self, model: ModelConfig) -> Actor | None:
        """The actor in this process, if its model without its adapter is the one to run."""
        actor = self.peer("actor")
        found = actor if isinstance(actor, Actor) and actor.is_reference(model, self) else None
        group = self.context.process_group
        if group is not None:
            # Ranks that would run a model of their own together must all have found one, or none.
            votes = torch.tensor(int(found is not None), device=self.device)
            distributed.all_reduce(votes, distributed.ReduceOp.MIN, group=group)
            found = found if votes else None
        return found

    @property
    def weight_owners(self) -> tuple[Worker, ...]:
        return () if self._actor is None else (self._actor,)

    def offload(self, *, keep_weights: bool) -> None:
        if self._actor is None:
            super().offload(keep_weights=keep_weights)

    @classmethod
    def select_class(cls, mesh: Mesh, config: ReferenceConfig, **_: Any) -> type[Worker]:  # Any: the constructor's
        """Ranks that hold a model together talk, and none of them can be replaced alone."""
        return _SharedReference if shares_model(mesh, config.engine) else cls

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("input_ids",), writes=("logprobs",))
    def logprobs(self, batch: TensorDict) -> TensorDict:
        """Log-probability `[T]` of every token under the reference."""
        with adapter_disabled(self.engine.model):
            values_T = self.engine.evaluate(batch, partial(policy_logprobs, temperature=self.temperature))
        return make_tensordict(tokens={"logprobs": values_T}, lengths=lengths(batch))


class _SharedReference(Reference):
    collective, replicated, stateless = True, False, False
