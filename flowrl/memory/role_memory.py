"""Computes the bytes that one rank of a role holds between calls, and the bytes that each call adds.

A backward pass can peak at three points: at the head, when the activations of all layers are saved; in a layer that
gradient checkpointing has recomputed; and at the gradient of the embeddings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flowrl.config import EMBEDDINGS, EngineConfig, LoraConfig, TransferConfig, shards_model
from flowrl.config.base import DeviceKind
from flowrl.controller.placement.plan import Mesh
from flowrl.engines.train.pipeline.stage_schedule import MAX_UNFINISHED, num_in_flight
from flowrl.memory.device_constants import nccl_bytes
from flowrl.memory.head_memory import Entropy, HeadMemory, Precision, policy_head_memory
from flowrl.memory.model_size import Linears, ModelSize

if TYPE_CHECKING:
    from flowrl.engines.train.layer_trace import LayerTrace


NF4_BYTES = 0.5 + (1 + 4 / 256) / 64
"""Bytes of a value in nf4: its 4-bit code, and its share of the 8-bit scale of 64 values, and of the 32-bit scale of
256 scales.
"""

NF4_VALUES = 128
"""Divisor of the number of values of a matrix in nf4: two codes per byte, in blocks of 64 values (`_BLOCK` in
flowrl/engines/models/adapters/quantized_base.py).
"""

QUANTIZATION_BLOCK = 64
"""Number of values of 8-bit moments with a common scale (`BLOCK` in flowrl/engines/train/module_engine.py)."""


@dataclass(frozen=True)
class CallMemory:
    """Bytes that a call uses in addition to the role's resident state."""

    name: str
    gradients: int = 0
    activations: int = 0
    gathered: int = 0
    """Bytes of weights that are all-gathered or merged with an adapter, and of their gradients."""
    kv_cache: int = 0
    optimizer: int = 0
    """Bytes of offloaded optimizer state that is loaded for the optimizer step."""
    buffers: int = 0
    """Bytes of buckets of transferred weights, and of the logits and probabilities of a sampler."""
    without_cache: bool = False
    """Whether the role's KV cache is not allocated during the call, because a sleeping vLLM wakes only its weights."""
    has_actor_weights: bool = False
    """Whether the weights of an actor that offloads stay on the device during the call."""

    @property
    def total(self) -> int:
        return self.gradients + self.activations + self.gathered + self.kv_cache + self.optimizer + self.buffers


@dataclass(frozen=True)
class RoleMemory:
    """Bytes that one rank of a role uses."""

    weights: int
    optimizer: int
    calls: tuple[CallMemory, ...]
    offloads: bool = False
    """Whether weights and optimizer state are offloaded while other roles run."""
    shares_actor_weights: bool = False
    """Whether the role reads the actor's weights, which then stay on the device during the role's calls."""
    checkpoint_copy: int = 0
    """Bytes of the checkpoint snapshot; 0 on GPUs, because the snapshot is in host memory."""
    kv_cache: int = 0
    """Bytes of the KV cache that stay allocated between calls."""
    sequence_cache: int = 0
    """Bytes of `kv_cache` that one sequence of full length occupies."""
    num_sequences: int = 0
    """Number of sequences that `kv_cache` should hold, for the longest call."""
    fixed: Mapping[str, int] = field(default_factory=dict)
    """Term of `flowrl.memory.device_constants` -> bytes that stay allocated in any case, even if the role offloads."""

    host: Mapping[str, int] = field(default_factory=dict)
    """Term -> bytes of a rank on a GPU in host memory: a sleeping vLLM, offloaded state and activations, checkpoint
    snapshots."""

    @property
    def resident(self) -> int:
        return self.weights + self.optimizer + self.checkpoint_copy + self.kv_cache

    def resident_during(self, call: CallMemory) -> int:
        """Returns the bytes that stay allocated during one of the role's own calls."""
        return self.resident - (self.kv_cache if call.without_cache else 0)


