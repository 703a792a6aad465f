"""Reference: the frozen policy from which the KL is measured."""

from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from flowrl.config import ReferenceConfig
from flowrl.controller.plan import Mesh
from flowrl.controller.register import Dispatch, register
from flowrl.controller.worker import Worker
from flowrl.data.table import lengths, make_table
from flowrl.engines.models import load_policy
from flowrl.engines.train import TrainEngine, is_sharded
from flowrl.workers.mesh import mesh_of, shares_model
from flowrl.workers.policy import PolicyModel, policy_logprobs


class Reference(Worker):
    """A causal language model that nothing changes; `temperature` as the actor's."""

    replicated = stateless = True

    def __init__(self, config: ReferenceConfig, *, temperature: float = 1.0) -> None:
        self.temperature = temperature
        mesh = mesh_of(self, config.engine)
        self.engine = TrainEngine(
            PolicyModel(load_policy(config.model, parts=is_sharded(config.engine, mesh))),
            None,
            config.engine,
            mesh=mesh,
            device=torch.device(self.device),
        )

    @classmethod
    def on(cls, mesh: Mesh, config: ReferenceConfig, **_: Any) -> type[Worker]:  # Any: the constructor's
        """Ranks that hold a model together talk, and none of them can be replaced alone."""
        return _SharedReference if shares_model(mesh, config.engine) else cls

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("input_ids",), writes=("logprobs",))
    def logprobs(self, batch: TensorDict) -> TensorDict:
        """Log-probability `[T]` of every token under the reference."""
        values_T = self.engine.evaluate(batch, partial(policy_logprobs, temperature=self.temperature))
        return make_table(tokens={"logprobs": values_T}, lengths=lengths(batch))


class _SharedReference(Reference):
    collective, replicated, stateless = True, False, False
