"""Estimates the memory of each device of a plan: the resident state of its roles plus the largest call.

The calls of a process run sequentially, so a device needs the state of all its roles and the memory of one call.
`estimate_memory` depends only on the settings, the plan, and the sizes of the models, which `read_sizes` reads.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from flowrl.config import (
    ActorConfig,
    ConfigError,
    DataConfig,
    JudgeConfig,
    ModelRoleConfig,
    ReferenceConfig,
    RolloutConfig,
    RolloutRunConfig,
    RunConfig,
    TrainedConfig,
    TransferConfig,
    import_attribute,
    keys_of,
    models_of,
)
from flowrl.controller.placement.plan import Plan, RolePlan, Slot
from flowrl.controller.placement.weight_transport import choose_transports
from flowrl.data.dtypes import ITEMSIZE
from flowrl.memory.device_constants import CPU_PROCESS, CUDA_PROCESS, FRAGMENTATION, nccl_bytes
from flowrl.memory.head_memory import Entropy
from flowrl.memory.model_fit import has_head
from flowrl.memory.model_size import ModelSize, find_size_problem, read_model_size
from flowrl.memory.role_memory import CallMemory, RoleMemory, RoleModel, inference_role, training_role
from flowrl.memory.rollout_memory import RolloutBatch, RolloutLoad, bucket_bytes

_CHARACTERS_PER_TOKEN = 4
"""Number of characters per token of a judge's prompt."""


@dataclass(frozen=True)
class DeviceMemory:
    """Memory that the roles on one device need."""

    node: int
    device: int
    roles: Mapping[str, RoleMemory | None]
    """Memory of each role; None if the size of the role's model is unknown."""
    fixed: Mapping[str, int]
    """Term -> bytes that the processes on the device need in any case, such as CUDA contexts."""
    fragmentation: float = 0.0
    """Bytes that torch reserves in addition to the tensors of a call, relative to these tensors."""
    processes: tuple[frozenset[str], ...] = ()
    """Roles of each process whose torch caches freed memory. Empty on a CPU, because freed memory returns to the host.
    """
    object_store: int = 0
    """Bytes of weights in the object store of the node, which all devices of the node share."""

    @property
    def is_known(self) -> bool:
        return None not in self.roles.values()

    @property
    def process(self) -> int:
        """Bytes that all processes need in any case."""
        return sum(self.fixed.values())

    @property
    def peak(self) -> tuple[int, str, CallMemory]:
        """Bytes, role and call at the peak, over all roles with known memory."""
        peaks = [(self.during(role, call), role, call) for role, call in self._calls]
        # Without eviction, the memory is the same during the largest calls of all processes.
        return max(peaks, key=lambda peak: (peak[0], peak[2].total), default=(self.process, "", CallMemory("start")))

    @property
    def _calls(self) -> list[tuple[str, CallMemory]]:
        return [(role, call) for role, memory in self.roles.items() if memory is not None for call in memory.calls]

    def during(self, role: str, call: CallMemory) -> int:
        """Returns the bytes of the device while a call runs."""
        state = sum(self.resident(other, role, call) for other in self.roles)
        return self.process + state + call.total + self.reserved(call) + self.cached(role)

    def cached(self, caller: str) -> int:
        """Returns the bytes that torch caches in other processes while a method of `caller` runs.

        A call evicts another process if a role of either process offloads. An evicted process returns its cache.
        Otherwise, a process keeps the memory of its largest call.
        """
        own = next((roles for roles in self.processes if caller in roles), frozenset[str]())
        if self._can_offload(own):
            return 0
        kept = [roles for roles in self.processes if roles != own and not self._can_offload(roles)]
        return sum(
            max((call.total + self.reserved(call) for role, call in self._calls if role in roles), default=0)
            for roles in kept
        )

    def _can_offload(self, roles: frozenset[str]) -> bool:
        return any((memory := self.roles[role]) is not None and memory.offloads for role in roles)

    def reserved(self, call: CallMemory) -> int:
        """Returns the bytes that torch reserves in addition to the tensors of a call."""
        return int(self.fragmentation * call.total)

    def resident(self, role: str, caller: str, call: CallMemory) -> int:
        """Returns the resident bytes of `role` while a call of `caller` (possibly the same role) runs."""
        memory, caller_memory = self.roles[role], self.roles.get(caller)
        if memory is None:
            return 0
        if role == caller:
            return memory.resident_during(call)
        if not memory.offloads:
            return memory.resident
        shares = call.has_actor_weights or (caller_memory is not None and caller_memory.shares_actor_weights)
        is_shared = role == "actor" and shares
        return memory.weights if is_shared else 0

    def needed_beside_cache(self, role: str) -> int:
        """Returns the peak bytes of everything except the KV cache of `role`, while this cache is allocated."""
        memory = self.roles[role]
        assert memory is not None, "the memory of the role is known"
        others = [
            self.during(caller, call)
            for caller, call in self._calls
            if not memory.offloads or (caller == role and not call.without_cache)
        ]
        return max(others, default=self.process) - memory.kv_cache

    def num_caches(self, roles: Collection[str]) -> int:
        """Returns the number of KV caches of `roles` that are allocated at the same time: the caches of all roles that
        never offload, and one cache of the other roles.
        """
        offloads = [memory.offloads for role in roles if (memory := self.roles.get(role)) is not None]
        return offloads.count(False) + any(offloads)

    def present_at_start(self, role: str, caches: Mapping[str, int]) -> int:
        """Returns the bytes in use when the engine of `role` measures the free memory. At this time, the engine has
        only a CUDA context, and trained roles have no optimizer state. `caches` maps each role to the bytes of its
        planned KV cache.
        """
        others = {other: memory for other, memory in self.roles.items() if other != role and memory is not None}
        processes = int(CUDA_PROCESS.value) + self.fixed.get("CUDA context", 0)
        engines = sum(sum(memory.fixed.values()) for memory in others.values() if "vLLM process" in memory.fixed)
        awake = {other: memory for other, memory in others.items() if not memory.offloads}
        state = sum(memory.weights + caches.get(other, memory.kv_cache) for other, memory in awake.items())
        return processes + engines + state


