"""Null settings get the values of the devices, and costly settings get a warning."""

from pathlib import Path
from typing import Any

import pytest

from flowrl.cli import main
from flowrl.config import (
    ConfigError,
    EngineConfig,
    EvaluationRunConfig,
    JudgeConfig,
    ModelConfig,
    ModelRoleConfig,
    Placement,
    ReferenceConfig,
    ReplicaSizes,
    RewardConfig,
    RolePlacement,
    RolloutConfig,
    RolloutRunConfig,
    RunConfig,
    TrainedConfig,
    VllmConfig,
    keys_of,
    load,
    recipe_class,
)
from flowrl.config.base import DeviceKind
from flowrl.config.engines.vllm_settings import PlannedVllmConfig
from flowrl.controller.placement.plan import Inventory, plan
from flowrl.memory.device_settings import (
    UNTESTED_FEATURES,
    FittedRun,
    default_num_seqs,
    find_costly_settings,
    fit_engine,
    fit_memory,
    render_settings,
    resolve_settings,
)
from flowrl.run.checks.checked_run import CheckedRun
from flowrl.run.role_groups import group_arguments
from flowrl.weight_sync.verification import gap_limit
from recipes.grpo.config import GRPOConfig
from tests.configs import plan_run
from tests.errors import missing_facts, rejects

ROOT = Path(__file__).parents[2]
QWEN = "Qwen/Qwen2.5-1.5B"
GIB = 2**30
VLLM = ("rollout.engine=vllm",)


def run_on(device: str, *settings: str, model: str = QWEN) -> GRPOConfig:
    """Returns a run of a published model with all roles on one device, which has 80 GB."""
    values = [f"actor.model.path={model}", "placement=single", f"placement.device={device}", "placement.memory_gb=80"]
    values += ["actor.kl_loss_coef=0", "rollout.max_num_seqs=null"]
    return load(ROOT / "recipes/grpo/arithmetic.yaml", [*values, *settings], GRPOConfig)


def resolve(config: GRPOConfig) -> GRPOConfig:
    resolved = resolve_settings(config, plan_run(config, [1]))
    assert isinstance(resolved, GRPOConfig)
    return resolved


def fit(config: GRPOConfig) -> FittedRun:
    planned = plan_run(config, [1])
    return fit_memory(resolve_settings(config, planned), planned, is_local=False)


def rollout_of(fitted: FittedRun) -> PlannedVllmConfig:
    assert isinstance(fitted.config, RolloutRunConfig)
    vllm = fitted.config.rollout.vllm
    assert isinstance(vllm, PlannedVllmConfig)
    return vllm


@pytest.mark.parametrize(
    ("dtype", "stated", "expected"),
    [
        ("float32", "null", "bfloat16"),
        ("float32", "float32", "float32"),
        ("float32", "float16", "float16"),
        ("bfloat16", "null", None),
        ("float64", "null", None),
    ],
)
def test_float32_weights_compute_in_bfloat16_on_a_gpu(dtype: str, stated: str, expected: str | None) -> None:
    settings = (f"actor.model.dtype={dtype}", f"actor.engine.compute_dtype={stated}")
    assert resolve(run_on("cuda", *settings)).actor.engine.compute_dtype == expected


@pytest.mark.parametrize("settings", [(), VLLM])
def test_cpus_change_no_setting(settings: tuple[str, ...]) -> None:
    config = run_on("cpu", *settings)
    run = CheckedRun(config, [1])
    assert run.applied.config is config
    assert "warning" not in render_settings(config, run.applied, run.plan)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((), "bfloat16"),
        (("actor.engine.compute_dtype=float16",), "float16"),
        (("actor.engine.compute_dtype=float32",), "float32"),
        (("actor.model.dtype=bfloat16",), "bfloat16"),
        (("rollout.vllm.dtype=float16",), "float16"),
    ],
)
def test_vllm_on_a_gpu_has_the_dtype_in_which_the_actor_computes(settings: tuple[str, ...], expected: str) -> None:
    assert resolve(run_on("cuda", *VLLM, *settings)).rollout.sent_dtype == expected


