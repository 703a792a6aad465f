"""The time of a phase equals the quotient of its FLOPs and bytes and the rates, by hand."""

import json
from dataclasses import replace

import pytest

from flowrl.config import EngineConfig, LoraConfig
from flowrl.controller.placement.plan import Mesh
from flowrl.devices.device_rates import GENERATION, LINK, MEMORY, TRAINING, DeviceRates
from flowrl.engines.train.model_flops import ModelFlops, planned_flops
from flowrl.memory.model_size import model_size_from_config
from flowrl.memory.role_memory import RoleModel
from flowrl.timing.phase_time import GenerationLoad, PassLoad, generation_time, pass_time

SETTINGS = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "tie_word_embeddings": False,
}
"""A layer has matrices of 64 x 64 (queries, output), 64 x 32 (keys, values) and 64 x 96 (MLP, three)."""

MATRICES = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
HEAD = 32 * 64
PARAMETERS = MATRICES + 2 * (64 + 32 + 32) + 2 * 2 * 64 + 2 * HEAD + 64
"""Biases of queries, keys and values, two norms per layer, embeddings, head and last norm."""

RATES = DeviceRates(
    "test",
    flops=1e9 / TRAINING.value,
    float32_flops=1e8 / TRAINING.value,
    memory_gb=80,
    memory=1e6 / MEMORY.value,
    nvlink=1e5 / LINK.value,
    host=1e4 / LINK.value,
    network=1e3 / LINK.value,
)
"""Rates that programs reach: 10^9 FLOP/s, 10^6 bytes/s of memory, ..., 10^3 bytes/s between nodes."""

LINK_RATE = RATES.nvlink
ONE_RANK = Mesh(1, 1, 1, 1)
SIZE = model_size_from_config(SETTINGS)
assert SIZE is not None
found_flops = planned_flops(json.dumps(SETTINGS), has_head=True)
assert found_flops is not None
FLOPS: ModelFlops = found_flops

FORWARD = 6 * 2 * MATRICES + 4 * 2 * HEAD + 12 * 2 * 4 * 64
"""FLOPs of two rows of three tokens, of which two are targets: 6 tokens, 4 targets, 2 x 6 pairs in 2 layers."""


def role_model(mesh: Mesh = ONE_RANK, lora: LoraConfig | None = None, **engine: object) -> RoleModel:
    assert SIZE is not None
    config = EngineConfig.model_validate({"strategy": "fsdp", "compute_dtype": "bfloat16", **engine})
    return RoleModel(SIZE, config, mesh, "cuda", 4, is_policy=True, max_length=3, lora=lora)


def test_the_parameters_are_those_of_the_size() -> None:
    assert SIZE is not None and SIZE.parameters == PARAMETERS


def test_a_forward_pass_takes_its_flops() -> None:
    time = pass_time(role_model(), FLOPS, PassLoad(rows=2, length=3, targets=2), RATES, LINK_RATE)
    assert time.model_flops == FORWARD and (time.overlapped_s, time.exposed_s) == (0, 0)
    assert time.seconds == time.compute_s == pytest.approx(FORWARD / 1e9)


def test_a_pass_in_float32_has_the_rate_of_float32() -> None:
    model = replace(role_model(), engine=EngineConfig(strategy="fsdp", compute_dtype="float32"))
    time = pass_time(model, FLOPS, PassLoad(rows=2, length=3, targets=2), RATES, LINK_RATE)
    assert time.compute_s == pytest.approx(FORWARD / 1e8)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_updates_count_backward_passes_recomputation_and_the_optimizer(checkpointing: bool) -> None:
    """Each layer recomputes all but its last matrix. The vocabulary is too small for logits in tiles."""
    recomputed = (6 * 2 * (MATRICES - 2 * 64 * 96) + 12 * 2 * 4 * 64) * checkpointing
    model, load = role_model(gradient_checkpointing=checkpointing), PassLoad(rows=2, length=3, targets=2, num_updates=5)
    time = pass_time(model, FLOPS, load, RATES, LINK_RATE)
    assert time.model_flops == 5 * 3 * FORWARD
    assert time.compute_s == pytest.approx(5 * (3 * FORWARD + recomputed) / 1e9)
    assert time.exposed_s == pytest.approx(5 * 28 * PARAMETERS / 1e6)


