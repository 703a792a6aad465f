"""Bytes that one rank receives from other ranks in the passes of a role. Pure functions; docs/step_time.md derives
them.

tests/benchmarks/parallel.py compares these numbers with the bytes that sockets receive.
"""

from flowrl.memory.role_memory import RoleModel


def gathered_bytes(model: RoleModel, *, is_training: bool) -> float:
    """Returns the bytes of FSDP's gathers of weights and sums of gradients within a copy of the model, in a
    micro-batch.

    Gradients are summed in float32.
    """
    if not model.is_sharded:
        return 0.0
    moved = num_gathers(model, is_training=is_training) * model.hidden_bytes * model.gathered_parameters
    moved += is_training * reduced_bytes(model)
    return moved * (model.num_shards - 1) / model.num_shards


def num_gathers(model: RoleModel, *, is_training: bool) -> int:
    """Returns how often FSDP gathers each weight in a micro-batch: twice in training with `reshard_after_forward`."""
    return 2 if is_training and model.engine.reshard_after_forward else 1


def reduced_bytes(model: RoleModel) -> int:
    """Returns the bytes of the gradients that FSDP sums in a micro-batch."""
    return 4 * min(model.trained_parameters, model.gathered_parameters)


def copied_sum_bytes(model: RoleModel) -> float:
    """Returns the bytes of the sum of gradient shards over the copies of a sharded model (HSDP), in a micro-batch."""
    if not model.is_sharded:
        return 0.0
    return _all_reduced(reduced_bytes(model) / model.num_shards, _num_ranks(model) // model.num_shards)


def copied_experts_bytes(model: RoleModel) -> float:
    """Returns the bytes of the sum of a rank's expert gradients over the copies of the model, in an update (HSDP with
    expert parallelism).
    """
    if not model.engine.expert_parallel or model.lora is not None:
        return 0.0
    own = (model.parameters - model.gathered_parameters) / model.num_shards
    return _all_reduced(4 * own, _num_ranks(model) // model.num_shards)


def stage_bytes(model: RoleModel, num_tokens: float) -> float:
    """Returns the bytes of the hidden states that a pipeline stage sends to the next stage, or of their gradients."""
    return num_tokens / model.mesh.sp * model.hidden_bytes * model.size.hidden if model.mesh.pp > 1 else 0.0


def tied_bytes(model: RoleModel) -> int:
    """Returns the bytes of the sum of the gradients of a tied embedding over the first and the last stage, in an
    update.
    """
    return 4 * model.size.embedding if model.mesh.pp > 1 and model.size.tied and model.lora is None else 0


def layer_bytes(model: RoleModel, num_tokens: float, *, is_training: bool) -> float:
    """Returns the bytes of the collectives within layers, for the tokens of a data-parallel rank.

    Tensor parallelism sums hidden states, in a layer with experts only those of the attention. Sequence parallelism
    exchanges queries, keys, values and the attention output. Expert parallelism exchanges the tokens of experts and
    the outputs of experts.
    """
    num_passes = 1 + is_training * (1 + model.engine.gradient_checkpointing)
    (tp, sp), size = (model.mesh.tp, model.mesh.sp), model.size
    element = 4 if model.precision == "float32" else 2  # autocast exchanges outputs of 16 bits
    summed = _all_reduced((1 if size.experts else 2) * size.hidden, tp)
    exchanged = 2 * (size.queries + size.keys) * (sp - 1) / sp / tp
    if model.engine.expert_parallel:
        exchanged += 2 * size.experts_per_token * size.hidden * (model.num_shards - 1) / model.num_shards
    return num_passes * model.num_layers * num_tokens / sp * element * (summed + exchanged)


def all_reduce_bytes(model: RoleModel) -> float:
    """Returns the bytes that a rank receives when replicas of a model sum their gradients, once per update."""
    return 0.0 if model.is_sharded else _all_reduced(4 * model.trained_parameters, _num_ranks(model))


def broadcast_bytes(model: RoleModel) -> float:
    """Returns the bytes that a rank receives after the optimizer step of ZeRO-1. These are the weights whose optimizer
    state other ranks have.
    """
    ranks = model.num_optimizer_ranks
    return model.trained * (ranks - 1) / ranks


def _num_ranks(model: RoleModel) -> int:
    """Returns the number of ranks of a pipeline stage that process different tokens with the same weights."""
    return model.mesh.dp * model.mesh.sp


def _all_reduced(num_bytes: float, ranks: int) -> float:
    """Returns the bytes that a rank receives in an all-reduce."""
    return 2 * num_bytes * (ranks - 1) / ranks
