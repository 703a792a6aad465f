"""Roles that cannot run on their devices are rejected before anything starts."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from flowrl.config import (
    ActorConfig,
    ConfigError,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    Placement,
    ReferenceConfig,
    RoleConfig,
    RolePlacement,
    RolloutConfig,
    RunConfig,
    TrainedConfig,
    TransferConfig,
    VllmConfig,
)
from flowrl.controller.placement.plan import Inventory, plan
from flowrl.memory.device_settings import resolve_settings
from flowrl.run.checks.placement_checks import (
    check_async_scheduling,
    check_bfloat16,
    check_determinism,
    check_quantization,
    check_speculation,
    warn_about_offload,
)
from flowrl.weight_sync.transfer import check_cuda_ipc, check_senders
from recipes.grpo.config import GRPOConfig
from tests.configs import grpo_settings, plan_run
from tests.engines import tiny
from tests.errors import missing_facts, rejects


class ActorRun(RunConfig):
    actor: ActorConfig


def run_with(placement: Placement, **engine: object) -> ActorRun:
    actor = ActorConfig(
        model=ModelConfig(path=Path("m")),
        optimizer=OptimizerConfig(lr=1e-4),
        engine=EngineConfig.model_validate(engine),
    )
    return ActorRun(output=Path("out"), steps=1, placement=placement, actor=actor)


def on(num_ranks: int, **sizes: int) -> Placement:
    role = RolePlacement.model_validate({"pool": "main"} | sizes)
    return Placement(device="cpu", pools={"main": [num_ranks]}, roles={"actor": role})


def test_offload_on_cpus_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    config = run_with(on(1), offload="idle")
    warn_about_offload(config, plan_run(config))
    (record,) = caplog.records
    assert not missing_facts(record.getMessage(), "actor.engine.offload", "idle")


def test_offload_of_activations_on_cpus_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    config = run_with(on(1), gradient_checkpointing=True, offload_activations=True)
    warn_about_offload(config, plan_run(config))
    (record,) = caplog.records
    assert not missing_facts(record.getMessage(), "actor.engine.offload_activations", "true")


def test_offload_on_gpus_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    config = run_with(Placement(device="cuda", pools={"all": "all"}, roles={"actor": "all"}), offload="idle")
    warn_about_offload(config, plan_run(config, [1]))
    assert not caplog.records


def test_a_run_is_planned_on_a_stated_inventory() -> None:
    planned = plan_run(run_with(Placement(device="cuda", pools={"all": "all"}, roles={"actor": "all"})), [4, 4])
    assert planned.kind == "cuda" and planned.roles["actor"].mesh.dp == 8


def test_a_mesh_that_the_engine_can_run_is_planned() -> None:
    planned = plan_run(run_with(on(8, tp=2, sp=2), strategy="fsdp", shard_ranks=1))
    assert (planned.roles["actor"].mesh.dp, planned.roles["actor"].mesh.tp) == (2, 2)


@pytest.mark.parametrize("strategy", ["auto", "ddp", "zero1", "fsdp"])
def test_stages_of_a_pipeline_are_planned_with_every_strategy(strategy: str) -> None:
    planned = plan_run(run_with(on(8, pp=2, sp=2), strategy=strategy))
    mesh = planned.roles["actor"].mesh
    assert (mesh.pp, mesh.dp, mesh.sp) == (2, 2, 2)


def test_settings_of_sharded_models_are_accepted_if_auto_shards() -> None:
    planned = plan_run(run_with(on(2, tp=2), reshard_after_forward=False, offload="parameters"))
    assert planned.roles["actor"].mesh.tp == 2


@pytest.mark.parametrize(
    ("placement", "engine", "pattern"),
    [
        (on(2), {"strategy": "single"}, r"actor\.engine\.strategy .*single"),
        (on(2, tp=2), {"strategy": "ddp"}, r"strategy .*ddp.* placement\.roles\.actor .*tp 2"),
        (on(2, tp=2), {"strategy": "zero1"}, r"strategy .*zero1.* placement\.roles\.actor .*tp 2"),
        (
            on(2),
            {"sequence_parallel_norms": True},
            r"sequence_parallel_norms .*true.* placement\.roles\.actor .*tp 1",
        ),
        (on(1), {"offload": "parameters"}, r"engine\.offload .*parameters.*strategy: fsdp.*offload: optimizer"),
        (on(1), {"reshard_after_forward": False}, r"engine\.reshard_after_forward .*false"),
        (
            on(2),
            {"offload": "parameters"},
            r"engine\.offload .*parameters.* strategy auto",
        ),
        (
            on(2),
            {"shard_ranks": 2},
            r"actor\.engine\.shard_ranks .*\b2\b.* strategy auto",
        ),
        (
            on(2, sp=2),
            {"reshard_after_forward": False},
            r"strategy auto .*strategy: fsdp",
        ),
        (on(4), {"strategy": "fsdp", "shard_ranks": 3}, r"engine\.shard_ranks .*\b3\b"),
        (on(1), {"overlap_all_reduce": True}, r"actor\.engine\.overlap_all_reduce .*one rank.*auto"),
        (on(2, tp=2), {"overlap_all_reduce": True}, r"actor\.engine\.overlap_all_reduce .*tp 2.*auto"),
        (on(2, pp=2), {"overlap_all_reduce": True}, r"actor\.engine\.overlap_all_reduce .*one rank per .*stage.*auto"),
        (on(2, pp=2), {"strategy": "single"}, r"actor\.engine\.strategy .*single"),
        (on(2, pp=2), {"offload": "parameters"}, r"engine\.offload .*parameters.*stage.*strategy: fsdp"),
        (on(4, pp=2), {"shard_ranks": 2}, r"engine\.shard_ranks .*stage's 2 ranks.*strategy: fsdp"),
        (on(4, pp=2), {"strategy": "fsdp", "shard_ranks": 4}, r"engine\.shard_ranks .*\b4\b.*\b2\b"),
        (on(4, pp=2, tp=2), {"sequence_parallel_norms": True}, r"engine\.sequence_parallel_norms .*pp 2.*remove"),
        (on(2, pp=2), {"compile": True}, r"engine\.compile .*pp 2.*remove"),
        (
            on(2, pp=2),
            {"gradient_checkpointing": True, "offload_activations": True},
            r"engine\.offload_activations .*pp 2.*remove",
        ),
    ],
)
def test_an_engine_that_its_ranks_cannot_run_is_rejected(placement: Placement, engine: dict, pattern: str) -> None:

    with pytest.raises(ConfigError, match=pattern):
        plan_run(run_with(placement, **engine))


@pytest.mark.parametrize(
    ("placement", "overlap"), [(on(2), True), (on(2, sp=2), True), (on(1), "auto"), (on(2, tp=2), "auto")]
)
def test_replicas_can_overlap_their_all_reduce(placement: Placement, overlap: bool | str) -> None:
    assert plan_run(run_with(placement, overlap_all_reduce=overlap))


def test_a_model_on_one_rank_can_be_sharded() -> None:
    """Its parameters then stay in host memory, except for the running layer."""
    assert plan_run(run_with(on(1), strategy="fsdp", offload="parameters"))


def test_parameters_of_a_model_that_is_not_sharded_are_not_offloaded() -> None:
    for placement in (on(1), on(1).model_copy(update={"device": "cuda"})):
        with rejects("offload", "parameters", "fsdp", error=ConfigError):
            plan_run(run_with(placement, offload="parameters"), [1])


@pytest.mark.parametrize("compiles", ["auto", False, True])
def test_compile_true_is_rejected_with_tp(compiles: bool | str) -> None:
    run = run_with(on(2, tp=2), compile=compiles)
    with rejects("actor.engine.compile", "tp", error=ConfigError) if compiles is True else nullcontext():
        assert plan_run(run)


class KlRun(ActorRun):
    reference: ReferenceConfig


def adapted(reference: str, sizes: dict[str, int], **engine: object) -> KlRun:
    """Returns a run of an actor with an adapter on pool main, and a reference of the same model."""
    roles = {"actor": {"pool": "main"} | sizes, "reference": {"pool": reference} | sizes}
    pools = {"main": [2], "other": [2]} if "other" in reference else {"main": [2]}
    placement = Placement.model_validate({"device": "cpu", "pools": pools, "roles": roles})
    run = run_with(placement, **engine)
    settings = run.model_dump() | {"actor": run.actor.model_dump() | {"lora": {"rank": 4}}}
    return KlRun.model_validate(settings | {"reference": {"model": {"path": "m"}}})


def test_an_adapter_may_be_tensor_parallel() -> None:
    assert plan_run(adapted("main", {"tp": 2})).roles["actor"].mesh.tp == 2


@pytest.mark.parametrize("reference", ["main", "main[1:]", "other"])
def test_a_reference_may_share_an_adapted_model_or_have_its_own(reference: str) -> None:
    assert plan_run(adapted(reference, {}, strategy="ddp")).roles["reference"].mesh.size == (
        1 if "[" in reference else 2
    )


@pytest.mark.parametrize(
    ("reference", "sizes", "engine", "pattern"),
    [
        (
            "main[1:]+other[1:]",
            {},
            {"strategy": "fsdp"},
            r"placement\.roles\.reference .*\b1\b.*\b2\b.* actor",
        ),
        ("main[1:]+other[1:]", {"sp": 2}, {}, r"placement\.roles\.reference .*\b1\b.*\b2\b.* actor"),
        ("main[1:]+other[1:]", {"tp": 2}, {}, r"placement\.roles\.reference .*\b1\b.*\b2\b.* actor"),
    ],
)
def test_an_adapter_that_its_ranks_cannot_run_is_rejected(
    reference: str, sizes: dict[str, int], engine: dict, pattern: str
) -> None:
    with pytest.raises(ConfigError, match=pattern):
        plan_run(adapted(reference, sizes, **engine))


class StudentRun(RunConfig):
    """A recipe that trains one model, in a role with a name of its own."""

    student: TrainedConfig


def student_run(num_ranks: int, sizes: dict[str, int], **engine: object) -> StudentRun:
    student = {"model": {"path": "m"}, "optimizer": {"lr": 1e-4}, "engine": engine}
    roles = {"student": {"pool": "main"} | sizes}
    placement = {"device": "cpu", "pools": {"main": [num_ranks]}, "roles": roles}
    return StudentRun.model_validate({"output": "out", "steps": 1, "student": student, "placement": placement})


@pytest.mark.parametrize("size", ["tp", "sp"])
def test_a_role_has_the_name_of_its_field(size: str) -> None:
    assert plan_run(student_run(2, {size: 2})).roles["student"].mesh.dp == 1


def test_an_engine_that_the_ranks_of_a_users_role_cannot_run_is_rejected_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^student\.engine\.shard_ranks .*\b3\b"):
        plan_run(student_run(4, {}, strategy="fsdp", shard_ranks=3))


def test_an_unsharded_role_rejects_parallel_sizes() -> None:
    class OnlyRollout(RunConfig):
        rollout: RoleConfig = RoleConfig()

    tensor = Placement(device="cpu", pools={"main": [2]}, roles={"rollout": RolePlacement(pool="main", tp=2)})
    with pytest.raises(ConfigError, match=r"placement\.roles\.rollout .*tp 2"):
        plan_run(OnlyRollout(output=Path("out"), steps=1, placement=tensor))


class RolloutRun(ActorRun):
    rollout: RolloutConfig


def quantized_run(quantization: str, num_ranks: int = 1) -> RolloutRun:
    roles = {"actor": "main", "rollout": "main"}
    return RolloutRun(
        output=Path("out"),
        steps=1,
        placement=Placement(device="cpu", pools={"main": [num_ranks]}, roles=roles),
        actor=run_with(on(1)).actor,
        rollout=RolloutConfig.model_validate(
            {"engine": "vllm", "max_response_tokens": 8, "quantization": quantization}
        ),
    )


def test_number_formats_that_the_device_does_not_support_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.quantization .*int4.* placement\.device .*cpu"):
        plan_run(quantized_run("int4"))
    assert plan_run(quantized_run("int8")).kind == "cpu"


def run_with_vllm(**settings: object) -> RolloutRun:
    rollout = {"engine": "vllm", "max_response_tokens": 8, "vllm": settings}
    return quantized_run("int8").model_copy(update={"rollout": RolloutConfig.model_validate(rollout)})


def test_asynchronous_scheduling_is_rejected_on_cpus_unless_it_is_auto() -> None:
    run = run_with_vllm(async_scheduling=True)
    with rejects("rollout.vllm.async_scheduling", "placement.device", "cpu", "auto", error=ConfigError):
        plan_run(run)
    check_async_scheduling(run, plan(run.placement, Inventory((1,), "cuda"), run.roles, run.dedicated_roles()))
    assert all(plan_run(run_with_vllm(async_scheduling=value)).kind == "cpu" for value in ("auto", False))


def test_speculative_decoding_is_rejected_on_cpus() -> None:
    """vLLM's build for CPUs then samples wrong tokens."""
    arguments = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    run = run_with_vllm(engine_args=arguments)
    with rejects("rollout.vllm.engine_args.speculative_config", "placement.device", "cpu", error=ConfigError):
        plan_run(run)
    check_speculation(run, plan(run.placement, Inventory((1,), "cuda"), run.roles, run.dedicated_roles()))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_deterministic_is_rejected_on_gpus_for_kernels_without_a_batch_invariant_mode(quantization: str) -> None:
    run = quantized_run(quantization).model_copy(update={"deterministic": True})
    gpus = plan(run.placement, Inventory((1,), "cuda"), run.roles, run.dedicated_roles())
    with rejects("deterministic", "rollout.quantization", quantization, "vllm", "fp8", "null", error=ConfigError):
        check_determinism(run, gpus)
    check_determinism(quantized_run("fp8").model_copy(update={"deterministic": True}), gpus)