@dataclass(frozen=True)
class RoleModel:
    """A role's model, with the settings that determine the memory of one rank."""

    size: ModelSize
    engine: EngineConfig
    mesh: Mesh
    device_type: DeviceKind
    param_bytes: int
    is_policy: bool
    """Whether the model has a language-model head."""
    max_length: int
    """Number of tokens of the longest row."""
    lora: LoraConfig | None = None
    is_inline: bool = False
    """Whether the inline backend runs the model. It does not shard."""
    optimizer: str = "adamw"
    """`optimizer.kind` of a trained role. A user's optimizer counts as AdamW."""
    stage: int = 0
    """Index of the pipeline stage whose memory is estimated."""

    @property
    def num_layers(self) -> int:
        """Number of layers of the stage."""
        own = self.size.stages(self.mesh.pp, has_head=self.is_policy)[self.stage]
        return own.end - own.start

    @property
    def has_embeddings(self) -> bool:
        return self.stage == 0

    @property
    def has_head(self) -> bool:
        """Whether the stage has a language-modeling head."""
        return self.is_policy and self.stage == self.mesh.pp - 1

    @property
    def is_sharded(self) -> bool:
        return not self.is_inline and shards_model(self.engine, self.mesh.tp)

    @property
    def num_shards(self) -> int:
        """Number of ranks over which FSDP shards the weights."""
        return self.mesh.shard_ranks(self.engine.shard_ranks) * self.mesh.sp if self.is_sharded else 1

    @property
    def precision(self) -> Precision:
        if self.param_bytes == 4 and self.engine.compute_dtype in (None, "float32"):
            return "float32"
        return "half" if self.param_bytes == 2 or self.is_sharded else "autocast"

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a value of the hidden states, and of a gathered weight."""
        return 2 if self.precision == "half" else 4

    @property
    def _can_pack(self) -> bool:
        """Whether the engine packs rows of a model that supports it."""
        is_slow = self.device_type == "cuda" and self.precision == "float32"
        return self.engine.packing == "always" or (self.engine.packing == "auto" and not is_slow)

    @property
    def offloads_parameters(self) -> bool:
        """Whether weights stay in host memory and move to the device layer by layer."""
        return self.device_type == "cuda" and self.engine.offload == "parameters" and self.is_sharded

    @property
    def offloads_when_idle(self) -> bool:
        return self.device_type == "cuda" and self.engine.offload == "idle"

    @property
    def offloads_activations(self) -> bool:
        """Whether the saved inputs of layers stay in host memory until the backward pass."""
        return self.device_type == "cuda" and self.engine.offload_activations

    @property
    def num_embeddings(self) -> int:
        """Number of matrices of the stage with the size of the embeddings."""
        is_shared = self.size.tied and self.mesh.pp == 1
        return self.has_embeddings + (self.has_head and not is_shared)

    @property
    def non_layer(self) -> int:
        """Number of parameters of the stage outside its layers."""
        return self.num_embeddings * self.size.embedding + (self.size.rest if self.stage == self.mesh.pp - 1 else 0)

    @property
    def layer(self) -> int:
        """Number of parameters of a layer on one tensor-parallel rank."""
        return self.size.layer_matrices // self.mesh.tp + self.size.layer_rest

    @property
    def gathered_layer(self) -> int:
        """Number of parameters that FSDP gathers for one layer: with expert parallelism, all but the experts."""
        return self.layer - (self.size.experts if self.engine.expert_parallel else 0)

    @property
    def parameters(self) -> int:
        """Number of parameters of one tensor-parallel rank before FSDP shards them, without an adapter."""
        return self.num_layers * self.layer - self.size.dense_surplus + self.non_layer

    @property
    def gathered_parameters(self) -> int:
        """Number of parameters of one tensor-parallel rank that FSDP gathers in a pass."""
        return self.parameters - self.num_layers * (self.layer - self.gathered_layer)

    @property
    def weights(self) -> int:
        return (self.parameters * self.param_bytes - self._saved_by_codes) // self.num_shards + self._adapter

    @property
    def _saved_by_codes(self) -> int:
        """Bytes by which the codes of quantized weights under an adapter are smaller than the weights."""
        quantization = None if self.lora is None else self.lora.base_quantization
        if quantization is None:
            return 0
        count = self.size.layers * sum(inputs * outputs for _, inputs, outputs in self._adapted)
        scales = self.size.layers * sum(outputs for _, _, outputs in self._adapted)
        codes = count * NF4_BYTES if quantization == "nf4" else count + scales * self.param_bytes
        return int(count * self.param_bytes - codes)

    @property
    def full_weights(self) -> int:
        """Bytes of the weights of all stages."""
        non_layer = self.size.non_layer if self.is_policy else self.size.backbone_non_layer
        return (self.size.layers * self.size.layer - self.size.dense_surplus + non_layer) * self.param_bytes

    @property
    def trained(self) -> int:
        """Bytes of the trainable weights on this rank."""
        if self.lora is None:
            return self.weights
        return self._adapter + self._saved_modules * self.param_bytes // self.num_shards

    @property
    def trained_parameters(self) -> int:
        """Number of trainable parameters of one tensor-parallel rank before FSDP shards them."""
        if self.lora is None:
            return self.parameters
        return self._matrices + self._saved_modules

    @property
    def _matrices(self) -> int:
        """Number of values in the matrices of the adapter on one rank, before FSDP shards them."""
        return self.num_layers * self._matrices_of_layer

    @property
    def _matrices_of_layer(self) -> int:
        rank = 0 if self.lora is None else self.lora.rank
        return rank * sum(inputs + outputs for _, inputs, outputs in self._adapted)

    @property
    def _saved_modules(self) -> int:
        """Number of parameters of embeddings and head that are trained beside an adapter. Norms are negligible."""
        names = () if self.lora is None else self.lora.modules_to_save
        largest = 2 if self.is_policy and not self.size.tied else 1
        return min(largest, sum(name.rpartition(".")[2] in EMBEDDINGS for name in names)) * self.size.embedding

    @property
    def moments(self) -> int:
        """Bytes of the optimizer state of this rank."""
        if self.num_optimizer_ranks == 1:
            return self._moments
        # A rank has at least the state of the largest weight, such as the embeddings.
        weights = [inputs * outputs for _, inputs, outputs in self.size.linears]
        weights += [self.size.embedding] if self.num_embeddings else []
        largest = max(weights) / self.parameters if self.lora is None else 0
        return int(self._moments * max(1 / self.num_optimizer_ranks, largest))

    @property
    def num_optimizer_ranks(self) -> int:
        """Number of ranks over which ZeRO-1 divides the optimizer state of a replicated model."""
        return self.mesh.size // self.mesh.pp if self.engine.strategy == "zero1" and not self.is_inline else 1

    @property
    def _moments(self) -> int:
        """Bytes of the optimizer state of the weights of this rank."""
        if self.lora is not None:  # in 8 bits only at ranks that are multiples of 64, which this overestimates
            return 2 * self.trained
        count, hidden = 2 * self.parameters * self.param_bytes, self._hidden(1)
        if self.optimizer == "muon":
            count = (2 * self.parameters - hidden) * self.param_bytes
        elif self.optimizer == "adamw_8bit":
            is_quantized = self.size.hidden % QUANTIZATION_BLOCK == 0
            embeddings = self.num_embeddings * self.size.embedding if is_quantized else 0
            quantized = self._hidden(QUANTIZATION_BLOCK * self.mesh.tp) + embeddings
            if is_quantized and self.size.expert_width % QUANTIZATION_BLOCK == 0:
                quantized += self.num_layers * self.size.experts - self.size.dense_surplus
            count -= int(2 * quantized * (self.param_bytes - 1 - 4 / QUANTIZATION_BLOCK))
        return count // self.num_shards

    def _hidden(self, divisor: int) -> int:
        """Returns the number of values on a tensor-parallel rank in the matrices of layers whose number of inputs is a
        multiple of `divisor`.
        """
        matrices = sum(inputs * outputs for _, inputs, outputs in self.size.linears if inputs % divisor == 0)
        return self.num_layers * matrices // self.mesh.tp

    @property
    def orthogonalized(self) -> int:
        """Bytes that Muon's orthogonalization of the largest matrix needs: the matrix, two updates, two products of
        rows, and the exchanged shards.
        """
        if self.optimizer != "muon":
            return 0
        element = 2 if self.device_type == "cuda" else 4
        return 6 * element * max(inputs * outputs for _, inputs, outputs in self.size.linears)

    @property
    def gradients(self) -> int:
        """Bytes of the gradients on this rank."""
        return 2 * self.trained if self.sums_in_float32 else self.trained

    @property
    def sums_in_float32(self) -> bool:
        """Whether gradients are summed in float32, because the trained weights have 16 bits."""
        return self.param_bytes == 2 and self.lora is None

    @property
    def _adapter(self) -> int:
        return 4 * self._matrices // self.num_shards

    @property
    def adapter(self) -> int:
        """Bytes of the full adapter, with the weights of `modules_to_save`, that a weight sync sends."""
        return 4 * self.size.layers * self._matrices_of_layer + self._saved_modules * self.param_bytes

    @property
    def merged(self) -> int:
        """Bytes of the weights that have an adapter."""
        return self.param_bytes * self.size.layers * sum(inputs * outputs for _, inputs, outputs in self._adapted)

    def num_senders(self, transfer: TransferConfig) -> int:
        """Returns the number of ranks that broadcast the weights: the first ones of the role."""
        is_divided = self.mesh.tp > 1 or self.mesh.pp > 1
        if transfer.senders == "one" or is_divided or self.lora is not None or self.is_inline:
            return 1
        return self.num_shards if self.is_sharded else self.mesh.size

    def exported(self, element_bytes: int) -> int:
        """Returns the bytes of the largest weight that a weight sync gathers, casts or merges with its adapter.

        A merge holds the weight, the float32 product of the adapter's matrices, and their float32 sum. Before, it also
        holds the float32 copy of a 16-bit weight; afterwards, the cast sum.
        """
        is_copied = self.is_sharded or self.mesh.pp > 1 or element_bytes != self.param_bytes
        adapted = max((inputs * outputs for _, inputs, outputs in self._adapted), default=0)
        copy = 4 if self.param_bytes == 2 else 0
        cast = element_bytes if element_bytes != 4 else 0
        return max(
            self.size.largest_weight * element_bytes if is_copied else 0,
            adapted * (self.param_bytes + 4 + 4 + max(copy, cast)),
        )

    @property
    def _adapted(self) -> Linears:
        return () if self.lora is None else self.size.adapted(self.lora.targets)

    @property
    def fixed(self) -> dict[str, int]:
        """Bytes of one dequantized weight, and of the NCCL communicators.

        There is one communicator each for all ranks, the shards, `tp` and `sp`, and three for `pp`: hidden states,
        gradients, and the ranks of a stage.
        """
        fixed = {}
        if self.lora is not None and self.lora.base_quantization is not None:
            largest = max(inputs * outputs for _, inputs, outputs in self._adapted)
            # torchao's index of each value has 8 bytes, and there are three copies of the weight.
            fixed["dequantized weight"] = largest * (8 + 3 * self.param_bytes)
        if self.device_type == "cpu" or self.mesh.size == 1 or self.is_inline:
            return fixed
        stages = 3 if self.mesh.pp > 1 else 0
        return fixed | {"NCCL": nccl_bytes(1 + self.is_sharded + (self.mesh.tp > 1) + (self.mesh.sp > 1) + stages)}

    def num_tokens(self, rows: int | None) -> int:
        """Returns the number of tokens of the largest micro-batch, for `rows` rows per call."""
        budget = self.engine.max_tokens_per_microbatch
        tokens = budget if rows is None else min(budget, rows * self.max_length // self.mesh.sp)
        return max(tokens, self.max_length // self.mesh.sp)

    def num_in_flight(self, rows: int | None) -> int:
        """Returns the largest number of micro-batches between their forward and backward pass in this stage."""
        if rows is None:
            return self.mesh.pp - self.stage
        num_micros = -(-rows * self.max_length // self.mesh.sp // self.num_tokens(rows))
        return num_in_flight(self.stage, self.mesh.pp, max(num_micros, 1))

    def sent(self, num_tokens: int) -> int:
        """Returns the bytes of hidden states and gradients on their way to and from other stages: two unfinished sends
        and the current one in each direction.
        """
        if self.mesh.pp == 1:
            return 0
        return (MAX_UNFINISHED + 1) * num_tokens * self.hidden_bytes * self.size.hidden

    def trace(self, num_tokens: int, *, is_training: bool) -> "LayerTrace":
        """Returns the activations of a micro-batch of `num_tokens` tokens with rows of about equal length."""
        # imported here, because a config is validated before torch is imported
        from flowrl.engines.train.layer_trace import Pass, trace_layers  # noqa: PLC0415

        row_tokens = self.max_length // self.mesh.sp or num_tokens
        num_rows = -(-num_tokens // row_tokens)
        half = self.engine.compute_dtype if self.engine.compute_dtype in ("bfloat16", "float16") else "bfloat16"
        return trace_layers(
            Pass(
                config=self.size.config,
                num_rows=num_rows,
                row_tokens=num_tokens // num_rows,
                device_type=self.device_type,
                weight_dtype=half if self.precision == "half" else "float32",
                compute_dtype=half if self.precision == "autocast" else None,
                is_training=is_training,
                gradient_checkpointing=is_training and self.engine.gradient_checkpointing,
                can_pack=self._can_pack,
                lora=self.lora,
                tp=self.mesh.tp,
            )
        )

    def head(self, num_tokens: int, entropy: Entropy) -> HeadMemory:
        if not self.has_head:
            return HeadMemory(0, 0)
        return policy_head_memory(self.size, self.precision, num_tokens, entropy, self.device_type)


def training_role(model: RoleModel, rows: int | None, entropy: Entropy, *, copies_checkpoints: bool) -> RoleMemory:
    """Returns the memory of a trained model, for `rows` rows per optimizer step."""
    moments = model.moments
    is_gpu = model.device_type == "cuda"  # on a CPU, device memory is host memory
    offloads_optimizer = is_gpu and model.engine.offload == "optimizer"
    gradients = 0 if model.offloads_parameters else model.gradients
    checkpoint_copy = model.trained + moments if copies_checkpoints else 0
    num_tokens = model.num_tokens(rows)
    calls = [_update(model, gradients, rows, entropy), inference_call(model, rows, "forward")]
    if offloads_optimizer or model.orthogonalized:
        loaded = moments if offloads_optimizer else 0
        calls.append(CallMemory("step", gradients=gradients, gathered=model.orthogonalized, optimizer=loaded))
    return RoleMemory(
        weights=0 if model.offloads_parameters else model.weights,
        optimizer=0 if model.offloads_parameters or offloads_optimizer else moments,
        calls=tuple(calls),
        offloads=model.offloads_when_idle,
        checkpoint_copy=0 if is_gpu else checkpoint_copy,
        fixed=model.fixed,
        host=_host_memory(model, moments, checkpoint_copy, _offloaded_activations(model, num_tokens)),
    )


def inference_role(model: RoleModel, rows: int | None, name: str) -> RoleMemory:
    """Returns the memory of a model that only runs forward passes, such as a reference or reward model."""
    weights = 0 if model.offloads_parameters else model.weights
    calls = (inference_call(model, rows, name),)
    host = _host_memory(model, 0, 0, 0)
    return RoleMemory(weights, 0, calls, offloads=model.offloads_when_idle, fixed=model.fixed, host=host)


def _host_memory(model: RoleModel, moments: int, checkpoint_copy: int, activations: int) -> dict[str, int]:
    """Returns the bytes of a rank on a GPU in host memory, by term.

    `offload: optimizer` offloads the optimizer's state. `offload: idle` offloads weights and moments, because gradients
    are freed before. `offload: parameters` offloads weights, moments and gradients.
    """
    if model.device_type == "cpu":
        return {}
    offloaded = moments if model.engine.offload == "optimizer" else 0
    if model.offloads_parameters:
        offloaded = model.weights + moments + (model.gradients if moments else 0)
    elif model.offloads_when_idle:
        offloaded = model.weights + moments
    terms = {"offloaded": offloaded, "activations": activations, "checkpoints": checkpoint_copy}
    return {name: count for name, count in terms.items() if count}


def _offloaded_activations(model: RoleModel, num_tokens: int) -> int:
    """Returns the bytes of the inputs of all layers except the last, which stays on the device."""
    if not model.offloads_activations:
        return 0
    return (model.num_layers - 1) * model.trace(num_tokens, is_training=True).per_layer


def inference_call(model: RoleModel, rows: int | None, name: str) -> CallMemory:
    num_tokens = model.num_tokens(rows)
    layers = model.trace(num_tokens, is_training=False)
    head = model.head(num_tokens, "none")
    kept = layers.kept(model.num_layers) + model.num_layers * layers.cached + model.sent(num_tokens)
    activations = kept + max(layers.peak, head.forward + _head_copy(model))
    return CallMemory(name, activations=activations, gathered=_gathered(model))


def _update(model: RoleModel, gradients: int, rows: int | None, entropy: Entropy) -> CallMemory:
    size, num_layers, num_tokens = model.size, model.num_layers, model.num_tokens(rows)
    layers = model.trace(num_tokens, is_training=True)
    element = 4 if model.precision == "float32" else 2
    # With sequence parallelism, the attention output is saved before and after the all-to-all between heads and shards.
    exchanged = num_tokens * element * size.queries if model.mesh.sp > 1 else 0
    # The input of a layer in its backward pass, and that of the layer before, which returns from host memory.
    num_kept = min(num_layers, 2) if model.offloads_activations else num_layers
    kept = layers.kept(num_kept) + num_layers * (0 if model.engine.gradient_checkpointing else exchanged)
    kept = model.num_in_flight(rows) * kept + model.sent(2 * num_tokens)
    head = model.head(num_tokens, entropy)
    is_full_finetuning = model.lora is None
    matrix_gradient = model.hidden_bytes * size.embedding if is_full_finetuning else 0
    embedding_gradient = matrix_gradient if model.has_embeddings else 0
    head_gradient = matrix_gradient if model.has_head else 0
    # Under autocast, the head computes the gradient of the copy of its weights, which is then cast to float32.
    head_copy = _head_copy(model)
    copy_gradient = head_copy if is_full_finetuning else 0
    at_head = kept + max(
        num_layers * layers.cached + head_copy + head.forward,
        head_copy + head.backward + (copy_gradient or head_gradient),
        copy_gradient + head_gradient,
    )
    # The gradient of a tied weight stays allocated until the gradient of the embeddings is added at the end.
    tied_gradient = head_gradient if size.tied and model.mesh.pp == 1 else 0
    at_layer = kept + tied_gradient + layers.peak + exchanged
    if not model.is_sharded:
        # The float32 sums stay allocated until all gradients have been cast to 16 bits.
        cast = model.trained if model.sums_in_float32 else 0
        return CallMemory("update", gradients, max(at_head, at_layer, tied_gradient + embedding_gradient, cast))
    # FSDP reduces the gradients of each layer, and at the end those of the other weights.
    layer_gradients, non_layer_gradients = (
        int(count * _reduced_bytes(model)) if is_full_finetuning else 0
        for count in (model.gathered_layer, model.non_layer)
    )
    in_layers = max(at_head, at_layer + layer_gradients)
    return CallMemory("update", gradients, max(in_layers, non_layer_gradients), _gathered(model))


def _head_copy(model: RoleModel) -> int:
    """Returns the bytes of the 16-bit copy of the head's weights that autocast keeps during a pass."""
    return 2 * model.size.embedding if model.precision == "autocast" and model.has_head else 0


def _gathered(model: RoleModel) -> int:
    """Returns the bytes that FSDP all-gathers: parameters outside the layers, the running layer and the next layer.

    One rank copies the running layer only: torch gathers nothing ahead (2.13: _fsdp_param_group.py:392,437).
    """
    if not model.is_sharded:
        return 0
    running = 1 if model.num_shards == 1 else 2
    layers = min(running, model.num_layers) if model.engine.reshard_after_forward else model.num_layers
    return model.hidden_bytes * (model.non_layer + layers * model.gathered_layer)


def _reduced_bytes(model: RoleModel) -> float:
    """Returns the bytes per parameter that FSDP holds while it reduces gradients, beside the gradient shards.

    First, these are the gradients and their float32 copy. Then, they are the copy and its reduced shard, which is cast
    to the dtype of 16-bit weights. One rank sums nothing, but has the same copies.
    """
    shard = 6 if model.param_bytes == 2 else 4
    return 4 + max(model.hidden_bytes, shard / model.num_shards)
