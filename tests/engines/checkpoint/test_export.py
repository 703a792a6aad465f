"""A checkpoint is exported to a folder that transformers loads."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from flowrl.config import EngineConfig, LoraConfig, ModelConfig, OptimizerConfig, UserError
from flowrl.data.checksums import CheckpointError
from flowrl.engines.checkpoint.engine_checkpoint import EngineCheckpoints, load
from flowrl.engines.checkpoint.export import DESCRIPTION, describe_adapter, export_adapter, export_model
from flowrl.engines.checkpoint.model_folder import describe_tokenizer
from flowrl.engines.checkpoint.shards import INDEX
from flowrl.engines.models.adapters.lora import add_adapter
from flowrl.engines.models.loading import ModelError, describe_model, load_critic
from flowrl.engines.parallel.rank_mesh import SINGLE_PROCESS
from flowrl.engines.train.fsdp.engine import FsdpEngine
from flowrl.engines.train.fsdp.outputs import PolicyModel, policy_outputs, value_outputs
from tests.engines.closeness import assert_norm_close
from tests.engines.export_ranks import CASES, START, critic_engine, main, values
from tests.engines.tiny import llama, qwen2, save
from tests.errors import rejects
from tests.processes import run_ranks


def saved(model: PreTrainedModel, tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir(parents=True)
    files = describe_model(model) | describe_tokenizer(save(model, tmp_path / "start"))
    checkpoints = EngineCheckpoints(
        FsdpEngine(PolicyModel(model), policy_outputs, OptimizerConfig(lr=1e-3), EngineConfig())
    )
    checkpoints.save(folder, extra_files={f"{DESCRIPTION}/{name}": data for name, data in files.items()})
    checkpoints.result()
    return folder


@pytest.mark.parametrize(
    "model", [qwen2, llama, lambda: qwen2(dtype=torch.bfloat16)], ids=["tied", "untied", "bfloat16"]
)
def test_an_exported_policy_has_the_same_logits(model, tmp_path: Path) -> None:
    export_model(saved(model(), tmp_path), tmp_path / "out")
    loaded, expected = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto").eval() for name in ("out", "start")
    )
    ids = torch.randint(2, 30, (2, 9))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, expected(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<end>"


def adapted(tmp_path: Path, base: Path, rank: int = 4) -> tuple[PreTrainedModel, Path]:
    """A model with an adapter that changes it, and its checkpoint, which names the model in `base`."""
    lora, model = LoraConfig(rank=rank), qwen2()
    add_adapter(model, lora)
    for name, weight in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.constant_(weight, 0.02)
    folder = saved(model, tmp_path)
    described = describe_adapter(ModelConfig(path=base), lora)
    for name, data in described.items():
        (folder / DESCRIPTION / name).write_bytes(data)
    return model, folder


def test_an_exported_adapter_is_merged_into_the_model_that_it_was_trained_on(tmp_path: Path) -> None:
    model, folder = adapted(tmp_path, save(qwen2(), tmp_path / "base"))
    export_model(folder, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.randint(2, 30, (2, 9))
    with torch.no_grad():
        assert_norm_close(loaded(ids).logits, model(ids).logits)


def test_an_adapter_of_another_model_or_of_none_is_rejected(tmp_path: Path) -> None:
    _, folder = adapted(tmp_path, save(llama(), tmp_path / "other"))
    with pytest.raises(CheckpointError, match="other"):
        export_model(folder, tmp_path / "out")
    _, folder = adapted(tmp_path / "again", tmp_path / "nowhere")
    with pytest.raises(ModelError, match="nowhere"):
        export_model(folder, tmp_path / "out")


def test_exporting_the_adapter_of_a_checkpoint_without_one_is_rejected(tmp_path: Path) -> None:
    folder = saved(qwen2(), tmp_path)
    (folder / INDEX).unlink()
    with pytest.raises(CheckpointError, match="adapter"):
        export_adapter(folder, tmp_path / "out")


def test_a_folder_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file/out"):
        export_model(saved(qwen2(), tmp_path), tmp_path / "file/out")


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder per case with the checkpoints `actor` and `critic` of two processes, and their saved models."""
    folder = tmp_path_factory.mktemp("ranks")
    save(qwen2(), folder / START)
    run_ranks(main, (folder,), 2)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_one_process_exports_a_checkpoint_of_two_ranks(of_two_ranks: Path, tmp_path: Path, name: str) -> None:
    export_model(of_two_ranks / name / "actor", tmp_path / "out")
    exported, expected, start = (
        load_file(path / "model.safetensors")
        for path in (tmp_path / "out", of_two_ranks / name / "saved-actor", of_two_ranks / START)
    )
    assert exported.keys() == expected.keys() == start.keys()
    assert all(torch.equal(exported[weight], expected[weight]) for weight in expected)
    assert not torch.equal(exported["model.layers.0.mlp.up_proj.weight"], start["model.layers.0.mlp.up_proj.weight"])