def test_fp8_needs_no_dtype_on_a_gpu() -> None:
    """fp8 requires weights in bfloat16, which is the default there."""
    fp8 = (*VLLM, "rollout.quantization=fp8", "algorithm.correction=auto")
    assert resolve(run_on("cuda", *fp8)).rollout.sent_dtype == "bfloat16"
    with rejects("rollout.vllm.dtype", "bfloat16", error=ConfigError):
        run_on("cpu", *fp8)


def test_an_actor_recomputes_the_log_probabilities_of_an_hf_rollout_on_a_gpu() -> None:
    """The rollout computes in float32, and the actor in bfloat16."""
    minibatches = "minibatch_size=64"
    assert run_on("cuda", minibatches).actor.old_logprobs == "recompute"
    assert run_on("cpu", minibatches).actor.old_logprobs == "rollout"


def test_an_actor_with_the_log_probabilities_of_its_rollout_computes_in_float32() -> None:
    config = run_on("auto", "minibatch_size=64")
    assert config.actor.old_logprobs == "rollout"
    planned = plan_run(config.model_copy(update={"placement": run_on("cuda").placement}), [1])
    resolved = resolve_settings(config, planned)
    assert isinstance(resolved, GRPOConfig) and resolved.actor.engine.compute_dtype is None
    warnings = list(find_costly_settings(fit_memory(resolved, planned, is_local=False), planned))
    assert ["placement.device: cuda" in warning for warning in warnings if "actor" in warning.split()[0]] == [True]


def test_an_actor_computes_in_bfloat16_with_the_log_probabilities_of_vllm() -> None:
    """vLLM never has the trainer's numbers, so float32 would have no benefit."""
    resolved = resolve(run_on("cuda", *VLLM, "actor.old_logprobs=rollout"))
    assert (resolved.actor.engine.compute_dtype, resolved.rollout.sent_dtype) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((), 0.05),  # bfloat16 is the default on GPUs
        (("actor.engine.compute_dtype=float32",), 0.001),
        (("actor.engine.compute_dtype=float32", "rollout.vllm.dtype=bfloat16"), 0.05),
        (("rollout.gap_warning=0.2",), 0.2),
    ],
)
def test_the_allowed_gap_is_that_of_the_coarser_dtype(settings: tuple[str, ...], expected: float) -> None:
    resolved = resolve(run_on("cuda", *VLLM, *settings))
    assert gap_limit(resolved.rollout, resolved.actor) == expected


@pytest.mark.parametrize(
    ("memory", "name", "expected"),
    [
        (80 * GIB, "NVIDIA H100 80GB HBM3", 1024),
        (70 * GIB, None, 1024),
        (70 * GIB - 1, None, 256),
        (80 * GIB, "NVIDIA A100-SXM4-80GB", 256),
        (160 * GIB, "an A100 of 160 GB", 1024),
        (None, None, 256),
    ],
)
def test_the_number_of_sequences_is_that_of_vllm(memory: float | None, name: str | None, expected: int) -> None:
    assert default_num_seqs(memory, name) == expected


def test_a_kv_cache_is_nine_tenths_of_the_free_memory() -> None:
    """80 GB - 27 GB needed = 53 GB. At the start, the plan has 9 GB in use."""
    vllm = PlannedVllmConfig(setting="", needed=27 * 10**9, present=9 * 10**9, least=10**9, limit=None)
    assert vllm.fit_cache(80 * 10**9, 71 * 10**9) == 47_700_000_000
    assert vllm.fit_cache(80 * 10**9, 75 * 10**9) == 47_700_000_000  # less in use than planned
    assert vllm.fit_cache(80 * 10**9, 61 * 10**9) == 38_700_000_000  # another program uses 10 GB
    assert vllm.fit_cache(80 * 10**9, 10 * 10**9) < 0
    limited = vllm.model_copy(update={"limit": 40 * 10**9})
    assert limited.fit_cache(80 * 10**9, 71 * 10**9) == 11_700_000_000
    one_of_two = vllm.model_copy(update={"num_caches": 2})
    assert one_of_two.fit_cache(80 * 10**9, 71 * 10**9) == 23_850_000_000


