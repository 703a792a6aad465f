"""Memory estimates equal measured peaks, and plans that do not fit are rejected before anything starts."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants

from flowrl.cli import main
from flowrl.config import ConfigError, EngineConfig, LoraConfig, RolloutConfig, load
from flowrl.config.base import DeviceKind
from flowrl.config.source import read_json
from flowrl.controller.placement.plan import Mesh
from flowrl.memory.memory_estimate import DeviceMemory, estimate_memory, explain_unknown_sizes, read_sizes
from flowrl.memory.memory_table import MemoryBudget, check_memory, memory_budget, render_memory
from flowrl.memory.model_size import PUBLISHED, model_size_from_config, read_model_size
from flowrl.memory.role_memory import RoleMemory, RoleModel, training_role
from flowrl.memory.rollout_memory import RolloutBatch, RolloutLoad, hf_memory, num_slots
from flowrl.run.checks.check_list import check_start
from recipes.ppo.config import PPOConfig
from tests.configs import plan_run
from tests.errors import missing_facts, rejects
from tests.hub_cache import make_snapshot
from tests.memory.memory_points import POINTS, estimated_peak, measure_growth
from tests.memory.one_gpu import call_of, memory_of

ROOT = Path(__file__).parents[2]
DEEPSEEK = ROOT / "recipes/ppo/deepseek7b.yaml"
SIZES = read_json(PUBLISHED)
SETTINGS, QWEN_7B = SIZES["deepseek-ai/deepseek-llm-7b-chat"], SIZES["Qwen/Qwen2.5-7B"]
BFLOAT16 = (
    *(
        f"{role}.{name}"
        for role in ("actor", "critic")
        for name in ("model.dtype=bfloat16", "engine.compute_dtype=null")
    ),
    "rollout.max_num_seqs=64",
    "rollout.engine=hf",
    "rollout.vllm=null",
)
"""Settings of the expected figures; the recipe itself trains float32 weights, and generates with vLLM."""


@pytest.mark.slow
@pytest.mark.parametrize("name", POINTS)
def test_estimate_equals_measured_peak(name: str) -> None:
    assert estimated_peak(POINTS[name]) == pytest.approx(measure_growth(name), rel=0.2)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SETTINGS))
    return folder


def config_of(model: Path, *settings: str) -> PPOConfig:
    paths = [f"{role}.model.path={model}" for role in ("actor", "critic", "reference")]
    return load(DEEPSEEK, [*paths, *BFLOAT16, *settings], PPOConfig)


def role_model(**settings) -> RoleModel:
    size = model_size_from_config(SETTINGS)
    assert size is not None
    return RoleModel(size, EngineConfig(**settings), Mesh(1, 4, 1, 1), "cuda", 2, True, 1024)


def test_fsdp_shards_resident_state_and_ddp_does_not() -> None:
    full = training_role(role_model(), 8, "none", copies_checkpoints=False)
    sharded = training_role(role_model(strategy="fsdp"), 8, "none", copies_checkpoints=False)
    assert full.weights == 2 * 6_910_365_696 and full.optimizer == 2 * full.weights
    assert sharded.resident == full.resident // 4
    assert sharded.calls[0].gradients == full.calls[0].gradients // 4


def test_optimizers_have_their_own_state() -> None:
    """The layers have 30 x 4 x 4096 x 4096 + 30 x 3 x 4096 x 11008 values in matrices, whose rows have whole blocks."""
    adamw, eight_bit, muon = (
        training_role(replace(role_model(), optimizer=kind), 8, "none", copies_checkpoints=False)
        for kind in ("adamw", "adamw_8bit", "muon")
    )
    total, hidden, embeddings = 6_910_365_696, 30 * (4 * 4096**2 + 3 * 4096 * 11008), 2 * 102400 * 4096
    assert adamw.optimizer == 4 * total
    assert muon.optimizer == 4 * total - 2 * hidden
    assert eight_bit.optimizer == int(2 * (hidden + embeddings) * (1 + 4 / 64)) + 4 * (total - hidden - embeddings)
    assert [call.name for call in muon.calls] == ["update", "forward", "step"]
    assert muon.calls[-1].gathered == 6 * 2 * 4096 * 11008


def test_adamw_8bit_has_small_moments_of_all_experts() -> None:
    settings = {
        "model_type": "qwen3_moe", "hidden_size": 128, "num_attention_heads": 2, "head_dim": 64, "vocab_size": 1000,
        "num_key_value_heads": 2, "num_hidden_layers": 3, "intermediate_size": 512, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [], "decoder_sparse_step": 1,
        "tie_word_embeddings": False,
    }  # fmt: skip
    size = model_size_from_config(settings)
    assert size is not None
    model = replace(role_model(), size=size, optimizer="adamw_8bit")
    quantized = 3 * (4 * 128 * 128 + 8 * 3 * 128 * 64) + 2 * 1000 * 128
    rest = 3 * (2 * 128 + 2 * 64 + 8 * 128) + 128
    own = training_role(model, 8, "none", copies_checkpoints=False)
    assert own.optimizer == pytest.approx(2 * quantized * (1 + 4 / 64) + 4 * rest, rel=1e-6)


def test_zero1_divides_the_optimizer_state_only() -> None:
    full, divided = (
        training_role(role_model(strategy=strategy), 8, "none", copies_checkpoints=False)
        for strategy in ("ddp", "zero1")
    )
    assert divided.optimizer == full.optimizer // 4
    assert (divided.weights, divided.calls) == (full.weights, full.calls)


def test_a_rank_of_zero1_has_the_state_of_the_largest_weight() -> None:
    model = replace(role_model(strategy="zero1"), mesh=Mesh(1, 64, 1, 1))
    memory = training_role(model, 8, "none", copies_checkpoints=False)
    assert memory.optimizer == pytest.approx(2 * 2 * 102400 * 4096)


def stage(index: int, rows: int = 8, lora: LoraConfig | None = None, **settings) -> RoleMemory:
    model = replace(role_model(**settings), mesh=Mesh(4, 1, 1, 1), stage=index, lora=lora)
    return training_role(model, rows, "none", copies_checkpoints=False)


def test_stages_have_the_weights_of_their_layers() -> None:
    """A layer has 4 x 4096^2 + 3 x 4096 x 11008 + 2 x 4096 parameters. The head costs as much as two layers."""
    layer, embeddings = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096, 102400 * 4096
    parameters = [stage(i).weights // 2 for i in range(4)]
    assert parameters == [8 * layer + embeddings, 8 * layer, 8 * layer, 6 * layer + embeddings + 4096]
    assert sum(parameters) == 6_910_365_696
    assert [stage(i).optimizer for i in range(4)] == [4 * count for count in parameters]


def test_the_first_stages_hold_the_activations_of_more_micro_batches() -> None:
    """8 rows of 1024 tokens are 8 micro-batches. The stages 1 and 2 of 4 have equal layers, and 3 and 2 micro-batches
    between forward and backward pass. With one micro-batch per update, both hold one. With an adapter, activations are
    the largest term.
    """
    size, lora = {"max_tokens_per_microbatch": 1024, "strategy": "ddp"}, LoraConfig(rank=1)
    second, third = (stage(i, lora=lora, **size).calls[0].activations for i in (1, 2))
    one_second, one_third = (stage(i, rows=1, lora=lora, **size).calls[0].activations for i in (1, 2))
    assert one_second == one_third
    kept = second - third
    assert kept > 0 and third - one_third == pytest.approx(kept)


def test_stages_of_a_plan_have_their_own_rows(model: Path) -> None:
    others = ", ".join(f"{role}: judges" for role in ("rollout", "reference", "critic", "reward"))
    config = config_of(model, "placement.roles={actor: {pool: policy, pp: 2}, " + others + "}")
    devices = estimate_memory(config, plan_run(config, [4]), read_sizes(config))
    first, second, *_ = (device.roles.get("actor") for device in devices)
    assert first is not None and second is not None and first.weights != second.weights
    assert first.weights + second.weights == 2 * 6_910_365_696


def test_gradients_of_16_bit_weights_have_32_bits() -> None:
    assert training_role(role_model(), 8, "none", copies_checkpoints=False).calls[0].gradients == 4 * 6_910_365_696


def test_offloaded_adam_state_is_loaded_for_the_step() -> None:
    resident = training_role(role_model(offload="optimizer"), 8, "none", copies_checkpoints=False)
    assert resident.optimizer == 0
    assert resident.calls[-1].optimizer == 2 * resident.weights


def test_offloaded_activations_move_from_the_gpu_to_host_memory() -> None:
    """Each of 30 layers saves 8 x 1024 tokens of 4096 16-bit numbers: 64 MiB. Two of these inputs stay on the GPU. The
    model has an adapter, because the gradients of all weights need more memory than the activations.
    """
    kept, moved = (_adapter_role(offload_activations=offloads) for offloads in (False, True))
    assert kept.calls[0].activations - moved.calls[0].activations == 28 * 2**26
    assert (kept.host, moved.host) == ({}, {"activations": 29 * 2**26})
    assert kept.calls[1] == moved.calls[1] and kept.resident == moved.resident


def test_activations_on_a_cpu_are_in_host_memory_already() -> None:
    kept, moved = (_adapter_role("cpu", offload_activations=offloads) for offloads in (False, True))
    assert kept == moved


def _adapter_role(device_type: DeviceKind = "cuda", **settings: bool) -> RoleMemory:
    model = role_model(gradient_checkpointing=True, **settings)
    model = replace(model, lora=LoraConfig(rank=4), device_type=device_type)
    return training_role(model, 8, "none", copies_checkpoints=False)


def test_checkpoint_snapshot_uses_no_gpu_memory() -> None:
    assert training_role(role_model(), 8, "none", copies_checkpoints=True).checkpoint_copy == 0


def test_kv_slots_double_when_a_row_outgrows_them() -> None:
    assert num_slots(100, 28) == (128, 128)
    assert num_slots(100, 30) == (320, 128)


def test_caches_of_waiting_episodes_need_memory(model: Path) -> None:
    size = model_size_from_config(SETTINGS)
    assert size is not None
    kv_cache = {}
    for has_environment, keeps in ((True, True), (True, False), (False, True)):
        settings = RolloutConfig(max_response_tokens=28, keep_turn_cache=keeps)
        load = RolloutLoad(size, 2, settings, RolloutBatch(256, 64, 100, has_environment), "cuda")
        kv_cache[has_environment, keeps] = hf_memory(load).calls[0].kv_cache
    assert kv_cache[True, False] == kv_cache[False, True] == kv_cache[True, True] // 2
    assert kv_cache[False, True] == 256 * 128 * 30 * 2 * 4096 * 2


def test_device_peak_is_all_resident_state_plus_the_largest_call(model: Path) -> None:
    config = config_of(model, "actor.engine.strategy=ddp", "rollout.max_num_seqs=16")
    device = estimate_memory(config, plan_run(config, [8]), read_sizes(config))[0]
    actor, reference = device.roles["actor"], device.roles["reference"]
    assert actor is not None and reference is not None
    peak, role, call = device.peak
    assert (role, call.name) == ("actor", "update")
    tensors = actor.resident + reference.resident + call.total
    assert peak == device.process + tensors + int(0.15 * call.total)


def test_rollout_colocated_with_unsharded_actor_holds_no_weights(model: Path) -> None:
    config = config_of(model, "actor.engine.strategy=ddp")
    rollout = estimate_memory(config, plan_run(config, [8]), read_sizes(config))[0].roles["rollout"]
    assert rollout is not None and rollout.weights == 0 and rollout.calls[0].gathered == 0


def test_colocated_quantized_rollout_holds_its_own_weights(model: Path) -> None:
    """Each of 30 layers has 4 x 4096^2 + 3 x 4096 x 11008 one-byte weights and a float32 scale per output. Embeddings,
    head and norms stay bfloat16."""
    correction = "algorithm.correction={kind: truncated}"
    config = config_of(model, "rollout.max_num_seqs=16", "rollout.quantization=int8", correction)
    rollout = estimate_memory(config, plan_run(config, [8]), read_sizes(config))[0].roles["rollout"]
    assert rollout is not None and rollout.shares_actor_weights
    matrices, outputs = 4 * 4096**2 + 3 * 4096 * 11008, 5 * 4096 + 2 * 11008
    assert rollout.weights == 30 * (matrices + 4 * outputs) + 2 * (6_910_365_696 - 30 * matrices)
    # The peak is one bfloat16 embedding, or one matrix with its float32 magnitudes and its scaled copy.
    assert {call.name: call.gathered for call in rollout.calls} == {
        "generate": 0,
        "set_version": max(2 * 102400 * 4096, 10 * 4096 * 11008),
    }


def test_rollout_colocated_with_sharded_actor_gathers_the_weights(model: Path) -> None:
    config = config_of(model, "actor.engine.strategy=fsdp")
    rollout = estimate_memory(config, plan_run(config, [8]), read_sizes(config))[0].roles["rollout"]
    assert rollout is not None and rollout.weights == 0 and rollout.calls[0].gathered == 2 * 6_910_365_696


def test_reference_of_a_lora_actor_holds_nothing(model: Path) -> None:
    config = config_of(model, "actor.lora.rank=16", "actor.engine.strategy=ddp")
    device = estimate_memory(config, plan_run(config, [8]), read_sizes(config))[0]
    actor, reference = device.roles["actor"], device.roles["reference"]
    assert reference is not None and reference.resident == 0
    assert actor is not None and actor.optimizer == 2 * 4 * 30 * 16 * (4 * 8192 + 3 * (4096 + 11008))


def test_rollout_and_reference_share_no_weights_of_an_actor_with_stages(model: Path) -> None:
    roles = ("actor", "reference")
    stages = [f"placement.roles.{role}={{pool: policy, pp: 2}}" for role in roles]
    config = config_of(model, *stages, "actor.lora.rank=16", "placement.pools.policy=[2]")
    devices = estimate_memory(config, plan_run(config, [4]), read_sizes(config))
    references = [device.roles["reference"] for device in devices[:2]]
    assert sum(memory.weights for memory in references if memory is not None) == 2 * 6_910_365_696
    for device in devices[:2]:
        rollout = device.roles["rollout"]
        assert rollout is not None and rollout.weights == 2 * 6_910_365_696


def test_adapter_targets_match_by_their_last_component(model: Path) -> None:
    targets = "[mlp.down_proj, self_attn.q_proj]"
    config = config_of(model, "actor.lora.rank=16", "actor.engine.strategy=ddp", f"actor.lora.targets={targets}")
    actor = estimate_memory(config, plan_run(config, [8]), read_sizes(config))[0].roles["actor"]
    assert actor is not None and actor.optimizer == 2 * 4 * 30 * 16 * ((11008 + 4096) + (4096 + 4096))


def test_idle_roles_are_offloaded(model: Path) -> None:
    engines = [f"{role}.engine.offload=idle" for role in ("actor", "critic", "reference")]
    config = config_of(model, f"placement={ROOT / 'placement/colocated.yaml'}", *engines, "placement.device=cuda")
    device = estimate_memory(config, plan_run(config, [8]), read_sizes(config))[0]
    actor, rollout = memory_of(device, "actor"), memory_of(device, "rollout")
    update = call_of(actor, "update")
    assert device.resident("critic", "actor", update) == device.resident("reference", "actor", update) == 0
    assert device.resident("actor", "rollout", call_of(rollout, "generate")) == actor.weights


@pytest.mark.parametrize(("name", "num_unknown"), [("ScriptedEngine", 0), ("UnknownMemoryEngine", 1)])
def test_a_users_engine_estimates_its_memory_or_is_reported_as_unknown(
    model: Path, name: str, num_unknown: int
) -> None:
    engine = f"tests.engines.rollout.scripted_engine:{name}"
    config = config_of(model, f"placement={ROOT / 'placement/standalone.yaml'}", f"rollout.engine={engine}")
    memories = [
        device.roles["rollout"]
        for device in estimate_memory(config, plan_run(config, [8]), read_sizes(config))
        if "rollout" in device.roles
    ]
    assert memories and all((memory is None) == bool(num_unknown) for memory in memories)
    assert all(memory.weights == 2 * 6_910_365_696 for memory in memories if memory is not None)
    unknown = explain_unknown_sizes(config)
    assert len(unknown) == num_unknown and all(engine in reason for reason in unknown)


CALLS = (("actor", "update"), ("rollout", "generate"))


def test_sleeping_vllm_rollout_is_offloaded_during_other_calls(model: Path) -> None:
    colocated = f"placement={ROOT / 'placement/colocated.yaml'}"
    sleeping = ["rollout.engine=vllm", "rollout.vllm.kv_cache_gb=20"]
    awake = [*sleeping, "rollout.vllm.sleep=false"]
    resident = {}
    for name, rollout in (("sleeping", sleeping), ("awake", awake)):
        config = config_of(model, colocated, "placement.device=cuda", *rollout)
        (device,) = estimate_memory(config, plan_run(config, devices=[1]), read_sizes(config))
        update, generate = (call_of(memory_of(device, role), call) for role, call in CALLS)
        resident[name] = device.resident("rollout", "actor", update)
        assert device.resident("rollout", "rollout", generate) == 2 * 6_910_365_696 + 20_000_000_000
    assert resident == {"sleeping": 0, "awake": 2 * 6_910_365_696 + 20_000_000_000}
    alone = config_of(model, f"placement={ROOT / 'placement/standalone.yaml'}", "placement.device=cuda", *sleeping)
    devices = estimate_memory(alone, plan_run(alone, devices=[8]), read_sizes(alone))
    assert not any(memory.offloads for device in devices if (memory := device.roles.get("rollout")))


@pytest.mark.parametrize(
    ("dtype", "weights"), [("null", 4 * 7_615_616_512), ("float16", 2 * 7_615_616_512), ("bfloat16", 2 * 7_615_616_512)]
)
def test_a_rollout_has_the_dtype_of_its_engine(model: Path, dtype: str, weights: int) -> None:
    """7,615,616,512 parameters: Qwen2.5-7B. The actor trains float32 weights."""
    (model / "config.json").write_text(json.dumps(QWEN_7B))
    vllm = ("actor.model.dtype=float32", "rollout.engine=vllm", "rollout.vllm.kv_cache_gb=60")
    config = config_of(model, *vllm, f"rollout.vllm.dtype={dtype}", f"placement={ROOT / 'placement/standalone.yaml'}")
    rollouts = [
        device.roles.get("rollout") for device in estimate_memory(config, plan_run(config, [8]), read_sizes(config))
    ]
    assert {memory.resident for memory in rollouts if memory is not None} == {weights + 60_000_000_000}


def test_plan_that_does_not_fit_names_the_setting_to_change(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [f"{role}.model.path={model}" for role in ("actor", "critic", "reference")]
    command = ["plan", str(DEEPSEEK), *paths, *BFLOAT16, "placement.memory_gb=45", "--devices", "8"]
    expected = {
        "rollout.max_num_seqs=256": ("rollout.generate", "rollout.max_num_seqs", 256),
        "critic.engine.max_tokens_per_microbatch=262144": ("critic.engine.max_tokens_per_microbatch", 262144),
        "critic.engine.strategy=ddp": ("critic.engine.strategy", "fsdp", 4),
    }
    for setting, facts in expected.items():
        assert main([*command, "rollout.max_num_seqs=16", setting]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and not missing_facts(printed.err, *facts, 45.0)


def test_plan_that_fits_prints_a_table(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [f"{role}.model.path={model}" for role in ("actor", "critic", "reference")]
    assert main(["plan", str(DEEPSEEK), *paths, "placement.memory_gb=500", "--devices", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("0:0 to 0:3"))
    actor = next(line.split() for line in lines[first:] if "actor" in line.split())
    assert actor[actor.index("actor") :][:4] == ["actor", "6.9", "13.8", "20.7"]
    assert any("all of 500.0" in line for line in lines)


def test_run_that_does_not_fit_is_rejected_before_it_starts(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    data = [f"data.{name}={rows}" for name in ("train", "test")]
    config = config_of(model, "placement.device=cpu", "placement.memory_gb=1", f"output={tmp_path / 'run'}", *data)
    with rejects("0:0", 1.0, error=ConfigError):
        check_start(config)


def test_cpu_processes_share_the_memory_of_their_node(model: Path) -> None:
    config = config_of(model, "placement.device=cpu")
    planned = plan_run(config, [8])
    devices = estimate_memory(config, planned, read_sizes(config))
    needs = sum(device.peak[0] for device in devices)
    check_memory(config, planned, devices, MemoryBudget(per_node=1.01 * needs))
    with rejects("8", "0:0", error=ConfigError):
        check_memory(config, planned, devices, MemoryBudget(per_node=0.99 * needs))


def test_missing_model_is_unknown_and_not_checked() -> None:
    paths = [f"{role}.model.path=owner/missing" for role in ("actor", "critic", "reference")]
    config = load(DEEPSEEK, ["placement.memory_gb=1", *paths], PPOConfig)
    planned = plan_run(config, [8])
    available = memory_budget(config, planned, is_local=False)
    devices = estimate_memory(config, planned, read_sizes(config))
    check_memory(config, planned, devices, available)
    assert render_memory(devices, available).count("unknown") == 6


def test_a_model_in_the_cache_of_the_hub_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    (make_snapshot(tmp_path, "owner/model") / "config.json").write_text(json.dumps(QWEN_7B))
    size = read_model_size(Path("owner/model"))
    assert size is not None and size.parameters == 7_615_616_512


@pytest.mark.parametrize(("key", "value"), [("rope_theta", "x"), ("hidden_act", "unknown")])
def test_a_model_that_transformers_cannot_construct_is_rejected(model: Path, key: str, value: str) -> None:
    (model / "config.json").write_text(json.dumps(SETTINGS | {key: value}))
    config = config_of(model)
    with rejects("actor.model.path", model, "config.json", error=ConfigError):
        estimate_memory(config, plan_run(config, [8]), read_sizes(config))


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "num_bytes"),
    [
        (8, "bfloat16", 2 + 4),  # gradient and copy
        (2, "bfloat16", 4 + (4 + 2) // 2),  # copy, its sum over ranks, and the sum in bfloat16
        (1, "bfloat16", 4 + 4 + 2),
        (8, "float32", 2 + 4),
        (1, "float32", 4 + 4),
    ],
)
def test_fsdp_reduces_the_gradients_outside_the_layers_in_float32(num_ranks: int, dtype: str, num_bytes: int) -> None:
    """Products have bfloat16, and so have gradients before they are copied for the reduction."""
    size = model_size_from_config(SETTINGS)
    assert size is not None
    compute_dtype = "bfloat16" if dtype == "float32" else None
    engine = EngineConfig(strategy="fsdp", compute_dtype=compute_dtype, max_tokens_per_microbatch=64)
    param_bytes = 4 if dtype == "float32" else 2
    model = RoleModel(size, engine, Mesh(1, num_ranks, 1, 1), "cuda", param_bytes, is_policy=True, max_length=64)
    update, *_ = training_role(model, None, "value", copies_checkpoints=False).calls
    assert update.activations == num_bytes * model.non_layer


@pytest.mark.parametrize(
    ("num_ranks", "reshards", "num_layers"),
    [(1, True, 1), (1, False, 30), (4, True, 2), (4, False, 30)],
)
def test_one_rank_gathers_no_layer_ahead(num_ranks: int, reshards: bool, num_layers: int) -> None:
    """Of deepseek-llm-7b: 838,864,896 parameters outside 30 layers of 202,383,360."""
    model = replace(role_model(strategy="fsdp", reshard_after_forward=reshards), mesh=Mesh(1, num_ranks, 1, 1))
    gathered = 2 * (838_864_896 + num_layers * 202_383_360)
    memory = training_role(model, 8, "none", copies_checkpoints=False)
    assert {call.gathered for call in memory.calls} == {gathered}


PUBLISHED_PEAKS = {
    "Qwen3-0.6B": (
        None,
        {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    ),
    "Qwen3-4B": (
        LoraConfig(rank=16),
        {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    ),
}
"""Model -> adapter and sizes of the published runs in docs/training.md."""


@pytest.mark.parametrize("name", PUBLISHED_PEAKS)
def test_the_documented_plan_of_published_peaks_is_the_estimate(name: str) -> None:
    lora, sizes = PUBLISHED_PEAKS[name]
    others = {
        "model_type": "qwen3",
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    }
    size = model_size_from_config(others | sizes)
    assert size is not None
    text = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    rows = re.findall(rf"^\| {name}[^|]*\| ([\d,]+) \| [\d.]+ GiB \| ([\d.]+) GiB \|$", text, re.MULTILINE)
    assert len(rows) == 2
    for tokens, shown in rows:
        num_tokens = int(tokens.replace(",", ""))
        engine = EngineConfig(
            strategy="fsdp",
            compute_dtype="bfloat16",
            gradient_checkpointing=True,
            max_tokens_per_microbatch=num_tokens,
        )
        model = RoleModel(size, engine, Mesh(1, 1, 1, 1), "cuda", 4, True, num_tokens, lora)
        memory = training_role(model, None, "value", copies_checkpoints=False)
        assert f"{(memory.resident + memory.calls[0].total) / 2**30:.1f}" == shown


def test_a_device_with_only_a_reward_function_has_no_peak_call() -> None:
    device = DeviceMemory(0, 0, {"reward": RoleMemory(0, 0, ())}, {"process": 500_000_000})
    assert device.peak[:2] == (500_000_000, "")
    (total,) = [line for line in render_memory([device], MemoryBudget()).splitlines() if " all " in line]
    assert total.split()[-2:] == ["0.5", "0.5"]
