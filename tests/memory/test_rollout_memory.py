"""The memory of a GPU that vLLM shares with other roles: weight syncs, evictions, and host memory."""

from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.config import ConfigError, EngineConfig, LoraConfig, Placement
from flowrl.controller.placement.plan import Mesh
from flowrl.memory.device_constants import TERMS
from flowrl.memory.memory_estimate import DeviceMemory, estimate_memory, host_memory, read_sizes
from flowrl.memory.memory_table import MemoryBudget, check_memory, memory_budget, render_memory
from flowrl.memory.model_size import read_model_size
from flowrl.memory.role_memory import CallMemory, RoleMemory, RoleModel
from recipes.grpo.config import GRPOConfig
from tests.configs import plan_run
from tests.errors import rejects
from tests.memory.one_gpu import call_of, grpo, memory_of, only_device

EMBEDDING = 2 * 151_936 * 1_536
"""Bytes of the largest weight of Qwen2.5-1.5B in bfloat16, which is tied. No layer is larger."""


def test_a_sleeping_vllm_keeps_its_process_and_its_graphs() -> None:
    device = only_device(grpo("Qwen/Qwen2.5-1.5B"))
    assert set(device.fixed) == {"CUDA context", "vLLM process", "CUDA graphs"}
    assert device.resident("rollout", "actor", call_of(memory_of(device, "actor"), "update")) == 0
    without = only_device(grpo("Qwen/Qwen2.5-1.5B", "rollout.vllm.graphs=false"))
    assert set(without.fixed) == {"CUDA context", "vLLM process"}


ACTOR = RoleMemory(10, 20, (CallMemory("update", activations=30), CallMemory("logprobs", activations=5)))
AWAKE = RoleMemory(6, 0, (CallMemory("generate", activations=4, buffers=3),), kv_cache=8)
APART = (frozenset({"actor"}), frozenset({"rollout"}))


@pytest.mark.parametrize(
    ("actor", "rollout", "processes", "update", "generate"),
    [
        # 2 of the processes + 30 of the actor + 14 of the rollout, calls of 30 + 15 and 7 + 3, and the other's cache
        (ACTOR, AWAKE, APART, 2 + 44 + 45 + 10, 2 + 44 + 10 + 45),
        (ACTOR, AWAKE, (APART[0] | APART[1],), 2 + 44 + 45, 2 + 44 + 10),
        (ACTOR, replace(AWAKE, offloads=True), APART, 2 + 30 + 45, 2 + 44 + 10),
        (replace(ACTOR, offloads=True), AWAKE, APART, 2 + 44 + 45, 2 + 14 + 10),
    ],
)
def test_a_process_that_is_never_evicted_keeps_the_memory_of_its_largest_call(
    actor: RoleMemory, rollout: RoleMemory, processes: tuple[frozenset[str], ...], update: int, generate: int
) -> None:
    roles = {"actor": actor, "rollout": rollout}
    device = DeviceMemory(0, 0, roles, {"CUDA context": 2}, fragmentation=0.5, processes=processes)
    assert device.during("actor", actor.calls[0]) == update
    assert device.during("rollout", rollout.calls[0]) == generate
    assert device.peak[0] == max(update, generate)


def test_a_sleeping_vllm_wakes_only_its_weights_to_load_new_ones() -> None:
    """The actor keeps 30 bytes. The rollout has 6 of weights, a cache of 8, and calls of 4 and 20."""
    load = CallMemory("load_ipc", gathered=20, without_cache=True)
    generate = CallMemory("generate", activations=4)
    rollout = RoleMemory(6, 0, (generate, load), offloads=True, kv_cache=8)
    device = DeviceMemory(0, 0, {"actor": ACTOR, "rollout": rollout}, {}, processes=APART)
    assert device.during("rollout", load) == 30 + 6 + 20
    assert device.during("rollout", generate) == 30 + 6 + 8 + 4
    assert device.needed_beside_cache("rollout") == 30 + 6 + 4


