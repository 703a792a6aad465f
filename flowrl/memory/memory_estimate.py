"""How much memory each device of a plan needs, before anything starts: what roles hold, and the largest of their calls.

Calls of one process come one after another, so a device needs what all its roles hold and what one call takes beside
that. Files are read for the models' sizes only; neither torch nor a model is loaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from flowrl.config import (
    ActorConfig,
    CriticConfig,
    OnPolicyConfig,
    ReferenceConfig,
    RewardConfig,
    RunConfig,
    models_of,
)
from flowrl.controller.placement.plan import Plan, RolePlan, Slot
from flowrl.memory.activations import Entropy
from flowrl.memory.model_size import model_size
from flowrl.memory.role_memory import Call, RoleMemory, RoleModel, run_role, trained_role
from flowrl.memory.rollout_memory import Prompts, rollout_role, vllm_role

PROCESS = {"cpu": 430_000_000, "cuda": 500_000_000}
"""A process before it has a model. On the CPU Python with torch, transformers and Ray, measured; on a GPU what CUDA
takes for itself, which has not been measured."""

_ITEMS = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class DeviceMemory:
    """What the roles of one device need."""

    node: int
    device: int
    roles: Mapping[str, RoleMemory | None]
    """None: the model's size is not known."""
    process: int

    @property
    def known(self) -> bool:
        return None not in self.roles.values()

    @property
    def peak(self) -> tuple[int, str, Call]:
        """(bytes, role, its call) when most is in use; of known roles."""
        found = {role: memory for role, memory in self.roles.items() if memory is not None}
        calls = [(self._during(role, call), role, call) for role, memory in found.items() for call in memory.calls]
        return max(calls, key=lambda peak: peak[0], default=(self.process, "", Call("start")))

    def _during(self, role: str, call: Call) -> int:
        return self.process + call.total + sum(self.held(other, role) for other in self.roles)

    def held(self, role: str, during: str) -> int:
        """What a role holds while a role (perhaps itself) is called."""
        memory, caller = self.roles[role], self.roles[during]
        if memory is None:
            return 0
        if not memory.leaves or role == during:
            return memory.held
        lends = role == "actor" and caller is not None and caller.borrows
        return memory.weights if lends else 0


def estimate(config: RunConfig, planned: Plan) -> list[DeviceMemory]:
    """What each device of a plan needs, in the order of nodes and devices; exact to a fifth (docs/training.md)."""
    roles = _Roles(config, planned)
    slots = {slot for role in planned.roles.values() for slot in role.slots}
    found = []
    for node, device in sorted({place for slot in slots for place in slot.places}):
        here = [slot for slot in slots if (node, device) in slot.places]
        memory = {
            name: roles.memory(name, slot)
            for name, role in planned.roles.items()
            for slot in here
            if slot in role.slots
        }
        found.append(DeviceMemory(node, device, memory, len(here) * PROCESS[planned.kind]))
    return found


