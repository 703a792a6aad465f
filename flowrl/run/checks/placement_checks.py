"""Checks of the settings against the placement plan: whether each role can run on its devices."""

import logging
from collections.abc import Iterator

from flowrl.config import (
    TRAIN_ENGINES,
    ConfigError,
    EngineConfig,
    JudgeConfig,
    ModelRoleConfig,
    ReferenceConfig,
    RolloutConfig,
    RolloutRunConfig,
    RunConfig,
    TrainedConfig,
    models_of,
    shards_model,
)
from flowrl.config.engines.rollout_engines import DEFAULT_ENGINE, name_alternatives
from flowrl.config.engines.train_engines import DEFAULT_TRAIN_ENGINE
from flowrl.config.engines.vllm_settings import find_speculation_problem
from flowrl.config.model import REPLICATED
from flowrl.config.roles import quantized_device_problem
from flowrl.controller.placement.inventory import check_one_node
from flowrl.controller.placement.plan import Mesh, Plan, RolePlan
from flowrl.memory.model_fit import check_model_fit, find_head_size_problem, find_replica_problem
from flowrl.run.checks.checked_run import find_generators

_logger = logging.getLogger(__name__)

_BFLOAT16_CAPABILITY = (8, 0)
"""CUDA compute capability from which GPUs have matrix products in bfloat16."""


def check_nodes(config: RunConfig) -> None:
    """Raises PlacementError if `devices` has counts for several nodes, but the run joins no cluster (`address`)."""
    if config.backend == "ray" and config.address is None:
        check_one_node(config.devices)


def describe_devices(config: RunConfig, planned: Plan) -> str:
    """Returns the numbers of roles and devices."""
    devices = {location for role in planned.roles.values() for slot in role.slots for location in slot.node_devices}
    return f"{len(planned.roles)} roles; number of {planned.kind} devices: {len(devices)}"


def check_engines(config: RunConfig, planned: Plan) -> None:
    """Raises ConfigError if a role's training engine cannot run on its ranks."""
    for role, model in _planned_models(config, planned).items():
        role_plan = planned.roles[role]
        _check_dimensions(role, role_plan, model.engine)
        if config.backend == "ray" and model.engine.kind == DEFAULT_TRAIN_ENGINE:
            _check_engine(role, role_plan, model.engine, is_trained=isinstance(model, TrainedConfig))


def check_other_engines(config: RunConfig, planned: Plan) -> None:
    """Raises ConfigError if a role without training engine has tp, sp or pp that it does not support."""
    models = _planned_models(config, planned)
    for role, role_plan in planned.roles.items():
        if role not in models:
            _check_unsharded(role, role_plan, config.role_settings.get(role))


def _planned_models(config: RunConfig, planned: Plan) -> dict[str, ModelRoleConfig]:
    """Returns the roles of a plan with a training engine."""
    models = {role: model for role, model in models_of(config).items() if model.model is not None}
    return {role: models[role] for role in planned.roles if role in models}


def check_model_sizes(config: RunConfig, planned: Plan) -> None:
    """Raises ConfigError if tp or sp does not divide the sizes of a local model, or if it lacks a LoRA target."""
    for role, model in _planned_models(config, planned).items():
        check_model_fit(role, model, planned.roles[role])


def check_replicas(config: RunConfig, planned: Plan) -> None:
    """Raises ConfigError if vLLM cannot shard a model over the devices of a replica. A model on the Hub is checked only
    if it is in the cache.
    """
    for role, _, _, model, _ in find_generators(config):
        if model is None or role not in planned.roles:
            continue
        if (problem := find_replica_problem(model.path, planned.roles[role].replica)) is not None:
            raise ConfigError(f"placement.roles.{role} has {problem}")


def _check_dimensions(role: str, role_plan: RolePlan, engine: EngineConfig) -> None:
    """Raises ConfigError if a role has a parallel dimension that its training engine does not support."""
    for name in ("pp", "dp", "sp", "tp"):
        size = getattr(role_plan.mesh, name)
        if size > 1 and name not in engine.capabilities.dimensions:
            fix = "remove it" if name != "dp" else f"make pool {role_plan.pool} smaller"
            known = [known for known, facts in TRAIN_ENGINES.items() if name in facts.dimensions]
            fix += f", or set {role}.engine.kind: {' or '.join(known)}" if known else ""
            raise ConfigError(
                f"placement.roles.{role} has {name} {size}, but {role}.engine.kind {engine.kind} supports only "
                f"{', '.join(engine.capabilities.dimensions)}: {fix}"
            )


