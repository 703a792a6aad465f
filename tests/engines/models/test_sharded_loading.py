"""Ranks that load only their shards of a model have the same weights as after a full load."""

import logging
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.multiprocessing.spawn import spawn
from transformers import AutoModel, AutoModelForCausalLM, HrmTextConfig, HrmTextForCausalLM, PreTrainedModel

from flowrl.config import ModelConfig
from flowrl.engines.checkpoint.model_folder import save_model
from flowrl.engines.models.loading import CriticModel, ModelError, load_policy
from flowrl.engines.models.sharded_loading import load_shards, make_meta_model
from tests.engines.closeness import assert_norm_close
from tests.engines.families import FAMILIES, build
from tests.engines.loading import MESHES, expected, load_experts, main, measure, write_adapter
from tests.engines.tiny import SIZES, llama, qwen2, qwen3_moe, save
from tests.errors import missing_facts
from tests.processes import run_ranks
from tests.slow_cases import as_parameters, selected_values

KINDS = (
    "tied policy",
    "policy",
    "critic",
    "fresh critic",
    "reward",
    "policy with an adapter",
    "critic with an adapter",
    "policy that continues an adapter",
    "policy with a merged adapter",
    "tied policy with a merged adapter",
    "critic with a merged adapter",
    "policy with experts",
    "critic with experts",
    "policy with experts and a buffer",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes two policies, one of them in several files, and a critic with its head."""
    folder = tmp_path_factory.mktemp("loading")
    save(qwen2(), folder / "tied")
    save(llama(), folder / "policy")
    llama().save_pretrained(folder / "policy", max_shard_size="20KB")
    (folder / "policy" / "model.safetensors").unlink()
    save(build("Mixtral"), folder / "mixtral")
    build("Mixtral").save_pretrained(folder / "mixtral", max_shard_size="20KB")
    (folder / "mixtral" / "model.safetensors").unlink()
    save(qwen3_moe(), folder / "qwen3_moe")
    save(with_selection_bias(build("DeepSeek-V3")), folder / "deepseek")
    critic = CriticModel(qwen2().model, head="fresh", seed=7)
    save_model(critic, folder / "tied", folder / "critic")
    write_adapter(folder / "policy", folder / "adapter")
    write_adapter(folder / "tied", folder / "tied adapter")
    return folder


def with_selection_bias(model: PreTrainedModel) -> PreTrainedModel:
    """Sets the persistent buffers of a model, which its routers add to their scores."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer)))
    return model


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> list[dict]:
    """Returns the results of one process per rank, for the meshes of the selected tests."""
    meshes = selected_values(request, "mesh")
    ranks = max(MESHES[mesh][0] for mesh in meshes)
    run_ranks(main, (folder, ranks, meshes), ranks)
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


@pytest.fixture(scope="module")
def unsharded(folder: Path) -> dict:
    return expected(folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", as_parameters(MESHES, "fsdp on 2"))
def test_sharded_loading_equals_full_loading(results: list[dict], unsharded: dict, mesh: str, kind: str):
    expected, weights = unsharded[kind]
    for rank in range(MESHES[mesh][0]):
        actual, found_weights = results[rank][mesh, kind]
        assert found_weights.keys() == weights.keys()
        assert all(torch.equal(found_weights[name], weights[name]) for name in weights)
        # These models are in bfloat16, and ranks sum in another order.
        rtol = 0.05 if kind.startswith("critic") or kind.endswith("buffer") else None
        assert_norm_close(actual, expected, rtol)


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForCausalLM])
@pytest.mark.parametrize("name", FAMILIES)
def test_buffers_that_no_file_contains_are_recomputed(name: str, auto: type, tmp_path: Path):
    meta_model = make_meta_model(auto, save(build(name), tmp_path), torch.float32)
    assert meta_model is not None and all(parameter.is_meta for parameter in meta_model.parameters())
    load_shards(meta_model, torch.device("cpu"))
    model = auto.from_pretrained(tmp_path)
    for kind in ("named_buffers", "named_parameters"):
        tensors, expected_tensors = (dict(getattr(m, kind)(remove_duplicate=False)) for m in (meta_model, model))
        assert tensors.keys() == expected_tensors.keys()
        assert all(torch.equal(tensors[name], expected_tensors[name]) for name in expected_tensors)


def test_tied_weights_stay_tied_when_loaded_in_shards(folder: Path):
    model = load_policy(ModelConfig(path=folder / "tied"), on_meta=True)
    load_shards(model, torch.device("cpu"))
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")


def renamed(folder: Path, old: str, new: str) -> Path:
    """Writes a policy whose file has a weight under another name, or not at all."""
    save(llama(), folder)
    weights = load_file(folder / "model.safetensors")
    weights = {name.replace(old, new): weight for name, weight in weights.items() if new or name != old}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_missing_weight_is_rejected_like_by_full_loading(tmp_path: Path):
    broken = ModelConfig(path=renamed(tmp_path, "model.norm.weight", ""))
    messages = []
    for on_meta in (True, False):
        with pytest.raises(ModelError, match=r"model\.norm\.weight") as caught:
            load_policy(broken, on_meta=on_meta)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_a_truncated_file_is_rejected(tmp_path: Path):
    path = save(llama(), tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_policy(ModelConfig(path=tmp_path), on_meta=True)


def test_a_pickle_file_is_rejected(tmp_path: Path):
    path = save(llama(), tmp_path) / "model.safetensors"
    torch.save(load_file(path), tmp_path / "pytorch_model.bin")
    path.unlink()
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_policy(ModelConfig(path=tmp_path), on_meta=True)


def test_files_that_only_transformers_can_read_are_loaded_unsharded_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """A matrix in the files of this family is the concatenation of several weights of its model."""
    torch.manual_seed(0)
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    model = HrmTextForCausalLM(HrmTextConfig(**sizes, hidden_size=32)).eval()
    with caplog.at_level(logging.WARNING):
        loaded = load_policy(ModelConfig(path=save(model, tmp_path)), on_meta=True)
    assert not missing_facts(caplog.text, "WARNING", tmp_path, "HrmTextForCausalLM")
    assert all(torch.equal(weight, model.get_parameter(name)) for name, weight in loaded.named_parameters())


def broken_expert(folder: Path) -> Path:
    """Writes a mixture of four experts, of which the last one has a NaN in each layer."""
    path = save(qwen3_moe(), folder) / "model.safetensors"
    weights = load_file(path)
    for name, weight in weights.items():
        if ".experts.3.up_proj" in name:
            weight[0, 0] = torch.nan
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def test_a_rank_reads_only_its_own_experts(tmp_path: Path):
    """A rank that reads the last expert raises an error."""
    run_ranks(load_experts, (broken_expert(tmp_path / "model"), tmp_path), 2)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["loaded", "model.layers.0"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads peak memory from /proc")
@pytest.mark.slow
def test_a_rank_of_two_never_holds_the_full_model(tmp_path: Path):
    model = qwen2(hidden_size=768, intermediate_size=3072, num_hidden_layers=11, vocab_size=2048)
    num_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert 9e7 < num_bytes / 4 < 12e7
    small, large = save(qwen2(), tmp_path / "small"), save(model, tmp_path / "large")
    del model
    for parts, lora in ((True, False), (True, True), (False, False)):
        folder = tmp_path / f"{parts} {lora}"
        folder.mkdir()
        spawn(measure, (folder, small, large, parts, lora), nprocs=2)
        grown = [int((folder / f"{rank}.txt").read_text()) / num_bytes for rank in range(2)]
        assert all(share < 0.75 for share in grown) == parts