def test_a_gpu_with_too_little_free_memory_names_the_key_of_its_engine() -> None:
    """80 GB - 27 GB needed - 60 GB of other programs."""
    cache = "reward.judge.vllm.kv_cache_gb"
    vllm = PlannedVllmConfig(setting=cache, needed=27 * 10**9, present=9 * 10**9, least=10**9, limit=None)
    assert vllm.measured_cache(80 * 10**9, 71 * 10**9) == 47_700_000_000
    with rejects(cache, "-6.3", "27.0", error=ConfigError):
        vllm.measured_cache(80 * 10**9, 11 * 10**9)


def test_the_kv_cache_uses_the_memory_that_the_plan_leaves() -> None:
    fitted = fit(run_on("cuda", *VLLM))
    vllm = rollout_of(fitted)
    assert fitted.config.role_settings["rollout"].model_dump()["max_num_seqs"] == 1024
    (device,) = fitted.devices
    assert vllm.needed == device.needed_beside_cache("rollout")
    assert vllm.kv_cache_gb == pytest.approx(0.9 * (80 - vllm.needed / 1e9), abs=0.1)
    assert device.peak[0] < 80e9


def test_the_rest_of_a_device_is_counted_beside_the_cache() -> None:
    """vLLM's weights (3.1 GB) and its sampler (1,024 sequences), and the state of the actor (18.5 GB)."""
    fitted = fit(run_on("cuda", *VLLM, "actor.engine.gradient_checkpointing=true"))
    vllm, (device,) = rollout_of(fitted), fitted.devices
    rollout, actor = device.roles["rollout"], device.roles["actor"]
    assert rollout is not None and actor is not None
    generate = next(call for call in rollout.calls if call.name == "generate")
    others = device.process + actor.resident + rollout.weights + generate.total + device.reserved(generate)
    assert vllm.needed == others
    assert vllm.present == 2 * 1_060_000_000 + actor.weights  # CUDA contexts of the trainer and of the engine itself


def judged_run(rollout: str, judge: str, **changes: Any) -> GRPOConfig:
    """Returns a run with a rollout and a judge on one GPU of 80 GB.

    Args:
        rollout: the rollout's `vllm.sleep`.
        judge: the judge's `vllm.sleep`.
        changes: further settings of the judge.
    """
    settings = {"model": {"path": QWEN}, "engine": "vllm", "vllm": {"sleep": judge == "true"}, **changes}
    config = run_on("cuda", *VLLM, f"rollout.vllm.sleep={rollout}")
    config = config.model_copy(update={"reward": reward_of(judge={"judge": settings})})
    placement = config.placement.model_copy(update={"roles": dict.fromkeys(config.roles, "main")})
    return config.model_copy(update={"placement": placement})


@pytest.mark.parametrize(
    ("rollout", "judge", "num_caches"),
    [("false", "false", 2), ("true", "false", 2), ("false", "true", 2), ("true", "true", 1)],
)
def test_two_engines_on_a_gpu_divide_its_memory_unless_both_sleep(rollout: str, judge: str, num_caches: int) -> None:
    fitted = fit(judged_run(rollout, judge))
    (device,), settings = fitted.devices, fitted.config.role_settings
    for role in ("rollout", "reward_judge"):
        vllm, memory = getattr(settings[role], "vllm"), device.roles[role]  # noqa: B009 (of two classes of settings)
        assert memory is not None and vllm.num_caches == num_caches
        assert vllm.setting == f"{keys_of(fitted.config)[role]}.vllm.kv_cache_gb"
        assert memory.kv_cache / 1e9 == pytest.approx(0.9 * (80 - vllm.needed / 1e9) / num_caches, abs=0.1)
    assert device.peak[0] < 80e9