def test_weights_of_an_actor_that_offloads_stay_on_the_device_only_while_the_rollout_copies_them() -> None:
    actor = RoleMemory(7, 14, (CallMemory("update", gradients=7, activations=2),), offloads=True)
    load = CallMemory("load_ipc", gathered=3, buffers=2, without_cache=True, has_actor_weights=True)
    generate = CallMemory("generate", activations=4)
    rollout = RoleMemory(6, 0, (generate, load), offloads=True, kv_cache=8)
    device = DeviceMemory(0, 0, {"actor": actor, "rollout": rollout}, {}, processes=APART)
    assert device.during("rollout", load) == 7 + 6 + 3 + 2
    assert device.during("rollout", generate) == 6 + 8 + 4
    assert device.during("actor", actor.calls[0]) == 7 + 14 + 7 + 2


@pytest.mark.parametrize(
    ("via", "expected"), [("auto", {"load_weights": False}), ("cuda_ipc", {"load_ipc": True})], ids=["auto", "cuda_ipc"]
)
def test_cuda_ipc_counts_the_weights_of_an_actor_that_offloads(via: str, expected: dict[str, bool]) -> None:
    config = grpo("Qwen/Qwen2.5-1.5B", "actor.engine.offload=idle", f"rollout.transfer.via={via}")
    rollout = memory_of(only_device(config), "rollout")
    assert {call.name: call.has_actor_weights for call in rollout.calls if call.name != "generate"} == expected


@pytest.mark.parametrize(
    ("settings", "actor", "call", "expected"),
    [
        ((), "main", "load_ipc", True),
        (("rollout.transfer.via=object_store",), "main", "load_weights", True),
        (("rollout.vllm.sleep=false",), "main", "load_ipc", False),
        ((), "other", "load_broadcast", False),  # evicted only by the reward, which need not run in between
    ],
)
def test_a_weight_sync_is_without_the_cache_if_the_actor_evicts_the_rollout(
    settings: tuple[str, ...], actor: str, call: str, expected: bool
) -> None:
    roles = {"actor": actor, "reward": "main", "rollout": "main"}
    pools = {pool: [1] for pool in roles.values()}
    placement = {"device": "cuda", "pools": pools, "roles": roles, "memory_gb": 80}
    config = grpo("Qwen/Qwen2.5-1.5B", "actor.kl_loss_coef=0", *settings)
    config = config.model_copy(update={"placement": Placement.model_validate(placement)})
    devices = estimate_memory(config, plan_run(config, [len(pools)]), read_sizes(config))
    (rollout,) = [memory for device in devices if (memory := device.roles.get("rollout")) is not None]
    assert call_of(rollout, call).without_cache == expected


def test_an_eviction_by_one_role_of_a_process_frees_the_caches_of_the_other_processes() -> None:
    """The critic offloads when idle, so each call of its process evicts the rollout."""
    critic = RoleMemory(1, 0, (CallMemory("update", activations=2),), offloads=True)
    roles = {"actor": ACTOR, "critic": critic, "rollout": AWAKE}
    device = DeviceMemory(0, 0, roles, {}, processes=(frozenset({"actor", "critic"}), frozenset({"rollout"})))
    assert device.during("actor", ACTOR.calls[1]) == 30 + 14 + 5


@pytest.mark.parametrize(
    ("sleep", "device", "expected"),
    [("false", "cuda", int(1.15 * (1_000_000_000 + 2 * EMBEDDING))), ("null", "cuda", 0), ("false", "cpu", 0)],
)
def test_a_plan_counts_the_cached_memory_of_an_engine_that_never_sleeps(sleep: str, device: str, expected: int) -> None:
    """Its largest call receives two buckets of 500 MB and two weights, and torch reserves 15 % more."""
    settings = ("rollout.max_num_seqs=16", "rollout.vllm.kv_cache_gb=1", f"rollout.vllm.sleep={sleep}")
    config = grpo("Qwen/Qwen2.5-1.5B", *settings, f"placement.device={device}")
    assert only_device(config).cached("actor") == expected


def test_a_device_that_is_full_of_cached_memory_names_the_settings_that_free_it() -> None:
    """The sampler of 16,384 sequences needs 35 GB."""
    settings = ("rollout.vllm.kv_cache_gb=1", "rollout.vllm.sleep=false", "rollout.max_num_seqs=16384")
    config = grpo("Qwen/Qwen2.5-1.5B", *settings, "placement.memory_gb=60")
    with rejects("rollout.generate", "rollout.max_num_seqs", 16384, "rollout.vllm.sleep", error=ConfigError):
        check(config)


