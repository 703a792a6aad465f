"""Settings that are null by default and depend on the devices: their values, a table of them, and warnings.

Entry points: `resolve_settings` (values that follow from the plan), `fit_memory` (values that depend on the memory of
the devices, and the memory check), `fit_engine` (values of an engine outside of a run) and `render_settings`.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from flowrl.config import (
    ONE_DEVICE,
    ActorConfig,
    EngineConfig,
    JudgeConfig,
    ModelConfig,
    ModelRoleConfig,
    ReplicaSizes,
    RoleConfig,
    RolloutConfig,
    RolloutRunConfig,
    RunConfig,
    TrainedConfig,
    TransferConfig,
    VllmConfig,
    default_compute_dtype,
    find_tokenizer_role,
    keys_of,
    models_of,
    shards_model,
)
from flowrl.config.base import DeviceKind
from flowrl.config.engines.train_engines import DEFAULT_TRAIN_ENGINE
from flowrl.config.engines.vllm_settings import DEFAULT_CACHE_GB, PlannedVllmConfig
from flowrl.config.roles import DEFAULT_NUM_SEQS
from flowrl.controller.placement.inventory import local_gpu_names, local_memory
from flowrl.controller.placement.plan import Mesh, Plan
from flowrl.controller.placement.plan_table import aligned
from flowrl.data.dtypes import ITEMSIZE
from flowrl.memory.device_constants import FRAGMENTATION
from flowrl.memory.memory_estimate import DeviceMemory, estimate_memory, read_sizes
from flowrl.memory.memory_table import MemoryBudget, check_memory, memory_budget
from flowrl.memory.model_size import ModelSize, find_size_problem, read_model_size
from flowrl.memory.rollout_memory import RolloutBatch, RolloutLoad, vllm_memory

_logger = logging.getLogger(__name__)

Generator = TypeVar("Generator", RolloutConfig, JudgeConfig)
"""Settings of a role that generates text."""

UNTESTED_FEATURES: Mapping[str, Callable[[RunConfig], bool]] = {
    "engine.compile with fsdp or sp": lambda config: any(
        value.engine.compile is True and (value.engine.strategy == "fsdp" or config.placement.role(role).sp > 1)
        for role, value in models_of(config).items()
    ),
    "engine.overlap_all_reduce": lambda config: any(
        value.engine.overlap_all_reduce for value in models_of(config).values()
    ),
    "engine.strategy zero1": lambda config: any(
        value.engine.strategy == "zero1" for value in models_of(config).values()
    ),
    "engine.offload_activations": lambda config: any(
        value.engine.offload_activations for value in models_of(config).values()
    ),
    "pp of trained roles": lambda config: _has_size(config, models_of(config), "pp"),
    "engine.expert_parallel": lambda config: any(value.engine.expert_parallel for value in models_of(config).values()),
    "lora.base_quantization": lambda config: any(
        isinstance(value, TrainedConfig) and value.lora is not None and value.lora.base_quantization is not None
        for value in models_of(config).values()
    ),
    "optimizer.kind adamw_8bit or muon": lambda config: any(
        isinstance(value, TrainedConfig) and value.optimizer.kind in ("adamw_8bit", "muon")
        for value in models_of(config).values()
    ),
    "tp of trained roles": lambda config: _has_size(config, models_of(config), "tp"),
    "sp of a role": lambda config: _has_size(config, models_of(config), "sp"),
    "tp or pp of a rollout or judge": lambda config: _has_size(
        config,
        [role for role, value in config.role_settings.items() if isinstance(value, RolloutConfig | JudgeConfig)],
        *("tp", "pp"),
    ),
    "vllm.engine_args.speculative_config": lambda config: any(
        settings.speculates for value in config.role_settings.values() if (settings := _vllm_of(value))
    ),
    "vllm.async_scheduling": lambda config: any(
        settings.async_scheduling for value in config.role_settings.values() if (settings := _vllm_of(value))
    ),
    "fork_workers": lambda config: config.fork_workers is True,
    "rollout.transfer.drop_weights": lambda config: any(each.drop_weights for each in _transfers(config)),
    "rollout.transfer.senders all": lambda config: any(each.senders == "all" for each in _transfers(config)),
    "rollout.transfer.via cuda_ipc with engine.offload idle": lambda config: (
        any(each.via == "cuda_ipc" for each in _transfers(config))
        and any(value.engine.offload == "idle" for value in models_of(config).values())
    ),
}
"""Features that have not run on GPUs -> whether a run uses them."""


def _has_size(config: RunConfig, roles: Iterable[str], *names: str) -> bool:
    """Returns whether one of these roles has one of these parallel sizes (tp, sp, pp)."""
    placed = [config.placement.role(role) for role in roles if role in config.placement.roles]
    return any(getattr(role, name) > 1 for role in placed for name in names)


def _vllm_of(value: RoleConfig) -> VllmConfig | None:
    return value.vllm if isinstance(value, RolloutConfig | JudgeConfig) else None


def _transfers(config: RunConfig) -> list[TransferConfig]:
    return [value.transfer for value in config.role_settings.values() if isinstance(value, RolloutConfig)]


_LARGE_GPU = 70 * 2**30
"""Memory in bytes from which vLLM decodes 1,024 sequences by default (vLLM 0.32: engine/arg_utils.py:2923-2941)."""

_HUGE_GPU = 160 * 2**30
"""Memory in bytes from which the name of the GPU does not matter for this default."""

_COSTLY = 2
"""Factor of time above which a setting gets a warning."""


def resolve_settings(config: RunConfig, planned: Plan) -> RunConfig:
    """Returns the config with the values of null settings that depend on the kind of devices. On CPUs, all null
    settings keep their meaning.
    """
    if planned.kind == "cpu":
        return config
    matches_rollout = isinstance(config, RolloutRunConfig) and config.rollout.capabilities.matches_trainer
    roles = {
        role: _resolve_role(value, matches_rollout)
        for role, value in config.role_settings.items()
        if role in planned.roles
    }
    if isinstance(config, RolloutRunConfig):
        roles["rollout"] = _with_dtype(config.rollout, config.served_dtype("cuda"))
    return _with_roles(config, roles)


def _with_roles(config: RunConfig, roles: Mapping[str, RoleConfig]) -> RunConfig:
    """Returns a copy of the config in which `roles` replaces the settings of its roles."""
    changes = {}
    for name, value in config:
        if isinstance(value, RoleConfig) and not roles.keys().isdisjoint(own := value.roles(name)):
            changes[name] = value.with_roles(name, {role: roles.get(role, known) for role, known in own.items()})
    return config.model_copy(update=changes)


def _resolve_role(value: RoleConfig, matches_rollout: bool) -> RoleConfig:
    """Returns the settings of a role on GPUs, where a null `compute_dtype` becomes bfloat16.

    `matches_rollout`: whether the rollout's log-probabilities are those of a float32 actor. An actor that trains with
    them (`old_logprobs: rollout`) then keeps computing in float32.
    """
    if isinstance(value, JudgeConfig):
        return _with_dtype(value, default_dtype(value.engine, value.model, "cuda"))
    if not isinstance(value, ModelRoleConfig) or value.model is None or value.engine.kind != DEFAULT_TRAIN_ENGINE:
        return value
    is_compared = matches_rollout and isinstance(value, ActorConfig) and value.old_logprobs == "rollout"
    if value.engine.compute_dtype is not None or is_compared:
        return value
    compute_dtype = default_compute_dtype(value.model, "cuda")
    return value.model_copy(update={"engine": value.engine.model_copy(update={"compute_dtype": compute_dtype})})


def default_dtype(engine: str, model: ModelConfig, device: DeviceKind) -> Literal["float32", "bfloat16", "float64"]:
    """Returns the dtype in which a rollout engine computes with a model of its own, if no setting names one."""
    return (default_compute_dtype(model, device) if engine == "vllm" else None) or model.dtype


def _with_dtype(value: Generator, dtype: str) -> Generator:
    """Returns the settings with the dtype of vLLM. Other engines compute in the dtype of the weights."""
    settings = value.vllm or VllmConfig()
    if value.engine != "vllm" or settings.dtype is not None:
        return value
    return value.model_copy(update={"vllm": settings.model_copy(update={"dtype": dtype})})


@dataclass(frozen=True)
class FittedRun:
    """A run whose settings fit the memory of its devices."""

    config: RunConfig
    """Settings with all values that depend on the devices."""
    devices: Sequence[DeviceMemory]
    budget: MemoryBudget


def fit_memory(config: RunConfig, planned: Plan, *, is_local: bool, gpu: str | None = None) -> FittedRun:
    """Sets the number of sequences and the KV caches of vLLM from the memory of GPUs, and checks the memory.

    Args:
        config: settings, from `resolve_settings`.
        planned: devices of the run.
        is_local: whether these are devices of this machine.
        gpu: name of the GPUs, if they are not those of this machine.
    Raises ConfigError if the memory is too small.
    """
    budget = memory_budget(config, planned, is_local=is_local)
    sizes = read_sizes(config)
    if planned.kind == "cuda":
        name = gpu or (_gpu_name() if is_local else None)
        config = _with_sequences(config, default_num_seqs(budget.per_device, name))
    choices = _offload_choices(config, planned)
    fitted = _fit_caches(_with_offload(config, choices), planned, sizes, budget)
    if choices and budget.per_device is None:
        keys = " and ".join(f"{keys_of(config)[role]}.engine.offload" for role in choices)
        _logger.warning(
            "%s is auto and offloads nothing, because the memory of the GPUs is unknown: set placement.memory_gb", keys
        )
    elif unknown := [role for role in choices if all(device.roles.get(role) is None for device in fitted.devices)]:
        keys = " and ".join(f"{keys_of(config)[role]}.engine.offload" for role in unknown)
        _logger.warning(
            "%s is auto and offloads nothing, because the size of the model is unknown: set none, optimizer or "
            "parameters",
            keys,
        )
    while (moved := _offload_more(choices, fitted)) != choices:
        choices = moved
        fitted = _fit_caches(_with_offload(config, choices), planned, sizes, budget)
    check_memory(fitted.config, planned, fitted.devices, budget)
    return fitted


def _fit_caches(config: RunConfig, planned: Plan, sizes: Mapping[Path, ModelSize], budget: MemoryBudget) -> FittedRun:
    """Returns the run with the KV caches of vLLM, which need not fit."""
    devices = estimate_memory(config, planned, sizes)
    fitted = _with_caches(config, devices, budget) if planned.kind == "cuda" else config
    return FittedRun(fitted, devices if fitted is config else estimate_memory(fitted, planned, sizes), budget)


OFFLOADS = ("none", "optimizer", "parameters")
"""Choices of `offload: auto`, in the order in which they are tried."""

OffloadChoices = Mapping[str, tuple[str, ...]]
"""Role with `offload: auto` -> its settings that remain to be tried, in this order."""


def _offload_choices(config: RunConfig, planned: Plan) -> OffloadChoices:
    """Returns the choices of each role with `offload: auto`. Empty on CPUs, whose memory is the host's."""
    choices: dict[str, tuple[str, ...]] = {}
    for role, value in models_of(config).items():
        if planned.kind == "cpu" or role not in planned.roles or value.engine.offload != "auto":
            continue
        optimizer = value.optimizer if isinstance(value, TrainedConfig) else None
        # Quantized moments are slow on the host, so `adamw_8bit` with `offload: parameters` is rejected.
        can_offload_weights = shards_model(value.engine, planned.roles[role].mesh.tp) and config.backend == "ray"
        can_offload_weights = can_offload_weights and (optimizer is None or optimizer.kind != "adamw_8bit")
        choices[role] = (
            "none",
            *(() if optimizer is None else ("optimizer",)),
            *(("parameters",) if can_offload_weights else ()),
        )
    return choices


