"""What is checked of a run before anything starts. Loads neither torch nor ray."""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flowrl.checkpoints.resume import is_resuming
from flowrl.checkpoints.run_folder import check_is_new, check_not_locked
from flowrl.config import (
    ActorConfig,
    AdvantageConfig,
    ConfigError,
    CriticConfig,
    EngineConfig,
    OnPolicyConfig,
    PreferenceConfig,
    PtxConfig,
    ReferenceConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    models_of,
    shards_model,
)
from flowrl.config.roles import int4_on_cpu
from flowrl.controller.placement.inventory import local_inventory
from flowrl.controller.placement.plan import Plan, RolePlan, plan
from flowrl.memory.memory_estimate import estimate_memory
from flowrl.memory.memory_table import check_memory, memory_budget
from flowrl.memory.model_fit import check_model_fit
from flowrl.schedules.schedule_plan import check_schedule
from flowrl.weight_sync.transfer import takes_one_by_one, transport_of


def plan_run(config: RunConfig, devices: Sequence[int] | None = None) -> Plan:
    """The plan of a run on this machine, or on an inventory of `devices` per node that is stated instead.

    Raises:
        PlacementError: the placement does not fit.
        ConfigError: a role's engine cannot run on the ranks that the placement gives it.
    """
    placement, stated = config.placement, devices or config.devices
    if config.address is not None and stated is None:
        raise ConfigError(
            f"the run joins the cluster at {config.address}, whose devices are not known here: state them per node, "
            f"with --devices 8,8 or devices: [8, 8]"
        )
    planned = plan(placement, local_inventory(placement.device, stated), type(config).roles, config.apart())
    check_engines(config, planned)
    return planned


def check_run(config: RunConfig) -> None:
    """Refuses what can be told before data and models are read: functions, placement, memory, and the output
    folder.

    Raises: as `check_start`, and `RunFolderError`.
    """
    check_start(config)
    check_not_locked(config.output)
    if not is_resuming(config):
        check_is_new(config.output)


def check_start(config: RunConfig) -> None:
    """The same but for the output folder.

    Raises: as `check_functions`, `check_rollouts`, `plan_run` and `check_memory`.
    """
    check_functions(config)
    check_rollouts(config)
    if config.address is None:
        planned = plan_run(config)
        check_memory(config, planned, estimate_memory(config, planned), memory_budget(config, planned, is_local=True))


def check_functions(config: RunConfig) -> None:
    """Imports the estimators, losses, rewards and the like that the config names as `module:function`.

    Raises: ConfigError for one that cannot be imported, does not fit its kind, or has other settings.
    """
    for group, value in config:
        if isinstance(value, RewardConfig):
            _check_import(f"{group}.function", value.function)
            _check_import(f"{group}.evaluation", value.evaluation)
    own = [chosen for chosen in _chosen_functions(config) if ":" in chosen[2]]
    if not own:
        return
    from flowrl.algorithms import registry  # noqa: PLC0415 (torch, only where a config names a function of its own)

    kinds = {known.kind: known for known in registry.REGISTRIES}
    for key, kind, name, options in own:
        try:
            kinds[kind].check(name, options)
        except registry.RegistryError as error:
            raise ConfigError(f"{key}: {error}") from error


def _check_import(key: str, name: str | None) -> None:
    if name is None:
        return
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ConfigError(
            f"{key}: {name} cannot be loaded ({type(error).__name__}: {error}): name it as module:function, of a "
            f"module that can be imported where the program is started"
        ) from error
    if not callable(found):
        raise ConfigError(f"{key}: {name} is a {type(found).__name__}, not a function")