def read_sizes(config: RunConfig) -> dict[Path, ModelSize]:
    """Returns the size of every model of a run that is on this machine, by its path or Hub name."""
    judges = [value for value in config.role_settings.values() if isinstance(value, JudgeConfig)]
    models = [value.model for value in (*models_of(config).values(), *judges) if value.model is not None]
    sizes = {model.path: read_model_size(model.path) for model in models}
    return {path: size for path, size in sizes.items() if size is not None}


def estimate_memory(config: RunConfig, planned: Plan, sizes: Mapping[Path, ModelSize]) -> list[DeviceMemory]:
    """Returns the memory of each device of a plan, ordered by node and device. Accurate to 20 % (docs/training.md).

    Args:
        config: settings of the run.
        planned: devices of the run.
        sizes: size of each model, by its path or Hub name. If the size is missing, the memory of the role is unknown.
    """
    estimator = _Estimator(config, planned, sizes)
    slots = {slot for role in planned.roles.values() for slot in role.slots}
    fragmentation = FRAGMENTATION.value if planned.kind == "cuda" else 0.0
    devices = []
    for node, device in sorted({location for slot in slots for location in slot.node_devices}):
        local_slots = [slot for slot in slots if (node, device) in slot.node_devices]
        roles = {
            name: estimator.role_memory(name, slot)
            for name, role in planned.roles.items()
            for slot in local_slots
            if slot in role.slots
        }
        fixed = _fixed_memory(planned, local_slots, roles)
        processes = (frozenset(name for name in roles if slot in planned.roles[name].slots) for slot in local_slots)
        caching = tuple(processes) if planned.kind == "cuda" else ()
        stored = estimator.object_store(node)
        devices.append(DeviceMemory(node, device, roles, fixed, fragmentation, caching, stored))
    return devices


def read_role_models(config: RunConfig, planned: Plan) -> dict[str, RoleModel]:
    """Returns the model of each role of a plan whose memory is estimated from the size of its model."""
    estimator = _Estimator(config, planned, read_sizes(config))
    models = {role: estimator.role_model(role) for role in planned.roles}
    return {role: model for role, model in models.items() if model is not None}


def _fixed_memory(planned: Plan, slots: Sequence[Slot], roles: Mapping[str, RoleMemory | None]) -> dict[str, int]:
    """Returns the terms of `device_constants` that the processes on a device need in any case, in bytes."""
    if planned.kind == "cpu":
        return {"process": len(slots) * int(CPU_PROCESS.value)}
    fixed: Counter[str] = Counter()
    for memory in roles.values():
        fixed.update({} if memory is None else memory.fixed)
    # The term "vLLM process" includes the CUDA context of its process.
    num_processes = len(slots) - sum("vLLM process" in memory.fixed for memory in roles.values() if memory is not None)
    fixed["CUDA context"] = num_processes * int(CUDA_PROCESS.value)
    names = ("CUDA context", "vLLM process", "CUDA graphs", "NCCL", "all-reduce")
    return {name: fixed[name] for name in names if fixed[name]}


