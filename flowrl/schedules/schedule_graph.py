"""Who feeds whom and who gives weights to whom, drawn in text for `flowrl plan`."""

from collections.abc import Sequence

from flowrl.config import OnPolicyConfig
from flowrl.controller.placement.plan import Plan, RolePlan
from flowrl.schedules.schedule_check import lanes_of
from flowrl.weight_sync.transfer import Transport, takes_one_by_one, transport_of

MOST_RANKS = 6
"""Of a side that are drawn; of more, the first, the last and dots between."""

_WAYS: dict[Transport, str] = {
    "shared": "in the same processes, where nothing travels",
    "object_store": "through the object store",
    "cuda_ipc": "in the memory of shared GPUs",
    "nccl": "from GPU to GPU by NCCL",
}


def render_graph(config: OnPolicyConfig, planned: Plan) -> str:
    """The schedule and its bounds in a sentence, then makers, trainers, and what goes from one to the other.

    Raises: ConfigError and PlacementError as the checks of a plan do.
    """
    rollout, actor = planned.roles["rollout"], planned.roles["actor"]
    makers = [_label(rollout, rank) for rank in range(rollout.mesh.dp)]
    trainers = [_label(actor, rank) for rank in range(actor.mesh.dp)]
    way = transport_of(actor, rollout, planned.kind, config.rollout, one_by_one=takes_one_by_one(config))
    weights = f"(2) weights, {_WAYS[way]}"
    lanes = lanes_of(config, planned)
    if lanes is None:
        drawn = _drawn(_some(makers), _some(trainers), _experience(config), weights)
    else:
        drawn = [*_routed(makers, trainers, lanes), weights.replace("weights,", "weights of every actor to all,")]
    return "\n".join([_sentence(config, rollout, actor), *drawn])


def _sentence(config: OnPolicyConfig, rollout: RolePlan, actor: RolePlan) -> str:
    schedule = config.schedule
    if schedule.kind == "sync" or not schedule.staleness:
        kind = "sync" if schedule.kind == "sync" else "async with max_staleness 0, which is sync"
        return f"schedule: {kind}; a step's responses are generated, and then trained on"
    if schedule.kind == "one_step_off":
        taken = {place for slot in actor.slots for place in slot.places}
        turns = any(taken & set(slot.places) for slot in rollout.slots)
        where = "; they share devices, which have one of them at a time" if turns else ""
        return f"schedule: one_step_off; a step's responses are generated while the one before trains{where}"
    words = [f"staleness at most {schedule.staleness}"]
    if schedule.max_concurrent is not None:
        prompts = "1 prompt" if schedule.max_concurrent == 1 else f"{schedule.max_concurrent} prompts"
        words.append(f"at most {prompts} worked on at once")
    if schedule.overprovision:
        words.append(f"{schedule.overprovision} more in flight than steps need")
    words.append("new weights between two tokens" if schedule.interrupt else "new weights when a maker has finished")
    return f"schedule: async; {', '.join(words)}"


def _experience(config: OnPolicyConfig) -> str:
    schedule, prompts, samples = config.schedule, config.prompts_per_step, config.samples_per_prompt
    most = (schedule.staleness + 1) * prompts + (schedule.overprovision or 0)
    of = f" of {samples} samples" if samples > 1 else ""
    if schedule.streams:
        return f"(1) experience: {prompts} prompts{of} a step, at most {most} untrained"
    return f"(1) experience: {prompts} prompts{of} a step"


def _label(role: RolePlan, rank: int) -> str:
    """The replica and its devices."""
    mesh = role.mesh
    places = [place for i, slot in enumerate(role.slots) if mesh.coordinates(i).dp == rank for place in slot.places]
    names = [f"{node}:{device}" for node, device in places]
    devices = "+".join(names) if len(names) <= 2 else f"{names[0]} to {names[-1]}"
    return f"{role.role} {rank}  {devices}"


def _some(labels: Sequence[str]) -> list[str]:
    if len(labels) <= MOST_RANKS:
        return list(labels)
    return [*labels[: MOST_RANKS - 2], "...", labels[-1]]


def _drawn(makers: Sequence[str], trainers: Sequence[str], experience: str, weights: str) -> list[str]:
    height = max(len(makers), len(trainers))
    at = (height - 1) // 2
    left, right = _side(makers, height), _side(trainers, height)
    width = max(map(len, makers))
    # The way back ends under the first letters of both sides, and its text must fit between.
    between = max(len(experience) + 8, len(weights) + 6 - width)
    lines = []
    for row in range(height):
        start = f"{left[row]:<{width}} --{'+' if len(makers) > 1 else '-'}" if left[row] else " " * (width + 4)
        middle = f"{'  ' + experience + '  ':-^{between}}" if row == at else " " * between
        end = f"{'+' if len(trainers) > 1 else '-'}-> {right[row]}" if right[row] else ""
        lines.append((start + middle + end).rstrip())
    back = width + between + 5
    lines.append(f"  ^{'|':>{back + 1}}")
    lines.append(f"  +{'  ' + weights + '  ':-^{back}}+")
    return lines


def _side(labels: Sequence[str], height: int) -> list[str]:
    """The labels in the middle of so many rows."""
    above = (height - len(labels)) // 2
    return [*[""] * above, *labels, *[""] * (height - above - len(labels))]


def _routed(makers: Sequence[str], trainers: Sequence[str], lanes: Sequence[Sequence[int]]) -> list[str]:
    width = max(map(len, makers))
    lines = []
    for maker, label in enumerate(makers):
        fed = [trainers[rank] for rank, feeders in enumerate(lanes) if maker in feeders]
        lines.append(f"{label:<{width}} --  (1) experience  --> {', '.join(fed)}")
    return lines
