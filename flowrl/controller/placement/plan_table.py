"""A plan as a table for people."""

from collections.abc import Iterable, Sequence

from flowrl.controller.placement.plan import Plan


def render_plan(plan: Plan) -> str:
    """A table of role x device: which rank of each role runs where."""
    slots = [slot for pool in plan.pools.values() for slot in pool.slots]
    places = sorted({(slot.node, slot.device) for slot in slots})
    rows = [["role", "pool", "mesh", *(f"{node}:{device}" for node, device in places)]]
    for role, role_plan in plan.roles.items():
        ranks = {place: str(rank) for rank, slot in enumerate(plan.slots(role)) for place in slot.places}
        mesh = role_plan.mesh
        sizes = (("pp", mesh.pp), ("dp", mesh.dp), ("sp", mesh.sp), ("tp", mesh.tp))
        shape = " ".join(f"{name}{size}" for name, size in sizes if size > 1 or name == "dp")
        shape += f" tp{role_plan.num_tp_devices}" if role_plan.num_tp_devices > 1 else ""
        rows.append([role, role_plan.pool, shape, *(ranks.get(place, ".") for place in places)])
    idle = (plan.num_devices or 0) - len(places)
    used = f"{len(places)} of {plan.num_devices}" if idle > 0 else f"{len(places)}"
    noun = "device" if used == "1" else "devices"
    title = f"{used} {plan.kind.upper()} {noun}; columns are node:device, cells are ranks"
    return "\n".join([title, *aligned(rows, 3)])


def aligned(rows: Sequence[Sequence[str]], num_words: int) -> Iterable[str]:
    """The rows of a table as lines. The first columns, so many, stand to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        words = [
            word.ljust(width) if i < num_words else word.rjust(width)
            for i, (word, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(words).rstrip()