def _with_offload(config: RunConfig, choices: OffloadChoices) -> RunConfig:
    """Returns the config with the first choice of each role."""
    models = models_of(config)
    engines = {role: models[role].engine.model_copy(update={"offload": first}) for role, (first, *_) in choices.items()}
    return _with_roles(
        config, {role: models[role].model_copy(update={"engine": engine}) for role, engine in engines.items()}
    )


def _offload_more(choices: OffloadChoices, fitted: FittedRun) -> OffloadChoices:
    """Returns the next choices if a device does not fit. The roles that offload least on such devices offload more, so
    that all roles offload their optimizer before one of them offloads its weights.
    """
    limit = fitted.budget.per_device
    full = [device for device in fitted.devices if limit is not None and device.is_known and device.peak[0] > limit]
    own = {role: left for role, left in choices.items() if len(left) > 1 and any(role in each.roles for each in full)}
    nearest = min((OFFLOADS.index(following) for _, following, *_ in own.values()), default=None)
    return {
        role: left[1:] if role in own and OFFLOADS.index(left[1]) == nearest else left for role, left in choices.items()
    }


def fit_engine(
    config: RolloutConfig, model: ModelConfig, device: DeviceKind, setting: str, replica: ReplicaSizes = ONE_DEVICE
) -> RolloutConfig:
    """Returns the settings of an engine that runs outside of a run and alone on its devices, with a run's defaults.

    Args:
        config: settings of the engine.
        model: the engine's model. If its size is unknown, the KV cache has `DEFAULT_CACHE_GB`, with a warning.
        device: kind of the devices. On CPUs, no setting changes.
        setting: name of the setting of the KV cache, for messages.
        replica: parallel sizes of the engine.
    """
    if device == "cpu" or config.engine != "vllm":
        return config
    config = _with_dtype(config, default_dtype(config.engine, model, device))
    if config.max_num_seqs is None:
        config = config.model_copy(update={"max_num_seqs": default_num_seqs(local_memory(device), _gpu_name())})
    settings = config.vllm or VllmConfig()
    if settings.kv_cache_gb is not None:
        return config
    size = read_model_size(model.path)
    if size is None:
        _logger.warning(
            "%s is %g, because the memory of the model is unknown: the model is %s, %s",
            setting,
            DEFAULT_CACHE_GB,
            model.path,
            find_size_problem(model.path),
        )
        return config
    # The length of prompts is unknown, so a cache for one response is enough.
    batch = RolloutBatch(config.num_seqs, config.num_seqs, max_prompt_tokens=0)
    memory = vllm_memory(
        RolloutLoad(size, ITEMSIZE[settings.dtype or model.dtype], config, batch, device, replica=replica)
    )
    on_device = DeviceMemory(0, 0, {"rollout": memory}, memory.fixed, FRAGMENTATION.value)
    # Without a limit, the engine measures the memory of its GPU.
    vllm = _plan_cache("rollout", setting, settings, [on_device], MemoryBudget(), ["rollout"])
    present = on_device.present_at_start("rollout", {})
    return config.model_copy(update={"vllm": vllm.model_copy(update={"present": present})})