def _check_unsharded(role: str, role_plan: RolePlan, config: object) -> None:
    """Raises ConfigError if a role that cannot be sharded has tp, sp or pp."""
    generates = isinstance(config, RolloutConfig | JudgeConfig)
    supported = config.capabilities.dimensions if generates else ()
    # A dedicated process uses all devices of its replica, so the mesh of its role has tp 1 and pp 1.
    mesh, replica = role_plan.mesh, role_plan.replica
    for name, size in (("tp", max(mesh.tp, replica.tp)), ("sp", mesh.sp), ("pp", max(mesh.pp, replica.pp))):
        if size > 1 and name not in supported:
            reason, fix = "the role cannot be sharded", "remove it"
            if name != "sp" and generates:
                others = name_alternatives(lambda known, name=name: name in known.dimensions)
                reason, fix = f"engine {config.engine} cannot shard it", f"set {role}.engine: {others}, or remove it"
            raise ConfigError(f"placement.roles.{role} has {name} {size}, but {reason}: {fix}")


def check_quantization(config: RunConfig, planned: Plan) -> None:
    """Raises ConfigError if the planned devices do not support the rollout's quantization."""
    for role, value in config:
        if isinstance(value, RolloutConfig) and (problem := quantized_device_problem(role, value, planned.kind)):
            raise ConfigError(problem)
    if isinstance(config, RolloutRunConfig):
        config.check_served_dtype(planned.kind)


def check_async_scheduling(config: RunConfig, planned: Plan) -> None:
    """Raises ConfigError if `vllm.async_scheduling` is true on CPUs."""
    for _, key, value, *_ in find_generators(config):
        if planned.kind == "cpu" and value.vllm is not None and value.vllm.async_scheduling is True:
            raise ConfigError(
                f"{key}.vllm.async_scheduling is true, which vLLM supports on GPUs only, but placement.device "
                f"is {planned.kind}: set auto or false"
            )


def check_speculation(config: RunConfig, planned: Plan) -> None:
    """Raises ConfigError for speculative decoding on CPUs."""
    for _, key, value, *_ in find_generators(config):
        arguments = {} if value.vllm is None else value.vllm.engine_args
        if (problem := find_speculation_problem(arguments, planned.kind)) is not None:
            raise ConfigError(
                f"{key}.vllm.engine_args.{problem}, but placement.device is {planned.kind}: remove it, or use GPUs"
            )


def check_head_sizes(config: RunConfig, planned: Plan) -> None:
    """Raises ConfigError if the engine of a rollout or judge does not support its model's heads on the devices."""
    for role, _, value, model, _ in find_generators(config):
        problem = None if model is None else find_head_size_problem(value.engine, model.path, planned.kind)
        if problem is not None:
            raise ConfigError(f"{role}.{problem}: set engine {DEFAULT_ENGINE}, or use another model")


def check_determinism(config: RunConfig, planned: Plan) -> None:
    """Raises ConfigError if `deterministic` is set for a run whose results depend on timing or on other rows."""
    if not config.deterministic:
        return
    if isinstance(config, RolloutRunConfig) and config.schedule.is_streaming:
        raise ConfigError(
            f"deterministic is true, but with schedule.kind {config.schedule.kind} the weights of each token depend on "
            f"timing: set schedule.kind: sync, or deterministic: false"
        )
    if planned.kind == "cpu":
        return
    for name, value in models_of(config).items():
        if value.engine.compile is True:
            raise ConfigError(
                f"deterministic is true, but {name}.engine.compile is true, and torch.compile selects kernels by "
                f"measured time: set {name}.engine.compile: auto, or deterministic: false"
            )
    for name, _, value, *_ in find_generators(config):
        if value.quantization is None:
            continue
        known = value.capabilities.quantizations
        if not known[value.quantization].deterministic:
            others = [key for key, each in known.items() if each.deterministic]
            raise ConfigError(
                f"deterministic is true, but {name}.quantization is {value.quantization}, whose kernels on GPUs are "
                f"not in the batch-invariant mode of engine {value.engine}: set {name}.quantization: "
                f"{' or '.join([*others, 'null'])}, or deterministic: false"
            )


