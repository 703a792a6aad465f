"""Checks a run before it starts. Imports torch and ray only if a config names a user-defined function."""

import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.checkpoints.resume import is_resuming
from flowrl.checkpoints.run_folder import check_is_new, check_not_locked
from flowrl.config import (
    ActorConfig,
    AdvantageConfig,
    ConfigError,
    DataConfig,
    EngineConfig,
    EnvironmentConfig,
    EvaluationConfig,
    JudgeConfig,
    ModelRoleConfig,
    PreferenceActorConfig,
    PreferenceConfig,
    PtxConfig,
    ReferenceConfig,
    RewardConfig,
    RewardModelConfig,
    RoleConfig,
    RolloutConfig,
    RolloutRunConfig,
    RunConfig,
    ScoringModelConfig,
    StudentConfig,
    TrainedConfig,
    find_tokenizer_role,
    models_of,
    shards_model,
)
from flowrl.config.algorithm.advantage import PenalizedAdvantageConfig
from flowrl.config.roles import quantized_device_problem
from flowrl.config.rollout.engines import DEFAULT_ENGINE, name_alternatives
from flowrl.controller.placement.cpu_threads import read_requested_threads
from flowrl.controller.placement.inventory import find_ipc_problem, local_capability, local_inventory
from flowrl.controller.placement.plan import Plan, RolePlan, plan
from flowrl.data.input_paths import find_dataset_problem, find_model_problem, read_vocabulary_size
from flowrl.data.reading.generated_rows import find_generator_problem
from flowrl.engines.rollout.base import check_engine_class
from flowrl.environments.base import EnvironmentLoadError, create_environment
from flowrl.environments.environment_function import EnvironmentFunctionError, load_environment_function
from flowrl.memory.device_settings import FittedRun, fit_memory, resolve_settings
from flowrl.memory.model_fit import (
    check_model_fit,
    excess_tokens_message,
    find_head_size_problem,
    has_experts,
    read_max_positions,
    read_num_token_ids,
    read_weight_names,
)
from flowrl.report.trackers.open_trackers import check_trackers
from flowrl.rewards.judgments import load_verdict
from flowrl.rewards.reward_function import RewardError, load_answer_function, load_reward_function
from flowrl.schedules.schedule_plan import check_schedule
from flowrl.weight_sync.transfer import check_cuda_ipc, choose_transports

_logger = logging.getLogger(__name__)

_BFLOAT16_CAPABILITY = (8, 0)
"""CUDA compute capability from which GPUs have matrix products in bfloat16."""


def plan_run(config: RunConfig, devices: Sequence[int] | None = None) -> Plan:
    """Returns the placement plan of a run. `devices` per node default to the config's, then to this machine's."""
    placement, stated = config.placement, devices or config.devices
    if config.address is not None and stated is None:
        raise ConfigError(
            f"the devices of the cluster at {config.address} are unknown here: state them per node, with "
            f"--devices 8,8 or devices: [8, 8]"
        )
    planned = plan(placement, local_inventory(placement.device, stated), config.roles, config.dedicated_roles())
    check_engines(config, planned)
    return planned


def check_run(config: RunConfig) -> None:
    """Checks output folder, functions, placement and memory before data and models are read.

    Raises UserError if one is invalid, and RunComplete if the output folder has this run with all its steps.
    """
    check_not_locked(config.output)
    if not is_resuming(config):
        check_is_new(config.output)
    check_start(config)


def check_start(config: RunConfig) -> None:
    """Checks functions, sequence lengths, vocabularies, placement, memory and the paths of models and data.

    Raises UserError if a check fails.
    """
    if config.threads is None:
        read_requested_threads()
    check_trackers(config.report)
    check_functions(config)
    check_rollouts(config)
    check_positions(config)
    check_vocabularies(config)
    check_reward_heads(config)
    planned = plan_run(config) if config.address is None else None
    check_paths(config)
    log_doubts(config, planned)
    if planned is not None:  # last, because the estimate imports torch
        check_devices(config, planned, is_local=True)


def check_devices(config: RunConfig, planned: Plan, *, is_local: bool) -> FittedRun:
    """Returns the settings and the memory of a run on its devices. `is_local`: these are devices of this machine.

    Raises ConfigError if the devices lack memory, bfloat16, or CUDA IPC for the weight sync. Only the memory is checked
    for devices of other machines.
    """
    resolved = resolve_settings(config, planned)
    if is_local and planned.kind == "cuda":
        check_bfloat16(resolved, local_capability())
        check_cuda_ipc(resolved, planned, find_ipc_problem())
    return fit_memory(resolved, planned, is_local=is_local)