def test_the_cache_of_another_engine_is_planned_memory_at_the_start() -> None:
    """Beside the engine's CUDA context: a trainer with its weights, and an awake judge with graphs, weights, cache."""
    fitted = fit(judged_run("true", "false"))
    (device,) = fitted.devices
    actor, judge = device.roles["actor"], device.roles["reward_judge"]
    assert actor is not None and judge is not None
    judge_bytes = judge.fixed["vLLM process"] + judge.fixed["CUDA graphs"] + judge.weights + judge.kv_cache
    assert rollout_of(fitted).present == 2 * 1_060_000_000 + actor.weights + judge_bytes


def test_a_warning_about_a_judge_names_the_key_of_its_settings() -> None:
    config = judged_run("true", "true", vllm={"sleep": True, "graphs": False})
    warnings = list(find_costly_settings(fit(config), plan_run(config, [1])))
    assert [warning.split()[0] for warning in warnings] == ["reward.components.0.judge.vllm.graphs"]


def test_a_judge_without_memory_for_a_sequence_is_not_blamed_on_a_cache_that_nobody_set() -> None:
    """The keys and values of 3 million tokens need 86 GB."""
    with rejects("reward_judge.generate", "reward_judge", "pool", error=ConfigError) as caught:
        fit(judged_run("true", "true", max_response_tokens=3_000_000))
    assert "kv_cache_gb" not in str(caught.value)


def test_a_sequence_of_full_length_occupies_its_keys_and_values() -> None:
    """Qwen2.5-1.5B: 28 layers with keys and values of 2 heads of 128 in 2 bytes; 8 + 5 tokens in this recipe."""
    config = run_on("cuda", *VLLM)
    num_tokens = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    assert rollout_of(fit(config)).least == 2 * 28 * 2 * 128 * 2 * num_tokens


def engine_alone(
    device: DeviceKind = "cuda", engine: str = "vllm", model: str = QWEN, **settings: Any
) -> RolloutConfig:
    config = RolloutConfig.model_validate({"engine": engine, "max_response_tokens": 100, "vllm": settings or None})
    return fit_engine(config, ModelConfig(path=Path(model)), device, "--kv-cache-gb")


def test_an_engine_of_several_devices_needs_the_memory_of_its_part_on_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # without nvidia-smi, the memory of the GPU is unknown
    config = RolloutConfig(engine="vllm", max_response_tokens=100)
    model = ModelConfig(path=Path(QWEN))
    alone, pair = (fit_engine(config, model, "cuda", "--kv-cache-gb", ReplicaSizes(tp=tp)).vllm for tp in (1, 2))
    assert isinstance(alone, PlannedVllmConfig) and isinstance(pair, PlannedVllmConfig)
    assert pair.least == alone.least / 2
    # Each device has half of the weights and of the activations, but all logits, and NCCL with its buffers.
    halved = 2 * 1_543_714_304 + 1.15 * 8192 * 2 * (2 * 1536 + 3 * 8960)
    communication = 32 * 10_485_760 + 96 * 2**20
    assert pair.needed == pytest.approx(alone.needed - halved / 2 + communication, rel=0.01)


