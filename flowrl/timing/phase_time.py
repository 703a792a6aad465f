"""Formulas of the time of one phase: passes over rows, generation, and copies. Pure functions; times are in seconds.

docs/step_time.md derives the formulas.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flowrl.devices.device_rates import GENERATION, LINK, MEMORY, TRAINING, DeviceRates
from flowrl.engines.train.model_flops import ModelFlops, count_pairs
from flowrl.engines.train.muon import NUM_ITERATIONS
from flowrl.engines.train.pipeline.stage_schedule import StageCost, pipeline_seconds
from flowrl.memory.head_memory import TILED_FROM
from flowrl.memory.role_memory import RoleModel
from flowrl.timing.pass_bytes import (
    all_reduce_bytes,
    broadcast_bytes,
    copied_experts_bytes,
    copied_sum_bytes,
    gathered_bytes,
    layer_bytes,
    num_gathers,
    reduced_bytes,
    stage_bytes,
    tied_bytes,
)

_WEIGHT_BYTES = 12
"""Bytes per parameter of an optimizer step, which reads weight and gradient, and writes the weight. Reads and writes of
the optimizer state are not included."""


@dataclass(frozen=True)
class PassLoad:
    """Rows of one data-parallel rank in a forward pass, or in the updates of a step."""

    rows: int
    """Rows of the forward pass, or of one update."""
    length: int
    """Mean number of tokens of a row."""
    targets: int
    """Mean number of tokens per row for which a log-probability is computed."""
    num_updates: int = 0
    """Number of optimizer updates. 0 stands for one forward pass."""


@dataclass(frozen=True)
class PassTime:
    """Time of a forward pass, or of all updates of a step, on one rank."""

    compute_s: float
    """Time of the matrix products, including recomputed products."""
    overlapped_s: float
    """Time of FSDP's collectives, of an overlapped all-reduce and of copies of offloaded weights, which overlap with
    the matrix products.
    """
    exposed_s: float
    """Time of all other collectives, of the optimizer, and of copies of its state."""
    model_flops: float
    """FLOPs of the rank without recomputed FLOPs, as a mean over the stages of a pipeline."""
    idle_share: float = 0.0
    """Part of `compute_s` in which a rank waits for other stages of its pipeline, as a mean over the stages."""

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.overlapped_s) + self.exposed_s


def pass_time(
    model: RoleModel,
    flops: ModelFlops,
    load: PassLoad,
    rates: DeviceRates,
    link: float,
    stage_link: float | None = None,
) -> PassTime:
    """Returns the time of passes over rows.

    `link` is the bytes per second between ranks that gather or all-reduce the model. `stage_link` is the bytes per
    second between pipeline stages; None stands for `link`.
    """
    is_training, repeats, sp = load.num_updates > 0, max(1, load.num_updates), model.mesh.sp
    lengths, targets = [load.length] * load.rows, load.targets * load.rows
    needed = flops.count(lengths, targets, is_training=is_training)
    recomputed = flops.count_recomputed(
        lengths,
        targets,
        layers=is_training and model.engine.gradient_checkpointing,
        head=is_training and model.is_policy and model.size.vocabulary >= TILED_FROM,
    )
    peak = rates.float32_flops if model.precision == "float32" else rates.flops
    num_devices = model.mesh.tp * sp
    rows_per_microbatch = max(1, model.engine.max_tokens_per_microbatch * sp // load.length)
    num_microbatches = math.ceil(load.rows / rows_per_microbatch)
    stages = [replace(model, stage=stage) for stage in range(model.mesh.pp)]
    head = flops.count([], targets, is_training=is_training) + (
        flops.count_recomputed([], targets, layers=False, head=is_training and model.size.vocabulary >= TILED_FROM)
    )
    costs = _stage_costs(stages, needed + recomputed - head, head, is_training=is_training)
    busy = sum(cost.forward + cost.backward for cost in costs)
    # The passes of a micro-batch on the slowest stage repeat while the pipeline fills and drains.
    num_passes = num_microbatches + model.mesh.pp - 1
    compute = pipeline_seconds([cost.divide(num_microbatches) for cost in costs], num_microbatches)
    overlapped = num_passes * max(_fsdp_seconds(stage, rates, link, is_training=is_training) for stage in stages)
    num_tokens = num_passes / num_microbatches * load.rows * load.length
    exposed = max(layer_bytes(stage, num_tokens, is_training=is_training) for stage in stages) / (link * LINK.value)
    # A stage receives hidden states, and in training also their gradients.
    exposed += (1 + is_training) * stage_bytes(model, num_tokens) / ((stage_link or link) * LINK.value)
    if is_training:
        exposed += max(_update_seconds(stage, rates) + broadcast_bytes(stage) / (link * LINK.value) for stage in stages)
        exposed += tied_bytes(model) / ((stage_link or link) * LINK.value)
        exposed += copied_experts_bytes(model) / (rates.network * LINK.value)
        all_reduce = max(map(all_reduce_bytes, stages)) / (link * LINK.value)
        # `auto` overlaps on GPUs.
        overlapped, exposed = (
            (overlapped + all_reduce, exposed)
            if model.engine.overlap_all_reduce
            else (overlapped, exposed + all_reduce)
        )
    return PassTime(
        compute_s=repeats * compute / (num_devices * peak * TRAINING.value),
        overlapped_s=repeats * overlapped,
        exposed_s=repeats * exposed,
        model_flops=repeats * needed / (num_devices * model.mesh.pp),
        idle_share=1 - busy / (model.mesh.pp * compute) if compute else 0.0,
    )


def _stage_costs(stages: Sequence[RoleModel], layers: float, head: float, *, is_training: bool) -> list[StageCost]:
    """Returns the FLOPs of each pipeline stage over all rows. `layers` and `head` are the FLOPs of all layers and of
    the head.
    """
    # The backward pass has two thirds of the products, and also recomputed ones, which the forward pass lacks.
    forward = 1 / 3 if is_training else 1.0
    costs = [layers * stage.num_layers / stage.size.layers + head * stage.has_head for stage in stages]
    return [StageCost(cost * forward, cost * (1 - forward)) for cost in costs]


def _fsdp_seconds(model: RoleModel, rates: DeviceRates, link: float, *, is_training: bool) -> float:
    """Returns the time of FSDP's collectives and copies in a micro-batch."""
    if not model.is_sharded:
        return 0.0
    seconds = gathered_bytes(model, is_training=is_training) / (link * LINK.value)
    seconds += is_training * copied_sum_bytes(model) / (rates.network * LINK.value)
    if model.offloads_parameters:
        shard = num_gathers(model, is_training=is_training) * model.param_bytes * model.parameters
        shard += is_training * reduced_bytes(model)
        seconds += shard / model.num_shards / (rates.host * LINK.value)
    return seconds