def host_memory(devices: Sequence[DeviceMemory]) -> dict[int, Counter[str]]:
    """Returns the host memory that a run on GPUs needs on each node, in bytes: node -> term -> bytes."""
    nodes: dict[int, Counter[str]] = {}
    for device in devices:
        terms = nodes.setdefault(device.node, Counter())
        for memory in device.roles.values():
            terms.update({} if memory is None else memory.host)
        if device.object_store:
            terms["object store"] = device.object_store
    return {node: terms for node, terms in nodes.items() if terms}


def explain_unknown_sizes(config: RunConfig) -> list[str]:
    """Returns one sentence per model or engine whose memory cannot be estimated, with the reason."""
    reasons, keys = [], keys_of(config)
    for role, value in models_of(config).items():
        if value.model is None:
            continue
        if not value.engine.capabilities.estimates_memory:
            reasons.append(f"{keys[role]}.engine.kind is {value.engine.kind}, whose memory is not estimated")
        elif value.model.dtype == "float64":
            reasons.append(f"{keys[role]}.model.dtype is float64, but memory is estimated for 16 and 32 bits only")
        elif (reason := find_size_problem(value.model.path)) is not None:
            reasons.append(f"{keys[role]}.model.path is {value.model.path}, {reason}")
    for role, value in config.role_settings.items():
        if isinstance(value, JudgeConfig) and (reason := find_size_problem(value.model.path)) is not None:
            reasons.append(f"{keys[role]}.model.path is {value.model.path}, {reason}")
        if isinstance(value, RolloutConfig | JudgeConfig) and value.capabilities.memory is None:
            reasons.append(f"{keys[role]}.engine is {value.engine}, whose capabilities name no `memory` function")
    return [f"memory unknown: {reason}" for reason in reasons]


