"""Renders the estimated memory of a plan as a table and rejects plans that exceed the available memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.config import (
    ConfigError,
    JudgeConfig,
    RolloutConfig,
    RunConfig,
    VllmConfig,
    keys_of,
    models_of,
    shards_model,
)
from flowrl.config.engines.vllm_settings import PlannedVllmConfig
from flowrl.config.roles import DEFAULT_NUM_SEQS
from flowrl.controller.placement.inventory import local_memory
from flowrl.controller.placement.plan import Plan
from flowrl.controller.placement.plan_table import aligned
from flowrl.memory.device_constants import TERMS
from flowrl.memory.memory_estimate import DeviceMemory, group_equal_devices, host_memory
from flowrl.memory.role_memory import CallMemory, RoleMemory
from flowrl.memory.rollout_memory import MIN_ROWS

GB = 1e9


@dataclass(frozen=True)
class MemoryBudget:
    """Available memory in bytes. None stands for unknown."""

    per_device: float | None = None
    per_node: float | None = None
    """Memory that all devices of a node share; used for CPU devices."""


def memory_budget(config: RunConfig, planned: Plan, *, is_local: bool) -> MemoryBudget:
    """Returns the memory set by `placement.memory_gb`, or this machine's memory if the plan is local."""
    stated = config.placement.memory_gb
    if stated is not None:
        return MemoryBudget(per_device=stated * GB)
    local = local_memory(planned.kind) if is_local else None
    return MemoryBudget(per_device=local) if planned.kind == "cuda" else MemoryBudget(per_node=local)


def check_memory(config: RunConfig, planned: Plan, devices: Sequence[DeviceMemory], budget: MemoryBudget) -> None:
    """Raises ConfigError if a device or node needs more memory than available. Skips models of unknown size."""
    for device in devices:
        if device.is_known and budget.per_device is not None and device.peak[0] > budget.per_device:
            raise ConfigError(_error_message(config, planned, device, budget.per_device))
    for node in sorted({device.node for device in devices}):
        on_node = [device for device in devices if device.node == node]
        needed = sum(device.peak[0] for device in on_node)
        is_known = all(device.is_known for device in on_node)
        if is_known and budget.per_node is not None and needed > budget.per_node:
            largest = max(on_node, key=lambda device: device.peak[0])
            total = f"the {len(on_node)} processes of node {node} need {needed / GB:.1f} GB together; "
            message = _error_message(config, planned, largest, budget.per_node)
            raise ConfigError(f"{total}{message}" if len(on_node) > 1 else message)


def _error_message(config: RunConfig, planned: Plan, device: DeviceMemory, available: float) -> str:
    needed, caller, call = device.peak
    role, use = _largest_use(device, caller, call)
    share = device.resident(role, caller, call) + (call.total + device.reserved(call) if role == caller else 0)
    largest = f" ({role}: {share / GB:.1f} GB)" if len(device.roles) > 1 else ""
    advice = _advice(config, planned, role, use, available - device.needed_beside_cache(role))
    advice += _sleep_advice(config, device) if device.cached(caller) else ""
    return (
        f"{caller}.{call.name} on device {device.node}:{device.device} needs about {needed / GB:.1f} GB{largest}, but "
        f"{available / GB:.1f} GB are available: {advice}"
    )


def _sleep_advice(config: RunConfig, device: DeviceMemory) -> str:
    """Returns the setting with which the processes of a device return their cached memory, or an empty string."""
    for role, value in config.role_settings.items():
        if not isinstance(value, RolloutConfig | JudgeConfig) or role not in device.roles:
            continue
        if value.vllm is not None and value.vllm.sleep is False:
            return f", or set {keys_of(config)[role]}.vllm.sleep: true"
    return ""


def _largest_use(device: DeviceMemory, caller: str, call: CallMemory) -> tuple[str, str]:
    """Returns the role and the kind of memory with the largest use while `call` of the role `caller` runs."""
    uses: list[tuple[float, str, str]] = []
    for role in device.roles:
        memory = device.roles[role]
        resident = device.resident(role, caller, call)
        cache = 0 if memory is None else min(memory.kv_cache, resident)
        uses.append((resident - cache + (call.gradients + call.optimizer if role == caller else 0), role, "state"))
        uses.append((cache, role, "allocated_cache"))
    uses += [
        (device.process, caller, "process"),
        (call.activations + call.buffers, caller, "activations"),
        (call.kv_cache, caller, "kv_cache"),
        (call.gathered, caller, "gathered"),
    ]
    _, role, use = max(uses)
    return role, use


