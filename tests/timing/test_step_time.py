"""The phases of a step follow from the settings, and its time from the phases and their devices."""

from pathlib import Path

import pytest

from flowrl.config import ConfigError, RunConfig, load, recipe_class
from flowrl.devices.device_rates import GPUS
from flowrl.run.checks.checked_run import CheckedRun
from flowrl.timing.step_time import Phase, Stage, StepTime, assume_lengths, estimate_step, step_seconds
from tests.errors import missing_facts

ROOT = Path(__file__).parents[2]


def phase(stage: Stage, seconds: float, *devices: int) -> Phase:
    return Phase(stage, stage, frozenset((0, device) for device in devices), seconds, "")


def test_stages_add_up_and_phases_of_a_stage_overlap_on_different_devices() -> None:
    """Scoring: 3 + 4 s on device 0, and 5 s on device 1. Update: 10 s on device 0, and 20 s on device 1."""
    phases = [
        phase("generation", 7, 0),
        phase("scoring", 3, 0),
        phase("scoring", 4, 0),
        phase("scoring", 5, 1),
        phase("update", 10, 0),
        phase("update", 20, 1),
        phase("sync", 1, 0, 1),
    ]
    assert step_seconds(phases, is_overlapped=False) == 7 + (3 + 4) + 20 + 1


@pytest.mark.parametrize(("generation", "expected"), [(2, 30 + 1), (50, 50 + 1)])
def test_generation_on_other_devices_overlaps_with_training(generation: float, expected: float) -> None:
    phases = [phase("generation", generation, 0), phase("update", 30, 1), phase("sync", 1, 0, 1)]
    assert step_seconds(phases, is_overlapped=True) == expected


def test_generation_on_the_same_devices_alternates_with_training() -> None:
    phases = [phase("generation", 5, 0), phase("update", 30, 0), phase("sync", 1, 0)]
    assert step_seconds(phases, is_overlapped=True) == 36


def estimate(recipe: str, *settings: str, devices: int = 8) -> StepTime:
    path = ROOT / "recipes" / recipe
    schema = recipe_class(path)
    assert issubclass(schema, RunConfig)
    config = load(path, ["placement.memory_gb=80", *settings], schema)
    run = CheckedRun(config, [devices])
    return estimate_step(run.fitted, run.plan, GPUS["h100"], assume_lengths(config))


def names(step: StepTime) -> list[str]:
    return [phase.name for phase in step.phases]


def test_the_phases_of_ppo_are_its_calls() -> None:
    step = estimate("ppo/deepseek7b.yaml")
    scoring = ["old log-probabilities", "log-probabilities of reference", "values of critic"]
    assert names(step) == ["generation", "switch", *scoring, "update of actor", "update of critic", "weight sync"]
    devices = {phase.name: {device for _, device in phase.devices} for phase in step.phases}
    assert devices["update of actor"] == {0, 1, 2, 3} and devices["update of critic"] == {4, 5, 6, 7}
    assert step.num_devices == 8 and step.num_rows == 1024 and not step.is_overlapped


def test_one_update_per_step_needs_no_old_log_probabilities() -> None:
    settings = ("algorithm.correction=null", "minibatch_size=1024")
    step = estimate("grpo/qwen1.5b.yaml", *settings, devices=1)
    assert names(step) == ["generation", "switch", "update of actor", "weight sync"]


def test_a_detached_rollout_overlaps_and_is_not_switched() -> None:
    step = estimate("grpo/qwen7b_async.yaml")
    assert step.is_overlapped and "switch" not in names(step)
    training = sum(phase.seconds for phase in step.phases if phase.name != "generation")
    assert step.seconds == pytest.approx(training)


def test_a_replica_of_two_stages_takes_the_time_of_two_replicas_with_half_of_its_sequences() -> None:
    """Its stages compute two batches at the same time, and each device holds the cache of half of the layers."""

    def generation(settings: str, **sizes: int) -> float:
        placement = {
            "placement.pools.main": "[1]",
            "placement.pools.makers": "[2]",
            "placement.roles.rollout": str({"pool": "makers", **sizes}),
        }
        changes = [f"{name}={value}" for name, value in placement.items()]
        step = estimate("grpo/qwen1.5b.yaml", settings, "rollout.vllm.kv_cache_gb=40", *changes, devices=3)
        return next(phase.seconds for phase in step.phases if phase.name == "generation")

    stages = generation("rollout.max_num_seqs=64", pp=2)
    assert stages == pytest.approx(generation("rollout.max_num_seqs=32"))
    assert stages > generation("rollout.max_num_seqs=64")


