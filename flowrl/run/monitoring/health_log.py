"""Applies the health checks to a run: writes `health.jsonl`, and reports new findings."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flowrl.checkpoints.run_folder import replacing
from flowrl.config import OnPolicyConfig, RolloutRunConfig, RunConfig, TrainedConfig
from flowrl.controller.placement.plan import Plan
from flowrl.health.measurement import RunFacts
from flowrl.health.monitor import FILE, Finding, HealthMonitor, format_findings
from flowrl.report.run_observer import RunObserver
from flowrl.weight_sync.verification import gap_causes, gap_limit


class HealthLog(RunObserver):
    """Applies the health checks to each step, writes `health.jsonl`, and reports new findings."""

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        plan: Plan,
        history: Iterable[Mapping[str, float]],
        notify: Callable[[str], None],
    ) -> None:
        self._path, self._notify = folder / FILE, notify
        self._stop_on = config.health.stop_on
        self._monitor = HealthMonitor(config.health, run_facts(config, plan))
        self._listeners: list[Callable[[Finding], None]] = []
        self._stop_reason: str | None = None
        for record in history:
            self._monitor.add(int(record["step"]), record)
        self._written = ""
        self._write(is_required=True)

    @property
    def stop_reason(self) -> str | None:
        return self._stop_reason

    @property
    def findings(self) -> Sequence[Finding]:
        """All findings, ordered by their first step. In a resumed run, findings of earlier steps are included."""
        return self._monitor.findings

    def add_listener(self, listener: Callable[[Finding], None]) -> None:
        """Adds a function that is called with each finding that begins or becomes clearly worse."""
        self._listeners.append(listener)

    def step_done(self, step: int, values: Mapping[str, float]) -> None:
        """Checks the metrics of a step, and reports new and clearly worse findings."""
        changed = self._monitor.add(step, values)
        self._write()
        for finding in changed:
            self._notify(f"health: step {step}: {finding.check}: {finding.message}")
            for listener in self._listeners:
                listener(finding)
            if finding.check in self._stop_on and self._stop_reason is None:
                self._stop_reason = (
                    f"health.stop_on ended the run, because of {finding.check} in step {step}: {finding.message}"
                )

    def summary(self) -> list[dict[str, Any]]:  # Any: values of a JSON file
        """Returns the findings for `summary.json`."""
        return [asdict(finding) for finding in self._monitor.findings]

    def _write(self, *, is_required: bool = False) -> None:
        text = format_findings(self._monitor.findings)
        if is_required or text != self._written:
            with replacing(self._path) as temporary:
                temporary.write_text(text, encoding="utf-8")
            self._written = text


def run_facts(config: RunConfig, plan: Plan) -> RunFacts:
    """Returns the facts about a run that the health checks need."""
    settings = frozenset(_keys(config.model_dump(mode="json")))
    devices = _device_roles(plan)
    if not isinstance(config, RolloutRunConfig):
        return RunFacts(settings=settings, devices=devices)
    rollout, actor = config.rollout, config.actor
    is_checked = isinstance(actor, TrainedConfig) and rollout.check != "off"
    return RunFacts(
        settings=settings,
        devices=devices,
        max_response_tokens=rollout.max_response_tokens,
        prompts_per_step=config.prompts_per_step,
        trains_on_scores=config.trains_on_scores,
        can_mask_truncated=isinstance(config, OnPolicyConfig) and not config.algorithm.mask_truncated,
        has_frozen_head=isinstance(actor, TrainedConfig) and actor.has_frozen_head,
        gap_limit=gap_limit(rollout, actor) if is_checked else None,
        gap_causes=f"likely causes, most likely first: {gap_causes(rollout)}",
    )


def _keys(settings: Mapping[str, Any], prefix: str = "") -> Iterable[str]:  # Any: values of settings
    """Yields the dotted keys of all settings and groups of settings."""
    for name, value in settings.items():
        yield prefix + name
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{name}.")


def _device_roles(plan: Plan) -> dict[tuple[str, ...], str]:
    """Returns roles -> pools. Each key has the roles that share a device. The value has the names of the pools of all
    such devices, joined by `+`.
    """
    roles: dict[tuple[int, int], list[str]] = {}
    pools: dict[tuple[int, int], str] = {}
    for name, role in plan.roles.items():
        for slot in role.slots:
            for device in slot.node_devices:
                roles.setdefault(device, []).append(name)
                pools.setdefault(device, slot.owner)
    devices: dict[tuple[str, ...], dict[str, None]] = {}
    for device, names in roles.items():
        devices.setdefault(tuple(names), {})[pools[device]] = None
    return {names: "+".join(own) for names, own in devices.items()}