class _Estimator:
    """Computes the memory of each role of a config on the ranks of a plan."""

    def __init__(self, config: RunConfig, planned: Plan, sizes: Mapping[Path, ModelSize]) -> None:
        self._config, self._planned, self._sizes = config, planned, sizes
        self._role_configs = models_of(config)
        self.role_model = cache(self._make_role_model)  # called once per slot
        self._transports = choose_transports(config, planned)
        prompts = [value.max_prompt_tokens for _, value in config if isinstance(value, DataConfig)]
        self._max_length = max(prompts, default=0)
        if isinstance(config, RolloutRunConfig):
            self._max_length = config.data.max_prompt_tokens + config.rollout.max_response_tokens

    def role_memory(self, role: str, slot: Slot) -> RoleMemory | None:
        """Returns the memory that a role needs on `slot`. Returns None if the size of its model is unknown.

        Raises ConfigError if transformers cannot construct the model.
        """
        role_config = self._role_configs.get(role)
        role_plan = self._planned.roles[role]
        if role == "rollout":
            return self._rollout_memory(role_plan, slot)
        judge = self._config.role_settings.get(role)
        if isinstance(judge, JudgeConfig):
            return self._judge_memory(judge, role_plan, slot)
        if role_config is None or role_config.model is None:  # a role without a model, such as a reward function
            return RoleMemory(0, 0, ())
        model = self.role_model(role)
        if model is None:
            return None
        try:
            return self._model_memory(role_config, role_plan, slot, model)
        except ConfigError as error:
            raise ConfigError(
                f"{keys_of(self._config)[role]}.model.path is {role_config.model.path}, but {error}"
            ) from None

    def _model_memory(
        self, role_config: ModelRoleConfig, role_plan: RolePlan, slot: Slot, model: RoleModel
    ) -> RoleMemory:
        mesh, whole = role_plan.mesh, model
        model = replace(model, stage=mesh.coordinates(role_plan.slots.index(slot)).pp)
        if isinstance(role_config, TrainedConfig):
            trains_entropy = isinstance(role_config, ActorConfig) and role_config.entropy_coef
            entropy: Entropy = "gradient" if trains_entropy else "value"
            copies = self._config.checkpoint.every > 0 and self._config.checkpoint.asynchronous
            memory = training_role(model, self._rows(role_plan, "minibatch_size"), entropy, copies_checkpoints=copies)
            sends = role_plan.slots.index(slot) < model.num_senders(self._transfer)
            return self._with_broadcast(memory, whole) if sends else memory
        rows = self._rows(role_plan, "batch_size")
        if isinstance(role_config, ReferenceConfig) and self._is_actor_without_adapter(role_config, role_plan, slot):
            actor = self.role_model("actor")
            assert actor is not None, "the actor has the reference's model"
            calls = inference_role(actor, rows, "logprobs").calls
            return RoleMemory(0, 0, calls, shares_actor_weights=True)
        return inference_role(model, rows, "logprobs" if model.is_policy else "score")

    def _with_broadcast(self, memory: RoleMemory, model: RoleModel) -> RoleMemory:
        """Adds the weight sync over NCCL to the memory of a rank of an actor that sends weights: the packed part of a
        bucket, and one weight.
        """
        config = self._config
        if self._transports.get("rollout") != "nccl" or model is not self.role_model("actor"):
            return memory
        assert isinstance(config, RolloutRunConfig), "the run has a rollout"
        element = ITEMSIZE[config.rollout.sent_dtype or config.actor.model.dtype]
        count = model.num_senders(config.rollout.transfer)
        bucket = bucket_bytes(model.size, element, config.rollout.transfer) // count
        call = CallMemory("broadcast_weights", gathered=model.exported(element) // count, buffers=bucket)
        fixed = {**memory.fixed, "NCCL": memory.fixed.get("NCCL", 0) + nccl_bytes(1)}
        return replace(memory, calls=(*memory.calls, call), fixed=fixed)

    @property
    def _transfer(self) -> TransferConfig:
        return self._config.rollout.transfer if isinstance(self._config, RolloutRunConfig) else TransferConfig()

    def object_store(self, node: int) -> int:
        """Returns the bytes of the last weights that were sent through the object store. A copy is on the node of the
        actor's first rank and on each node of the rollout. Returns 0 on CPUs.
        """
        config, roles = self._config, self._planned.roles
        transport = self._transports.get("rollout")
        is_used = transport in ("object_store", "adapter") and self._planned.kind == "cuda"
        if not is_used or not isinstance(config, RolloutRunConfig) or (actor := self.role_model("actor")) is None:
            return 0
        slots = (roles["actor"].slots[0], *roles["rollout"].slots)
        element = ITEMSIZE[config.rollout.sent_dtype or config.actor.model.dtype]
        sent = actor.adapter if transport == "adapter" else actor.size.parameters * element
        return sent if node in {slot.node for slot in slots} else 0

    def _make_role_model(self, role: str) -> RoleModel | None:
        value = self._role_configs.get(role)
        if not isinstance(value, ModelRoleConfig) or value.model is None or role not in self._planned.roles:
            return None
        size = self._sizes.get(value.model.path)
        if size is None or value.model.dtype == "float64" or not value.engine.capabilities.estimates_memory:
            return None  # Activations are counted for 16 and 32 bits.
        return RoleModel(
            size=size,
            engine=value.engine,
            mesh=self._planned.roles[role].mesh,
            device_type=self._planned.kind,
            param_bytes=ITEMSIZE[value.model.dtype],
            is_policy=has_head(value),
            max_length=self._max_length,
            lora=value.lora if isinstance(value, TrainedConfig) else None,
            is_inline=self._config.backend == "inline",
            optimizer=value.optimizer.kind if isinstance(value, TrainedConfig) else "adamw",
        )

    def _rollout_memory(self, role_plan: RolePlan, slot: Slot) -> RoleMemory | None:
        config = self._config
        model = self._role_configs["actor"].model if isinstance(config, RolloutRunConfig) else None
        size = None if model is None else self._sizes.get(model.path)
        if not isinstance(config, RolloutRunConfig) or model is None or size is None or model.dtype == "float64":
            return None
        rollout, rows = config.rollout, -(-config.batch_size // role_plan.mesh.dp)
        if rollout.capabilities.memory is None:
            return None
        actor = self.role_model("actor")  # None in an evaluation without training
        can_offload = rollout.can_sleep(on_gpus=True) and self._planned.kind == "cuda"
        num_prompts = -(-rows // config.samples_per_prompt)
        offloads = can_offload and self._shares_device(slot, self._planned.roles)
        load = RolloutLoad(
            size=size,
            param_bytes=ITEMSIZE[rollout.sent_dtype or model.dtype],
            config=rollout,
            batch=RolloutBatch(rows, num_prompts, config.data.max_prompt_tokens, config.environment is not None),
            device_type=self._planned.kind,
            weight_owner=actor if actor is not None and self._shares_actor_weights(actor, role_plan, slot) else None,
            replica=role_plan.replica,
            offloads=offloads,
            is_evicted_by_actor=offloads and self._shares_device(slot, {"actor"} & self._planned.roles.keys()),
            transport=self._transports.get("rollout"),
            sender=actor if self._transports.get("rollout") in ("cuda_ipc", "nccl", "adapter") else None,
        )
        return import_attribute(rollout.capabilities.memory)(load)

    def _judge_memory(self, judge: JudgeConfig, role_plan: RolePlan, slot: Slot) -> RoleMemory | None:
        """Returns the memory of a judge, or None if the size of its model or the memory of its engine is unknown."""
        size = self._sizes.get(judge.model.path)
        if size is None or judge.model.dtype == "float64" or judge.capabilities.memory is None:
            return None
        num_responses = 1 if judge.kind == "pointwise" else 2
        # The data and the rollout limit the prompt and the responses, in tokens of the policy.
        prompt = len(judge.read_prompt()) // _CHARACTERS_PER_TOKEN
        if isinstance(self._config, RolloutRunConfig):
            responses = num_responses * self._config.rollout.max_response_tokens
            prompt += self._config.data.max_prompt_tokens + responses
        rows = (self._rows(role_plan, "batch_size") or 1) * judge.max_judgments
        can_offload = judge.generation.can_sleep(on_gpus=True) and self._planned.kind == "cuda"
        load = RolloutLoad(
            size=size,
            param_bytes=ITEMSIZE[judge.generation.sent_dtype or judge.model.dtype],
            config=judge.generation,
            batch=RolloutBatch(rows, rows, prompt),
            device_type=self._planned.kind,
            replica=role_plan.replica,
            offloads=can_offload and self._shares_device(slot, self._planned.roles),
        )
        return import_attribute(judge.capabilities.memory)(load)

    def _shares_device(self, slot: Slot, roles: Collection[str]) -> bool:
        """Returns whether any of these roles has a process on another slot that includes a device of this slot."""
        others = {other for role in roles for other in self._planned.roles[role].slots if other != slot}
        return any(location in other.node_devices for other in others for location in slot.node_devices)

    def _shares_actor_weights(self, actor: RoleModel, rollout_plan: RolePlan, slot: Slot) -> bool:
        """Returns whether the rollout shares the weights of the actor on this slot."""
        actor_slots = self._planned.roles["actor"].slots
        if actor.mesh.pp > 1:  # no rank has all layers
            return False
        return slot in actor_slots and (not actor.is_sharded or tuple(actor_slots) == tuple(rollout_plan.slots))

    def _is_actor_without_adapter(self, reference: ReferenceConfig, reference_plan: RolePlan, slot: Slot) -> bool:
        """Returns whether the colocated actor with its LoRA adapter disabled replaces the reference."""
        value, actor = self._role_configs.get("actor"), self.role_model("actor")
        if (
            actor is None
            or actor.mesh.pp > 1
            or not isinstance(value, TrainedConfig)
            or not value.has_base(reference.model)
        ):
            return False
        actor_plan = self._planned.roles["actor"]
        is_collective = actor.is_sharded or actor.mesh.sp > 1
        has_same_ranks = tuple(actor_plan.slots) == tuple(reference_plan.slots)
        is_aligned = has_same_ranks and actor_plan.mesh == reference_plan.mesh
        return slot in actor_plan.slots and (is_aligned or not is_collective)

    def _rows(self, role_plan: RolePlan, setting: str) -> int | None:
        """Returns the rows per rank of a batch or minibatch, or None if the config does not limit them."""
        config = self._config
        if not isinstance(config, RolloutRunConfig):
            return None
        rows = config.minibatch_size if setting == "minibatch_size" else config.batch_size
        return -(-rows // role_plan.mesh.dp)


def group_equal_devices(devices: Sequence[DeviceMemory]) -> list[list[DeviceMemory]]:
    """Groups adjacent devices whose roles need the same memory."""
    groups: list[list[DeviceMemory]] = []
    for device in devices:
        if groups and groups[-1][0].roles == device.roles:
            groups[-1].append(device)
        else:
            groups.append([device])
    return groups