def test_an_engine_outside_of_a_run_has_the_defaults_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside its cache are 3.1 GB of weights, activations, the logits of 256 sequences, and 15 % fragmentation."""
    monkeypatch.setenv("PATH", "")  # without nvidia-smi, the memory of the GPU is unknown
    config = engine_alone()
    vllm = config.vllm
    assert isinstance(vllm, PlannedVllmConfig)
    assert (config.num_seqs, vllm.dtype, vllm.kv_cache_gb) == (256, "bfloat16", None)
    step = int(1.15 * (8192 * 2 * (2 * 1536 + 3 * 8960) + 256 * 151_936 * (3 * 4 + 2)))
    vllm_process = int(1.27 * GIB) + int(1.62 * GIB)
    assert vllm.needed == pytest.approx(2 * 1_543_714_304 + step + vllm_process, abs=2)
    assert (vllm.present, vllm.least) == (1_060_000_000, 2 * 28 * 2 * 128 * 2 * 100)
    assert vllm.setting == "--kv-cache-gb"


def test_stated_settings_of_an_engine_outside_of_a_run_are_kept() -> None:
    vllm = engine_alone(kv_cache_gb=3, dtype="float32").vllm
    assert vllm == VllmConfig(kv_cache_gb=3, dtype="float32")


def test_the_cache_of_an_engine_with_a_model_of_unknown_size_is_1_gb_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    vllm = engine_alone(model=str(tmp_path)).vllm
    assert vllm is not None and vllm.cache_bytes == 10**9
    (record,) = caplog.records
    assert not missing_facts(record.getMessage(), "--kv-cache-gb", 1, str(tmp_path), "mamba")


def test_a_stated_cache_of_a_model_of_unknown_size_gets_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert engine_alone(model="missing", kv_cache_gb=3).vllm == VllmConfig(kv_cache_gb=3, dtype="bfloat16")
    assert not caplog.records


@pytest.mark.parametrize(("device", "engine"), [("cpu", "vllm"), ("cuda", "hf")])
def test_engines_without_a_cache_of_free_memory_keep_their_settings(device: DeviceKind, engine: str) -> None:
    config = engine_alone(device, engine)
    assert config.vllm is None and config.max_num_seqs is None


def test_an_evaluation_on_a_gpu_has_the_defaults_of_a_run() -> None:
    """Its plan has no actor, which only names the model."""
    settings = {"actor": {"model": {"path": QWEN}}, "rollout": {"engine": "vllm", "max_response_tokens": 100}}
    rest = {"output": "out", "data": {"test": "rows.jsonl", "max_prompt_tokens": 50}, "reward": {"function": "m:f"}}
    config = EvaluationRunConfig.model_validate({**settings, **rest})
    roles = {"rollout": "main", "reward": "main", "actor": "main"}
    placement = Placement.model_validate({"device": "cuda", "pools": {"main": [1]}, "roles": roles, "memory_gb": 80})
    planned = plan(placement, Inventory((1,), "cuda"), ("rollout", "reward"), ("rollout",))
    config = config.model_copy(update={"placement": placement})
    vllm = rollout_of(fit_memory(resolve_settings(config, planned), planned, is_local=False))
    assert vllm.dtype == "bfloat16" and vllm.kv_cache_gb is not None
    assert vllm.kv_cache_gb == pytest.approx(0.9 * (80 - vllm.needed / 1e9), abs=0.1)


def test_a_stated_cache_and_a_stated_number_of_sequences_are_kept() -> None:
    fitted = fit(run_on("cuda", *VLLM, "rollout.vllm.kv_cache_gb=3", "rollout.max_num_seqs=7"))
    assert isinstance(fitted.config, GRPOConfig) and fitted.config.rollout.vllm is not None
    assert (fitted.config.rollout.vllm.kv_cache_gb, fitted.config.rollout.num_seqs) == (3, 7)


def test_a_gpu_without_room_for_a_cache_is_rejected() -> None:
    """An engine that never sleeps keeps its cache during updates, whose peak is larger than the memory."""
    awake = (*VLLM, "rollout.vllm.sleep=false", "rollout.max_num_seqs=256")
    needed = rollout_of(fit(run_on("cuda", *awake))).needed
    with rejects("actor.update", error=ConfigError):
        fit(run_on("cuda", *awake, f"placement.memory_gb={needed / 1e9}"))


def test_the_engine_measures_a_gpu_whose_memory_the_driver_does_not_know() -> None:
    """Such as a GPU of a cluster."""
    vllm = rollout_of(fit(run_on("cuda", *VLLM, "placement.memory_gb=null")))
    assert vllm.kv_cache_gb is None and vllm.limit is None
    assert vllm.fit_cache(80 * 10**9, 80 * 10**9) == int(0.9 * (80 * 10**9 - vllm.needed))


def test_the_cache_of_a_model_of_unknown_size_is_1_gb() -> None:
    fitted = fit(run_on("cuda", *VLLM, model="owner/missing"))
    assert isinstance(fitted.config, GRPOConfig) and fitted.config.rollout.vllm is not None
    assert fitted.config.rollout.vllm.cache_bytes == 10**9
    planned = plan_run(fitted.config, [1])
    assert any("rollout.vllm.kv_cache_gb" in warning for warning in find_costly_settings(fitted, planned))


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ((*VLLM, "actor.engine.compute_dtype=float32"), "actor.engine.compute_dtype"),
        ((), "rollout.engine"),
        ((*VLLM, "actor.engine.strategy=fsdp", "actor.engine.offload=parameters"), "actor.engine.offload"),
        ((*VLLM, "rollout.vllm.dtype=float32"), "rollout.vllm.dtype"),
        ((*VLLM, "rollout.vllm.graphs=false"), "rollout.vllm.graphs"),
        ((*VLLM, "rollout.vllm.kv_cache_gb=0.01"), "rollout.vllm.kv_cache_gb"),
    ],
)
def test_a_setting_that_doubles_the_time_gets_a_warning(settings: tuple[str, ...], key: str) -> None:
    config = run_on("cuda", *settings)
    warnings = list(find_costly_settings(fit(config), plan_run(config, [1])))
    assert [warning.split()[0] for warning in warnings].count(key) == 1


def test_parameters_in_host_memory_get_no_warning_on_several_gpus() -> None:
    """The copies of the next layer then overlap with the running layer."""
    offload = ("actor.engine.strategy=fsdp", "actor.engine.offload=parameters")
    config = run_on("cuda", *VLLM, "placement.pools.main=[2]", *offload)
    planned = plan_run(config, [2])
    fitted = fit_memory(resolve_settings(config, planned), planned, is_local=False)
    assert list(find_costly_settings(fitted, planned)) == []


def offloading(memory_gb: int, *settings: str) -> GRPOConfig:
    """Returns a run with `offload: auto` on two GPUs, over which FSDP2 shards the actor."""
    values = ("placement.pools.main=[2]", "actor.engine.strategy=fsdp", "actor.engine.gradient_checkpointing=true")
    return run_on("cuda", *VLLM, f"placement.memory_gb={memory_gb}", *values, *("actor.engine.offload=auto", *settings))


def fit_on_two(config: GRPOConfig) -> FittedRun:
    planned = plan_run(config, [2])
    return fit_memory(resolve_settings(config, planned), planned, is_local=False)


@pytest.mark.parametrize(("memory_gb", "offload"), [(40, "none"), (20, "optimizer"), (15, "parameters")])
def test_auto_offloads_as_little_as_fits(memory_gb: int, offload: str) -> None:
    """Each choice fits, and those before it do not."""
    config = offloading(memory_gb)
    fitted = fit_on_two(config)
    assert isinstance(fitted.config, GRPOConfig) and fitted.config.actor.engine.offload == offload
    assert max(device.peak[0] for device in fitted.devices) <= memory_gb * 1e9
    others = ("none", "optimizer", "parameters")
    for less in others[: others.index(offload)]:
        with pytest.raises(ConfigError, match="GB are available"):
            fit_on_two(offloading(memory_gb, f"actor.engine.offload={less}"))
    assert f" {offload}*" in render_settings(config, fitted, plan_run(config, [2]))


def test_auto_that_does_not_fit_is_rejected() -> None:
    with rejects("available", "10.0", error=ConfigError):
        fit_on_two(offloading(10))


def test_auto_does_not_offload_weights_with_quantized_moments() -> None:
    fitted = fit_on_two(offloading(13))
    assert isinstance(fitted.config, GRPOConfig) and fitted.config.actor.engine.offload == "parameters"
    with rejects("available", "13.0", error=ConfigError):
        fit_on_two(offloading(13, "actor.optimizer.kind=adamw_8bit"))


def test_auto_without_known_memory_offloads_nothing_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = offloading(80)
    unknown = config.model_copy(update={"placement": config.placement.model_copy(update={"memory_gb": None})})
    fitted = fit_on_two(unknown)
    assert isinstance(fitted.config, GRPOConfig) and fitted.config.actor.engine.offload == "none"
    assert not missing_facts(caplog.text, "actor.engine.offload", "placement.memory_gb")


def test_auto_for_a_model_of_unknown_size_offloads_nothing_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    fitted = fit_on_two(offloading(80, "actor.model.path=nobody/unknown"))
    assert isinstance(fitted.config, GRPOConfig) and fitted.config.actor.engine.offload == "none"
    assert not missing_facts(caplog.text, "actor.engine.offload", "auto", "size", "unknown")


def test_the_defaults_on_a_gpu_with_vllm_get_no_warning() -> None:
    config = run_on("cuda", *VLLM)
    assert list(find_costly_settings(fit(config), plan_run(config, [1]))) == []


def test_a_group_gets_the_settings_of_its_devices() -> None:
    config = run_on("cuda", *VLLM)
    applied = resolve(config)
    assert group_arguments(config, applied, "actor", (config.actor.model_copy(),), {}) == ((applied.actor,), {})
    arguments = (config.rollout, config.actor.model), {"seed": 1}
    assert group_arguments(config, applied, "rollout", *arguments) == (
        (applied.rollout, config.actor.model),
        {"seed": 1},
    )


def test_roles_with_equal_settings_get_the_settings_of_their_own_devices() -> None:
    class TwoReferences(GRPOConfig):
        teacher: ReferenceConfig | None = None

    reference = ReferenceConfig(model=ModelConfig(path=Path("m")))
    applied = reference.model_copy(update={"engine": EngineConfig(compute_dtype="bfloat16")})
    stated = TwoReferences.model_construct(reference=reference, teacher=reference)
    resolved = TwoReferences.model_construct(reference=reference, teacher=applied)
    assert group_arguments(stated, resolved, "teacher", (stated.reference,), {}) == ((applied,), {})
    assert group_arguments(stated, resolved, "reference", (stated.reference,), {}) == ((reference,), {})


def reward_of(**components: Any) -> RewardConfig:
    return RewardConfig.model_validate([{"name": name, **settings} for name, settings in components.items()])


def test_judges_and_reward_models_get_the_settings_of_their_devices(tmp_path: Path) -> None:
    judge = {"judge": {"model": {"path": "judge"}, "engine": "vllm"}}
    reward = reward_of(judge=judge, model={"model": {"path": "scorer"}}, exact={"function": "math:sqrt"})
    config = run_on("cuda", *VLLM).model_copy(update={"reward": reward})
    roles = dict.fromkeys(config.roles, "main")
    placement = config.placement.model_copy(update={"roles": roles})
    config = config.model_copy(update={"placement": placement})
    resolved = resolve(config).role_settings
    judge_settings, scorer = resolved["reward_judge"], resolved["reward_model"]
    assert isinstance(judge_settings, JudgeConfig) and judge_settings.vllm is not None
    assert judge_settings.vllm.dtype == "bfloat16"
    assert getattr(scorer, "engine").compute_dtype == "bfloat16"  # noqa: B009 (the class is private to its module)
    assert resolved["reward"].roles("reward").keys() == {"reward", "reward_judge", "reward_model"}


def test_a_plan_prints_the_settings_of_its_devices(capsys: pytest.CaptureFixture[str]) -> None:
    values = (f"actor.model.path={QWEN}", "placement=single", "placement.device=cuda", "placement.memory_gb=80")
    recipe = str(ROOT / "recipes/grpo/arithmetic.yaml")
    assert main(["plan", recipe, *values, *VLLM, "rollout.vllm.kv_cache_gb=2", "--devices", "1"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    first = next(i for i, words in enumerate(lines) if words[:2] == ["settings", "on"])
    rollout = next(words for words in lines[first:] if words[:1] == ["rollout"])
    actor = next(words for words in lines[first:] if words[:1] == ["actor"])
    assert rollout[1:] == ["vllm", "bfloat16*", "bfloat16*", "2.0", "GB", "512", "yes", "yes"]
    assert actor[3:5] == ["float32", "bfloat16*"]
    untested = next(words for words in lines[first:] if words[:3] == ["off", "by", "default,"])
    assert " ".join(untested).endswith(f" {', '.join(UNTESTED_FEATURES)}")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("engine.compile with fsdp or sp", ("actor.engine.compile=true", "actor.engine.strategy=fsdp")),
        ("vllm.async_scheduling", ("rollout.vllm.async_scheduling=auto",)),
        ("rollout.transfer.drop_weights", ("rollout.transfer.drop_weights=true",)),
        ("fork_workers", ("fork_workers=true",)),
    ],
)
def test_a_plan_names_the_untested_features_of_the_run(
    name: str, settings: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    values = (f"actor.model.path={QWEN}", "placement=single", "placement.device=cuda", "placement.memory_gb=80")
    recipe = str(ROOT / "recipes/grpo/arithmetic.yaml")
    assert main(["plan", recipe, *values, *VLLM, *settings, "--devices", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    off, on = (next(line for line in lines if line.startswith(start)) for start in ("off by default", "on, but"))
    assert name not in off.partition(": ")[2].split(", ") and on.partition(": ")[2].split(", ") == [name]


@pytest.mark.parametrize(
    ("role", "sizes", "name"),
    [
        ("actor", {"tp": 2}, "tp of trained roles"),
        ("actor", {"sp": 2}, "sp of a role"),
        ("actor", {"pp": 2}, "pp of trained roles"),
        ("rollout", {"pp": 2}, "tp or pp of a rollout or judge"),
    ],
)
def test_parallel_sizes_are_untested_features(role: str, sizes: dict[str, int], name: str) -> None:
    config = run_on("cuda", *VLLM)
    roles = {**config.placement.roles, role: RolePlacement.model_validate({"pool": "main"} | sizes)}
    config = config.model_copy(update={"placement": config.placement.model_copy(update={"roles": roles})})
    assert [feature for feature, is_used in UNTESTED_FEATURES.items() if is_used(config)] == [name]


def test_roles_keep_their_settings_if_no_value_depends_on_the_devices() -> None:
    config = run_on("cuda", *VLLM)
    assert isinstance(config.actor, TrainedConfig)
    assert resolve(config).data is config.data


def test_the_actor_and_its_frozen_reference_on_one_gpu_compute_in_the_same_dtypes() -> None:
    config = run_on("cuda", "actor.kl_loss_coef=0.1")
    engines = [resolve(config).role_settings[role].model_dump()["engine"] for role in ("actor", "reference")]
    assert [(engine["strategy"], engine["compute_dtype"]) for engine in engines] == [("auto", "bfloat16")] * 2


@pytest.mark.parametrize("recipe", ["ppo", "dpo"])
def test_the_reference_of_a_recipe_for_one_gpu_rounds_like_its_actor(recipe: str) -> None:
    path = ROOT / f"recipes/{recipe}/qwen1.5b.yaml"
    schema = recipe_class(path)
    assert issubclass(schema, RunConfig)
    config = load(path, ["placement.memory_gb=80"], schema)
    roles = resolve_settings(config, plan_run(config, [1])).role_settings
    found = []
    for role in (roles["actor"], roles["reference"]):
        assert isinstance(role, ModelRoleConfig) and role.model is not None
        found.append((role.model.dtype, role.engine.compute_dtype, role.engine.strategy))
    assert found[0] == found[1]