def _chosen_functions(config: RunConfig) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """(key, kind of function, name, settings) of every choice of a function."""
    for group, value in config:
        if isinstance(value, ActorConfig):
            yield f"{group}.loss", "policy loss", value.loss, value.loss_options or {}
            yield f"{group}.kl_loss_kind", "KL estimate", value.kl_loss_kind, {}
            yield f"{group}.aggregation", "aggregation", value.aggregation, {}
        elif isinstance(value, PreferenceConfig):
            yield f"{group}.loss", "preference loss", value.loss, value.options or {}
        elif isinstance(value, PtxConfig):
            yield f"{group}.form", "ptx form", value.form, value.options or {}
        elif isinstance(value, AdvantageConfig):
            yield from _functions_of_advantages(group, value)


def _functions_of_advantages(
    group: str, config: AdvantageConfig
) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:  # Any: the user's own
    yield f"{group}.estimator", "advantage estimator", config.estimator, config.options or {}
    yield f"{group}.kl_kind", "KL estimate", config.kl_kind or "", {}
    if config.kl_control is not None:
        yield f"{group}.kl_control.kind", "KL control", config.kl_control.kind, config.kl_control.options or {}
    if (correction := config.applied_correction) is not None:
        yield f"{group}.correction.kind", "rollout correction", correction.kind, correction.options or {}
    for i, shaping in enumerate(config.shaping):
        yield f"{group}.shaping.{i}.kind", "reward shaping", shaping.kind, shaping.options or {}


def check_engines(config: RunConfig, planned: Plan) -> None:
    """Refuses a role whose engine cannot run on the ranks of its mesh, and a schedule that a plan does not let.

    Raises: `ConfigError`.
    """
    models = {role: found for role, found in models_of(config).items() if found[1].model is not None}
    found = dict(config)
    for role, place in planned.roles.items():
        if place.mesh.pp > 1:
            raise ConfigError(
                f"placement.roles.{role} has pp {place.mesh.pp}, but no engine runs a model's layers as a pipeline: "
                f"remove pp, and cut the model with strategy: fsdp or tp"
            )
        if role not in models:
            _refuse_cuts(role, place, found.get(role))
            continue
        prefix, model = models[role]
        check_model_fit(role, prefix, model, place)
        if config.backend == "ray":
            _check_engine(role, f"{prefix}engine", place, model.engine)
    check_adapters(config, planned)
    check_quantization(config, planned)
    check_schedule(config, planned)
    for role, value in config:
        if isinstance(value, RolloutConfig) and {"actor", role} <= planned.roles.keys():
            actor, one_by_one = planned.roles["actor"], takes_one_by_one(config)
            transport_of(actor, planned.roles[role], planned.kind, value, one_by_one=one_by_one)


def _refuse_cuts(role: str, place: RolePlan, config: object) -> None:
    """Refuses to cut a role whose ranks each hold all they need. Raises `ConfigError`."""
    # Of a role apart one process leads tensor-parallel devices, and its mesh has none.
    for name, size in (("tp", place.mesh.tp), ("sp", place.mesh.sp)):
        if size > 1:
            which, fix = "its ranks", "remove it"
            if name == "tp" and isinstance(config, RolloutConfig):
                which, fix = f"its ranks, with engine {config.engine},", f"set {role}.engine: vllm, or remove it"
            raise ConfigError(
                f"placement.roles.{role} has {name} {size}, but each of {which} holds all it needs: {fix}"
            )


def check_quantization(config: RunConfig, planned: Plan) -> None:
    """Refuses a quantised rollout that the devices of a plan do not run. Raises `ConfigError`."""
    for role, value in config:
        if isinstance(value, RolloutConfig) and value.quantization == "int4" and planned.kind == "cpu":
            raise ConfigError(int4_on_cpu(role))
    if isinstance(config, OnPolicyConfig):
        config.check_served_dtype()