def log_doubts(config: RunConfig, planned: Plan | None) -> None:
    """Logs a warning per setting that is untested, or has no effect on the planned devices. None: unknown devices."""
    for role, value in models_of(config).items():
        if value.model is not None and isinstance(value, TrainedConfig) and has_experts(value.model.path):
            _logger.warning(
                "%s.model.path is %s, a mixture of experts, whose training is untested: it has no auxiliary loss that "
                "balances the experts and no estimate of memory, and each rank reads all weights before it shards them",
                role,
                value.model.path,
            )
    offloads = {role: value.engine.offload for role, value in models_of(config).items()}
    settings = [f"{role}.engine.offload is {offload}" for role, offload in offloads.items() if offload != "none"]
    if planned is not None and planned.kind == "cpu" and settings:
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


def check_positions(config: RunConfig) -> None:
    """Raises ConfigError if a local model supports fewer tokens than the data and the rollout allow.

    Reward models are not checked, because they also score rows that are too long.
    """
    for role in models_of(config).values():
        if (
            isinstance(role, ScoringModelConfig)
            or role.model is None
            or (limit := read_max_positions(role.model.path)) is None
        ):
            continue
        for setting, num_tokens in _sequence_lengths(config, role):
            if num_tokens > limit:
                raise ConfigError(excess_tokens_message(setting, num_tokens, role.model.path, limit))


def _sequence_lengths(config: RunConfig, role: RoleConfig) -> Iterator[tuple[str, int]]:
    """Yields (settings, number of tokens) of the longest sequence of each kind that a role receives."""
    for group, data in config:
        if isinstance(data, PtxConfig):
            if isinstance(role, ActorConfig):  # other roles do not receive this text
                yield f"{group}.max_tokens", data.max_tokens
        elif isinstance(data, DataConfig) and isinstance(config, RolloutRunConfig):
            total = data.max_prompt_tokens + config.rollout.max_response_tokens
            yield f"{group}.max_prompt_tokens + rollout.max_response_tokens", total
        elif isinstance(data, DataConfig):
            yield f"{group}.max_prompt_tokens", data.max_prompt_tokens


def check_vocabularies(config: RunConfig) -> None:
    """Raises ConfigError if a local model can receive token ids for which it has no embeddings.

    All roles receive ids of one tokenizer, except reward models, which can have a tokenizer of their own. Many
    published tokenizers have added tokens beyond the embeddings of their model. They are allowed, because
    `ChatTokenizer` rejects a template and rows that contain such a token.
    """
    models = models_of(config)
    encoder = find_tokenizer_role(config)
    for role, value in models.items():
        source = role if isinstance(value, ScoringModelConfig) else encoder
        if value.model is None or source is None or (tokenizer := models[source].model) is None:
            continue
        size, num_ids = read_vocabulary_size(value.model.path), read_num_token_ids(tokenizer.tokenizer_path)
        if size is None or num_ids is None:
            continue
        without_added, num_needed = num_ids
        if role == encoder:
            num_needed = without_added
        elif source == encoder and (encoder_size := read_vocabulary_size(tokenizer.path)) is not None:
            # The policy may sample every id for which it has an embedding.
            num_needed = min(num_needed, max(without_added, encoder_size))
        if num_needed <= size:
            continue
        key = f"{source}.model.{'path' if tokenizer.tokenizer is None else 'tokenizer'}"
        fix = "use the model's own tokenizer" if role == source else f"use a model with the tokenizer of {source}"
        raise ConfigError(
            f"{role}.model.path is {value.model.path}, which has embeddings for {size} tokens, but the tokenizer of "
            f"{key} in {tokenizer.tokenizer_path} gives it {num_needed} ids: {fix}"
        )


def check_reward_heads(config: RunConfig) -> None:
    """Raises ConfigError if a local reward model lacks the weights of its head, and the settings create no new head."""
    for role, value in models_of(config).items():
        if (
            not isinstance(value, ScoringModelConfig | RewardModelConfig)
            or value.head == "fresh"
            or value.model is None
        ):
            continue
        names = read_weight_names(value.model.path)
        if names and not any(name.endswith("score.weight") for name in names):
            raise ConfigError(
                f"{role}.model.path is {value.model.path}, which is not a reward model, because it lacks the head "
                f"score.weight: train one with recipes/reward_model, or set {role}.head: fresh to try out a program"
            )