def _gpu_name() -> str | None:
    return next(iter(local_gpu_names()), None)


def default_num_seqs(memory: float | None, name: str | None) -> int:
    """Returns vLLM's default number of sequences for offline inference on a GPU with this memory and name."""
    is_large = memory is not None and memory >= _LARGE_GPU and "a100" not in (name or "").lower()
    return 1024 if is_large or (memory is not None and memory >= _HUGE_GPU) else DEFAULT_NUM_SEQS


def _with_sequences(config: RunConfig, num_seqs: int) -> RunConfig:
    changed: dict[str, RoleConfig] = {
        role: value.model_copy(update={"max_num_seqs": num_seqs})
        for role, value in config.role_settings.items()
        if isinstance(value, RolloutConfig) and value.engine == "vllm" and value.max_num_seqs is None
    }
    return _with_roles(config, changed)


def _with_caches(config: RunConfig, devices: Sequence[DeviceMemory], budget: MemoryBudget) -> RunConfig:
    """Returns the config with KV caches of vLLM that use the memory that the plan leaves free."""
    engines: dict[str, RolloutConfig | JudgeConfig] = {}
    own: dict[str, list[DeviceMemory]] = {}
    for role, value in config.role_settings.items():
        if not isinstance(value, RolloutConfig | JudgeConfig) or value.engine != "vllm":
            continue
        on_role = [device for device in devices if role in device.roles]
        has_null_cache = value.vllm is None or value.vllm.kv_cache_gb is None
        if has_null_cache and on_role and all(device.is_known for device in on_role):
            engines[role], own[role] = value, on_role
    if not engines:
        return config
    keys = keys_of(config)
    planned = {
        role: _plan_cache(
            role, f"{keys[role]}.vllm.kv_cache_gb", value.vllm or VllmConfig(), own[role], budget, engines.keys()
        )
        for role, value in engines.items()
    }
    caches = {role: vllm.cache_bytes for role, vllm in planned.items() if vllm.kv_cache_gb is not None}
    changed: dict[str, RoleConfig] = {}
    for role, value in engines.items():
        present = max(device.present_at_start(role, caches) for device in own[role])
        changed[role] = value.model_copy(update={"vllm": planned[role].model_copy(update={"present": present})})
    return _with_roles(config, changed)