def _advice(config: RunConfig, planned: Plan, role: str, use: str, cache_room: float) -> str:
    role_plan, key = planned.roles[role], keys_of(config)[role]
    if use == "process":
        return "processes without models already use most of it; use fewer devices or devices with more memory"
    for name, value in config.role_settings.items():
        if name == role and isinstance(value, RolloutConfig | JudgeConfig):
            current_gb = (value.vllm or VllmConfig()).cache_bytes / GB
            largest_gb = math.floor(cache_room / GB * 10) / 10
            is_stated = not isinstance(value.vllm, PlannedVllmConfig)
            if use == "allocated_cache" and largest_gb > 0 and is_stated:
                return f"lower {key}.vllm.kv_cache_gb (now {current_gb:g}) to {largest_gb:g}"
            num_seqs = value.max_num_seqs or DEFAULT_NUM_SEQS
            can_lower = use in ("kv_cache", "activations") and num_seqs > MIN_ROWS
            lower = f"lower {key}.max_num_seqs (now {num_seqs}), or " if can_lower else ""
            return f"{lower}give {name} a pool of its own instead of {role_plan.pool}"
    key, engine = f"{key}.engine", models_of(config)[role].engine
    if use == "activations":
        checkpointing = "" if engine.gradient_checkpointing else f", or set {key}.gradient_checkpointing: true"
        return f"lower {key}.max_tokens_per_microbatch (now {engine.max_tokens_per_microbatch}){checkpointing}"
    if use == "gathered":
        return f"set {key}.reshard_after_forward: true and a 16-bit {key}.compute_dtype"
    num_ranks, tp = role_plan.mesh.size, role_plan.mesh.tp
    if num_ranks > 1 and not shards_model(engine, tp) and config.backend == "ray":
        return f"set {key}.strategy: fsdp to shard the model over its {num_ranks} ranks"
    if role_plan.mesh.shard_ranks(engine.shard_ranks) < role_plan.mesh.dp:
        return f"set {key}.shard_ranks: {role_plan.mesh.dp} to shard the model over all ranks"
    return (
        f"give {role} more devices than the {num_ranks} of {role_plan.pool}, with {key}.strategy: fsdp, or use a "
        f"smaller model"
    )


def render_memory(devices: Sequence[DeviceMemory], budget: MemoryBudget) -> str:
    """Returns a table with one line per device and role, in GB, and the sources of estimated terms. A dot stands for
    less than 0.05 GB.
    """
    heads = ["devices", "role", "weights", "Adam", "state", "call"]
    rows = [[*heads, "grads", "activations", "gathered", "KV", "buffers", "total"]]
    for group in group_equal_devices(devices):
        first, last = group[0], group[-1]
        label = f"{first.node}:{first.device}"
        label += f" to {last.node}:{last.device}" if len(group) > 1 else ""
        for role, memory in first.roles.items():
            rows.append([label, role, *_cells(memory)])
            label = ""
        if first.is_known:
            rows += [["", term, *[""] * 9, _gb(count)] for term, count in _fixed_terms(first).items()]
        rows.append(["", *_total_cells(first, budget)])
    title = "memory in GB per device: state of each role, its largest call, and the peak"
    # One line per node with memory of roles on GPUs, in addition to the memory of the processes.
    host_lines = [
        f"host memory of node {node}: {sum(terms.values()) / GB:.1f} ("
        + ", ".join(f"{term} {_gb(count)}" for term, count in terms.items())
        + ")"
        for node, terms in host_memory(devices).items()
    ]
    return "\n".join([title, *aligned(rows, 2), *host_lines, *_sources(devices)])


def _fixed_terms(device: DeviceMemory) -> dict[str, int]:
    """Returns the terms of a device at its peak that belong to no single role."""
    terms = dict(device.fixed)
    if reserved := device.reserved(device.peak[2]):
        terms["fragmentation"] = reserved
    if cached := device.cached(device.peak[1]):
        terms["cached"] = cached
    return terms


def _sources(devices: Sequence[DeviceMemory]) -> list[str]:
    """Returns the constants of `device_constants` in the table that are not measured, one line each."""
    used = {term: None for device in devices if device.is_known for term in _fixed_terms(device)}
    used |= dict.fromkeys(term for terms in host_memory(devices).values() for term in terms)
    calls = [call for device in devices for memory in device.roles.values() if memory for call in memory.calls]
    if any(call.buffers for call in calls):
        used["buffers"] = None
    constants = [(term, constant) for term in used for constant in TERMS.get(term, ()) if not constant.is_measured]
    if not constants:
        return []
    lines = [f"  {term}: {constant.shown} {constant.meaning} ({constant.source})" for term, constant in constants]
    return ["estimated, not measured:", *lines]


def _cells(memory: RoleMemory | None) -> list[str]:
    if memory is None:
        return ["unknown", *[""] * 9]
    call = max(memory.calls, key=lambda call: memory.resident_during(call) + call.total, default=CallMemory(""))
    state = [memory.weights, memory.optimizer, memory.resident]
    kv_cache = call.kv_cache + (0 if call.without_cache else memory.kv_cache)
    transient = [call.gradients, call.activations, call.gathered, kv_cache, call.buffers]
    return [*map(_gb, state), call.name, *map(_gb, transient), _gb(memory.resident_during(call) + call.total)]


def _total_cells(device: DeviceMemory, budget: MemoryBudget) -> list[str]:
    needed, role, call = device.peak
    limit = "" if budget.per_device is None else f" of {budget.per_device / GB:.1f}"
    if budget.per_node is not None:
        limit = f" (node: {budget.per_node / GB:.1f})"
    if not device.is_known:
        return ["all", "unknown", *[""] * 9]
    resident = sum(device.resident(other, role, call) for other in device.roles) + device.process
    return [f"all{limit}", "", "", _gb(resident), f"{role}.{call.name}" if role else "", *[""] * 5, _gb(needed)]


def _gb(count: float) -> str:
    return f"{count / GB:.1f}" if count >= 5e7 else "."
