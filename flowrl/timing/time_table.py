"""Renders the estimated time of a step as a table, with its assumptions."""

from collections.abc import Sequence

from flowrl.controller.placement.plan_table import aligned
from flowrl.devices.device_rates import (
    DECODE_WAIT,
    EAGER_DECODE_WAIT,
    GENERATION,
    LINK,
    MEMORY,
    PAGEABLE_COPY,
    TRAINING,
    WEIGHT_SYNC,
    AssumedRate,
)
from flowrl.timing.step_time import DeviceIndex, StepTime


def render_time(step: StepTime) -> str:
    """Returns a table with one line per phase, the sum, and the assumed rates with their sources."""
    lengths, rates = step.lengths, step.rates
    rows = [["phase", "devices", "parts in seconds", "seconds", "MFU"]]
    for phase in step.phases:
        peak = phase.seconds * len(phase.devices) * rates.flops
        mfu = f"{phase.model_flops / peak:.0%}" if phase.model_flops else "."
        rows.append([phase.name, _describe_devices(sorted(phase.devices)), phase.details, f"{phase.seconds:.1f}", mfu])
    how = "generation overlaps with training" if step.is_overlapped else "stages run one after another"
    rows.append(["step", "", how, f"{step.seconds:.1f}", f"{step.mfu:.0%}"])
    tokens = f"{lengths.prompt:,} prompt tokens and {lengths.response:,} response tokens per sequence"
    trained = "response tokens"
    if not lengths.response:
        tokens, trained = f"{lengths.prompt:,} tokens per sequence", "tokens"
    speed = step.num_rows * (lengths.response or lengths.prompt) / step.seconds
    return "\n".join(
        [
            f"estimated time of a step in seconds, not measured: {step.num_devices} x {rates.name}, {step.num_rows:,} "
            f"sequences",
            *aligned(rows, 3),
            f"{speed:,.0f} {trained}/s, {speed / step.num_devices:,.0f} per GPU",
            f"assumed mean lengths: {tokens}",
            f"not estimated: {', '.join(step.omitted)}",
            "assumed rates:",
            *(f"  {each.meaning} ({each.source})" for each in (_ROLLOUT if lengths.response else _TRAINING)),
        ]
    )


_TRAINING: tuple[AssumedRate, ...] = (TRAINING, MEMORY, LINK)
_ROLLOUT = (*_TRAINING, GENERATION, DECODE_WAIT, EAGER_DECODE_WAIT, WEIGHT_SYNC, PAGEABLE_COPY)
"""Assumed rates of every run (`_TRAINING`), and of runs with a rollout."""


def _describe_devices(devices: Sequence[DeviceIndex]) -> str:
    first, *others = (f"{node}:{device}" for node, device in devices)
    return f"{first} to {others[-1]}" if others else first