def test_a_large_vocabulary_recomputes_its_logits() -> None:
    settings = SETTINGS | {"vocab_size": 8192}
    size, flops = model_size_from_config(settings), planned_flops(json.dumps(settings), has_head=True)
    assert size is not None and flops is not None
    load = PassLoad(rows=1, length=1, targets=1, num_updates=1)
    time = pass_time(replace(role_model(), size=size), flops, load, RATES, LINK_RATE)
    assert time.compute_s - time.model_flops / 1e9 == pytest.approx(2 * 64 * 8192 / 1e9)


def test_fsdp_gathers_weights_twice_and_reduces_gradients_in_each_microbatch() -> None:
    """Two micro-batches of one row on each of four ranks. Weights have 2 bytes in collectives, and gradients 4."""
    model = role_model(Mesh(1, 4, 1, 1), max_tokens_per_microbatch=3)
    load = PassLoad(rows=2, length=3, targets=2)
    forward = pass_time(model, FLOPS, load, RATES, LINK_RATE)
    assert forward.overlapped_s == pytest.approx(2 * 2 * PARAMETERS * 3 / 4 / 1e5)
    assert forward.seconds == max(forward.compute_s, forward.overlapped_s)
    training = pass_time(model, FLOPS, replace(load, num_updates=1), RATES, LINK_RATE)
    assert training.overlapped_s == pytest.approx(2 * (2 * 2 + 4) * PARAMETERS * 3 / 4 / 1e5)
    assert training.exposed_s == pytest.approx(28 * PARAMETERS / 4 / 1e6)


def test_copies_of_a_sharded_model_sum_their_gradients_between_nodes() -> None:
    model = role_model(Mesh(1, 4, 1, 1), shard_ranks=2)
    one = role_model(Mesh(1, 2, 1, 1), shard_ranks=2)
    load = PassLoad(rows=1, length=3, targets=2, num_updates=1)
    several, single = (pass_time(each, FLOPS, load, RATES, LINK_RATE) for each in (model, one))
    assert several.overlapped_s - single.overlapped_s == pytest.approx(2 * 4 * PARAMETERS / 2 / 2 / 1e3)


def test_stages_wait_for_each_other_and_for_the_hidden_states() -> None:
    """Two micro-batches of one row on two stages of one layer each. The second one also has the head, so it is slower:
    the first stage computes one micro-batch before it starts.
    """
    model = role_model(Mesh(2, 1, 1, 1), max_tokens_per_microbatch=3)
    load = PassLoad(rows=2, length=3, targets=2)
    forward = pass_time(model, FLOPS, load, RATES, LINK_RATE)
    layer, head = (3 * 2 * MATRICES + 6 * 2 * 4 * 64) / 2, 2 * 2 * HEAD
    assert 2 * (2 * layer + head) == FORWARD
    assert forward.compute_s == pytest.approx((layer + 2 * (layer + head)) / 1e9)
    assert forward.model_flops == FORWARD / 2
    assert forward.idle_share == pytest.approx(1 - FORWARD / (2 * forward.compute_s * 1e9))
    # 3 tokens of 64 values of 2 bytes per micro-batch, for the two micro-batches and once until the last stage starts.
    assert forward.exposed_s == pytest.approx(3 * 3 * 64 * 2 / 1e5)
    training = pass_time(model, FLOPS, replace(load, num_updates=1), RATES, LINK_RATE)
    assert training.compute_s == pytest.approx(3 * forward.compute_s)
    assert training.idle_share == pytest.approx(forward.idle_share)


@pytest.mark.parametrize(("num_rows", "share"), [(1, 1 / 2), (3, 1 / 4)])
def test_stages_of_equal_cost_are_idle_for_the_bubble(num_rows: int, share: float) -> None:
    """A value head costs nothing. With one micro-batch per row, p - 1 of m + p - 1 micro-batches are idle."""
    model = replace(role_model(Mesh(2, 1, 1, 1), max_tokens_per_microbatch=3), is_policy=False)
    flops = planned_flops(json.dumps(SETTINGS), has_head=False)
    assert flops is not None
    load = PassLoad(rows=num_rows, length=3, targets=2, num_updates=1)
    assert pass_time(model, flops, load, RATES, LINK_RATE).idle_share == pytest.approx(share)