def test_deterministic_accepts_each_quantization_on_cpus() -> None:
    assert plan_run(quantized_run("int8").model_copy(update={"deterministic": True})).kind == "cpu"


def test_deterministic_is_rejected_for_responses_that_depend_on_timing() -> None:
    placement = {"device": "cpu", "pools": {"a": [1], "b": [1]}, "roles": {"rollout": "b"}}
    placement["roles"] |= dict.fromkeys(("actor", "reference", "reward"), "a")
    schedule = {"kind": "async", "max_staleness": 1}
    settings = grpo_settings(deterministic=True, placement=placement, schedule=schedule)
    with rejects("deterministic", "schedule.kind", "async", "sync", error=ConfigError):
        plan_run(GRPOConfig.model_validate(settings))
    assert plan_run(GRPOConfig.model_validate(settings | {"schedule": schedule | {"max_staleness": 0}}))


def test_a_tensor_parallel_hf_rollout_is_rejected_naming_vllm() -> None:
    roles = {"actor": "main", "rollout": {"pool": "other", "tp": 2}}
    pools = {"main": [1], "other": [2]}
    placement = Placement.model_validate({"device": "cpu", "pools": pools, "roles": roles})
    run = quantized_run("int8").model_copy(update={"placement": placement})
    assert plan_run(run).roles["rollout"].replica.tp == 2
    run = run.model_copy(update={"rollout": RolloutConfig(max_response_tokens=8)})
    with pytest.raises(ConfigError, match=r"placement\.roles\.rollout .*tp 2.*rollout\.engine: vllm"):
        plan_run(run)