def check_rollouts(config: RunConfig) -> None:
    """Refuses a rollout engine that this program cannot start. Raises `ConfigError`."""
    for name in config.apart():
        if config.backend == "inline":
            raise ConfigError(
                f"{name}.engine is vllm, which takes a process for itself, and backend inline has one for all roles: "
                f"set backend: ray, or {name}.engine: hf"
            )
        if config.address is None and importlib.util.find_spec("vllm") is None:
            raise ConfigError(
                f"{name}.engine is vllm, which is not installed here: run bash recipes/install_vllm.sh, or set "
                f"{name}.engine: hf"
            )
    for name, value in config:
        if not isinstance(value, RolloutConfig) or value.engine != "vllm" or value.quantization not in ("int8", "int4"):
            continue
        if config.address is None and importlib.util.find_spec("torchao") is None:
            raise ConfigError(
                f"{name}.quantization is {value.quantization}, for which vLLM needs torchao, which is not installed "
                f"here: run pip install 'torchao>=0.18,<0.19', or set {name}.quantization: fp8"
            )


def check_adapters(config: RunConfig, planned: Plan) -> None:
    """Refuses a reference on a part of the ranks that run together a model with an adapter, which it would share.

    Raises: `ConfigError`.
    """
    for role, value in config:
        if not isinstance(value, ActorConfig | CriticConfig) or value.lora is None:
            continue
        place = planned.roles[role]
        cut = shards_model(value.engine, place.mesh.size, place.mesh.tp)
        together = config.backend == "ray" and (cut or place.mesh.sp > 1)
        for name, other in config:
            if together and isinstance(other, ReferenceConfig) and other.model == value.model:
                _check_beside(name, planned.roles[name], role, place)


def _check_beside(name: str, reference: RolePlan, role: str, actor: RolePlan) -> None:
    """Ranks that ran the actor's model for a reference would wait for those that are not in the reference."""
    shared = set(reference.slots) & set(actor.slots)
    if shared and reference.mesh == actor.mesh and set(reference.slots) != set(actor.slots):
        raise ConfigError(
            f"placement.roles.{name} is {reference.pool}, {len(shared)} of the {len(actor.slots)} devices of {role}, "
            f"whose model it shares because of {role}.lora: give it {actor.pool}, or devices of its own"
        )


def _check_engine(role: str, key: str, place: RolePlan, engine: EngineConfig) -> None:
    mesh = place.mesh
    if mesh.size > 1 and engine.strategy == "single" and role in ("actor", "critic"):
        raise ConfigError(
            f"{key}.strategy is single, but pool {place.pool} gives the role {mesh.size} ranks: "
            f"set strategy: auto, ddp or fsdp, or make the pool one device"
        )
    if mesh.tp > 1 and engine.strategy in ("single", "ddp"):
        raise ConfigError(
            f"{key}.strategy is {engine.strategy}, but placement.roles.{role} has tp {mesh.tp}, which cuts the model: "
            f"set strategy: fsdp, or remove tp"
        )
    if engine.sequence_parallel_norms and mesh.tp == 1:
        raise ConfigError(
            f"{key}.sequence_parallel_norms is true, but placement.roles.{role} has tp 1, so that no ranks share a "
            f"layer: remove it, or set tp"
        )
    if not shards_model(engine, mesh.size, mesh.tp):
        _refuse_settings_of_cuts(key, place, engine)
    if engine.shard_ranks is not None and mesh.dp % engine.shard_ranks:
        raise ConfigError(
            f"{key}.shard_ranks is {engine.shard_ranks}, which does not divide the role's {mesh.dp} data-parallel "
            f"ranks: set it to a divisor, or leave it out for all"
        )


def _refuse_settings_of_cuts(key: str, place: RolePlan, engine: EngineConfig) -> None:
    """Refuses what would do nothing, because each rank of the role has the whole model. Raises `ConfigError`."""
    num_ranks = place.mesh.size
    for name, asked in engine.for_cut_models().items():
        if num_ranks == 1:
            instead = "set offload: optimizer" if name == "offload" else "remove it"
            why = f"the role has one rank, which cuts nothing: {instead}, or give the role more ranks"
        else:
            why = f"strategy {engine.strategy} gives each of the role's {num_ranks} ranks the whole model: "
            why += "set strategy: fsdp, or remove it"
        raise ConfigError(f"{key}.{name} is {asked}, but {why}")
