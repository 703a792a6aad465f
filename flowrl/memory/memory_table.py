"""The memory that a plan needs, as a table; and what is refused because it cannot fit."""

from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.config import (
    ConfigError,
    RolloutConfig,
    RunConfig,
    models_of,
    shards_model,
)
from flowrl.controller.placement.inventory import local_memory
from flowrl.controller.placement.plan import Plan
from flowrl.controller.placement.plan_table import aligned
from flowrl.memory.memory_estimate import DeviceMemory, same_devices
from flowrl.memory.role_memory import Call, RoleMemory
from flowrl.memory.rollout_memory import MIN_ROWS

GB = 1e9


@dataclass(frozen=True)
class Room:
    """How much memory there is, in bytes; None where nothing says."""

    of_device: float | None = None
    of_node: float | None = None
    """Where the devices of a node share it."""


def room(config: RunConfig, planned: Plan, *, here: bool) -> Room:
    """The memory of the devices of a plan: as the placement states it, or as this machine has it if the plan is for it.

    Args:
        here: whether the devices are those of this machine.
    """
    stated = config.placement.memory_gb
    if stated is not None:
        return Room(of_device=stated * GB)
    found = local_memory(planned.kind) if here else None
    return Room(of_device=found) if planned.kind == "cuda" else Room(of_node=found)


def check_memory(config: RunConfig, planned: Plan, devices: Sequence[DeviceMemory], available: Room) -> None:
    """Refuses a plan of which some device, or some node, needs more memory than it has. Raises `ConfigError`.

    Where the size of a model is not known, nothing is refused.

    Args:
        devices: what `estimate` gives for the plan.
    """
    for found in devices:
        if found.known and available.of_device is not None and found.peak[0] > available.of_device:
            raise ConfigError(_refusal(config, planned, found, found.peak[0], available.of_device, ""))
    for node in sorted({found.node for found in devices}):
        on_node = [found for found in devices if found.node == node]
        needed = sum(found.peak[0] for found in on_node)
        if all(found.known for found in on_node) and available.of_node is not None and needed > available.of_node:
            largest = max(on_node, key=lambda found: found.peak[0])
            whole = f"the {len(on_node)} processes of node {node} need {needed / GB:.1f} GB together, of which "
            raise ConfigError(
                _refusal(config, planned, largest, largest.peak[0], available.of_node, whole if on_node[1:] else "")
            )


def _refusal(
    config: RunConfig, planned: Plan, device: DeviceMemory, needed: float, available: float, before: str
) -> str:
    _, caller, call = device.peak
    role, part = _largest(device, caller, call)
    memory = device.roles[role]
    assert memory is not None, "a device with a role of unknown size is not refused"
    share = device.held(role, caller) + (call.total if role == caller else 0)
    others = f", {role} alone {share / GB:.1f} GB" if len(device.roles) > 1 else ""
    where = f"{caller}'s {call.name} on device {device.node}:{device.device}"
    return (
        f"{before}{where} needs about {needed / GB:.1f} GB{others}, but there are {available / GB:.1f} GB: "
        f"{_advice(config, planned, role, part)}"
    )


def _largest(device: DeviceMemory, caller: str, call: Call) -> tuple[str, str]:
    """(role, which part of its memory) that takes most while a role is called."""
    parts: list[tuple[float, str, str]] = []
    for role in device.roles:
        state = device.held(role, caller) + (call.gradients + call.optimizer if role == caller else 0)
        parts.append((state, role, "state"))
    parts += [
        (device.process, caller, "process"),
        (call.activations, caller, "activations"),
        (call.cache, caller, "cache"),
        (call.whole, caller, "whole"),
    ]
    _, role, part = max(parts)
    return role, part


def _advice(config: RunConfig, planned: Plan, role: str, part: str) -> str:
    """What to change first."""
    place = planned.roles[role]
    if part == "process":
        return "a process takes most of it before it has a model: give the run fewer devices, or larger ones"
    for name, value in config:
        if name == role and isinstance(value, RolloutConfig):
            lower = part in ("cache", "activations") and value.max_num_seqs > MIN_ROWS
            fewer = f"lower {name}.max_num_seqs, which is {value.max_num_seqs}, or " if lower else ""
            return f"{fewer}give {name} devices of its own in place of {place.pool}"
    prefix, model = models_of(config)[role]
    key, engine = f"{prefix}engine", model.engine
    if part == "activations":
        checkpointing = "" if engine.gradient_checkpointing else f", or set {key}.gradient_checkpointing: true"
        return f"lower {key}.max_tokens_per_microbatch, which is {engine.max_tokens_per_microbatch}{checkpointing}"
    if part == "whole":
        return f"set {key}.reshard_after_forward: true and a half-precision {key}.compute_dtype"
    if place.mesh.size > 1 and not shards_model(engine, place.mesh.size, place.mesh.tp) and config.backend == "ray":
        return f"set {key}.strategy: fsdp, which cuts what it holds over its {place.mesh.size} ranks"
    return (
        f"give {role} more devices than the {place.mesh.size} of {place.pool}, with {key}.strategy: fsdp, or a smaller "
        f"model"
    )


def render_memory(devices: Sequence[DeviceMemory], available: Room) -> str:
    """A table of device x role in GB; a dot is nothing."""
    heads = ["devices", "role", "weights", "Adam", "held", "call", "gradients", "activations", "whole", "KV", "total"]
    rows = [heads]
    for group in same_devices(devices):
        first, last = group[0], group[-1]
        label = f"{first.node}:{first.device}"
        label += f" to {last.node}:{last.device}" if len(group) > 1 else ""
        for role, memory in first.roles.items():
            rows += [[label, role, *row] for row in _rows_of(memory)]
            label = ""
        rows.append(["", "all", *_total(first, available)])
    title = "memory in GB of each device: what roles hold, the largest call of each, and the most at once"
    return "\n".join([title, *aligned(rows, 2)])


def _rows_of(memory: RoleMemory | None) -> list[list[str]]:
    if memory is None:
        return [["unknown", *[""] * 8]]
    call = max(memory.calls, key=lambda call: call.total, default=Call(""))
    state = [memory.weights, memory.optimizer, memory.held]
    beside = [call.gradients, call.activations, call.whole, call.cache]
    return [[*map(_gb, state), call.name, *map(_gb, beside), _gb(memory.held + call.total)]]


def _total(device: DeviceMemory, available: Room) -> list[str]:
    needed, role, call = device.peak
    if not device.known:
        return ["unknown", *[""] * 8]
    limit = "" if available.of_device is None else f" of {available.of_device / GB:.1f}"
    if available.of_node is not None:
        limit = f", the node has {available.of_node / GB:.1f}"
    held = sum(device.held(other, role) for other in device.roles) + device.process
    return ["", "", _gb(held), f"{role}.{call.name}", *[""] * 4, _gb(needed) + limit]


def _gb(count: float) -> str:
    return f"{count / GB:.1f}" if count >= 5e7 else "."