def model_with_heads_of(size: int, folder: Path) -> Path:
    folder.mkdir()
    sizes = {"hidden_size": 4 * size, "num_attention_heads": 4, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    return folder


def vllm_run(model: Path, device: str) -> GRPOConfig:
    roles = dict.fromkeys(("actor", "rollout", "reference", "reward"), "main")
    placement = {"device": device, "pools": {"main": [1]}, "roles": roles}
    rollout = {"engine": "vllm", "max_response_tokens": 8}
    return GRPOConfig.model_validate(grpo_settings(model=model, rollout=rollout, placement=placement))


@pytest.mark.parametrize("size", [8, 48])
def test_vllm_on_a_cpu_rejects_a_head_size_that_its_attention_does_not_support(size: int, tmp_path: Path) -> None:
    model = model_with_heads_of(size, tmp_path / "model")
    with rejects("rollout.engine", "vllm", "cpu", size, 32, 80, 512, model, "hf", error=ConfigError):
        plan_run(vllm_run(model, "cpu"), [1])


@pytest.mark.parametrize(("size", "device"), [(32, "cpu"), (80, "cpu"), (8, "cuda")])
def test_vllm_accepts_other_head_sizes(size: int, device: str, tmp_path: Path) -> None:
    assert plan_run(vllm_run(model_with_heads_of(size, tmp_path / "model"), device), [1]).kind == device


def scripted(name: str) -> RolloutConfig:
    return RolloutConfig(max_response_tokens=8, engine=f"tests.engines.rollout.scripted_engine:{name}")


@pytest.mark.parametrize(("sizes", "facts"), [({"tp": 3}, ("tp", 3, "heads")), ({"pp": 2}, ())])
def test_sizes_of_a_rollout_that_do_not_divide_its_model_are_rejected(
    sizes: dict, facts: tuple, tmp_path: Path
) -> None:
    tiny.save(tiny.qwen2(hidden_size=128), tmp_path)
    run = vllm_run(tmp_path, "cpu")
    num_devices = next(iter(sizes.values()))
    roles = {"actor": "main", "reference": "main", "reward": "main", "rollout": {"pool": "makers", **sizes}}
    placement = {"device": "cpu", "pools": {"main": [1], "makers": [num_devices]}, "roles": roles}
    run = run.model_copy(update={"placement": Placement.model_validate(placement)})
    if not facts:
        assert plan_run(run).roles["rollout"].replica.num_devices == 2
        return
    with rejects("placement.roles.rollout", *facts, error=ConfigError):
        plan_run(run)


def test_a_users_engine_without_tensor_parallelism_is_rejected_on_several_devices() -> None:
    roles = {"actor": "main", "rollout": {"pool": "other", "tp": 2}}
    placement = Placement.model_validate({"device": "cpu", "pools": {"main": [1], "other": [2]}, "roles": roles})
    run = quantized_run("int8").model_copy(update={"placement": placement, "rollout": scripted("DedicatedEngine")})
    with rejects("placement.roles.rollout", "tp", 2, "DedicatedEngine", "rollout.engine", "vllm", error=ConfigError):
        plan_run(run)


def test_int4_on_the_wrong_device_is_rejected_before_its_compute_dtype() -> None:
    vllm = {"dtype": "float32"}
    rollout = {"engine": "vllm", "max_response_tokens": 8, "quantization": "int4", "vllm": vllm}
    config = GRPOConfig.model_validate(grpo_settings(rollout=rollout))
    assert config.placement.device == "auto"
    cpus, gpus = Inventory((8,), "cpu"), Inventory((8,), "cuda")
    for inventory, pattern in ((cpus, r"placement\.device .*cpu"), (gpus, "bfloat16.* float32")):
        with pytest.raises(ConfigError, match=pattern):
            check_quantization(config, plan(config.placement, inventory, config.roles, ("rollout",)))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({}, "actor.engine.compute_dtype"),
        ({"engine": EngineConfig(compute_dtype="float16")}, None),
        ({"model": ModelConfig(path=Path("model"), dtype="bfloat16")}, "actor.model.dtype"),
    ],
)
def test_bfloat16_is_rejected_on_gpus_that_lack_it(changes: dict, key: str | None) -> None:
    """It is the default on GPUs."""
    config = run_with(on(1).model_copy(update={"device": "cuda"}))
    config = config.model_copy(update={"actor": config.actor.model_copy(update=changes)})
    planned = plan_run(config, [1])
    resolved = resolve_settings(config, planned)
    for capability in (None, (8, 0), (9, 0)):
        check_bfloat16(resolved, capability)
    if key is None:
        check_bfloat16(resolved, (7, 5))
        return
    with rejects(key, "bfloat16", "7.5", "8.0", "float16", error=ConfigError):
        check_bfloat16(resolved, (7, 5))