class _Roles:
    """The roles of a config on the ranks of a plan."""

    def __init__(self, config: RunConfig, planned: Plan) -> None:
        self._config, self._planned = config, planned
        self._values = {role: value for role, (_, value) in models_of(config).items()}
        self._model = cache(self._read_model)  # asked for by every slot
        self._longest = 0
        if isinstance(config, OnPolicyConfig):
            self._longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens

    def memory(self, role: str, slot: Slot) -> RoleMemory | None:
        """Of the rank of a role that is on a slot."""
        value = self._values.get(role)
        place = self._planned.roles[role]
        if isinstance(value, RewardConfig) and value.model is None:
            return RoleMemory(0, 0, ())
        if role == "rollout":
            return self._rollout(place, slot)
        model = self._model(role)
        if model is None:
            return None
        if isinstance(value, ActorConfig | CriticConfig):
            entropy: Entropy = "gradient" if isinstance(value, ActorConfig) and value.entropy_coef else "value"
            saves = self._config.checkpoint.every > 0 and self._config.checkpoint.asynchronous
            return trained_role(model, self._rows(place, "minibatch_size"), entropy, saves=saves)
        if isinstance(value, ReferenceConfig) and self._is_actor(value, place, slot):
            actor = self._model("actor")
            assert actor is not None, "it is the reference's model"
            calls = run_role(actor, self._rows(place, "batch_size"), "logprobs").calls
            return RoleMemory(0, 0, calls, borrows=True)
        return run_role(model, self._rows(place, "batch_size"), "logprobs" if model.is_policy else "score")

    def _read_model(self, role: str) -> RoleModel | None:
        value = self._values.get(role)
        if not isinstance(value, ActorConfig | CriticConfig | ReferenceConfig | RewardConfig) or value.model is None:
            return None
        size = model_size(value.model.path)
        if size is None:
            return None
        return RoleModel(
            size=size,
            engine=value.engine,
            mesh=self._planned.roles[role].mesh,
            kind=self._planned.kind,
            item=_ITEMS[value.model.dtype],
            is_policy=isinstance(value, ActorConfig | ReferenceConfig),
            longest=self._longest,
            lora=value.lora if isinstance(value, ActorConfig | CriticConfig) else None,
            alone=self._config.backend == "inline",
        )

    def _rollout(self, place: RolePlan, slot: Slot) -> RoleMemory | None:
        config, actor = self._config, self._model("actor")
        if not isinstance(config, OnPolicyConfig) or actor is None:
            return None
        if config.rollout.engine == "vllm":
            sleeps = config.rollout.vllm is None or config.rollout.vllm.sleep is not False
            leaves = sleeps and self._planned.kind == "cuda" and self._shares(slot)
            return vllm_role(actor.size, actor.item, config.rollout, place.leads, leaves=leaves)
        rows = -(-config.batch_size // place.mesh.dp)
        prompts = Prompts(rows, -(-rows // config.samples_per_prompt), config.data.max_prompt_tokens)
        lender = actor if self._lends(actor, place, slot) else None
        return rollout_role(actor.size, actor.item, config.rollout, prompts, lender, self._planned.kind)

    def _shares(self, slot: Slot) -> bool:
        """Whether roles of other processes use a device of this one."""
        used = {other for role in self._planned.roles.values() for other in role.slots if other != slot}
        return any(place in other.places for other in used for place in slot.places)

    def _lends(self, actor: RoleModel, place: RolePlan, slot: Slot) -> bool:
        """Whether the actor of a slot lends its weights: one that is cut does to a role on its very ranks only."""
        of_actor = self._planned.roles["actor"].slots
        return slot in of_actor and (not actor.is_cut or tuple(of_actor) == tuple(place.slots))

    def _is_actor(self, reference: ReferenceConfig, place: RolePlan, slot: Slot) -> bool:
        """Whether a reference is the actor without its adapter."""
        value, actor = self._values.get("actor"), self._model("actor")
        if actor is None or not isinstance(value, ActorConfig) or value.lora is None or value.model != reference.model:
            return False
        of_actor = self._planned.roles["actor"]
        together = actor.is_cut or actor.mesh.sp > 1
        same = tuple(of_actor.slots) == tuple(place.slots) and of_actor.mesh == place.mesh
        return slot in of_actor.slots and (same or not together)

    def _rows(self, place: RolePlan, setting: str) -> int | None:
        """Rows of one rank in a step or a minibatch; None where rows are of any length."""
        config = self._config
        if not isinstance(config, OnPolicyConfig):
            return None
        rows = config.minibatch_size if setting == "minibatch_size" else config.batch_size
        return -(-rows // place.mesh.dp)


def same_devices(devices: Sequence[DeviceMemory]) -> list[list[DeviceMemory]]:
    """Devices next to each other that need the same."""
    groups: list[list[DeviceMemory]] = []
    for found in devices:
        if groups and groups[-1][0].roles == found.roles:
            groups[-1].append(found)
        else:
            groups.append([found])
    return groups
