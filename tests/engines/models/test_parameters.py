import torch

from flowrl.config import EngineConfig
from flowrl.engines.train.engine import TrainEngine
from tests.engines.losses import Bigram, bigram_loss
from tests.engines.tables import VOCABULARY, table
from tests.engines.train.test_engine import OPTIMIZER


def test_training_continues_after_weights_and_optimizer_were_offloaded():
    """On the CPU, offloading changes no device; tests/engines/train/test_precision.py tests a GPU."""
    engines = [TrainEngine(Bigram(VOCABULARY, 8), OPTIMIZER, EngineConfig()) for _ in range(2)]
    for seed in range(3):
        engines[1].offload()
        engines[1].onload()
        for engine in engines:
            engine.update(table(5, seed), bigram_loss)
    for one, other in zip(engines[0].model.parameters(), engines[1].model.parameters(), strict=True):
        assert torch.equal(one, other)
