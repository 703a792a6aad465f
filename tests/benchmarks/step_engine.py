"""The rollout engine of the runs of `tests.benchmarks.step`."""

from dataclasses import replace

from flowrl.config.engines.rollout_engines import ENGINES
from flowrl.engines.rollout.base import EngineContext
from flowrl.engines.rollout.hf.engine import HfRollout, SeparateBatch
from tests.benchmarks.turns import TurnClient


class SteppedEngine(HfRollout):
    """The engine `hf`, which waits for permission before it generates the responses of a step."""

    capabilities = replace(ENGINES["hf"], options=("socket",))
    _turns: TurnClient

    @classmethod
    def start(cls, context: EngineContext) -> "SteppedEngine":
        engine = super().start(context)
        assert isinstance(engine, SteppedEngine)
        engine._turns = TurnClient(str(context.config.options["socket"]))
        return engine

    def open_batch(self) -> SeparateBatch:
        self._turns.wait()  # a step generates one batch
        return super().open_batch()