def _plan_cache(
    role: str,
    setting: str,
    settings: VllmConfig,
    devices: Sequence[DeviceMemory],
    budget: MemoryBudget,
    roles: Collection[str],
) -> PlannedVllmConfig:
    """Returns the settings of an engine with its KV cache.

    Args:
        setting: name of the setting of the cache, for messages.
        roles: all roles with a null cache, which divide the memory.
    """
    limit = None if budget.per_device is None else int(budget.per_device)
    planned = PlannedVllmConfig(
        **dict(settings),
        setting=setting,
        needed=max(device.needed_beside_cache(role) for device in devices),
        present=0,
        least=max(memory.sequence_cache for device in devices if (memory := device.roles[role]) is not None),
        limit=limit,
        num_caches=max(device.num_caches(roles) for device in devices),
    )
    if limit is None:  # only the engine knows the memory of its GPU
        return planned
    # If not even one sequence fits, the memory check reports by how much.
    bytes_ = max(planned.fit_cache(limit, limit), planned.least)
    return planned.model_copy(update={"kv_cache_gb": max(math.floor(bytes_ / 1e8), 1) / 10})


def render_settings(stated: RunConfig, fitted: FittedRun, planned: Plan) -> str:
    """Returns a table of the settings of all models, and one line for each costly choice.

    `stated` has the settings of the file, in which the values of the devices are null.
    """
    heads = ["role", "engine", "strategy", "weights", "compute", "attention", "offload"]
    heads += ["KV cache", "sequences", "CUDA graphs", "prefix cache"]
    rows = [heads]
    for role, value in fitted.config.role_settings.items():
        known = stated.role_settings[role]
        if isinstance(value, JudgeConfig):
            rows.append(_generator_row(role, known, value.generation, value.model.dtype, planned))
        elif isinstance(value, RolloutConfig):
            rows.append(_generator_row(role, known, value, _policy_dtype(fitted.config), planned))
        elif role in planned.roles and isinstance(value, ModelRoleConfig) and value.model is not None:
            rows.append(_model_row(role, known, value, value.model, planned))
    offload = heads.index("offload")
    if all(row[offload] in ("", "none") for row in rows[1:]):
        rows = [row[:offload] + row[offload + 1 :] for row in rows]
    lines = [f"settings on {planned.kind} devices; a star marks the value of a null or auto setting"]
    lines += aligned(rows, len(rows[0]))
    lines += [f"warning: {warning}" for warning in find_costly_settings(fitted, planned)]
    if planned.kind == "cuda":
        used = [name for name, is_used in UNTESTED_FEATURES.items() if is_used(stated)]
        unused = [name for name in UNTESTED_FEATURES if name not in used]
        lines.append(f"off by default, because they have not run on GPUs: {', '.join(unused)}")
        if used:
            lines.append(f"on, but have not run on a GPU: {', '.join(used)}")
    return "\n".join(lines)