def check_profile(config: RunConfig, planned: Plan) -> None:
    """Raises ConfigError if `report.profile` names a step or a rank that the run does not have."""
    profile = config.report.profile
    if profile is None:
        return
    if config.steps and max(profile.steps) > config.steps:
        raise ConfigError(
            f"report.profile.steps has {max(profile.steps)}, but the run has {config.steps} steps: choose steps from 1 "
            f"to {config.steps}"
        )
    num_ranks = max(len(role.slots) for role in planned.roles.values())
    if max(profile.ranks) >= num_ranks:
        raise ConfigError(
            f"report.profile.ranks has {max(profile.ranks)}, but the roles have at most {num_ranks} ranks: choose "
            f"ranks from 0 to {num_ranks - 1}"
        )


def check_adapters(config: RunConfig, planned: Plan) -> None:
    """Raises ConfigError if a quantized LoRA model is sharded, or if a reference shares a sharded LoRA model but is
    colocated with only some of its ranks.
    """
    for role, value in config:
        if not isinstance(value, TrainedConfig) or value.lora is None:
            continue
        role_plan = planned.roles[role]
        is_sharded = shards_model(value.engine, role_plan.mesh.tp)
        is_divided = is_sharded or role_plan.mesh.pp > 1
        if is_divided and value.lora.base_quantization is not None:
            size = f"pp {role_plan.mesh.pp}" if role_plan.mesh.pp > 1 else f"tp {role_plan.mesh.tp}"
            raise ConfigError(
                f"{role}.lora.base_quantization is {value.lora.base_quantization}, but placement.roles.{role} has "
                f"{size}, which divides the model: remove one of them"
            )
        # A reference never shares the model of pipeline stages.
        is_collective = config.backend == "ray" and (is_sharded or role_plan.mesh.sp > 1) and role_plan.mesh.pp == 1
        for name, other in config:
            if is_collective and isinstance(other, ReferenceConfig) and value.has_base(other.model):
                _check_shared_ranks(name, planned.roles[name], role, role_plan)


def _check_shared_ranks(name: str, reference: RolePlan, role: str, actor: RolePlan) -> None:
    # A collective forward pass needs all ranks of the actor, so it would hang on a subset.
    shared = set(reference.slots) & set(actor.slots)
    if shared and reference.mesh == actor.mesh and set(reference.slots) != set(actor.slots):
        raise ConfigError(
            f"placement.roles.{name} is {reference.pool}, which has {len(shared)} of the {len(actor.slots)} devices of "
            f"{role}, whose model it shares because of {role}.lora: assign {name} to {actor.pool}, or to other devices"
        )


def _check_engine(role: str, role_plan: RolePlan, engine: EngineConfig, *, is_trained: bool) -> None:
    """Raises ConfigError if the engine's settings do not fit the role's mesh."""
    key, mesh = f"{role}.engine", role_plan.mesh
    if mesh.size > 1 and engine.strategy == "single" and is_trained:
        raise ConfigError(
            f"{key}.strategy is single, but the role has {mesh.size} ranks in pool {role_plan.pool}: "
            f"set strategy: auto, ddp, zero1 or fsdp, or make the pool one device"
        )
    if mesh.pp > 1:
        _check_stages(key, role, mesh, engine)
    if mesh.tp > 1 and engine.strategy in REPLICATED:
        raise ConfigError(
            f"{key}.strategy is {engine.strategy}, but placement.roles.{role} has tp {mesh.tp}, which shards "
            "the model: "
            f"set strategy: fsdp, or remove tp"
        )
    if engine.sequence_parallel_norms and mesh.tp == 1:
        raise ConfigError(
            f"{key}.sequence_parallel_norms is true, but placement.roles.{role} has tp 1, so no ranks share a "
            f"layer: remove it, or set tp"
        )
    if engine.compile is True and mesh.tp > 1:
        # The DTensors of tp make torch 2.13 raise a RecursionError when it compiles for variable sizes.
        raise ConfigError(
            f"{key}.compile is true, but placement.roles.{role} has tp {mesh.tp}, which torch.compile does not support "
            f"with micro-batches of different sizes: set it to auto or false, or remove tp"
        )
    if not shards_model(engine, mesh.tp):
        _check_unsharded_settings(key, role_plan, engine)
    if engine.overlap_all_reduce is True and (mesh.size == mesh.pp or shards_model(engine, mesh.tp)):
        reason = "has one rank" if mesh.size == 1 else "has one rank per pipeline stage"
        reason = reason if mesh.size == mesh.pp else f"has tp {mesh.tp}, which shards the model"
        raise ConfigError(
            f"{key}.overlap_all_reduce is true, but {role} {reason}, and only replicated models on several ranks "
            f"support it: remove {key}.overlap_all_reduce, or set it to auto"
        )
    if engine.shard_ranks is not None and mesh.dp % engine.shard_ranks:
        raise ConfigError(
            f"{key}.shard_ranks is {engine.shard_ranks}, which does not divide the role's {mesh.dp} data-parallel "
            f"ranks: set it to a divisor, or remove it"
        )