def test_bfloat16_of_vllm_is_rejected_on_gpus_that_lack_it(tmp_path: Path) -> None:
    config = vllm_run(model_with_heads_of(64, tmp_path / "model"), "cuda")
    actor = config.actor.model_copy(update={"engine": EngineConfig(compute_dtype="float16")})
    rollout = config.rollout.model_copy(update={"vllm": VllmConfig(dtype="bfloat16")})
    config = config.model_copy(update={"actor": actor, "rollout": rollout, "reference": None})
    config = config.model_copy(update={"placement": on_gpu("actor", "rollout", "reward")})
    planned = plan_run(config, [1])
    with rejects("rollout.vllm.dtype", "7.5", error=ConfigError):
        check_bfloat16(resolve_settings(config, planned), (7, 5))


def test_bfloat16_weights_of_an_hf_rollout_are_rejected_on_gpus_that_lack_it(tmp_path: Path) -> None:
    """The rollout computes in the dtype of the weights, whatever the actor's `compute_dtype` is."""
    model = ModelConfig(path=tmp_path, dtype="bfloat16")
    config = GRPOConfig.model_validate(grpo_settings(model=tmp_path))
    actor = config.actor.model_copy(update={"model": model, "engine": EngineConfig(compute_dtype="float16")})
    config = config.model_copy(update={"actor": actor, "reference": None, "placement": on_gpu(*config.roles)})
    planned = plan_run(config, [1])
    with rejects("actor.model.dtype", "float32", "7.5", error=ConfigError):
        check_bfloat16(resolve_settings(config, planned), (7, 5))


