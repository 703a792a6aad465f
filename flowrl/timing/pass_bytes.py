"""Bytes that one rank receives from others in the passes of a role. Pure functions; docs/step_time.md derives them.

tests/benchmarks/parallel.py compares them with the bytes that sockets receive.
"""

from flowrl.memory.role_memory import RoleModel


def element_bytes(model: RoleModel) -> int:
    """Returns the bytes of a value of hidden states and of a gathered weight."""
    return 4 if model.precision == "float32" else 2


def gathered_bytes(model: RoleModel, *, is_training: bool) -> float:
    """Returns the bytes of FSDP's gathers and sums within a copy of the model, in a micro-batch.

    A pass gathers the weights once, and with training and `reshard_after_forward` twice. Gradients are summed in
    float32.
    """
    if not model.is_sharded:
        return 0.0
    num_gathers = 2 if is_training and model.engine.reshard_after_forward else 1
    moved = num_gathers * element_bytes(model) * model.gathered_parameters + is_training * reduced_bytes(model)
    return moved * (model.num_shards - 1) / model.num_shards


def reduced_bytes(model: RoleModel) -> int:
    """Returns the bytes of the gradients that FSDP sums in a micro-batch."""
    return 4 * min(model.trained_parameters, model.gathered_parameters)


def copied_sum_bytes(model: RoleModel) -> float:
    """Returns the bytes of the sum of gradient shards over the copies of a sharded model (HSDP), in a micro-batch."""
    copies = model.mesh.dp * model.mesh.sp // model.num_shards
    return 2 * reduced_bytes(model) / model.num_shards * (copies - 1) / copies if model.is_sharded else 0.0


def copied_experts_bytes(model: RoleModel) -> float:
    """Returns the bytes of the sum of the gradients of a rank's own experts over the copies of the model (HSDP with
    expert parallelism), in an update.
    """
    if not model.engine.expert_parallel or model.lora is not None:
        return 0.0
    copies = model.mesh.dp * model.mesh.sp // model.num_shards
    own = (model.parameters - model.gathered_parameters) / model.num_shards
    return 2 * 4 * own * (copies - 1) / copies


def stage_bytes(model: RoleModel, num_tokens: float) -> float:
    """Returns the bytes of the hidden states that a pipeline stage sends to the next one, or of their gradients."""
    return num_tokens / model.mesh.sp * model.hidden_bytes * model.size.hidden if model.mesh.pp > 1 else 0.0


def tied_bytes(model: RoleModel) -> int:
    """Returns the bytes of the sum of the gradients of a tied embedding over the first and the last stage, in an
    update.
    """
    return 4 * model.size.embedding if model.mesh.pp > 1 and model.size.tied and model.lora is None else 0


def layer_bytes(model: RoleModel, num_tokens: float, *, is_training: bool) -> float:
    """Returns the bytes of the collectives within layers, for the tokens of a data-parallel rank.

    They are sums of tensor parallelism over hidden states, of which a layer with experts has only that of its
    attention, exchanges of sequence parallelism over queries, keys, values and the attention output, and exchanges of
    expert parallelism over the tokens of experts and their outputs.
    """
    num_passes = 1 + is_training * (1 + model.engine.gradient_checkpointing)
    (tp, sp), size = (model.mesh.tp, model.mesh.sp), model.size
    summed = (1 if size.experts else 2) * size.hidden * 2 * (tp - 1) / tp
    exchanged = 2 * (size.queries + size.keys) * (sp - 1) / sp / tp
    if model.engine.expert_parallel:
        exchanged += 2 * size.experts_per_token * size.hidden * (model.num_shards - 1) / model.num_shards
    return num_passes * model.num_layers * num_tokens / sp * element_bytes(model) * (summed + exchanged)


def all_reduce_bytes(model: RoleModel) -> float:
    """Returns the bytes of the all-reduce of the gradients of replicated weights, in an update."""
    ranks = model.mesh.dp * model.mesh.sp
    return 0.0 if model.is_sharded else 2 * 4 * model.trained_parameters * (ranks - 1) / ranks


def broadcast_bytes(model: RoleModel) -> float:
    """Returns the bytes of the updated weights that a rank of ZeRO-1 receives, in an update."""
    ranks = model.num_optimizer_ranks
    return model.trained * (ranks - 1) / ranks