def check_paths(config: RunConfig) -> None:
    """Raises ConfigError if a model is neither a directory nor available on the Hub, or if there is no data file."""
    problems = list(find_path_problems(config))
    if len(problems) > 1:
        raise ConfigError("\n  ".join([f"{len(problems)} settings are invalid:", *problems]))
    if problems:
        raise ConfigError(problems[0])


def find_path_problems(config: RunConfig) -> Iterator[str]:
    """Yields a message per path of a model or data file that cannot be read. It names all settings with the path."""
    paths = {
        f"{role}.model.path": (entry.model.path, find_model_problem)
        for role, entry in models_of(config).items()
        # The nodes of a cluster may have other files than the driver, which reads only one tokenizer.
        if entry.model is not None and (config.address is None or role == find_tokenizer_role(config))
    }
    judges = {role: value for role, value in config.role_settings.items() if isinstance(value, JudgeConfig)}
    if config.address is None:
        paths |= {f"{role}.model.path": (judge.model.path, find_model_problem) for role, judge in judges.items()}
    encoder = models_of(config).get(find_tokenizer_role(config) or "")
    if encoder is not None and encoder.model is not None and encoder.model.tokenizer is not None:
        paths[f"{find_tokenizer_role(config)}.model.tokenizer"] = (encoder.model.tokenizer, find_model_problem)
    for group, value in config:
        if isinstance(value, DataConfig | PtxConfig):
            paths |= {key: (path, find_dataset_problem) for key, path in value.files(group).items()}
    keys: dict[tuple[Path, Callable[[Path], str | None]], list[str]] = {}
    for key, checked in paths.items():
        keys.setdefault(checked, []).append(key)
    for (path, find_problem), names in keys.items():
        if problem := find_problem(path):
            yield f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} {path}, but {problem}"
    generated = [
        key for group, value in config if isinstance(value, DataConfig | PtxConfig) for key in value.generated(group)
    ]
    if generated and (problem := find_generator_problem()):
        yield f"{' and '.join(generated)} cannot generate rows, because {problem}"


def check_functions(config: RunConfig) -> None:
    """Imports all functions, engines and environments of the user. Raises ConfigError if one is invalid."""
    for group, value in config:
        if isinstance(value, RolloutConfig):
            check_engine_class(value.engine)
            _check_loads(f"{group}.environment", value.environment, load_environment_function)
        if isinstance(value, RewardConfig):
            for key, function in value.functions():
                _check_loads(f"{group}.{key}", function, load_reward_function)
        for key, evaluation in _evaluations(group, value):
            _check_loads(f"{key}.extract_answer", evaluation.extract_answer, load_answer_function)
    for role, value in config.role_settings.items():
        if isinstance(value, JudgeConfig):
            _check_judge(role, value)
        elif isinstance(value, EnvironmentConfig):
            _check_environment(role, value)
    _check_algorithm(config)


def _evaluations(group: str, value: object) -> Iterator[tuple[str, EvaluationConfig]]:
    """Yields the settings of evaluations in a section of the config, by key."""
    if isinstance(value, EvaluationConfig):
        yield group, value
    if isinstance(value, DataConfig):
        for name, held_out in value.tests.items():
            if held_out.evaluation is not None:
                yield f"{group}.tests.{name}.evaluation", held_out.evaluation


def _check_algorithm(config: RunConfig) -> None:
    """Raises ConfigError if a loss, estimator or another function of the algorithm is invalid."""
    user_defined = [choice for choice in _chosen_functions(config) if ":" in choice[2]]
    if not user_defined:
        return
    from flowrl.algorithms import registry  # noqa: PLC0415 (torch, only for user-defined functions)

    kinds = {known.kind: known for known in registry.REGISTRIES}
    for key, kind, name, options in user_defined:
        try:
            kinds[kind].check(name, options)
        except registry.RegistryError as error:
            raise ConfigError(f"{key}: {error}") from error


def _check_judge(role: str, config: JudgeConfig) -> None:
    """Raises ConfigError if the engine, the prompt or the verdict of a judge cannot be loaded."""
    check_engine_class(config.engine)
    try:
        config.read_prompt()
        load_verdict(config.applied_verdict)
    except ValueError as error:
        raise ConfigError(f"{role}.{error}") from error


def _check_environment(role: str, config: EnvironmentConfig) -> None:
    """Raises ConfigError if an environment cannot be created."""
    try:
        create_environment(config.name, config.options)
    except EnvironmentLoadError as error:
        raise ConfigError(f"{role}.name: {error}") from error


