"""What an algorithm takes from one step to the next: a few numbers, which are computed and stay beside the data.

A recipe holds the state as a future and hands it on, so the driver waits for no step but one that is saved:

    carried = Carried(config.algorithm)
    run.keep(actor, carried=carried)
    for step, batch in ...:
        batch = estimate_advantages(batch, config.algorithm, carried.now)
        carried.advance(batch)
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict

from flowrl.algorithms import FixedKlControl, KlControl, RewardMoments, masked_mean
from flowrl.algorithms.registry import kl_controls, kl_kinds
from flowrl.config import AdvantageConfig, KlControlConfig, UserError
from flowrl.controller.future import Future
from flowrl.data.batch.batch import Batch
from flowrl.data.batch.block import LocalRef
from flowrl.data.batch.tensordicts import lengths, pad_tokens
from flowrl.run.reward_shaping import remembers, shaped_rewards, shaping_columns


@dataclass(frozen=True)
class AlgorithmState:
    """Plain numbers, to be saved with a run by `dataclasses.asdict`."""

    kl_control: KlControl
    """Its `coef` is the one of the step to come."""

    moments: tuple[RewardMoments, ...] = ()
    """For each entry of `algorithm.shaping`, of the rewards that came to it; only what reads them counts them."""


State = AlgorithmState | Future | LocalRef
"""A state, or the future of one."""


def first_state(config: AdvantageConfig) -> AlgorithmState:
    """The state before the first step. Raises UserError on a KL control of the user's that is none, or that no
    checkpoint could keep."""
    control: KlControl = FixedKlControl(config.kl_coef or 0.0)
    if config.kl_control is not None:
        make = kl_controls.load(config.kl_control.kind)
        control = _checked(make(coef=config.kl_coef, **config.kl_control.arguments()), config.kl_control)
    return AlgorithmState(control, (RewardMoments(),) * len(config.shaping))


class Carried:
    """The state of a run's next step, as a recipe holds it and a checkpoint keeps it."""

    def __init__(self, config: AdvantageConfig) -> None:
        self._config = config
        self.now: State = first_state(config)
        """Before the step to come."""

    def advance(self, batch: Batch) -> None:
        """After a step with this batch. Does not wait."""
        self.now = next_state(batch, self._config, self.now)

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint. Waits for the step."""
        state = self.now if isinstance(self.now, AlgorithmState) else self.now.get()
        assert is_dataclass(state.kl_control)
        return asdict(state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave."""
        first = first_state(self._config)
        assert is_dataclass(first.kl_control) and not isinstance(first.kl_control, type)
        control = replace(first.kl_control, **state["kl_control"])
        self.now = AlgorithmState(control, tuple(RewardMoments(**moments) for moments in state["moments"]))


def carries(config: AdvantageConfig) -> bool:
    """Whether a step of this algorithm depends on the steps before."""
    return _steers(config) or remembers(config.shaping)


def next_state(batch: Batch, config: AdvantageConfig, state: State) -> State:
    """The state after a step with this batch; the same one where the algorithm carries nothing. Does not wait."""
    if not carries(config):
        return state
    reads = dict.fromkeys(shaping_columns(config.shaping))
    if _steers(config):
        reads |= dict.fromkeys(("old_logprobs", "ref_logprobs", "response_mask"))
    return batch.reduce(advanced, list(reads), config=config, state=state)


def advanced(table: TensorDict, config: AdvantageConfig, state: AlgorithmState) -> AlgorithmState:
    """`next_state`, beside the data."""
    control, moments = state.kl_control, state.moments
    if remembers(config.shaping):
        moments = shaped_rewards(table, config.shaping, moments)[1]
    if config.kl_control is not None and _steers(config):
        control = _checked(control.update(*_measured_kl(table, config)), config.kl_control)
    return AlgorithmState(control, moments)


def _steers(config: AdvantageConfig) -> bool:
    return config.kl_control is not None and config.kl_control.kind != "fixed"


def _checked(control: object, config: KlControlConfig) -> KlControl:
    if not isinstance(control, KlControl):
        raise UserError(
            f"algorithm.kl_control.kind {config.kind} gives a {type(control).__name__} without coef or "
            f"update(kl, num_rows): write both, like AdaptiveKlControl in flowrl/algorithms/kl/kl_control.py"
        )
    if not is_dataclass(control):
        raise UserError(
            f"algorithm.kl_control.kind {config.kind} gives a {type(control).__name__}, which no checkpoint can keep: "
            f"make it a dataclass of plain numbers, like AdaptiveKlControl in flowrl/algorithms/kl/kl_control.py"
        )
    return control


def _measured_kl(table: TensorDict, config: AdvantageConfig) -> tuple[float, int]:
    """The mean KL to the reference over the step's response tokens, in nats, and the number of rows that have one."""
    assert config.kl_kind is not None
    names = ("old_logprobs", "ref_logprobs", "response_mask")
    logprobs_BT, ref_logprobs_BT, mask_BT = (pad_tokens(table["tokens", name], lengths(table)) for name in names)
    kl_BT = kl_kinds.load(config.kl_kind)(logprobs=logprobs_BT, ref_logprobs=ref_logprobs_BT)
    return float(masked_mean(kl_BT.to(torch.float64), mask_BT)), int(mask_BT.any(-1).sum())