def test_the_sampler_needs_its_logits() -> None:
    """Three float32 tensors and one bfloat16 tensor of 256 x 151,936 logits."""
    rollout = memory_of(only_device(grpo("Qwen/Qwen2.5-1.5B", "rollout.max_num_seqs=256")), "rollout")
    assert call_of(rollout, "generate").buffers == 256 * 151_936 * (3 * 4 + 2)


@pytest.mark.parametrize(
    ("bucket_mb", "bucket"),
    [
        (600, 600_000_000),
        (100, EMBEDDING),  # a weight larger than a bucket forms its own bucket
        (10_000, 2 * 1_543_714_304),  # no bucket is larger than the model
    ],
)
def test_a_colocated_weight_sync_needs_two_buckets(bucket_mb: int, bucket: int) -> None:
    """Sender and receiver have one each. The sender also has a cast weight, and vLLM a module that it rebuilds."""
    rollout = memory_of(only_device(grpo("Qwen/Qwen2.5-1.5B", f"rollout.transfer.bucket_mb={bucket_mb}")), "rollout")
    load = call_of(rollout, "load_ipc")
    assert (load.buffers, load.gathered) == (2 * bucket, 2 * EMBEDDING)


def test_a_weight_sync_through_the_object_store_has_no_buckets_on_the_gpu() -> None:
    rollout = memory_of(only_device(grpo("Qwen/Qwen2.5-1.5B", "actor.engine.offload=idle")), "rollout")
    load = call_of(rollout, "load_weights")
    assert (load.buffers, load.gathered) == (0, EMBEDDING)


def test_weights_in_the_dtype_of_the_rollout_are_not_copied_before_they_are_sent() -> None:
    settings = ("actor.model.dtype=bfloat16", "actor.engine.compute_dtype=null", "actor.engine.strategy=single")
    rollout = memory_of(only_device(grpo("Qwen/Qwen2.5-1.5B", *settings)), "rollout")
    assert call_of(rollout, "load_ipc").gathered == EMBEDDING


@pytest.mark.parametrize(
    ("stored", "sent", "num_bytes"),
    [
        (4, 2, 4 + 4 + 4 + 2),  # weight, product, sum, cast sum
        (4, 4, 4 + 4 + 4),
        (2, 2, 2 + 4 + 4 + 4),  # weight, product, float32 copy of the weight, sum
        (2, 4, 2 + 4 + 4 + 4),
    ],
)
def test_a_merge_with_an_adapter_needs_its_float32_sums(stored: int, sent: int, num_bytes: int) -> None:
    """The largest adapted matrix has 1,536 x 8,960 values."""
    size = read_model_size(Path("Qwen/Qwen2.5-1.5B"))
    assert size is not None
    engine = EngineConfig(strategy="fsdp")
    model = RoleModel(size, engine, Mesh(1, 1, 1, 1), "cuda", stored, True, 64, LoraConfig(rank=16))
    assert model.exported(sent) == EMBEDDING // 2 * sent  # the embeddings have no adapter, and are larger
    narrow = replace(model, size=replace(size, embedding=1000))
    assert narrow.exported(sent) == 1536 * 8960 * num_bytes


@pytest.mark.parametrize("tp", [1, 2])
def test_a_weight_sync_over_nccl_needs_one_bucket_on_the_first_actor_and_two_on_each_rollout(tp: int) -> None:
    """Of two actor ranks, the first sends. The group has a communicator on each of its devices."""
    placement = {"device": "cuda", "pools": {"train": [2], "make": [2]}, "memory_gb": 80}
    roles = {"actor": "train", "reference": "train", "reward": "train", "rollout": {"pool": "make", "tp": tp}}
    stated = grpo("Qwen/Qwen2.5-1.5B", "rollout.transfer.bucket_mb=500", "actor.engine.strategy=fsdp")
    config = stated.model_copy(update={"placement": Placement.model_validate(placement | {"roles": roles})})
    first, second, *rollouts = estimate_memory(config, plan_run(config, [4]), read_sizes(config))
    broadcast = call_of(memory_of(first, "actor"), "broadcast_weights")
    assert (broadcast.buffers, broadcast.gathered) == (500_000_000, EMBEDDING)
    assert "broadcast_weights" not in {call.name for call in memory_of(second, "actor").calls}
    # Of all ranks and of the shards; on the first rank also of the transfer group.
    communicator = 32 * 10_485_760
    assert memory_of(first, "actor").fixed["NCCL"] == 3 * communicator
    assert memory_of(second, "actor").fixed["NCCL"] == 2 * communicator
    assert len(rollouts) == 2
    for device in rollouts:
        rollout = memory_of(device, "rollout")
        load = call_of(rollout, "load_broadcast")
        assert (load.buffers, load.gathered) == (2 * 500_000_000, EMBEDDING)
        assert rollout.fixed["NCCL"] == tp * communicator


