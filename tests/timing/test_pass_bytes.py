"""Bytes that a rank receives, by hand for one layer. test_phase_time.py has the times of the same collectives."""

from dataclasses import replace

import pytest

from flowrl.config import LoraConfig
from flowrl.controller.placement.plan import Mesh
from flowrl.memory.model_size import model_size_from_config
from flowrl.timing.pass_bytes import (
    all_reduce_bytes,
    broadcast_bytes,
    copied_experts_bytes,
    copied_sum_bytes,
    gathered_bytes,
    layer_bytes,
    stage_bytes,
    tied_bytes,
)
from tests.engines import tiny
from tests.timing.test_phase_time import HEAD, PARAMETERS, SETTINGS, role_model

TIED = model_size_from_config(SETTINGS | {"tie_word_embeddings": True})
assert TIED is not None
TIED_SIZE = TIED


def test_ranks_without_peers_receive_nothing():
    model = role_model()
    amounts = (all_reduce_bytes, broadcast_bytes, copied_sum_bytes, tied_bytes)
    assert [amount(model) for amount in amounts] == [0] * len(amounts)
    assert (gathered_bytes(model, is_training=True), layer_bytes(model, 6, is_training=True)) == (0, 0)
    assert stage_bytes(model, 6) == 0


def test_replicas_receive_gradients_and_the_weights_that_others_update():
    """An all-reduce receives 2 (n - 1) / n of the float32 gradients; ZeRO-1 also the weights of the other ranks."""
    ddp, zero1 = (role_model(Mesh(1, 4, 1, 1), strategy=strategy) for strategy in ("ddp", "zero1"))
    assert (all_reduce_bytes(ddp), broadcast_bytes(ddp)) == (2 * 4 * PARAMETERS * 3 / 4, 0)
    assert (all_reduce_bytes(zero1), broadcast_bytes(zero1)) == (2 * 4 * PARAMETERS * 3 / 4, 4 * PARAMETERS * 3 / 4)


@pytest.mark.parametrize("precision", [2, 4])
def test_tensor_parallel_layers_sum_two_hidden_states_in_each_pass(precision: int):
    """An all-reduce over two ranks receives each value once. Training has a forward and a backward pass."""
    model = role_model(Mesh(1, 1, 1, 2), compute_dtype={2: "bfloat16", 4: "float32"}[precision])
    per_pass = 2 * 2 * 6 * 64 * precision
    assert layer_bytes(model, 6, is_training=False) == per_pass
    assert layer_bytes(model, 6, is_training=True) == 2 * per_pass


def test_stages_receive_hidden_states_and_the_first_and_last_sum_a_tied_embedding():
    staged = role_model(Mesh(2, 1, 1, 1))
    assert (stage_bytes(staged, 6), tied_bytes(staged)) == (6 * 64 * 2, 0)
    tied = replace(staged, size=TIED_SIZE)
    assert tied_bytes(tied) == 4 * HEAD
    assert tied_bytes(replace(tied, lora=LoraConfig(rank=2))) == 0


MIXTURE = model_size_from_config(tiny.qwen3_moe().config.to_dict())
assert MIXTURE is not None
MIXTURE_SIZE = MIXTURE


def test_a_layer_with_experts_sums_only_the_hidden_states_of_its_attention():
    dense, mixture = role_model(Mesh(1, 1, 1, 2)), replace(role_model(Mesh(1, 1, 1, 2)), size=MIXTURE_SIZE)
    per_sum = 2 * 6 * MIXTURE_SIZE.hidden * 2
    assert layer_bytes(mixture, 6, is_training=False) == MIXTURE_SIZE.layers * per_sum / 2
    assert layer_bytes(dense, 6, is_training=False) == 2 * 2 * 6 * 64 * 2


def test_copies_of_divided_experts_sum_their_gradients_once_per_update():
    """Two copies of two ranks. Each rank owns half of the experts, whose float32 gradients it receives once."""
    settings = {"expert_parallel": True, "shard_ranks": 2}
    model = replace(role_model(Mesh(1, 4, 1, 1), **settings), size=MIXTURE_SIZE)
    experts = MIXTURE_SIZE.layers * MIXTURE_SIZE.experts
    assert copied_experts_bytes(model) == 4 * experts / 2
    whole = replace(role_model(Mesh(1, 2, 1, 1), **settings), size=MIXTURE_SIZE)
    assert copied_experts_bytes(whole) == copied_experts_bytes(role_model()) == 0


def test_stages_exchange_float32_hidden_states_under_autocast():
    replicated = role_model(Mesh(2, 1, 1, 1), strategy="auto")
    assert replicated.precision == "autocast" and stage_bytes(replicated, 6) == 6 * 64 * 4
