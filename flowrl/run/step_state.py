"""What an algorithm takes from one step to the next: a few numbers, which are computed and stay beside the data.

A recipe holds the state as a future and hands it on, so the driver waits for no step:

    state = first_state(config.algorithm)
    for step, batch in ...:
        batch = estimate_advantages(batch, config.algorithm, state)
        state = next_state(batch, config.algorithm, state)
"""

from dataclasses import dataclass

from tensordict import TensorDict

from flowrl.algorithms import RewardMoments
from flowrl.config import AdvantageConfig
from flowrl.controller.future import Future
from flowrl.data.batch import Batch
from flowrl.data.block import LocalRef
from flowrl.run.reward_shaping import remembers, shaped_rewards, shaping_columns


@dataclass(frozen=True)
class StepState:
    """Plain numbers, to be saved with a run by `dataclasses.asdict`."""

    moments: tuple[RewardMoments, ...] = ()
    """For each entry of `algorithm.shaping`, of the rewards that came to it; only what reads them counts them."""


State = StepState | Future | LocalRef
"""A state, or the future of one."""


def carries(config: AdvantageConfig) -> bool:
    """Whether a step of this algorithm depends on the steps before."""
    return remembers(config.shaping)


def first_state(config: AdvantageConfig) -> StepState:
    """The state before the first step."""
    return StepState(moments=(RewardMoments(),) * len(config.shaping))


def next_state(batch: Batch, config: AdvantageConfig, state: State) -> State:
    """The state after a step with this batch; the same one where the algorithm carries nothing. Does not wait."""
    if not carries(config):
        return state
    return batch.reduce(advanced, shaping_columns(config.shaping), config=config, state=state)


def advanced(table: TensorDict, config: AdvantageConfig, state: StepState) -> StepState:
    """`next_state`, beside the data."""
    return StepState(moments=shaped_rewards(table, config.shaping, state.moments)[1])