@pytest.mark.parametrize("name", CASES)
def test_one_process_resumes_a_critic_saved_by_two_ranks(of_two_ranks: Path, name: str) -> None:
    critic = critic_engine(CASES[name], of_two_ranks, SINGLE_PROCESS)
    load(critic, of_two_ranks / name / "critic")
    assert critic.steps.num_steps == 2
    for rank in range(2):
        expected_values = torch.load(of_two_ranks / f"{rank}.pt")[name]
        assert_norm_close(values(critic), expected_values)


@pytest.mark.parametrize("name", CASES)
def test_an_exported_critic_of_two_ranks_has_the_values_of_the_trained_one(
    of_two_ranks: Path, tmp_path: Path, name: str
) -> None:
    export_model(of_two_ranks / name / "critic", tmp_path / "out")
    exported, saved_weights = (
        load_file(path / "model.safetensors") for path in (tmp_path / "out", of_two_ranks / name / "saved-critic")
    )
    assert exported.keys() == saved_weights.keys() >= {"score.weight", "score.bias"}
    assert all(torch.equal(exported[weight], saved_weights[weight]) for weight in exported)
    loaded = load_critic(ModelConfig(path=tmp_path / "out"))
    engine = FsdpEngine(loaded, value_outputs, OptimizerConfig(lr=1e-3), EngineConfig())
    assert_norm_close(values(engine), torch.load(of_two_ranks / "0.pt")[name])


def test_the_adapter_of_a_critic_is_not_exported_without_its_head(of_two_ranks: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="critic"):
        export_adapter(of_two_ranks / "an adapter, ddp" / "critic", tmp_path / "out")


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match=str(tmp_path)):
        export_model(saved(llama(), tmp_path), tmp_path / "out")


def test_a_config_that_is_not_a_language_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        export_model(tmp_path, tmp_path / "out")


def test_a_checkpoint_without_the_description_of_its_model_names_the_fix(of_two_ranks: Path, tmp_path: Path) -> None:
    """Earlier versions saved critics without a description."""
    checkpoint = shutil.copytree(of_two_ranks / "ddp" / "critic", tmp_path / "critic")
    shutil.rmtree(checkpoint / DESCRIPTION)
    with rejects(checkpoint, "resume", error=CheckpointError):
        export_model(checkpoint, tmp_path / "out")


def test_a_config_of_another_model_is_rejected(tmp_path: Path) -> None:
    folder = saved(llama(), tmp_path)
    (folder / DESCRIPTION / "config.json").write_bytes(describe_model(qwen2())["config.json"])
    with pytest.raises((ModelError, RuntimeError), match=r"weight"):
        export_model(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_exported_policy_keeps_its_generation_config(tmp_path: Path) -> None:
    model = qwen2()
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [1, 5]
    export_model(saved(model, tmp_path), tmp_path / "out")
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [1, 5]
