"""Renders a plan as text."""

from collections.abc import Iterable, Sequence

from flowrl.controller.placement.cpu_threads import divide_cpus
from flowrl.controller.placement.plan import Plan


def render_plan(plan: Plan) -> str:
    """Returns a table with a row per role and a column per device. The cells are ranks."""
    slots = [slot for pool in plan.pools.values() for slot in pool.slots]
    devices = sorted({(slot.node, slot.device) for slot in slots})
    rows = [["role", "pool", "mesh", *(f"{node}:{device}" for node, device in devices)]]
    for role, role_plan in plan.roles.items():
        ranks = {device: str(rank) for rank, slot in enumerate(plan.slots(role)) for device in slot.node_devices}
        mesh = role_plan.mesh
        sizes = (("pp", mesh.pp), ("dp", mesh.dp), ("sp", mesh.sp), ("tp", mesh.tp))
        shape = " ".join(f"{name}{size}" for name, size in sizes if size > 1 or name == "dp")
        own_sizes = (("pp", role_plan.replica.pp), ("tp", role_plan.replica.tp))
        shape += "".join(f" {name}{size}" for name, size in own_sizes if size > 1)
        rows.append([role, role_plan.pool, shape, *(ranks.get(device, ".") for device in devices)])
    idle = (plan.num_devices or 0) - len(devices)
    used = f"{len(devices)} of {plan.num_devices}" if idle > 0 else f"{len(devices)}"
    kind = "CPU" if plan.kind == "cpu" else "CUDA"
    title = f"{used} {kind} device{'s' * (used != '1')}; columns are node:device, cells are ranks"
    return "\n".join([title, *aligned(rows, 3)])


def render_threads(plan: Plan, requested: int | None, usable_cpus: int | None, *, is_inline: bool = False) -> str:
    """Returns a line with the number of torch CPU threads per process.

    Args:
        plan: the plan.
        requested: number in the setting or in OMP_NUM_THREADS; None divides the usable CPUs of a node.
        usable_cpus: number of usable CPUs of this machine; None if the plan is for another machine.
        is_inline: whether all roles share one process.
    """
    counts = [1] if is_inline else sorted(set(plan.count_processes().values()))
    if requested is not None:
        value = f"{requested}"
    elif usable_cpus is not None:
        num_threads = divide_cpus(usable_cpus, counts[-1])
        value = f"{num_threads} (usable CPUs: {usable_cpus}, processes: {counts[-1]})"
    else:
        value = f"OMP_NUM_THREADS, or else usable CPUs of the node / {' or '.join(map(str, counts))}, at least 1"
    return f"torch CPU threads per process: {value}"


def aligned(rows: Sequence[Sequence[str]], num_words: int) -> Iterable[str]:
    """Yields the lines of a table: the first `num_words` columns left-aligned, the other columns right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        words = [
            word.ljust(width) if i < num_words else word.rjust(width)
            for i, (word, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(words).rstrip()
