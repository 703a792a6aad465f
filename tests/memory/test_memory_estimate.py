"""The memory of a plan: what is estimated is what is measured; what cannot fit is refused before anything starts."""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flowrl.cli import main
from flowrl.config import ConfigError, EngineConfig, load
from flowrl.controller.placement.plan import Mesh
from flowrl.memory.memory_estimate import estimate
from flowrl.memory.memory_table import Room, check_memory, render_memory, room
from flowrl.memory.model_size import size_of
from flowrl.memory.role_memory import RoleModel, trained_role
from flowrl.memory.rollout_memory import num_slots
from flowrl.run.preflight import check_run, plan_run
from recipes.ppo.config import PPOConfig
from tests.memory.memory_points import POINTS, grown, needed

ROOT = Path(__file__).parents[2]
DEEPSEEK = ROOT / "recipes/ppo/deepseek7b.yaml"
SETTINGS = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "vocab_size": 102400,
    "tie_word_embeddings": False,
}
"""Of deepseek-llm-7b-chat."""
QUICK = ("gradient checkpointing", "critic", "reference")


@pytest.fixture(scope="module")
def peaks() -> Mapping[str, int]:
    """What processes of their own, beside each other, grew by."""
    with ThreadPoolExecutor(len(QUICK)) as pool:
        return dict(zip(QUICK, pool.map(grown, QUICK), strict=True))


@pytest.mark.parametrize("name", QUICK)
def test_the_estimate_is_the_measured_peak(peaks: Mapping[str, int], name: str) -> None:
    assert needed(POINTS[name]) == pytest.approx(peaks[name], rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in POINTS if name not in QUICK])
def test_the_estimate_is_the_measured_peak_of_more_settings(name: str) -> None:
    assert needed(POINTS[name]) == pytest.approx(grown(name), rel=0.2)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SETTINGS))
    return folder


def config_of(model: Path, *settings: str) -> PPOConfig:
    paths = [f"{role}.model.path={model}" for role in ("actor", "critic", "reference")]
    return load(DEEPSEEK, [*paths, *settings], PPOConfig)


def engine_of(**settings) -> RoleModel:
    size = size_of(SETTINGS)
    assert size is not None
    return RoleModel(size, EngineConfig(**settings), Mesh(1, 4, 1, 1), "cuda", 2, True, 1024)


def test_fsdp_divides_what_is_held_and_ddp_does_not() -> None:
    whole = trained_role(engine_of(), 8, "none", saves=False)
    parts = trained_role(engine_of(strategy="fsdp"), 8, "none", saves=False)
    assert whole.weights == 2 * 6_910_365_696 and whole.optimizer == 2 * whole.weights
    assert parts.held == whole.held // 4
    assert parts.calls[0].gradients == whole.calls[0].gradients // 4


def test_adams_state_that_is_away_comes_for_the_step() -> None:
    held = trained_role(engine_of(offload="optimizer"), 8, "none", saves=False)
    assert held.optimizer == 0
    assert held.calls[-1].optimizer == 2 * held.weights


def test_a_checkpoint_needs_no_memory_of_a_gpu() -> None:
    assert trained_role(engine_of(), 8, "none", saves=True).copy == 0


def test_slots_double_when_a_row_grows_out_of_them() -> None:
    assert num_slots(100, 28) == (128, 128)
    assert num_slots(100, 30) == (320, 128)


def test_roles_of_one_device_add_up_and_the_largest_call_counts(model: Path) -> None:
    config = config_of(model, "actor.engine.strategy=ddp", "rollout.max_num_seqs=16")
    device = estimate(config, plan_run(config, [8]))[0]
    actor, reference = device.roles["actor"], device.roles["reference"]
    assert actor is not None and reference is not None
    peak, role, call = device.peak
    assert (role, call.name) == ("actor", "update")
    assert peak == device.process + actor.held + reference.held + call.total


def test_a_rollout_beside_an_actor_that_is_whole_holds_no_weights(model: Path) -> None:
    config = config_of(model, "actor.engine.strategy=ddp")
    rollout = estimate(config, plan_run(config, [8]))[0].roles["rollout"]
    assert rollout is not None and rollout.weights == 0 and rollout.calls[0].whole == 0


def test_a_quantised_rollout_beside_an_actor_holds_weights_of_its_own(model: Path) -> None:
    """Of 30 layers 4 x 4096^2 + 3 x 4096 x 11008 weights in a byte each and a float32 per output; the rest, embeddings,
    head and norms, in bfloat16."""
    correction = "algorithm.correction={kind: truncated}"
    config = config_of(model, "rollout.max_num_seqs=16", "rollout.quantization=int8", correction)
    rollout = estimate(config, plan_run(config, [8]))[0].roles["rollout"]
    assert rollout is not None and rollout.borrows
    matrices, outputs = 4 * 4096**2 + 3 * 4096 * 11008, 5 * 4096 + 2 * 11008
    assert rollout.weights == 30 * (matrices + 4 * outputs) + 2 * (6_910_365_696 - 30 * matrices)
    # An embedding in bfloat16; a matrix in bfloat16, in float32 and divided by its scales.
    assert {call.name: call.whole for call in rollout.calls} == {
        "generate": 0,
        "set_version": max(2 * 102400 * 4096, 10 * 4096 * 11008),
    }


def test_a_rollout_beside_an_actor_in_parts_puts_the_weights_together(model: Path) -> None:
    config = config_of(model, "actor.engine.strategy=fsdp")
    rollout = estimate(config, plan_run(config, [8]))[0].roles["rollout"]
    assert rollout is not None and rollout.weights == 0 and rollout.calls[0].whole == 2 * 6_910_365_696


