"""Computes the bytes of a rollout role: weights, KV cache, and activations of a prefill or decode step."""

from dataclasses import dataclass, replace

from flowrl.config import ONE_DEVICE, ReplicaSizes, RolloutConfig, TransferConfig, VllmConfig
from flowrl.config.base import DeviceKind
from flowrl.controller.placement.weight_transport import Transport
from flowrl.memory.device_constants import (
    ALL_REDUCE,
    CUDA_GRAPHS,
    PINNED_ROUNDING,
    SAMPLER_COPIES,
    TRANSFER_BUCKETS,
    VLLM_PROCESS,
    nccl_bytes,
)
from flowrl.memory.model_size import ModelSize
from flowrl.memory.role_memory import CallMemory, RoleMemory, RoleModel

SLOT_MULTIPLE = 32
"""The number of KV slots per row is a multiple of this number (flowrl/engines/rollout/hf/kv_cache.py)."""

MIN_ROWS = 16
"""Minimum number of rows decoded together (flowrl/engines/rollout/hf/decoder.py)."""

PREFILL_TOKENS = 16384
"""Maximum number of prompt tokens per prefill pass (flowrl/engines/rollout/hf/decoder.py)."""

SAMPLED_ELEMENTS = 2**22
"""Maximum number of probabilities per sampling chunk (flowrl/engines/rollout/sampling.py)."""

VLLM_STEP_TOKENS = 8192
"""Maximum number of tokens per step of the vLLM engine (flowrl/engines/rollout/vllm/engine.py)."""

INT8_CHUNK_TOKENS = 4096
"""Maximum number of tokens per block of an int8 matrix product (flowrl/engines/models/int8.py)."""

_LOADS = {"cuda_ipc": "load_ipc", "nccl": "load_broadcast", "adapter": "load_adapter"}
"""Transport -> method of the rollout that loads weights. Other transports use `load_weights`."""

_BITS = {"int8": 8, "fp8": 8, "int4": 4}


@dataclass(frozen=True)
class RolloutBatch:
    """Upper limits for one `generate` call on one rank."""

    rows: int
    unique_prompts: int
    """Number of different prompts. Each prompt is prefilled once."""
    max_prompt_tokens: int
    has_environment: bool = False
    """Whether an environment continues the responses, so that engine hf keeps the KV caches of waiting episodes."""


@dataclass(frozen=True)
class RolloutLoad:
    """A rollout on one device, for which the function named by `EngineCapabilities.memory` estimates the memory."""

    size: ModelSize
    param_bytes: int
    """Bytes per parameter in the engine, before quantization."""
    config: RolloutConfig
    batch: RolloutBatch
    device_type: DeviceKind
    weight_owner: RoleModel | None = None
    """The actor in the same process, or None."""
    replica: ReplicaSizes = ONE_DEVICE
    """Parallel sizes of the engine's devices."""
    offloads: bool = False
    """Whether the engine sleeps while other roles use the device."""
    is_evicted_by_actor: bool = False
    """Whether the engine sleeps while the actor trains, so that it wakes up only its weights for a weight sync."""
    transport: Transport | None = None
    """Transport of weights from the actor, or None for an engine whose weights never change."""
    sender: RoleModel | None = None
    """The actor, if it sends its adapter, or sends weights from another process on this GPU or from other GPUs."""