def _check_stages(key: str, role: str, mesh: Mesh, engine: EngineConfig) -> None:
    """Raises ConfigError for settings that pipeline stages do not support."""
    unsupported = {
        "sequence_parallel_norms": engine.sequence_parallel_norms,
        "offload_activations": engine.offload_activations,
        "compile": engine.compile is True,
        "expert_parallel": engine.expert_parallel,
    }
    for name in (name for name, is_set in unsupported.items() if is_set):
        raise ConfigError(
            f"{key}.{name} is true, but placement.roles.{role} has pp {mesh.pp}, which does not support it: remove "
            f"{key}.{name}, or remove pp"
        )


def _check_unsharded_settings(key: str, role_plan: RolePlan, engine: EngineConfig) -> None:
    """Raises ConfigError for settings of sharded models if each rank of the role has the full model."""
    mesh = role_plan.mesh
    num_ranks = mesh.size // mesh.pp
    model, owner = ("the model", "the role") if mesh.pp == 1 else ("the layers of a stage", "the stage")
    for name, value in engine.sharding_settings().items():
        if num_ranks == 1:
            alternative = "set offload: optimizer" if name == "offload" else "remove it"
            reason = f"strategy {engine.strategy} does not shard {model} of one rank: set strategy: fsdp, or "
            reason += alternative
        else:
            full = "the full model" if mesh.pp == 1 else model
            reason = f"strategy {engine.strategy} puts {full} on each of {owner}'s {num_ranks} ranks: "
            reason += "set strategy: fsdp, or remove it"
        raise ConfigError(f"{key}.{name} is {str(value).lower()}, but {reason}")


def warn_about_offload(config: RunConfig, planned: Plan) -> None:
    """Logs a warning if settings of offloading have no effect, because the devices are CPUs."""
    engines = {f"{role}.engine": value.engine for role, value in models_of(config).items()}
    settings = [
        f"{key}.offload is {engine.offload}"
        for key, engine in engines.items()
        if engine.offload not in ("none", "auto")
    ]
    settings += [f"{key}.offload_activations is true" for key, engine in engines.items() if engine.offload_activations]
    if planned.kind == "cpu" and settings:
        _logger.warning("%s, but the devices are CPUs, so it has no effect: remove it", " and ".join(settings))


def check_bfloat16(config: RunConfig, capability: tuple[int, int] | None) -> None:
    """Raises ConfigError if a model computes in bfloat16 on GPUs that lack it. `capability`: None if it is unknown."""
    if capability is None or capability >= _BFLOAT16_CAPABILITY:
        return
    for key, dtype, fix in _computed_dtypes(config):
        if dtype == "bfloat16":
            own, needed = (".".join(map(str, version)) for version in (capability, _BFLOAT16_CAPABILITY))
            raise ConfigError(
                f"{key} is bfloat16, but the GPUs of this machine have compute capability {own}, and bfloat16 needs "
                f"{needed}: set {fix}"
            )


def _computed_dtypes(config: RunConfig) -> Iterator[tuple[str, str | None, str]]:
    """Yields (key, dtype, alternative to bfloat16) of the setting that determines in which dtype a role computes."""
    for role, value in config.role_settings.items():
        if isinstance(value, RolloutConfig | JudgeConfig) and value.vllm is not None:
            yield f"{role}.vllm.dtype", value.vllm.dtype, f"{role}.vllm.dtype: float16"
        elif isinstance(value, JudgeConfig):
            yield f"{role}.model.dtype", value.model.dtype, f"{role}.model.dtype: float32"
        elif isinstance(value, RolloutConfig) and isinstance(config, RolloutRunConfig):
            yield "actor.model.dtype", config.actor.model.dtype, "actor.model.dtype: float32"
        elif isinstance(value, ModelRoleConfig) and value.model is not None:
            key, half = f"{role}.model.dtype", f"{role}.engine.compute_dtype: float16"
            if value.engine.compute_dtype is None:
                yield key, value.model.dtype, f"{key}: float32, and {half}"
            else:
                yield f"{role}.engine.compute_dtype", value.engine.compute_dtype, half