def test_a_stage_updates_its_own_weights() -> None:
    """The first stage has the embeddings, and the second one as many parameters in its head, and the last norm."""
    model, load = role_model(Mesh(2, 1, 1, 1)), PassLoad(rows=1, length=3, targets=2, num_updates=1)
    own = (PARAMETERS - 64) / 2 + 64
    transfers = 2 * 2 * 3 * 64 * 2 / 1e5
    assert pass_time(model, FLOPS, load, RATES, LINK_RATE).exposed_s == pytest.approx(transfers + 28 * own / 1e6)


def test_ddp_sums_gradients_once_per_update_after_the_backward_pass() -> None:
    model = role_model(Mesh(1, 4, 1, 1), strategy="ddp", max_tokens_per_microbatch=3)
    time = pass_time(model, FLOPS, PassLoad(rows=2, length=3, targets=2, num_updates=1), RATES, LINK_RATE)
    assert time.overlapped_s == 0
    all_reduce, adam = 2 * 4 * PARAMETERS * 3 / 4 / 1e5, 28 * PARAMETERS / 1e6
    assert time.exposed_s == pytest.approx(all_reduce + adam)
    overlapping = replace(model, engine=model.engine.model_copy(update={"overlap_all_reduce": "auto"}))
    time = pass_time(overlapping, FLOPS, PassLoad(rows=2, length=3, targets=2, num_updates=1), RATES, LINK_RATE)
    assert (time.overlapped_s, time.exposed_s) == (pytest.approx(all_reduce), pytest.approx(adam))


def test_zero1_divides_the_optimizer_step_and_broadcasts_the_weights() -> None:
    model = role_model(Mesh(1, 4, 1, 1), strategy="zero1", max_tokens_per_microbatch=3)
    time = pass_time(model, FLOPS, PassLoad(rows=2, length=3, targets=2, num_updates=1), RATES, LINK_RATE)
    sums, weights = (count * 4 * PARAMETERS * 3 / 4 / 1e5 for count in (2, 1))
    # 12 bytes of the weights of a rank, and its state, of which the embeddings are the largest part.
    adam = (12 * PARAMETERS / 4 + 2 * model.moments) / 1e6
    assert 2 * PARAMETERS <= model.moments < 8 * PARAMETERS
    assert time.exposed_s == pytest.approx(sums + weights + adam)


def test_muon_has_one_moment_per_matrix_and_five_iterations() -> None:
    adamw, muon = (replace(role_model(), optimizer=kind) for kind in ("adamw", "muon"))
    load = PassLoad(rows=1, length=3, targets=2, num_updates=1)
    times = [pass_time(model, FLOPS, load, RATES, LINK_RATE) for model in (adamw, muon)]
    assert SIZE is not None
    hidden = SIZE.layers * sum(inputs * outputs for _, inputs, outputs in SIZE.linears)
    sides = [sorted((inputs, outputs)) for _, inputs, outputs in SIZE.linears]
    flops = SIZE.layers * sum(
        5 * 2 * (rows * columns * rows + rows**3 + rows * rows * columns) for rows, columns in sides
    )
    assert times[1].exposed_s - times[0].exposed_s == pytest.approx(flops / 1e9 - 2 * 4 * hidden / 1e6)


def test_tensor_and_sequence_parallelism_divide_the_flops_and_exchange_activations() -> None:
    """tp: two sums per layer of [6, 64] in bfloat16. sp: 3 tokens per rank, queries and output of 64, keys and values
    of 32.
    """
    load = PassLoad(rows=2, length=3, targets=2)
    tensor = pass_time(role_model(Mesh(1, 1, 1, 2)), FLOPS, load, RATES, LINK_RATE)
    assert tensor.compute_s == pytest.approx(FORWARD / 2 / 1e9)
    assert tensor.exposed_s == pytest.approx(2 * 2 * 6 * 64 * 2 * 2 * (1 / 2) / 1e5)
    sequence = pass_time(role_model(Mesh(1, 1, 2, 1)), FLOPS, load, RATES, LINK_RATE)
    assert sequence.exposed_s == pytest.approx(2 * 3 * (64 + 32 + 32 + 64) * 2 * (1 / 2) / 1e5)


def test_an_adapter_reduces_and_updates_its_own_parameters() -> None:
    """Rank 1 adds input width + output width parameters to each of the seven matrices of both layers."""
    adapter = 2 * (2 * 128 + 2 * 96 + 3 * 160)
    model = role_model(lora=LoraConfig(rank=1))
    assert model.trained_parameters == adapter
    time = pass_time(model, FLOPS, PassLoad(rows=1, length=3, targets=2, num_updates=1), RATES, LINK_RATE)
    assert time.exposed_s == pytest.approx(28 * adapter / 1e6)