def test_each_of_several_senders_needs_a_part_of_a_bucket_and_a_communicator_on_each_rollout() -> None:
    """A rollout also concatenates the parts of a bucket."""
    roles = {"actor": "train", "reference": "train", "reward": "train", "rollout": "make"}
    placement = {"device": "cuda", "pools": {"train": [2], "make": [1]}, "memory_gb": 80, "roles": roles}
    settings = ("rollout.transfer.bucket_mb=500", "rollout.transfer.senders=all")

    config = grpo("Qwen/Qwen2.5-1.5B", "actor.engine.strategy=fsdp", *settings)
    config = config.model_copy(update={"placement": Placement.model_validate(placement)})
    first, second, last = estimate_memory(config, plan_run(config, [3]), read_sizes(config))
    rollout, communicator = memory_of(last, "rollout"), 32 * 10_485_760
    for actor in (memory_of(first, "actor"), memory_of(second, "actor")):
        broadcast = call_of(actor, "broadcast_weights")
        assert (broadcast.buffers, broadcast.gathered) == (250_000_000, EMBEDDING // 2)
        assert actor.fixed["NCCL"] == 3 * communicator
    assert call_of(rollout, "load_broadcast").buffers == 3 * 500_000_000
    assert rollout.fixed["NCCL"] == 2 * communicator


def test_each_tensor_parallel_device_has_a_vllm_process_with_its_buffers() -> None:
    """The leader of the replica has no CUDA context of its own."""
    roles = {"actor": "train", "reference": "train", "reward": "train", "rollout": {"pool": "make", "tp": 2}}
    placement = {"device": "cuda", "pools": {"train": [1], "make": [2]}, "roles": roles, "memory_gb": 80}
    update = {"placement": Placement.model_validate(placement)}
    config = grpo("Qwen/Qwen2.5-1.5B", "rollout.transfer.via=object_store").model_copy(update=update)
    _, *rollouts = estimate_memory(config, plan_run(config, [3]), read_sizes(config))
    expected = {
        "vLLM process": int(1.27 * 2**30),
        "CUDA graphs": int(1.62 * 2**30),
        "NCCL": 32 * 10_485_760,
        "all-reduce": 96 * 2**20,
    }
    assert [device.fixed for device in rollouts] == [expected, expected]


def test_a_stage_of_a_rollout_has_its_layers_and_one_embedding() -> None:
    """Of 3 stages of Qwen2.5-1.5B, the largest have 10 of its 28 layers, which have 46,797,824 parameters each. A third
    of the tokens' keys and values is more than theirs.
    """
    roles = {"actor": "train", "reference": "train", "reward": "train", "rollout": {"pool": "make", "tp": 2, "pp": 3}}
    placement = {"device": "cuda", "pools": {"train": [1], "make": [6]}, "roles": roles, "memory_gb": 80}
    update = {"placement": Placement.model_validate(placement)}
    config = grpo("Qwen/Qwen2.5-1.5B", "rollout.transfer.via=object_store").model_copy(update=update)
    _, *rollouts = estimate_memory(config, plan_run(config, [7]), read_sizes(config))
    assert len(rollouts) == 6
    norm, tokens = 1536, config.data.max_prompt_tokens + config.rollout.max_response_tokens
    for memory in (memory_of(device, "rollout") for device in rollouts):
        assert memory.weights == (2 * (10 * 46_797_824 + norm) + EMBEDDING) // 2
        assert memory.sequence_cache == tokens * 10 * 2 * 256 * 2 // 2
        assert memory.fixed["NCCL"] == 2 * 32 * 10_485_760


NUM_WEIGHTS = 1_543_714_304
"""Parameters of Qwen2.5-1.5B."""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((), {"sleeping vLLM": 2 * 2 * NUM_WEIGHTS}),  # bfloat16, in pinned blocks of up to twice the size
        (("rollout.vllm.sleep=false",), {}),
        (("rollout.vllm.sleep=false", "actor.engine.offload=optimizer"), {"offloaded": 8 * NUM_WEIGHTS}),
        (
            ("rollout.vllm.sleep=false", "actor.engine.offload=idle"),  # weights are sent in bfloat16
            {"offloaded": 12 * NUM_WEIGHTS, "object store": 2 * NUM_WEIGHTS},
        ),
        (
            ("rollout.vllm.sleep=false", "actor.engine.strategy=fsdp", "actor.engine.offload=parameters"),
            {"offloaded": 16 * NUM_WEIGHTS},
        ),
        (("rollout.vllm.sleep=false", "checkpoint.every=1"), {"checkpoints": 12 * NUM_WEIGHTS}),
        (("rollout.vllm.dtype=null", "placement.device=cpu"), {}),
    ],
)
def test_the_host_memory_of_a_gpu_run_is_counted(settings: tuple[str, ...], expected: dict[str, int]) -> None:
    config = grpo("Qwen/Qwen2.5-1.5B", "actor.kl_loss_coef=0", *settings)
    device = only_device(config)
    assert host_memory([device]) == ({0: expected} if expected else {})
    assert ("host memory of node 0" in render_memory([device], MemoryBudget())) == bool(expected)