def test_a_reference_beside_its_actor_with_an_adapter_holds_nothing(model: Path) -> None:
    config = config_of(model, "actor.lora.rank=16", "actor.engine.strategy=ddp")
    device = estimate(config, plan_run(config, [8]))[0]
    actor, reference = device.roles["actor"], device.roles["reference"]
    assert reference is not None and reference.held == 0
    assert actor is not None and actor.optimizer == 2 * 4 * 30 * 16 * (4 * 8192 + 3 * (4096 + 11008))


def test_an_adapter_on_layers_of_dotted_names_counts_those(model: Path) -> None:
    targets = "[mlp.down_proj, self_attn.q_proj]"
    config = config_of(model, "actor.lora.rank=16", "actor.engine.strategy=ddp", f"actor.lora.targets={targets}")
    actor = estimate(config, plan_run(config, [8]))[0].roles["actor"]
    assert actor is not None and actor.optimizer == 2 * 4 * 30 * 16 * ((11008 + 4096) + (4096 + 4096))


def test_idle_roles_leave_the_device_to_the_one_that_runs(model: Path) -> None:
    engines = [f"{role}.engine.offload=idle" for role in ("actor", "critic", "reference")]
    config = config_of(model, f"placement={ROOT / 'placement/colocated.yaml'}", *engines, "placement.device=cuda")
    device = estimate(config, plan_run(config, [8]))[0]
    assert device.held("critic", "actor") == device.held("reference", "actor") == 0
    actor = device.roles["actor"]
    assert actor is not None and device.held("actor", "rollout") == actor.weights


def test_a_rollout_that_sleeps_is_not_there_while_other_processes_use_its_device(model: Path) -> None:
    colocated = f"placement={ROOT / 'placement/colocated.yaml'}"
    sleeping = ["rollout.engine=vllm", "rollout.vllm.kv_cache_gb=20"]
    awake = [*sleeping, "rollout.vllm.sleep=false"]
    held = {}
    for name, rollout in (("sleeping", sleeping), ("awake", awake)):
        config = config_of(model, colocated, "placement.device=cuda", *rollout)
        (device,) = estimate(config, plan_run(config, devices=[1]))
        held[name] = device.held("rollout", "actor")
        assert device.held("rollout", "rollout") == 2 * 6_910_365_696 + 20_000_000_000
    assert held == {"sleeping": 0, "awake": 2 * 6_910_365_696 + 20_000_000_000}
    alone = config_of(model, f"placement={ROOT / 'placement/standalone.yaml'}", "placement.device=cuda", *sleeping)
    devices = estimate(alone, plan_run(alone, devices=[8]))
    assert not any(memory.leaves for device in devices if (memory := device.roles.get("rollout")))


def test_what_cannot_fit_is_refused_with_what_to_change(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [f"{role}.model.path={model}" for role in ("actor", "critic", "reference")]
    command = ["plan", str(DEEPSEEK), *paths, "placement.memory_gb=40", "--devices", "8"]
    refusals = {
        "rollout.max_num_seqs=256": "rollout's generate on device 0:0 needs about ",
        "critic.engine.max_tokens_per_microbatch=262144": ": lower critic.engine.max_tokens_per_microbatch, which is 2",
        "critic.engine.strategy=ddp": ": set critic.engine.strategy: fsdp, which cuts what it holds over its 4 ranks",
    }
    for setting, sentence in refusals.items():
        assert main([*command, "rollout.max_num_seqs=16", setting]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and sentence in printed.err and "but there are 40.0 GB" in printed.err


def test_the_seven_billion_recipe_fits_eight_gpus_of_eighty_gb(model: Path) -> None:
    config = config_of(model, "placement.memory_gb=80")
    planned = plan_run(config, [8])
    check_memory(config, planned, estimate(config, planned), room(config, planned, here=False))


def test_a_plan_that_fits_is_a_table(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [f"{role}.model.path={model}" for role in ("actor", "critic", "reference")]
    assert main(["plan", str(DEEPSEEK), *paths, "placement.memory_gb=500", "--devices", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    actor = next(line for line in lines if line.startswith("0:0 to 0:3"))
    assert actor.split()[3:7] == ["actor", "3.5", "6.9", "10.4"]
    assert any(line.endswith("of 500.0") for line in lines)


def test_a_run_is_refused_before_it_starts(model: Path, tmp_path: Path) -> None:
    config = config_of(model, "placement.device=cpu", "placement.memory_gb=1", f"output={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match=r"on device 0:0 needs about .* but there are 1\.0 GB: "):
        check_run(config)


def test_processes_of_a_node_share_its_memory(model: Path) -> None:
    config = config_of(model, "placement.device=cpu")
    planned = plan_run(config, [8])
    devices = estimate(config, planned)
    needs = sum(found.peak[0] for found in devices)
    check_memory(config, planned, devices, Room(of_node=1.01 * needs))
    with pytest.raises(ConfigError, match="the 8 processes of node 0 need "):
        check_memory(config, planned, devices, Room(of_node=0.99 * needs))


def test_a_model_that_is_not_there_is_unknown_and_refuses_nothing() -> None:
    config = load(DEEPSEEK, ["placement.memory_gb=1"], PPOConfig)
    planned = plan_run(config, [8])
    available = room(config, planned, here=False)
    devices = estimate(config, planned)
    check_memory(config, planned, devices, available)
    assert render_memory(devices, available).count("unknown") == 6