def test_offloaded_state_is_copied_to_the_gpu() -> None:
    load = PassLoad(rows=1, length=3, targets=2, num_updates=1)
    optimizer = pass_time(role_model(offload="optimizer"), FLOPS, load, RATES, LINK_RATE)
    assert optimizer.exposed_s == pytest.approx(28 * PARAMETERS / 1e6 + 16 * PARAMETERS / 1e4)
    parameters = pass_time(role_model(offload="parameters"), FLOPS, load, RATES, LINK_RATE)
    assert parameters.overlapped_s == pytest.approx((2 * 4 + 4) * PARAMETERS / 1e4)


LOAD = GenerationLoad(
    num_rows=8,
    num_prefills=2,
    prompt_tokens=3,
    response_tokens=2,
    longest_response=2,
    num_seqs=4,
    weight_bytes=1e3,
    token_bytes=10,
    cache_bytes=1e9,
    num_devices=1,
    step_s=0.5,
)
TOKEN_FLOPS = 2 * (MATRICES + HEAD)
COMPUTE = RATES.flops * GENERATION.value


def test_generation_adds_prefill_weights_cache_and_waits() -> None:
    """Two waves of four sequences have two steps each. A response of two tokens reads 4 + 5 cached tokens."""
    assert FLOPS is not None
    time = generation_time(FLOPS, LOAD, RATES)
    prefill = 3 * 2 * MATRICES + 2 * HEAD + 6 * 2 * 4 * 64
    assert time.num_concurrent == 4
    assert time.prefill_s == pytest.approx(2 * prefill / COMPUTE)
    step = max(1e3 / 1e6, 4 * TOKEN_FLOPS / COMPUTE)
    assert time.decode_s == pytest.approx(4 * step + 8 * (4 + 5) * 10 / 1e6 + 4 * 0.5)
    decode = 2 * 2 * (MATRICES + HEAD) + (4 + 5) * 2 * 4 * 64
    assert time.model_flops == 2 * prefill + 8 * decode


@pytest.mark.parametrize(("num_rows", "is_memory_bound"), [(1, True), (4, False)])
def test_a_step_waits_for_the_slower_of_weights_and_products(num_rows: int, is_memory_bound: bool) -> None:
    weights_s = 2 * TOKEN_FLOPS / COMPUTE  # as long as the products of two sequences
    load = replace(LOAD, num_rows=num_rows, weight_bytes=weights_s * 1e6, token_bytes=1e-9, step_s=0)
    time = generation_time(FLOPS, load, RATES)
    assert time.decode_s == pytest.approx(2 * (weights_s if is_memory_bound else 2 * weights_s))


def test_the_cache_limits_the_sequences() -> None:
    """A sequence of five tokens has 50 bytes, so 149 bytes hold two."""
    time = generation_time(FLOPS, replace(LOAD, cache_bytes=149), RATES)
    assert time.num_concurrent == 2


def test_the_longest_response_ends_alone() -> None:
    load = replace(LOAD, weight_bytes=0, longest_response=12)
    difference = (
        generation_time(FLOPS, load, RATES).decode_s
        - generation_time(FLOPS, replace(LOAD, weight_bytes=0), RATES).decode_s
    )
    assert difference == pytest.approx(10 * (TOKEN_FLOPS / COMPUTE + 0.5))


def test_tensor_parallel_devices_share_products_and_sum_hidden_states() -> None:
    load = replace(LOAD, num_devices=2, summed_bytes=100, weight_bytes=0, token_bytes=1e-9, step_s=0)
    time = generation_time(FLOPS, load, RATES)
    assert time.decode_s == pytest.approx(4 * 4 * (TOKEN_FLOPS / 2 / COMPUTE + 100 / 1e5))


def test_stages_on_other_nodes_exchange_hidden_states_over_their_own_link() -> None:
    load = PassLoad(rows=4, length=3, targets=2)
    model = replace(role_model(), mesh=replace(role_model().mesh, pp=2))
    same, slower = (pass_time(model, FLOPS, load, RATES, LINK_RATE, link) for link in (LINK_RATE, LINK_RATE / 10))
    assert slower.exposed_s == pytest.approx(10 * same.exposed_s) and same.exposed_s > 0
    assert (slower.compute_s, slower.overlapped_s) == (same.compute_s, same.overlapped_s)