def _check_loads(key: str, name: str | None, load: Callable[[str], object]) -> None:
    try:
        _ = name and load(name)
    except (RewardError, EnvironmentFunctionError) as error:
        raise ConfigError(f"{key}: {error}") from error


def _chosen_functions(config: RunConfig) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """Yields (key, kind, name, settings) of every function that the config names."""
    for group, value in config:
        if isinstance(value, ActorConfig):
            yield f"{group}.loss", "policy loss", value.loss.kind, value.loss.arguments()
            yield f"{group}.kl_loss_kind", "KL estimator", value.kl_loss_kind, {}
            yield f"{group}.aggregation", "aggregation", value.aggregation, {}
        elif isinstance(value, PreferenceActorConfig):
            yield f"{group}.loss", "preference loss", value.loss.kind, value.loss.arguments()
        elif isinstance(value, StudentConfig):
            yield f"{group}.loss", "distillation loss", value.loss.kind, value.loss.arguments()
        elif isinstance(value, RewardModelConfig):
            yield f"{group}.loss", "reward model loss", value.loss.kind, value.loss.arguments()
        elif isinstance(value, PreferenceConfig):
            yield group, "preference loss", value.kind, value.arguments()
        elif isinstance(value, AdvantageConfig):
            yield from _functions_of_advantages(group, value)


def _functions_of_advantages(
    group: str, config: AdvantageConfig
) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:  # Any: settings of user-defined functions
    yield f"{group}.estimator", "advantage estimator", config.estimator, config.arguments()
    if isinstance(config, PenalizedAdvantageConfig):
        yield f"{group}.kl_kind", "KL estimator", config.kl_kind, {}
        yield f"{group}.kl_control.kind", "KL control", config.kl_control.kind, config.kl_control.arguments()
    if (correction := config.applied_correction) is not None:
        yield f"{group}.correction.kind", "rollout correction", correction.kind, correction.arguments()
    for i, shaping in enumerate(config.shaping):
        yield f"{group}.shaping.{i}.kind", "reward shaping", shaping.kind, shaping.arguments()


def check_engines(config: RunConfig, planned: Plan) -> None:
    """Raises ConfigError if a role's engine cannot run on its ranks, or the plan does not support the schedule."""
    config = resolve_settings(config, planned)
    models = {role: entry for role, entry in models_of(config).items() if entry.model is not None}
    for role, role_plan in planned.roles.items():
        if role_plan.mesh.pp > 1:
            raise ConfigError(
                f"placement.roles.{role} has pp {role_plan.mesh.pp}, but no engine supports pipeline parallelism: "
                f"remove pp, and shard the model with strategy: fsdp or tp"
            )
        if role not in models:
            _check_unsharded(role, role_plan, config.role_settings.get(role))
            continue
        model = models[role]
        check_model_fit(role, model, role_plan)
        if config.backend == "ray":
            _check_engine(role, role_plan, model.engine, is_trained=isinstance(model, TrainedConfig))
    check_adapters(config, planned)
    check_quantization(config, planned)
    check_head_sizes(config, planned)
    if config.deterministic:
        check_determinism(config, planned)
    check_profile(config, planned)
    check_schedule(config, planned)
    choose_transports(config, planned)


def _check_unsharded(role: str, role_plan: RolePlan, config: object) -> None:
    """Raises ConfigError if a role that cannot be sharded has tp or sp."""
    if isinstance(config, RolloutConfig | JudgeConfig) and config.capabilities.tensor_parallel:
        # An engine in a dedicated process has one process per tp group, so its mesh has tp 1.
        sizes = {"sp": role_plan.mesh.sp}
    else:
        sizes = {"tp": max(role_plan.mesh.tp, role_plan.num_tp_devices), "sp": role_plan.mesh.sp}
    for name, size in sizes.items():
        if size > 1:
            reason, fix = "the role cannot be sharded", "remove it"
            if name == "tp" and isinstance(config, RolloutConfig | JudgeConfig):
                others = name_alternatives(lambda known: known.tensor_parallel)
                reason, fix = f"engine {config.engine} cannot shard it", f"set {role}.engine: {others}, or remove it"
            raise ConfigError(f"placement.roles.{role} has {name} {size}, but {reason}: {fix}")


def check_quantization(config: RunConfig, planned: Plan) -> None:
    """Raises ConfigError if the planned devices do not support the rollout's quantization."""
    for role, value in config:
        if isinstance(value, RolloutConfig) and (problem := quantized_device_problem(role, value, planned.kind)):
            raise ConfigError(problem)
    if isinstance(config, RolloutRunConfig):
        config.check_served_dtype(planned.kind)