def test_sleep_and_offload_copy_weights_and_optimizer_out_and_in() -> None:
    """Qwen2.5-1.5B has 1,543,714,304 parameters. vLLM copies 2 bytes of each over PCIe at 0.8 x 64 GB/s. An idle actor
    copies weights and Adam's moments, 12 bytes.
    """
    parameters = 1_543_714_304
    sleeping, idle = (
        next(phase for phase in estimate("grpo/qwen1.5b.yaml", setting, devices=1).phases if phase.name == "switch")
        for setting in ("seed=0", "actor.engine.offload=idle")
    )
    assert sleeping.seconds == pytest.approx(2 * 2 * parameters / (0.8 * 64e9))
    assert idle.seconds - sleeping.seconds == pytest.approx(2 * 12 * parameters / (0.8 * 64e9))


def test_dropped_weights_are_not_copied_and_those_of_a_reference_only_return() -> None:
    def switch(*settings: str) -> float:
        phases = estimate("grpo/qwen1.5b.yaml", *settings, devices=1).phases
        return next(phase.seconds for phase in phases if phase.name == "switch")

    link = 0.8 * 64e9
    assert switch("rollout.transfer.drop_weights=true") == 0
    reference = (
        "actor.kl_loss_coef=0.01",
        "placement.roles.reference=main",
        "reference.engine.offload=idle",
        "reference.model.path=Qwen/Qwen2.5-1.5B",
        "reference.model.dtype=bfloat16",
    )
    assert switch(*reference) - switch() == pytest.approx(2 * 1_543_714_304 / link)


@pytest.mark.parametrize(
    ("recipe", "devices", "settings", "seconds"),
    [
        ("grpo/qwen1.5b.yaml", 1, [], 2 * 1_543_714_304 / (0.17 * 3.35e12 / 4)),
        ("grpo/qwen1.5b.yaml", 1, ["rollout.transfer.via=object_store"], 2 * 1_543_714_304 / 1.4e9),
        ("grpo/qwen7b_async.yaml", 8, [], 2 * 7_615_616_512 / (0.17 * 450e9)),
    ],
    ids=["cuda_ipc", "object_store", "nccl"],
)
def test_a_weight_sync_takes_the_bytes_of_its_transport(
    recipe: str, devices: int, settings: list[str], seconds: float
) -> None:
    sync = next(phase for phase in estimate(recipe, *settings, devices=devices).phases if phase.stage == "sync")
    assert sync.seconds == pytest.approx(seconds)


def test_pairs_have_two_rows_and_a_stored_reference_runs_before_the_steps() -> None:
    stored, live = (
        estimate("dpo/qwen1.5b.yaml", "epochs=2", f"reference_logprobs={when}", "batch_size=4", devices=1)
        for when in ("auto", "live")
    )
    assert stored.num_rows == live.num_rows == 8
    assert names(stored) == ["update of actor"]
    assert names(live) == ["log-probabilities of reference", "update of actor"]


@pytest.mark.parametrize(
    ("recipe", "prompt", "response", "facts"),
    [
        ("grpo/qwen1.5b.yaml", 513, None, ("--prompt-tokens", "513", "data.max_prompt_tokens", "512")),
        ("grpo/qwen1.5b.yaml", None, 1025, ("--response-tokens", "1025", "rollout.max_response_tokens", "1024")),
        ("sft/qwen0.5b.yaml", None, 5, ("--response-tokens", "5", "rollout")),
    ],
)
def test_lengths_that_the_settings_do_not_allow_are_rejected(
    recipe: str, prompt: int | None, response: int | None, facts: tuple[str, ...]
) -> None:
    path = ROOT / "recipes" / recipe
    schema = recipe_class(path)
    assert issubclass(schema, RunConfig)
    with pytest.raises(ConfigError) as caught:
        assume_lengths(load(path, [], schema), prompt, response)
    assert not missing_facts(str(caught.value), *facts)


def test_a_model_of_unknown_size_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        estimate("sft/qwen0.5b.yaml", "actor.model.path=some/unknown-model", devices=1)
    assert not missing_facts(str(caught.value), "--time", "actor.model.path", "some/unknown-model")


@pytest.mark.parametrize(
    ("settings", "is_named"),
    [
        ((), False),
        (("actor.engine.strategy=fsdp",), True),
        (("actor.engine.compile=false",), True),
        (("actor.engine.strategy=fsdp", "actor.engine.compile=true"), False),
        (("deterministic=true",), True),
    ],
)
def test_roles_whose_layers_are_not_compiled_are_named(settings: tuple[str, ...], is_named: bool) -> None:
    """The rate of passes is that of compiled layers."""
    step = estimate("grpo/qwen1.5b.yaml", *settings, devices=1)
    assert any("actor" in part and "compile" in part for part in step.omitted) is is_named
