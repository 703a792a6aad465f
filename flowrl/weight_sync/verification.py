"""Whether rollout and trainer are one policy: their weights after each update, log-probabilities after each step."""

from collections.abc import Callable, Mapping
from math import isnan
from typing import Any

from flowrl.config import ActorConfig, CheckFailed, RolloutConfig, RunConfig
from flowrl.controller.dispatch import Future
from flowrl.controller.group import WorkerGroup

COMPLETE_PARTS = 8
"""A complete check travels in so many parts, each with every eighth weight."""

GAP_WARNING = {"float32": 0.001, "bfloat16": 0.05, "float16": 0.05}
"""Type of a model's arithmetic -> `rollout.gap_warning` where the config has none. Two engines that sum in another
order differ by 1e-6 to 1e-5 in float32, and by 0.005 to 0.02 where 16 bits are rounded to in every layer; stale weights
or another temperature by more than either."""

GAP_WARNING_QUANTISED = 0.1
"""The same of a quantised rollout: int8 of a 100M model is at 0.02."""

SAY_EVERY = 10
"""Steps between two lines of the same warning."""


class ComparedWeights:
    """What came of the comparisons after an update, as metrics of its step."""

    def __init__(self, version: int, futures: list[Future]) -> None:
        self.version = version
        self._futures = futures

    def get(self) -> Mapping[str, float]:
        """`weights_compared` and `weights_unreached` of the rollout's first rank. Raises what a comparison raised."""
        compared = [future.get()[0] for future in self._futures]
        return {
            "weights_compared": float(sum(each.count for each in compared)),
            "weights_unreached": float(sum(len(each.unreached) for each in compared)),
        }

    def done(self) -> bool:
        return all(future.done() for future in self._futures)

    def unreached(self) -> list[str]:
        """The weights of which the engine does not tell what it serves."""
        return [name for future in self._futures for name in future.get()[0].unreached]


class WeightsCheck:
    """Has a rollout compare the weights that it is given with the actor's, which are those of `version`.

    Made before they are given and compared after, so that all that is the actor's leaves together: a device that the
    two have in turns changes hands once. Does not wait; a difference ends the run, as any call's failure. Nothing is
    compared where the rollout samples from the actor's own weights, where the config wants no check, and for roles
    without these methods.
    """

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup, version: int, config: RolloutConfig | None) -> None:
        self._version = version
        knows = hasattr(rollout.cls, "check_weights") and hasattr(actor.cls, "weight_samples")
        parts: list[dict[str, Any]] = []
        if config is not None and knows and not rollout.is_colocated_with(actor) and config.check_weights != "off":
            complete = [{"part": part, "parts": COMPLETE_PARTS} for part in range(COMPLETE_PARTS)]
            parts = [{}] if config.check_weights == "sampled" else complete
        dtype = None if config is None else config.sent_dtype
        self._samples = [actor.weight_samples.submit(version, dtype=dtype, **part) for part in parts]

    def compare(self, rollout: WorkerGroup) -> ComparedWeights | None:
        """What comes of it, of this rollout or replica, which was given them; None where nothing is compared."""
        if not self._samples:
            return None
        return ComparedWeights(self._version, [rollout.check_weights.submit(each) for each in self._samples])


def gap_limit(rollout: RolloutConfig, actor: ActorConfig) -> float:
    """The mean gap in nats per token above which two engines count as two policies."""
    if rollout.gap_warning is not None:
        return rollout.gap_warning
    if rollout.quantization is not None:
        return GAP_WARNING_QUANTISED
    return max(GAP_WARNING[dtype] for dtype in (actor.model.dtype, actor.engine.compute_dtype) if dtype is not None)


class RolloutWatch:
    """Follows a run's steps; for a run without a rollout it does nothing.

    Args:
        say: prints a line.
    """

    def __init__(self, config: RunConfig, say: Callable[[str], None]) -> None:
        settings = dict(config)
        rollout, actor = settings.get("rollout"), settings.get("actor")
        self._rollout = rollout if isinstance(rollout, RolloutConfig) else None
        self._actor = actor if isinstance(actor, ActorConfig) else None
        self._say = say
        self._checks: list[ComparedWeights] = []
        self._said_unreached = False
        self._said_gap_at: int | None = None
        self.gap_steps = 0
        """Steps with a gap above the limit."""

    def follow(self, check: ComparedWeights | None) -> tuple[ComparedWeights, ...]:
        """Takes up a comparison, if there is one; its metrics."""
        if check is None:
            return ()
        if not self._said_unreached:
            self._checks.append(check)
        return (check,)

    def look(self, step: int, values: Mapping[str, float]) -> None:
        """Tells what is wrong with a step that is done and whose metrics are written. Raises CheckFailed where the
        config says `check: strict`."""
        self._tell_unreached()
        if values.get("staleness_max", 0.0) > 0:
            return  # between two versions of the policy there is a gap, whatever samples from them
        if self._rollout is None or self._actor is None or self._rollout.check == "off" or "rollout_gap" not in values:
            return
        gap, limit = values["rollout_gap"], gap_limit(self._rollout, self._actor)
        if gap <= limit or (isnan(gap) and not values.get("response_tokens")):
            return
        self.gap_steps += 1
        sentence = _gap_sentence(step, gap, limit, self._rollout)
        if self._rollout.check == "strict":
            raise CheckFailed(sentence)
        if self._said_gap_at is None or step - self._said_gap_at >= SAY_EVERY:
            self._said_gap_at = step
            self._say(f"warning: {sentence}")

    def _tell_unreached(self) -> None:
        while self._checks and self._checks[0].done() and not self._said_unreached:
            if names := self._checks.pop(0).unreached():
                self._said_unreached = True
                self._checks.clear()
                self._say(
                    f"warning: {len(names)} kinds of weights cannot be compared with the actor's after updates, such "
                    f"as {names[0]}: the engine does not tell what it serves of them"
                )


def _gap_sentence(step: int, gap: float, limit: float, rollout: RolloutConfig) -> str:
    return (
        f"step {step}: the rollout's log-probabilities are {gap:.3g} nats per token from the trainer's on average, "
        f"above rollout.gap_warning {limit:g}; likely causes, the first first: {gap_causes(rollout)}"
    )


def gap_causes(rollout: RolloutConfig) -> str:
    """Why the log-probabilities of two engines may differ, what is likeliest first."""
    weights = "weights that were not handed over, or by the recipe after they had changed again"
    if rollout.check_weights == "off":
        weights += " (rollout.check_weights is off: set it to sampled)"
    return (
        f"{weights}; another type of weights or arithmetic (model.dtype, engine.compute_dtype); another temperature, "
        f"top-k or top-p than the actor was made with; a quantised rollout; positions, padding or attention that the "
        f"two engines treat differently"
    )