def test_the_host_memory_of_a_node_is_that_of_all_its_devices() -> None:
    config = grpo("Qwen/Qwen2.5-1.5B", "actor.kl_loss_coef=0", "placement.pools.main=[2]")
    devices = estimate_memory(config, plan_run(config, [2]), read_sizes(config))
    assert host_memory(devices) == {0: {"sleeping vLLM": 2 * 2 * 2 * NUM_WEIGHTS}}


@pytest.mark.parametrize(
    ("transport", "expected"),
    [
        ("object_store", {0: {"object store": 2 * NUM_WEIGHTS}, 1: {"object store": 2 * NUM_WEIGHTS}}),
        ("auto", {}),  # NCCL
    ],
)
def test_each_node_of_a_rollout_has_one_copy_of_weights_in_the_object_store(
    transport: str, expected: dict[int, dict[str, int]]
) -> None:
    """Node 0 has the actor, node 1 two replicas, and node 2 the reference."""
    roles = {"actor": "train", "reward": "train", "rollout": "make", "reference": "rest"}
    pools = {"train": [2, 0, 0], "make": [0, 2, 0], "rest": [0, 0, 2]}
    placement = Placement.model_validate({"device": "cuda", "pools": pools, "roles": roles, "memory_gb": 80})
    config = grpo("Qwen/Qwen2.5-1.5B", f"rollout.transfer.via={transport}").model_copy(update={"placement": placement})
    devices = estimate_memory(config, plan_run(config, [2, 2, 2]), read_sizes(config))
    assert len(devices) == 6 and host_memory(devices) == expected


def test_a_cache_larger_than_the_device_names_the_largest_that_fits() -> None:
    config = grpo("Qwen/Qwen2.5-1.5B", "rollout.vllm.kv_cache_gb=90")
    with rejects("rollout.vllm.kv_cache_gb", 90, error=ConfigError) as caught:
        check(config)
    largest = str(caught.value).rpartition(" ")[2]
    fitting = grpo("Qwen/Qwen2.5-1.5B", f"rollout.vllm.kv_cache_gb={largest}")
    check(fitting)
    assert 80e9 - only_device(fitting).needed_beside_cache("rollout") - float(largest) * 1e9 < 1e8


def check(config: GRPOConfig) -> None:
    planned = plan_run(config, [1])
    devices = estimate_memory(config, planned, read_sizes(config))
    check_memory(config, planned, devices, memory_budget(config, planned, is_local=False))


def test_every_estimated_term_is_printed_with_its_source() -> None:
    config = grpo("Qwen/Qwen2.5-1.5B")
    printed = render_memory([only_device(config)], MemoryBudget(per_device=80e9))
    _, estimated = printed.split("estimated, not measured:")
    used = ("CUDA context", "vLLM process", "CUDA graphs", "buffers", "fragmentation")
    assert all(constant.source in estimated for term in used for constant in TERMS[term])