@pytest.mark.parametrize(
    ("via", "offload", "is_rejected"),
    [
        ("auto", "none", True),
        ("cuda_ipc", "none", True),
        ("cuda_ipc", "idle", True),
        ("auto", "idle", False),  # selects the object store
        ("object_store", "none", False),
    ],
)
def test_cuda_ipc_is_rejected_on_a_machine_that_lacks_it(
    via: str, offload: str, is_rejected: bool, tmp_path: Path
) -> None:
    config = vllm_run(model_with_heads_of(64, tmp_path / "model"), "cuda")
    actor = config.actor.model_copy(update={"engine": EngineConfig.model_validate({"offload": offload})})
    rollout = config.rollout.model_copy(update={"transfer": TransferConfig.model_validate({"via": via})})
    config = config.model_copy(update={"actor": actor, "rollout": rollout})
    planned = plan_run(config, [1])
    check_cuda_ipc(config, planned, None)
    problem = ("VARIABLE is wrong", "unset VARIABLE")
    if not is_rejected:
        check_cuda_ipc(config, planned, problem)
        return
    with rejects("rollout.transfer.via", via, "VARIABLE", "unset", "object_store", error=ConfigError):
        check_cuda_ipc(config, planned, problem)


def split_run(tp: int = 1, pp: int = 1, lora: LoraConfig | None = None, **transfer: str) -> GRPOConfig:
    """Returns a run whose actor sends its weights to a vLLM rollout on other CPU devices."""
    roles = {"actor": {"pool": "train", "tp": tp, "pp": pp}, "reward": "train", "rollout": "make"}
    placement = Placement.model_validate({"device": "cpu", "pools": {"train": [2], "make": [1]}, "roles": roles})
    settings = grpo_settings(
        model=Path("m"), rollout={"engine": "vllm", "max_response_tokens": 1, "transfer": transfer}
    )
    config = GRPOConfig.model_validate(settings | {"placement": placement, "reference": None})
    return config.model_copy(update={"actor": config.actor.model_copy(update={"lora": lora})})


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        (split_run(senders="all"), ["object_store"]),
        (split_run(senders="all", via="gloo", lora=LoraConfig(rank=2)), ["LoRA"]),
        (split_run(senders="all", via="gloo", tp=2), ["tp", 2]),
        (split_run(senders="all", via="gloo", pp=2), ["pp", 2]),
    ],
)
def test_several_senders_without_effect_are_rejected(config: GRPOConfig, facts: list[object]) -> None:
    with rejects("rollout.transfer.senders", *facts, error=ConfigError):
        check_senders(config, plan_run(config))
    check_senders(split_run(senders="all", via="gloo"), plan_run(split_run(senders="all", via="gloo")))


def on_gpu(*roles: str) -> Placement:
    return Placement(device="cuda", pools={"main": [1]}, roles=dict.fromkeys(roles, "main"))


def test_deterministic_runs_on_gpus_do_not_compile() -> None:
    run = GRPOConfig.model_validate(grpo_settings(deterministic=True))
    gpus = plan(run.placement, Inventory((1,), "cuda"), run.roles, run.dedicated_roles())
    check_determinism(run, gpus)
    actor = run.actor.model_copy(update={"engine": EngineConfig(compile=True)})
    with rejects("deterministic", "actor.engine.compile", "auto", error=ConfigError):
        check_determinism(run.model_copy(update={"actor": actor}), gpus)
