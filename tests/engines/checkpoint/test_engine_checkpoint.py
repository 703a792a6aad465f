"""A restored engine continues bitwise identically, also from a checkpoint of another number of ranks."""

from pathlib import Path

import pytest
import torch

from flowrl.config import EngineConfig, OptimizerConfig
from flowrl.data.checksums import CheckpointError, checksum_of
from flowrl.devices import device as devices
from flowrl.engines.checkpoint.engine_checkpoint import EngineCheckpoints, load
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs
from flowrl.engines.train.steps import LossScale
from tests.devices.recorded_device import RecordedDevice
from tests.engines.checkpoint_ranks import STRATEGIES, copied, full_parameters, main, save, sharded
from tests.engines.closeness import assert_norm_close
from tests.engines.losses import LOGPROBS, Bigram, bigram_loss, bigram_outputs
from tests.engines.tables import VOCABULARY, table
from tests.engines.tiny import qwen2
from tests.processes import run_ranks


def train(engine: FsdpEngine, steps: range) -> None:
    for step in steps:
        engine.update(table(5, seed=step), bigram_loss, LOGPROBS)


def assert_equal(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_steps_after_a_load_are_bitwise_identical_to_an_uninterrupted_run(tmp_path: Path, asynchronous: bool) -> None:
    straight, again = copied(None), copied(None)
    train(straight, range(3))
    save(straight, tmp_path, asynchronous=asynchronous)
    train(straight, range(3, 6))
    load(again, tmp_path)
    assert again.steps.num_steps == 3
    train(again, range(3, 6))
    assert_equal(full_parameters(again.model), full_parameters(straight.model))


def test_an_asynchronous_save_contains_the_state_at_its_call(tmp_path: Path) -> None:
    engine, again = copied(None), copied(None)
    train(engine, range(2))
    expected, checkpoints = full_parameters(engine.model), EngineCheckpoints(engine)
    checkpoints.save(tmp_path, asynchronous=True)
    train(engine, range(2, 8))
    checkpoints.result()
    load(again, tmp_path)
    assert_equal(full_parameters(again.model), expected)


def test_a_second_asynchronous_save_reuses_the_memory_of_the_first(tmp_path: Path) -> None:
    engine, again = copied(None), copied(None)
    checkpoints = EngineCheckpoints(engine)
    for step in range(2):
        train(engine, range(step, step + 1))
        (tmp_path / str(step)).mkdir()
        checkpoints.save(tmp_path / str(step), asynchronous=True)
        checkpoints.result()
    load(again, tmp_path / "0")
    assert again.steps.num_steps == 1
    load(again, tmp_path / "1")
    assert_equal(full_parameters(again.model), full_parameters(engine.model))


def test_asynchronous_saves_wait_for_the_device_and_share_one_host_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations: list[str] = []
    monkeypatch.setattr(devices, "_CPU", RecordedDevice(devices._CPU, operations.append))
    engine = copied(None)
    train(engine, range(1))
    checkpoints = EngineCheckpoints(engine)
    for step in range(2):
        (tmp_path / str(step)).mkdir()
        checkpoints.save(tmp_path / str(step), asynchronous=True)
        checkpoints.result()
    assert operations == ["host buffer", "synchronize", "synchronize"]


def test_a_checkpoint_before_the_first_step_has_no_moments(tmp_path: Path) -> None:
    save(copied(None), tmp_path, asynchronous=False)
    straight, again = copied(None), copied(None)
    load(again, tmp_path)
    train(straight, range(2))
    train(again, range(2))
    assert_equal(full_parameters(again.model), full_parameters(straight.model))


def test_random_numbers_continue_after_a_load(tmp_path: Path) -> None:
    engine = copied(None)
    save(engine, tmp_path, asynchronous=False)
    expected = torch.rand(3)
    torch.rand(100)
    load(engine, tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_the_files_match_their_checksums(tmp_path: Path) -> None:
    checkpoints = EngineCheckpoints(copied(None))
    checkpoints.save(tmp_path, extra_files={"model/config.json": b"{}"})
    saved = checkpoints.result()
    assert saved is not None and saved.architecture == "Bigram, 1,426 parameters"
    assert {name: checksum_of(tmp_path / name) for name in saved.files} == saved.files
    assert set(saved.files) == {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    model, other = (
        FsdpEngine(qwen2(seed=seed), policy_outputs, OptimizerConfig(lr=1e-3), EngineConfig()) for seed in (0, 1)
    )
    save(model, tmp_path, asynchronous=False)
    assert "lm_head" not in (tmp_path / "index.json").read_text()
    load(other, tmp_path)
    assert_equal(full_parameters(other.model), full_parameters(model.model))
    assert other.model.get_output_embeddings().weight is other.model.get_input_embeddings().weight  # pyright: ignore


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """Returns the results of two processes that resumed from one, and the folders."""
    folder = tmp_path_factory.mktemp("two")
    for name in ("one-sharded", "two-fsdp", "two-tp", "one-copied", "two-copied", "two-random", "blocked"):
        (folder / name).mkdir()
    one, copy = sharded(None), copied(None)
    for _ in range(2):
        one.step()
    train(copy, range(2))
    save(one, folder / "one-sharded", asynchronous=False)
    save(copy, folder / "one-copied", asynchronous=False)
    run_ranks(main, (folder,), 2)
    return folder, [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("how", STRATEGIES)
def test_shards_resume_from_a_checkpoint_of_one_process(two_ranks: tuple[Path, list[dict]], how: str) -> None:
    straight = sharded(None)
    for _ in range(3):
        straight.step()
    for results in two_ranks[1]:
        assert_norm_close(results[how, "weights"], full_parameters(straight.model))


@pytest.mark.parametrize("how", STRATEGIES)
def test_one_process_resumes_from_shards(two_ranks: tuple[Path, list[dict]], how: str) -> None:
    straight, again = sharded(None), sharded(None)
    load(again, two_ranks[0] / f"two-{how}")
    assert again.num_steps == 3
    again.step()
    for _ in range(4):
        straight.step()
    assert_norm_close(full_parameters(again.model), full_parameters(straight.model))


def test_ddp_replicas_and_one_process_resume_from_each_other(two_ranks: tuple[Path, list[dict]]) -> None:
    folder, results = two_ranks
    again = copied(None)
    load(again, folder / "two-copied")
    assert again.steps.num_steps == 3
    for actual in results:
        assert_equal(actual["copied", "weights"], full_parameters(again.model))


def test_random_numbers_of_each_rank_continue_after_a_load(two_ranks: tuple[Path, list[dict]]) -> None:
    for results in two_ranks[1]:
        assert torch.equal(results["drawn again"], results["drawn"])
    assert not torch.equal(two_ranks[1][0]["drawn"], two_ranks[1][1]["drawn"])


def test_ddp_rank_0_writes_everything_and_fsdp_ranks_write_their_shards(two_ranks: tuple[Path, list[dict]]) -> None:
    first, second = two_ranks[1]
    assert first["copied", "files"] == ["index.json", "random-00000.json", "rank-00000.bin"]
    assert second["copied", "files"] == ["random-00001.json"]
    assert second["fsdp", "files"] == second["tp", "files"] == ["random-00001.json", "rank-00001.bin"]


def test_a_write_error_of_one_rank_is_raised_by_all(two_ranks: tuple[Path, list[dict]]) -> None:
    assert [results["blocked"] for results in two_ranks[1]] == [two_ranks[1][1]["blocked"]] * 2
    assert "nowhere" in two_ranks[1][0]["blocked"]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    engine = copied(None)
    train(engine, range(1))
    save(engine, tmp_path, asynchronous=False)
    return tmp_path


def test_a_different_size_is_rejected_with_the_name_of_a_weight(stored: Path) -> None:
    other = FsdpEngine(Bigram(VOCABULARY, 8), bigram_outputs, None, EngineConfig())
    with pytest.raises(CheckpointError, match=r"weight.*float32 \[32, 17\].*float32 \[32, 8\]"):
        load(other, stored)


def test_a_different_model_is_rejected_and_unchanged(stored: Path) -> None:
    other = FsdpEngine(qwen2(), policy_outputs, None, EngineConfig())
    before = full_parameters(other.model)
    with pytest.raises(CheckpointError, match=r"model\.model\.embed_tokens\.weight"):
        load(other, stored)
    assert_equal(full_parameters(other.model), before)


@pytest.mark.parametrize(
    ("name", "contents", "named"),
    [
        ("index.json", None, "index.json"),
        ("index.json", b"{", "index.json"),
        ("index.json", b'{"format": 2}', "format 2"),
        ("rank-00000.bin", b"short", "rank-00000.bin"),
    ],
)
def test_a_corrupt_folder_is_rejected(stored: Path, name: str, contents: bytes | None, named: str) -> None:
    (stored / name).unlink()
    if contents is not None:
        (stored / name).write_bytes(contents)
    with pytest.raises(CheckpointError, match=named):
        load(copied(None), stored)


def test_a_missing_tensor_file_is_named(stored: Path) -> None:
    (stored / "rank-00000.bin").unlink()
    with pytest.raises(CheckpointError, match=r"rank-00000\.bin"):
        load(copied(None), stored)


def test_a_missing_folder_is_reported_by_wait(tmp_path: Path) -> None:
    checkpoints = EngineCheckpoints(copied(None))
    checkpoints.save(tmp_path / "none", asynchronous=True)
    with pytest.raises(CheckpointError, match=str(tmp_path / "none")):
        checkpoints.result()
    checkpoints.save(tmp_path)
    assert checkpoints.result() is not None


def test_the_float16_loss_scale_is_restored(tmp_path: Path) -> None:
    engines = [
        FsdpEngine(
            PolicyModel(qwen2()), policy_outputs, OptimizerConfig(lr=1e-3), EngineConfig(compute_dtype="float16")
        )
        for _ in range(2)
    ]
    engines[0].steps.loss_scale = LossScale(512.0, good_steps=9)
    save(engines[0], tmp_path, asynchronous=False)
    load(engines[1], tmp_path)
    assert engines[1].steps.loss_scale == LossScale(512.0, good_steps=9)
