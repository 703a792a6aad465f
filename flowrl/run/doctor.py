"""Implements `flowrl doctor`, which starts a recipe's actor and rollout and compares weights and log-probabilities.

Shape suffix: T is the number of tokens of all responses.
"""

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from flowrl.config import CheckFailed, Placement, RolloutConfig, RolloutRunConfig
from flowrl.controller.cluster import Cluster
from flowrl.controller.group import WorkerGroup
from flowrl.controller.placement.weight_transport import choose_transports
from flowrl.controller.worker import Worker
from flowrl.data.batch.batch import Batch
from flowrl.data.console import make_console
from flowrl.devices.device import local_tensor
from flowrl.memory.device_settings import render_settings
from flowrl.rewards.pool import PoolLimits, ScoringPool
from flowrl.run.checks.checked_run import CheckedRun
from flowrl.run.datasets import read_prompts
from flowrl.run.interrupt import Interruption
from flowrl.user_code.isolation import describe_missing
from flowrl.weight_sync.transfer import WeightSync
from flowrl.weight_sync.verification import WeightsCheck, gap_causes, gap_limit

PROMPTS, TOKENS = 8, 32
"""Smallest number of prompts, and largest number of tokens per response."""

_COLD = 1e-4
"""Temperature so low that -`_COLD` x (log-probability of a token) is the distance of its logit to the largest one."""

_LARGEST = 20
"""Largest allowed gap of a token, as a multiple of the allowed mean gap."""

_TIE = 1e-3
"""Largest distance of two logits that counts as rounding at temperature `_COLD`."""


_TRANSPORTS = {"shared": "none (the rollout uses the actor's weights)", "local": "copied within the process"}
"""Transport -> name in the table. Other transports have the name of the setting."""


@dataclass
class _Findings:
    rows: list[tuple[str, str]] = field(default_factory=list)

    def add(self, name: str, value: str) -> None:
        self.rows.append((name, value))

    def table(self) -> Table:
        table = Table(title="Rollout and actor", title_justify="left", show_header=False)
        for name, value in self.rows:
            table.add_row(Text(name), Text(value))
        return table


def examine(
    config: RolloutRunConfig, actor_class: type[Worker], rollout_class: type[Worker], console: Console | None = None
) -> None:
    """Starts actor and rollout, syncs changed weights twice, generates, and prints a table of the comparisons.

    Writes no files. Raises CheckFailed or WorkerError if weights or log-probabilities of the rollout differ from the
    actor's, UserError if the config is invalid, and Interrupted if a signal ended the program.
    """
    prompts, _ = read_prompts(config)
    console, findings = console or make_console(), _Findings()
    rollout_config = config.rollout.model_copy(
        update={"max_response_tokens": min(TOKENS, config.rollout.max_response_tokens), "check_weights": "complete"}
    )
    config = config.model_copy(update={"rollout": rollout_config})
    if (isolation := _isolation(config)) is not None:
        findings.add("isolation", isolation)
    findings.add("engine", ", ".join([rollout_config.engine, *_versions(rollout_config)]))
    try:
        with ExitStack() as resources:
            interruption = resources.enter_context(Interruption(console.print))
            interruption.progress = "before the comparison was complete"
            console.print(f"starting actor, rollout ({config.backend})")
            cluster = resources.enter_context(_cluster(config))
            interruption.install()  # with `address`, Ray has installed its own handlers
            fitted = CheckedRun(config, planned=cluster.plan).applied
            console.print(render_settings(config, fitted, cluster.plan))
            applied = fitted.config
            assert isinstance(applied, RolloutRunConfig)
            config, rollout_config = applied, applied.rollout
            actor = cluster.group("actor", actor_class, config.actor)
            rollout = cluster.group("rollout", rollout_class, rollout_config, config.actor.model, seed=config.seed)
            transport = choose_transports(config, cluster.plan)["rollout"]
            findings.add("weight sync", _TRANSPORTS.get(transport, transport.replace("_", " ")))
            unchecked = rollout_config.model_copy(update={"check_weights": "off"})  # the comparison is timed separately
            weight_sync = WeightSync(config.model_copy(update={"rollout": unchecked}), cluster.plan)
            _compare_weights(weight_sync, config, actor, rollout, findings)
            rows = Batch.from_rows([row | {"sample": 0} for row in prompts.take(max(PROMPTS, 2 * rollout.world_size))])
            _compare_responses(config, actor, rollout, rows, findings)
    finally:
        console.print(findings.table())
    console.print("OK: uses the actor's weights and matches transformers")


def _cluster(config: RolloutRunConfig) -> Cluster:
    """Returns a cluster with the processes of only the actor and the rollout."""
    placement = config.placement
    roles = {name: placement.roles[name] for name in ("actor", "rollout")}
    used = {part.pool for name in roles for part in placement.role(name).parts}
    return Cluster(
        Placement(
            device=placement.device,
            pools={name: size for name, size in placement.pools.items() if name in used},
            roles=roles,
            memory_gb=placement.memory_gb,
        ),
        backend=config.backend,
        address=config.address,
        devices=config.devices,
        roles=tuple(roles),
        dedicated=config.dedicated_roles(),
        num_threads=config.threads,
        prepare=("flowrl.workers",),
        fork_workers=config.fork_workers,
        call_timeout_s=config.call_timeout_s,
        start_timeout_s=config.start_timeout_s,
    )


def _isolation(config: RolloutRunConfig) -> str | None:
    """Returns the protections against reward functions or environments that this node lacks, as text. Returns None if
    the run has neither.
    """
    reward = config.reward_settings
    settings = config.environment if reward is None or not reward.has_functions else reward
    if settings is None:
        return None
    limits = PoolLimits(workers=1, timeout_s=None, memory_mb=settings.memory_mb, allow_network=settings.network)
    with ScoringPool([], limits) as pool:
        missing = pool.find_missing_protections()
    if not missing:
        return "this node offers all protections against user code"
    return f"on this node, user code can {describe_missing(missing)} (docs/rewards.md, Isolation)"


