import torch

from flowrl.config import EngineConfig
from flowrl.engines.train.fsdp.engine import FsdpEngine
from tests.engines.losses import LOGPROBS, Bigram, bigram_loss, bigram_outputs
from tests.engines.tables import VOCABULARY, table
from tests.engines.train.fsdp.test_engine import OPTIMIZER


def test_training_continues_after_weights_and_optimizer_were_offloaded():
    """On the CPU, offloading changes no device; tests/engines/train/fsdp/test_precision.py tests a GPU."""
    engines = [FsdpEngine(Bigram(VOCABULARY, 8), bigram_outputs, OPTIMIZER, EngineConfig()) for _ in range(2)]
    for seed in range(3):
        engines[1].offload()
        engines[1].onload()
        for engine in engines:
            engine.update(table(5, seed), bigram_loss, LOGPROBS)
    for one, other in zip(engines[0].model.parameters(), engines[1].model.parameters(), strict=True):
        assert torch.equal(one, other)