def _policy_dtype(config: RunConfig) -> str:
    """Returns the dtype of the weights of the policy from which a rollout generates."""
    policy = config.role_settings[find_tokenizer_role(config) or "actor"]
    assert isinstance(policy, ModelRoleConfig) and policy.model is not None, "a run with a rollout has a policy"
    return policy.model.dtype


def _model_row(role: str, stated: RoleConfig, value: ModelRoleConfig, model: ModelConfig, planned: Plan) -> list[str]:
    assert isinstance(stated, ModelRoleConfig), "the resolved settings of a role have the class of the stated settings"
    engine, mesh = value.engine, planned.roles[role].mesh
    replicated = "single" if mesh.size == mesh.pp else "zero1" if engine.strategy == "zero1" else "ddp"
    strategy = "fsdp" if shards_model(engine, mesh.tp) else replicated
    compute = engine.compute_dtype or model.dtype
    is_half = planned.kind == "cuda" and compute in ("bfloat16", "float16")
    attention = ("flash-attn or varlen" if is_half else "sdpa") if engine.attention == "auto" else engine.attention
    if engine.kind != DEFAULT_TRAIN_ENGINE:
        return [role, engine.kind, "", model.dtype, *[""] * 7]
    return [
        role,
        engine.kind,
        _marked(strategy, stated.engine.strategy == "auto"),
        model.dtype,
        _marked(compute, stated.engine.compute_dtype is None),
        _marked(attention, stated.engine.attention == "auto"),
        _marked("none" if engine.offload == "auto" else engine.offload, stated.engine.offload == "auto"),
        *[""] * 4,
    ]


