"""Reference: the frozen policy from which the KL is measured."""

import torch
from tensordict import TensorDict

from flowrl.config import ReferenceConfig
from flowrl.controller.register import Dispatch, register
from flowrl.controller.worker import Worker
from flowrl.data.table import lengths, make_table
from flowrl.engines.models import load_policy
from flowrl.engines.train import TrainEngine
from flowrl.workers.forward import policy_logprobs


class Reference(Worker):
    """A causal language model that nothing changes; `temperature` as the actor's."""

    replicated = stateless = True

    def __init__(self, config: ReferenceConfig, *, temperature: float = 1.0) -> None:
        self.temperature = temperature
        model = load_policy(config.model)
        self.engine = TrainEngine(
            model, None, config.engine, group=self.context.process_group, device=torch.device(self.device)
        )

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=("input_ids",), writes=("logprobs",))
    def logprobs(self, batch: TensorDict) -> TensorDict:
        """Log-probability `[T]` of every token under the reference."""
        values_T = self.engine.evaluate(batch, lambda model, micro: policy_logprobs(model, micro, self.temperature))
        return make_table(tokens={"logprobs": values_T}, lengths=lengths(batch))