def hf_memory(load: RolloutLoad) -> RoleMemory:
    """Returns the memory of a rollout with transformers."""
    size, param_bytes, config, batch = load.size, load.param_bytes, load.config, load.batch
    weight_owner, device_type = load.weight_owner, load.device_type
    is_quantized = config.quantization is not None
    gathered = 0
    if weight_owner is not None and not is_quantized:
        gathered = weight_owner.full_weights if weight_owner.is_sharded else weight_owner.merged
    rows = max(MIN_ROWS, min(config.num_seqs, batch.rows))
    prompt = batch.max_prompt_tokens
    final_slots, previous_slots = num_slots(prompt, config.max_response_tokens)
    slot_bytes = size.cached_values * param_bytes
    prefill_tokens = min(rows, batch.unique_prompts) * _round_up(prompt)
    # On a GPU, prefill allocates the cache of every row. On the CPU, rows of one prompt share pages until written.
    prefill_slots = rows * _round_up(prompt) if device_type == "cuda" else prefill_tokens
    chunk_tokens = min(INT8_CHUNK_TOKENS, PREFILL_TOKENS, prefill_tokens)
    int8_sums = chunk_tokens * 8 * size.mlp if is_quantized else 0
    # On the CPU, unwritten slots take no memory until the cache is compacted, at three quarters of the rows.
    written_slots = max(_needed_slots(prompt, config.max_response_tokens), 3 * final_slots // 4)
    decode_slots = rows * (final_slots if device_type == "cuda" else written_slots)
    steps = [
        (prefill_slots * slot_bytes, min(PREFILL_TOKENS, prefill_tokens) * _run_bytes(size, param_bytes) + int8_sums),
        (decode_slots * slot_bytes, _decode(size, param_bytes, rows, final_slots, previous_slots)),
    ]
    kv_cache, activations = max(steps, key=sum)
    if batch.has_environment and config.keep_turn_cache:
        # All episodes may wait for their environment while the slots stay allocated.
        kv_cache += batch.rows * (prompt + config.max_response_tokens) * slot_bytes
    calls = [CallMemory("generate", activations=activations, gathered=gathered, kv_cache=kv_cache)]
    if is_quantized:
        name = "set_version" if weight_owner else "load_weights"
        calls.append(CallMemory(name, gathered=_quantization_bytes(size, param_bytes)))
    has_own_weights = weight_owner is None or is_quantized
    weights = weight_bytes(size, param_bytes, config.quantization) if has_own_weights else 0
    return RoleMemory(weights, 0, tuple(calls), shares_actor_weights=weight_owner is not None)


def weight_bytes(size: ModelSize, param_bytes: int, quantization: str | None) -> int:
    """Returns the bytes of all weights, including the scales of quantized matrices."""
    if quantization is None:
        return size.parameters * param_bytes
    matrices = size.layers * sum(inputs * outputs for _, inputs, outputs in size.linears)
    scales = size.layers * sum(outputs for _, _, outputs in size.linears)
    return (size.parameters - matrices) * param_bytes + matrices * _BITS[quantization] // 8 + 4 * scales


def _quantization_bytes(size: ModelSize, param_bytes: int) -> int:
    """Returns the peak bytes of quantizing one weight: the weight, its float32 magnitudes and the scaled copy."""
    largest = max(inputs * outputs for _, inputs, outputs in size.linears)
    return max(size.embedding * param_bytes, largest * (8 if param_bytes == 4 else 10))


def vllm_memory(load: RolloutLoad) -> RoleMemory:
    """Returns the memory of a vLLM rollout on the device of a replica that has the most layers.

    vLLM allocates the KV cache at start. It offloads weights and KV cache together.
    """
    param_bytes, config, tp, pp = load.param_bytes, load.config, load.replica.tp, load.replica.pp
    settings, is_gpu = config.vllm or VllmConfig(), load.device_type == "cuda"
    # Of several stages, the first has the input embeddings, and the last has the head.
    size = replace(load.size, layers=-(-load.size.layers // pp), tied=load.size.tied or pp > 1)
    step = VLLM_STEP_TOKENS * _run_bytes(size, param_bytes) // tp
    # On GPUs, a null cache uses the memory that the plan leaves free.
    kv_cache = 0 if is_gpu and settings.kv_cache_gb is None else settings.cache_bytes
    num_tokens = load.batch.max_prompt_tokens + config.max_response_tokens
    weights = weight_bytes(size, param_bytes, config.quantization) // tp
    # Every device of a replica has the logits of all sequences.
    logits = config.num_seqs * size.vocabulary * (int(SAMPLER_COPIES.value) * 4 + param_bytes)
    # Buffers for the states that a stage receives: the hidden states and the residual stream.
    received = 2 * VLLM_STEP_TOKENS * size.hidden * param_bytes if pp > 1 else 0
    calls = [CallMemory("generate", activations=step, buffers=logits + received)]
    if is_gpu and load.transport is not None:
        calls.append(_load_weights(load))
    fixed = {"vLLM process": int(VLLM_PROCESS.value)} if is_gpu else {}
    if is_gpu and settings.graphs:
        fixed["CUDA graphs"] = int(CUDA_GRAPHS.value)
    if is_gpu and (num_communicators := (tp > 1) + (pp > 1) + _num_broadcasts(load)):
        fixed["NCCL"] = nccl_bytes(num_communicators)
    if is_gpu and tp > 1:
        fixed["all-reduce"] = int(ALL_REDUCE.value)
    return RoleMemory(
        weights,
        0,
        tuple(calls),
        offloads=load.offloads,
        kv_cache=kv_cache,
        sequence_cache=size.cached_values * param_bytes * num_tokens // tp,
        num_sequences=min(config.num_seqs, load.batch.rows),
        fixed=fixed,
        host={"sleeping vLLM": int(PINNED_ROUNDING.value * weights)} if load.offloads else {},
    )


def _num_broadcasts(load: RolloutLoad) -> int:
    """Returns the number of broadcasts of a bucket: one per sender."""
    if load.transport != "nccl":
        return 0
    return 1 if load.sender is None else load.sender.num_senders(load.config.transfer)


def _load_weights(load: RolloutLoad) -> CallMemory:
    """Returns the memory of loading one bucket into vLLM, on each of its devices.

    vLLM keeps received weights until their module is complete, and then builds the module a second time. With CUDA IPC,
    the bucket and the exported weight of the sender are on the same device. Parts of several senders are concatenated.
    With an adapter, the rollout merges one weight at a time on its device.
    """
    module = max(load.size.embedding, load.size.layer) * load.param_bytes
    sender = load.sender if load.transport in ("cuda_ipc", "adapter") else None
    exported = 0 if sender is None else sender.exported(load.param_bytes)
    buckets = 0
    if load.transport in ("cuda_ipc", "nccl"):
        num_buckets = int(TRANSFER_BUCKETS.value) + (_num_broadcasts(load) > 1)
        buckets = num_buckets * bucket_bytes(load.size, load.param_bytes, load.config.transfer)
    name = _LOADS.get(load.transport or "", "load_weights")
    return CallMemory(
        name,
        gathered=module + exported,
        buffers=buckets,
        without_cache=load.is_evicted_by_actor,
        has_actor_weights=load.transport == "cuda_ipc",
    )


def bucket_bytes(size: ModelSize, param_bytes: int, transfer: TransferConfig) -> int:
    """Returns the bytes of the largest bucket of a weight sync. A weight larger than `bucket_mb` has its own bucket."""
    largest = max(int(transfer.bucket_mb * 1e6), size.largest_weight * param_bytes)
    return min(largest, size.parameters * param_bytes)


def num_slots(prompt: int, response: int) -> tuple[int, int]:
    """Returns the KV slots per row after a full response, and the slots before the last doubling of the cache."""
    needed, slots = _needed_slots(prompt, response), _round_up(prompt)
    previous = slots
    while slots < needed:
        previous, slots = slots, 2 * (slots + SLOT_MULTIPLE)
    return slots, previous


def _run_bytes(size: ModelSize, param_bytes: int) -> int:
    """Returns the bytes per token of a layer without autograd: residual stream, input and three MLP activations."""
    return param_bytes * (2 * size.hidden + 3 * size.mlp)


def _decode(size: ModelSize, param_bytes: int, rows: int, slots: int, previous_slots: int) -> int:
    """Returns the peak bytes of a decode step: sampling, the attention of one layer, or growing one layer's cache."""
    sampled = min(rows, max(1, SAMPLED_ELEMENTS // size.vocabulary)) * size.vocabulary
    logits = 2 * rows * size.vocabulary * param_bytes + sampled * (16 if param_bytes == 4 else 20)
    attention = rows * slots * (2 * size.heads * param_bytes + 1 + param_bytes)
    return max(logits, attention, 2 * size.keys * param_bytes * rows * previous_slots)


def _needed_slots(prompt: int, response: int) -> int:
    """Returns the KV slots of a full row. The last response token needs no slot, because no step reads it."""
    return _round_up(prompt + response - 1)


def _round_up(slots: int) -> int:
    return -(-slots // SLOT_MULTIPLE) * SLOT_MULTIPLE