def _generator_row(role: str, stated: RoleConfig, value: RolloutConfig, model_dtype: str, planned: Plan) -> list[str]:
    assert isinstance(stated, RolloutConfig | JudgeConfig)
    dtype, num_seqs = value.sent_dtype or model_dtype, _marked(f"{value.num_seqs:,}", stated.max_num_seqs is None)
    if value.engine != "vllm":
        return [role, value.engine, "", dtype, dtype, "", "", "", num_seqs, "", ""]
    settings, known = value.vllm or VllmConfig(), stated.vllm or VllmConfig()
    size = f"{settings.cache_bytes / 1e9:.1f} GB"
    if isinstance(settings, PlannedVllmConfig) and settings.kv_cache_gb is None:
        size = "free memory"
    dtype = _marked(dtype, known.dtype is None)
    graphs = "yes" if settings.graphs and planned.kind == "cuda" else "no"
    prefixes = "yes" if settings.prefix_caching else "no"
    return [
        role,
        "vllm",
        "",
        dtype,
        dtype,
        "",
        "",
        _marked(size, known.kv_cache_gb is None),
        num_seqs,
        graphs,
        prefixes,
    ]


def _marked(text: str, is_default: bool) -> str:
    return f"{text}*" if is_default else text


def find_costly_settings(fitted: FittedRun, planned: Plan) -> Iterator[str]:
    """Yields one sentence per setting with which a run on GPUs takes more than twice as long."""
    if planned.kind == "cpu":
        return
    keys = keys_of(fitted.config)
    for role, value in fitted.config.role_settings.items():
        if isinstance(value, RolloutConfig | JudgeConfig):
            yield from _costly_generation(role, keys[role], value, fitted.devices)
        elif role in planned.roles and isinstance(value, ModelRoleConfig) and value.model is not None:
            yield from _costly_engine(role, keys[role], value.engine, value.model, planned.roles[role].mesh)


def _costly_engine(role: str, key: str, engine: EngineConfig, model: ModelConfig, mesh: Mesh) -> Iterator[str]:
    if model.dtype == "float32":
        # An H100 has 67 TFLOP/s in float32 and 989 in bfloat16 (nvidia.com/en-us/data-center/h100).
        if engine.compute_dtype == "float32":
            yield f"{key}.engine.compute_dtype is float32, which GPUs compute several times slower: set bfloat16"
        elif engine.compute_dtype is None:
            yield (
                f"{role} computes in float32, several times slower than in bfloat16, because actor.old_logprobs is "
                f"rollout: set placement.device: cuda, or {key}.engine.compute_dtype: bfloat16"
            )
    # Per micro-batch and parameter, an update copies 12 bytes at up to 64 GB/s (PCIe 5.0 x16). An H100 then computes
    # about 6 x 16,384 FLOP at 400 TFLOP/s, for 1.3 times as long. The optimizer step on the CPU follows.
    if engine.offload == "parameters" and mesh.shard_ranks(engine.shard_ranks) * mesh.sp == 1:
        yield (
            f"{key}.engine.offload is parameters, with which one GPU waits for the copy of each layer: set optimizer "
            f"or idle if the weights fit, or give {role} more devices"
        )


def _costly_generation(
    role: str, key: str, value: RolloutConfig | JudgeConfig, devices: Sequence[DeviceMemory]
) -> Iterator[str]:
    if value.engine == "hf":
        yield (
            f"{key}.engine is hf, which on a GPU is for tests and small models: run python -m recipes.install_vllm, "
            f"and set {key}.engine: vllm"
        )
    if value.engine != "vllm":
        return
    settings = value.vllm or VllmConfig()
    if settings.dtype == "float32":
        yield f"{key}.vllm.dtype is float32, which GPUs compute several times slower: set bfloat16"
    if not settings.graphs:
        yield f"{key}.vllm.graphs is false, so each token launches all kernels one by one: set true"
    memories = [memory for device in devices if (memory := device.roles.get(role)) is not None]
    if not memories:
        if settings.kv_cache_gb is None:
            yield (
                f"{key}.vllm.kv_cache_gb is {DEFAULT_CACHE_GB:g}, because the memory of the model is unknown: set it, "
                f"or download the model first"
            )
        return
    capacity = min(memory.kv_cache // max(1, memory.sequence_cache) for memory in memories)
    wanted = max(memory.num_sequences for memory in memories)
    if settings.kv_cache_gb is not None and wanted > _COSTLY * capacity:
        increase = "" if isinstance(settings, PlannedVllmConfig) else "increase it, or "
        yield (
            f"{key}.vllm.kv_cache_gb is {settings.kv_cache_gb:g}, enough for {capacity:,} of {wanted:,} sequences of "
            f"full length at a time: {increase}give {role} more devices, or devices of its own"
        )