def _update_seconds(model: RoleModel, rates: DeviceRates) -> float:
    """Returns the time of an update after its last all-reduce: the optimizer step, and copies of its state."""
    own = model.trained_parameters / model.num_shards / model.num_optimizer_ranks
    seconds = (_WEIGHT_BYTES * own + 2 * model.moments) / (rates.memory * MEMORY.value)
    if model.engine.offload == "optimizer":
        seconds += 2 * model.moments / (rates.host * LINK.value)
    return seconds + _orthogonalization_flops(model) / (rates.flops * TRAINING.value)


def _orthogonalization_flops(model: RoleModel) -> float:
    """Returns the FLOPs of a rank for Muon's orthogonalization. The exchange of shards is not included; it adds about
    the bytes of a gather of the weights.

    An iteration on a matrix of R <= C has three products: R x C by C x R, R x R by R x R, and R x R by R x C.
    """
    if model.optimizer != "muon":
        return 0.0
    sides = [(min(inputs, outputs), max(inputs, outputs)) for _, inputs, outputs in model.size.linears]
    flops = NUM_ITERATIONS * sum(2 * rows * rows * (2 * columns + rows) for rows, columns in sides)
    num_ranks = model.num_shards * model.mesh.tp if model.is_sharded else model.num_optimizer_ranks
    return model.num_layers * flops / num_ranks


@dataclass(frozen=True)
class GenerationLoad:
    """Responses that one replica of a rollout generates in a step. Bytes are per device of the replica."""

    num_rows: int
    num_prefills: int
    """Number of prompts that are computed: each prompt once, or once per response without a prefix cache."""
    prompt_tokens: int
    response_tokens: int
    """Mean number of tokens of a response."""
    longest_response: int
    """Number of tokens of the longest response, which ends last."""
    num_seqs: int
    """Largest number of sequences that the engine decodes concurrently."""
    weight_bytes: float
    """Bytes of the weights that a decode step reads."""
    token_bytes: float
    """Bytes of the KV cache per token."""
    cache_bytes: float
    """Size of the KV cache; infinite if it grows with the sequences."""
    num_devices: int
    """Number of tensor-parallel devices."""
    step_s: float
    """Time per decode step in which the GPU waits."""
    summed_bytes: float = 0.0
    """Bytes per token of the all-reduces of tensor parallelism."""


@dataclass(frozen=True)
class GenerationTime:
    """Time of the responses of one replica, and its model FLOPs over all its devices."""

    prefill_s: float
    decode_s: float
    num_concurrent: int
    """Number of sequences that are decoded at the same time."""
    model_flops: float

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.decode_s


def generation_time(flops: ModelFlops, load: GenerationLoad, rates: DeviceRates) -> GenerationTime:
    """Returns the time of prefill and decode steps.

    A decode step takes the longer of reading all weights and multiplying them with all sequences. It also reads the KV
    cache of all sequences. Free slots are filled at once. All responses have the mean length, except the last response,
    which has the largest length.
    """
    prompt, response, rows = load.prompt_tokens, load.response_tokens, load.num_rows
    compute = load.num_devices * rates.flops * GENERATION.value
    prefill_flops = flops.count([prompt], 1, is_training=False)
    sums_s = load.summed_bytes / (rates.nvlink * LINK.value)
    fitting = load.cache_bytes / (load.token_bytes * (prompt + response))
    concurrent = max(1, math.floor(min(load.num_seqs, rows, fitting)))
    num_steps, rest_steps = response * rows / concurrent, load.longest_response - response
    token_s = (flops.per_token.forward + flops.per_target.forward) / compute + sums_s
    weights_s = load.weight_bytes / (rates.memory * MEMORY.value)
    linear_s = num_steps * max(weights_s, concurrent * token_s) + rest_steps * max(weights_s, token_s)
    pairs = count_pairs(prompt + response) - count_pairs(prompt)
    cache_s = rows * pairs * load.token_bytes / (rates.memory * MEMORY.value)
    row_flops = flops.count([prompt + response], response, is_training=False) - flops.count(
        [prompt], 0, is_training=False
    )
    return GenerationTime(
        prefill_s=load.num_prefills * (prefill_flops / compute + prompt * sums_s),
        decode_s=linear_s + cache_s + (num_steps + rest_steps) * load.step_s,
        num_concurrent=concurrent,
        model_flops=load.num_prefills * prefill_flops + rows * row_flops,
    )