def check_head_sizes(config: RunConfig, planned: Plan) -> None:
    """Raises ConfigError if the engine of a rollout or judge does not support its model's heads on the devices."""
    for role, value in config.role_settings.items():
        if isinstance(value, JudgeConfig):
            model = value.model
        elif isinstance(value, RolloutConfig) and isinstance(config, RolloutRunConfig):
            model = config.actor.model
        else:
            continue
        if problem := find_head_size_problem(value.engine, model.path, planned.kind):
            raise ConfigError(f"{role}.{problem}")


def check_determinism(config: RunConfig, planned: Plan) -> None:
    """Raises ConfigError if `deterministic` is set for a run whose results depend on timing or on other rows."""
    if isinstance(config, RolloutRunConfig) and config.schedule.is_streaming:
        raise ConfigError(
            f"deterministic is true, but with schedule.kind {config.schedule.kind} the weights of each token depend on "
            f"timing: set schedule.kind: sync, or deterministic: false"
        )
    for name, role in config.role_settings.items():
        value = role.generation if isinstance(role, JudgeConfig) else role
        if not isinstance(value, RolloutConfig) or value.quantization is None or planned.kind == "cpu":
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


def check_rollouts(config: RunConfig) -> None:
    """Raises ConfigError if an engine cannot start, because a package is missing or the backend is inline.

    Checks the engines of rollouts and judges.
    """
    for name, role in config.role_settings.items():
        value = role.generation if isinstance(role, JudgeConfig) else role
        if not isinstance(value, RolloutConfig):
            continue
        capabilities = value.capabilities
        if capabilities.own_process and config.backend == "inline":
            raise ConfigError(
                f"{name}.engine is {value.engine}, which needs a dedicated process, but backend inline has one "
                f"process: set backend: ray, or {name}.engine: {DEFAULT_ENGINE}"
            )
        if config.address is not None:
            continue  # The driver does not know the packages of the cluster.
        for package in capabilities.packages:
            if importlib.util.find_spec(package.module) is None:
                raise ConfigError(
                    f"{name}.engine is {value.engine}, which needs {package.module}, which is not installed: run "
                    f"{package.install}, or set {name}.engine: {DEFAULT_ENGINE}"
                )
        if value.quantization is None:
            continue
        for package in capabilities.quantizations[value.quantization].packages:
            if importlib.util.find_spec(package.module) is None:
                others = [key for key, each in capabilities.quantizations.items() if package not in each.packages]
                raise ConfigError(
                    f"{name}.quantization {value.quantization} needs {package.module}, which is not installed: run "
                    f"{package.install}, or set {name}.quantization: {' or '.join(others) or 'null'}"
                )


def check_adapters(config: RunConfig, planned: Plan) -> None:
    """Raises ConfigError if a reference shares a sharded LoRA model but is colocated with only some of its ranks."""
    for role, value in config:
        if not isinstance(value, TrainedConfig) or value.lora is None:
            continue
        role_plan = planned.roles[role]
        is_sharded = shards_model(value.engine, role_plan.mesh.tp)
        is_collective = config.backend == "ray" and (is_sharded or role_plan.mesh.sp > 1)
        for name, other in config:
            if is_collective and isinstance(other, ReferenceConfig) and other.model == value.model:
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
            f"set strategy: auto, ddp or fsdp, or make the pool one device"
        )
    if mesh.tp > 1 and engine.strategy in ("single", "ddp"):
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
    if not shards_model(engine, mesh.tp):
        _check_unsharded_settings(key, role_plan, engine)
    if engine.shard_ranks is not None and mesh.dp % engine.shard_ranks:
        raise ConfigError(
            f"{key}.shard_ranks is {engine.shard_ranks}, which does not divide the role's {mesh.dp} data-parallel "
            f"ranks: set it to a divisor, or remove it"
        )


def _check_unsharded_settings(key: str, role_plan: RolePlan, engine: EngineConfig) -> None:
    """Raises ConfigError for settings of sharded models if each rank of the role has the full model."""
    num_ranks = role_plan.mesh.size
    for name, value in engine.sharding_settings().items():
        if num_ranks == 1:
            alternative = "set offload: optimizer" if name == "offload" else "remove it"
            reason = f"strategy {engine.strategy} does not shard the model of one rank: set strategy: fsdp, or "
            reason += alternative
        else:
            reason = f"strategy {engine.strategy} puts the full model on each of the role's {num_ranks} ranks: "
            reason += "set strategy: fsdp, or remove it"
        raise ConfigError(f"{key}.{name} is {value}, but {reason}")