def _versions(config: RolloutConfig) -> list[str]:
    """Returns the names and versions of the engine's installed packages."""
    versions = []
    for package in config.capabilities.packages:
        found = [name for name in package.distributions if any(metadata.distributions(name=name))]
        versions += [f"{name} {metadata.version(name)}" for name in found[:1]]
    return versions


def _compare_weights(
    weight_sync: WeightSync, config: RolloutRunConfig, actor: WorkerGroup, rollout: WorkerGroup, findings: _Findings
) -> None:
    """Compares all accessible weights after loading and after each of two weight syncs. Measures the second sync. If
    the rollout uses the actor's own weights, there is nothing to compare.
    """
    counts: list[str] = []
    sync_s = 0.0
    for version in range(3):
        if version:
            actor.run(nudge)
            started_s = time.monotonic()
            weight_sync.send(actor, rollout, version)
            rollout.run(_no_op)
            sync_s = time.monotonic() - started_s
        check = WeightsCheck(actor, rollout, version, config.rollout).compare(rollout)
        if check is not None:
            count, unreached = check.get()["weights_compared"], check.unreached()
            lacking = f" ({len(unreached)} are not accessible, such as {unreached[0]})" if unreached else ""
            counts.append(f"{count:.0f}{lacking}")
    if counts:
        findings.add(
            "weights compared", f"{counts[0]} after loading, {counts[1]} and {counts[2]} after updates: all equal"
        )
    else:
        findings.add("weights compared", "none (the actor's own)")
    findings.add("weight sync time", f"{1e3 * sync_s:.0f} ms")


def nudge(worker: Any) -> None:  # Any: the recipe's actor
    """Changes every trained weight slightly, so that the comparison detects a missing weight sync."""
    state = worker.engine.save_state(with_optimizer=False)
    with torch.no_grad():
        for weight in state.values():
            own = local_tensor(weight)
            # Scaling would not change zeros, such as the initial weights of an adapter.
            own.copy_(torch.where(own == 0, torch.full_like(own, 2**-10), own * (1 + 2**-6)))
    worker.engine.load_state(state, worker.engine.counters())


def _no_op(worker: Worker) -> None:
    """Does nothing. Calls run in order, so the result of this call arrives after the results of all earlier calls."""


def _compare_responses(
    config: RolloutRunConfig, actor: WorkerGroup, rollout: WorkerGroup, rows: Batch, findings: _Findings
) -> None:
    """Compares the rollout's greedy tokens and its log-probabilities with those of the actor's model on the same
    tokens. Raises CheckFailed if they differ by more than the limits.
    """
    greedy = rows.union(rollout.generate.submit(rows, temperature=0.0))
    greedy_T = _gaps(config, actor, greedy, 1.0, "greedy", findings)
    below_T = -_COLD * _logprobs(actor, greedy, _COLD)
    sampled = rows.union(rollout.generate.submit(rows))
    sampled.get("rollout_logprobs")
    started_s = time.monotonic()
    again = rows.union(rollout.generate.submit(rows))
    count = int(again.get("response_mask").sum())
    findings.add("tokens per second", f"{count / (time.monotonic() - started_s):,.0f} ({len(rows)} rows)")
    _gaps(config, actor, sampled, config.rollout.temperature, "sampled", findings)
    others = int((below_T > _TIE).sum())
    far = below_T > max(_TIE, 2 * float(greedy_T.max()))
    near = f", {others} ties within {float(below_T.max()):.2g}" if others else ""
    findings.add("greedy tokens", f"{len(below_T) - others} of {len(below_T)} match transformers{near}")
    if far.any():
        raise CheckFailed(
            f"{int(far.sum())} of {len(far)} greedy tokens differ from transformers, by up to "
            f"{float(below_T.max()):.3g} in the logits, more than the log-probability gap explains: the engine "
            "modifies "
            f"the logits (penalties, bad words, a minimal length) or does not decode greedily"
        )


def _gaps(
    config: RolloutRunConfig, actor: WorkerGroup, batch: Batch, temperature: float, how: str, findings: _Findings
) -> Tensor:
    """Returns the gaps [T] between rollout and actor log-probabilities. Raises CheckFailed if they exceed the limit."""
    mask = batch.get("response_mask").bool()
    rollout_T = batch.get("rollout_logprobs")[mask]
    gaps_T = (_logprobs(actor, batch, temperature) - rollout_T).abs()
    mean, largest, limit = float(gaps_T.mean()), float(gaps_T.max()), gap_limit(config.rollout, config.actor)
    findings.add(f"log-probability gap, {how}", f"{mean:.2g} mean, {largest:.2g} largest, {len(gaps_T)} tokens")
    if not (mean <= limit and largest <= _LARGEST * limit):
        raise CheckFailed(
            f"the log-probabilities of {how} tokens differ from transformers by {mean:.3g} on average and "
            f"{largest:.3g} at most, above the limits {limit:g} (rollout.gap_warning) and {_LARGEST * limit:g} "
            f"({_LARGEST} times that); likely causes, most likely first: {gap_causes(config.rollout)}"
        )
    return gaps_T


def _logprobs(actor: WorkerGroup, batch: Batch, temperature: float) -> Tensor:
    actor.run(_set_temperature, temperature)
    return actor.logprobs(batch).get("logprobs")[batch.get("response_mask").bool()]


def _set_temperature(worker: Any, temperature: float) -> None:  # Any: the recipe's actor
    worker.temperature = temperature
