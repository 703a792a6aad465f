"""Verifies that rollout and trainer have equal weights after each update and equal log-probabilities in each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isnan
from typing import TYPE_CHECKING, Any

from flowrl.config import CheckFailed, RolloutConfig, RunConfig, TrainedConfig

if TYPE_CHECKING:  # `flowrl plan` selects a transport without numpy
    from flowrl.controller.dispatch import Future
    from flowrl.controller.group import WorkerGroup

COMPLETE_SUBSETS = 8
"""Number of subsets of a complete check. Subset i compares the weights i, i + 8, i + 16, ..."""

GAP_WARNING = {"float64": 0.001, "float32": 0.001, "bfloat16": 0.05, "float16": 0.05}
"""Dtype of weights or compute -> default of `rollout.gap_warning`, in nats per token.

Correct engines differ by 1e-6 to 1e-5 in float32 and by 0.005 to 0.02 in 16 bits, due to summation order. Stale weights
or a different temperature cause larger gaps."""

GAP_WARNING_QUANTIZED = 0.1
"""Default of `rollout.gap_warning` for a quantized rollout. The gap of an int8 model with 100M parameters is 0.02."""


class ComparedWeights:
    """Results of the weight comparisons after an update, as metrics of the step."""

    def __init__(self, version: int, futures: list[Future]) -> None:
        self.version = version
        self._futures = futures

    def get(self) -> Mapping[str, float]:
        """Returns `weights_compared` and `weights_unreached` of rank 0. Raises CheckFailed if weights differ."""
        compared = [future.get()[0] for future in self._futures]
        return {
            "weights_compared": float(sum(result.count for result in compared)),
            "weights_unreached": float(sum(len(result.unreached) for result in compared)),
        }

    def done(self) -> bool:
        return all(future.done() for future in self._futures)

    def unreached(self) -> list[str]:
        """Returns the names of the weights that the engine cannot read back."""
        return [name for future in self._futures for name in future.get()[0].unreached]


def has_weights_in_process(actor: WorkerGroup, rollout: WorkerGroup) -> bool:
    """Returns whether the rollout reads the actor's weights in its own process, so that they are not sent."""
    return rollout.is_colocated_with(actor) and actor.shares_model


class WeightsCheck:
    """Compares the weights of a rollout with samples of the actor's weights of `version`.

    The constructor exports the samples and must run before the weights are sent; `compare` runs afterwards. Neither
    call waits. A difference raises CheckFailed when the result is read. Nothing is compared if the rollout reads the
    actor's weights in its own process, if `rollout.check_weights` is `off`, or if a role does not support the check.
    """

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup, version: int, config: RolloutConfig | None) -> None:
        self._version = version
        has_methods = hasattr(rollout.cls, "check_weights") and hasattr(actor.cls, "weight_samples")
        selections: list[dict[str, Any]] = []
        is_sent = not has_weights_in_process(actor, rollout)
        if config is not None and has_methods and is_sent and config.check_weights != "off":
            complete = [{"subset": subset, "num_subsets": COMPLETE_SUBSETS} for subset in range(COMPLETE_SUBSETS)]
            selections = [{}] if config.check_weights == "sampled" else complete
        dtype = None if config is None else config.sent_dtype
        self._samples = [actor.weight_samples.submit(version, dtype=dtype, **selection) for selection in selections]

    def compare(self, rollout: WorkerGroup) -> ComparedWeights | None:
        """Submits the comparison to a rollout or replica that has loaded the weights. Returns None if disabled."""
        if not self._samples:
            return None
        return ComparedWeights(self._version, [rollout.check_weights.submit(samples) for samples in self._samples])


def gap_limit(rollout: RolloutConfig, actor: TrainedConfig) -> float:
    """Returns the mean gap, in nats per token, above which a run warns or ends."""
    if rollout.gap_warning is not None:
        return rollout.gap_warning
    if rollout.quantization is not None:
        return GAP_WARNING_QUANTIZED
    dtypes = (actor.model.dtype, actor.engine.compute_dtype, rollout.sent_dtype)
    return max(GAP_WARNING[dtype] for dtype in dtypes if dtype is not None)


class RolloutWatch:
    """Counts the steps with a large `rollout_gap`, ends a strict run, and reports weights that cannot be compared.

    The health check `logprob_gap` reports the gap of a run that is not strict.
    """

    def __init__(self, config: RunConfig, report: Callable[[str], None]) -> None:
        settings = dict(config)
        rollout, actor = settings.get("rollout"), settings.get("actor")
        self._rollout = rollout if isinstance(rollout, RolloutConfig) else None
        self._actor = actor if isinstance(actor, TrainedConfig) else None
        self._report = report
        self._checks: list[ComparedWeights] = []
        self._reported_unreached = False
        self.gap_steps = 0
        """Number of steps with a gap above the limit."""

    def follow(self, check: ComparedWeights | None) -> tuple[ComparedWeights, ...]:
        """Registers a comparison and returns it as a tuple of metrics, which is empty if `check` is None."""
        if check is None:
            return ()
        if not self._reported_unreached:
            self._checks.append(check)
        return (check,)

    def check_step(self, step: int, values: Mapping[str, float]) -> None:
        """Checks the metrics of a step. Raises CheckFailed if the gap is too large and `check` is strict."""
        self._report_unreached()
        if values.get("staleness_max", 0.0) > 0:
            return  # stale responses have a gap by construction
        gap = values.get("rollout_gap", values.get("actor/rollout_gap"))
        if self._rollout is None or self._actor is None or self._rollout.check == "off" or gap is None:
            return
        limit = gap_limit(self._rollout, self._actor)
        if gap <= limit or (isnan(gap) and not values.get("response_tokens")):
            return
        self.gap_steps += 1
        if self._rollout.check == "strict":
            raise CheckFailed(
                f"step {step}: rollout and trainer log-probabilities differ by {gap:.3g} nats per token on average, "
                f"above rollout.gap_warning {limit:g}; likely causes, most likely first: {gap_causes(self._rollout)}"
            )

    def _report_unreached(self) -> None:
        while self._checks and self._checks[0].done() and not self._reported_unreached:
            if names := self._checks.pop(0).unreached():
                self._reported_unreached = True
                self._checks.clear()
                self._report(
                    f"warning: {len(names)} kinds of weights cannot be compared with the actor's after updates, such "
                    f"as {names[0]}: the engine cannot read them back"
                )


def gap_causes(rollout: RolloutConfig) -> str:
    """Returns the possible causes of different log-probabilities, most likely first."""
    weights = "weights not synced, or changed by the recipe after the sync"
    if rollout.check_weights == "off":
        weights += " (rollout.check_weights is off: set it to sampled)"
    return (
        f"{weights}; a different dtype of weights or compute (model.dtype, engine.compute_dtype); a different "
        f"temperature, top_k or top_p than the actor's; a quantized rollout; positions, padding or attention handled "
        f"differently by the two engines"
    )
