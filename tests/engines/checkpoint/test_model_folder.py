"""Models are written to folders for transformers, in files of a limited size."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from flowrl.config import ExportConfig, ModelConfig, UserError
from flowrl.engines.checkpoint.model_folder import (
    copy_model,
    describe_tokenizer,
    in_file_order,
    save_model,
    write_model,
    write_safetensors,
)
from flowrl.engines.models.loading import CriticModel, ModelError, describe_model, load_critic, load_reward_model
from flowrl.engines.models.weights import full_weights, weight_shapes
from tests.engines.closeness import assert_norm_close
from tests.engines.export_memory import fail_together, measure_checkpoint, measure_ranks
from tests.engines.families import FAMILIES, build
from tests.engines.tiny import SIZES, convolving, llama, qwen2, save
from tests.errors import rejects
from tests.processes import run_ranks

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
LENGTHS = torch.tensor([4, 4])
LONGER = torch.nn.functional.pad(IDS, (0, 1), value=2)
"""The rows of `IDS` with one more token, which a score of their lengths does not depend on."""

SMALL = ExportConfig(max_shard_gb=3e-5)
"""Files of at most 30 kB."""


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, hidden_size=32, num_local_experts=2)).eval()


def logits(folder: Path) -> Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()(IDS).logits


def read_weights(folder: Path) -> dict[str, Tensor]:
    return {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}


@pytest.mark.parametrize("model", [qwen2, llama, mixtral], ids=["tied", "untied", "experts"])
def test_files_of_limited_size_have_the_index_and_the_weights_of_save_pretrained(model, tmp_path: Path) -> None:
    start = save(model(), tmp_path / "start")
    save_model(model(), start, tmp_path / "out", SMALL)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    expected, exported = load_file(start / "model.safetensors"), read_weights(tmp_path / "out")
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in expected.values())
    assert index["metadata"]["total_parameters"] == sum(weight.numel() for weight in expected.values())
    assert index["weight_map"].keys() == expected.keys()
    for file in files:
        own = load_file(tmp_path / "out" / file)
        assert all(index["weight_map"][name] == file for name in own)
        assert len(own) == 1 or sum(weight.nbytes for weight in own.values()) <= 30_000
    assert torch.equal(logits(tmp_path / "out"), logits(start))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_names_and_the_configuration_are_those_of_save_pretrained(name: str, tmp_path: Path) -> None:
    model = build(name)
    start = save(model, tmp_path / "start")
    save_model(model, start, tmp_path / "out")
    with (
        safe_open(start / "model.safetensors", "pt") as expected,
        safe_open(tmp_path / "out" / "model.safetensors", "pt") as exported,
    ):
        assert set(exported.keys()) == set(expected.keys())
        assert exported.metadata() == expected.metadata()
    configs = [json.loads((folder / "config.json").read_text()) for folder in (start, tmp_path / "out")]
    assert configs[0] == configs[1]


def test_weights_are_cast_to_the_dtype_of_the_export(tmp_path: Path) -> None:
    start = save(llama(), tmp_path / "start")
    save_model(llama(), start, tmp_path / "out", ExportConfig(dtype="bfloat16"))
    expected, exported = load_file(start / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(exported[name], weight.bfloat16()) for name, weight in expected.items())
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_weights_that_overflow_in_float16_are_rejected(tmp_path: Path) -> None:
    model = llama()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 7e4
    start = save(llama(), tmp_path / "start")
    with rejects("lm_head.weight", "float16", 65504, "bfloat16"):
        save_model(model, start, tmp_path / "out", ExportConfig(dtype="float16"))
    assert not (tmp_path / "out").exists()


def test_weights_of_several_dtypes_are_aligned(tmp_path: Path) -> None:
    """A reader of safetensors can map a weight only at a multiple of its element size."""
    weights = {"norm": torch.arange(3).bfloat16(), "head": torch.arange(2.0)}
    shapes = in_file_order((name, weight.dtype, tuple(weight.shape)) for name, weight in weights.items())
    write_safetensors(tmp_path, shapes, ((name, weights[name]) for name, _, _ in shapes), 1e9)
    written = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(written[name], weight) for name, weight in weights.items())
    with (tmp_path / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert header["head"]["data_offsets"][0] % 4 == 0


def test_a_copy_of_a_model_has_other_file_sizes_and_another_dtype(tmp_path: Path) -> None:
    start = save(llama(), tmp_path / "start")
    (tmp_path / "out").mkdir()
    copy_model(start, tmp_path / "out", ExportConfig(max_shard_gb=3e-5, dtype="bfloat16"))
    expected, exported = load_file(start / "model.safetensors"), read_weights(tmp_path / "out")
    assert all(torch.equal(exported[name], weight.bfloat16()) for name, weight in expected.items())
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert logits(tmp_path / "out").dtype == torch.bfloat16


def test_a_copy_names_the_file_with_weights_that_cannot_be_read(tmp_path: Path) -> None:
    model = save(llama(), tmp_path / "model")
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    (tmp_path / "out").mkdir()
    with rejects(file, error=ModelError):
        copy_model(model, tmp_path / "out", ExportConfig(dtype="bfloat16"))


# Heads.


def last_values(critic: CriticModel) -> Tensor:
    """Returns the value of the state after each row of `IDS`."""
    with torch.no_grad():
        return critic(LONGER)[:, -1]


@pytest.mark.parametrize("name", FAMILIES)
def test_an_exported_critic_is_loaded_as_critic_and_as_reward_model(name: str, tmp_path: Path) -> None:
    start = save(build(name), tmp_path / "start")
    critic = load_critic(ModelConfig(path=start), head="fresh", seed=1)
    torch.nn.init.constant_(critic.value_head.bias, 0.25)
    save_model(critic, start, tmp_path / "out", SMALL)
    out = ModelConfig(path=tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(load_critic(out)(IDS), critic(IDS))
        assert torch.equal(load_reward_model(out)(LONGER, LENGTHS), last_values(critic))
        classifier = AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "out",
            attn_implementation="eager",  # torch ignores the softcap of Gemma 2
        ).eval()
        # transformers' heads have no bias.
        assert_norm_close(classifier(IDS).logits[:, 0] + 0.25, last_values(critic))
    assert classifier.config.num_labels == 1


def test_a_critic_starts_from_the_head_of_a_reward_model(tmp_path: Path) -> None:
    start = save(llama(), tmp_path / "start")
    reward = load_reward_model(ModelConfig(path=start), head="fresh")
    save_model(reward, start, tmp_path / "out")
    with torch.no_grad():
        scores = reward(LONGER, LENGTHS)
        assert torch.equal(last_values(load_critic(ModelConfig(path=tmp_path / "out"))), scores)


def test_a_critic_of_a_family_without_classifiers_is_its_backbone_with_the_head(tmp_path: Path) -> None:
    start = save(convolving(), tmp_path / "start")
    critic = load_critic(ModelConfig(path=start), head="fresh")
    save_model(critic, start, tmp_path / "out")
    assert AutoConfig.from_pretrained(tmp_path / "out").architectures == [type(critic.backbone).__name__]
    with torch.no_grad():
        assert torch.equal(load_critic(ModelConfig(path=tmp_path / "out"))(IDS), critic(IDS))


def test_a_head_with_several_outputs_is_rejected(tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_config(qwen2(num_labels=3).config)
    with pytest.raises(ModelError, match=r"score\.weight.*\[3, 64\]"):
        load_critic(ModelConfig(path=save(model, tmp_path)))


def test_a_value_head_of_an_earlier_version_is_rejected_with_the_fix(tmp_path: Path) -> None:
    save(llama(), tmp_path)
    (tmp_path / "value_head.safetensors").touch()
    with pytest.raises(ModelError, match=r"value_head\.safetensors.*flowrl export --role critic"):
        load_critic(ModelConfig(path=tmp_path))


# Interrupted exports.


def write(model: PreTrainedModel, weights: Iterator[tuple[str, Tensor]], start: Path, output: Path) -> None:
    write_model("policy", describe_model(model), in_file_order(weight_shapes(model)), weights, start, output, SMALL)


def test_an_export_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    model = llama()
    start = save(model, tmp_path / "start")

    def fail() -> Iterator[tuple[str, Tensor]]:
        yield from list(full_weights(model))[:8]
        assert (tmp_path / "out.partial" / "model-00001-of-00004.safetensors").is_file()
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        write(model, fail(), start, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["start"]


KILLED = """
import os
from pathlib import Path
from flowrl.engines.models.weights import full_weights
from tests.engines.checkpoint.test_model_folder import write
from tests.engines.tiny import llama

def end():
    yield from list(full_weights(llama()))[:8]
    os._exit(9)

write(llama(), end(), Path("start"), Path("out"))
"""


@pytest.mark.slow
def test_a_killed_export_leaves_no_folder_with_the_name_of_the_output(tmp_path: Path) -> None:
    start = save(llama(), tmp_path / "start")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    killed = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, env=environment, check=False)
    assert killed.returncode == 9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.partial", "start"]
    save_model(llama(), start, tmp_path / "out")
    assert torch.equal(logits(tmp_path / "out"), logits(start)) and not (tmp_path / "out.partial").exists()


def test_weights_of_another_model_are_rejected_before_a_file_is_written(tmp_path: Path) -> None:
    start = save(llama(), tmp_path / "start")
    for wrong in (qwen2(), qwen2(hidden_size=32)):
        shapes = weight_shapes(wrong)
        with pytest.raises(ModelError, match="weight"):
            write_model("policy", describe_model(llama()), shapes, full_weights(wrong), start, tmp_path / "out")
    assert not (tmp_path / "out").exists() and describe_tokenizer(start)


@pytest.mark.slow
def test_all_ranks_end_if_the_writer_fails(tmp_path: Path) -> None:
    save(qwen2(), tmp_path / "start")
    (tmp_path / "file").touch()
    run_ranks(fail_together, (tmp_path,), 2)
    errors = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
    assert UserError.__name__ in errors[0] and errors[1] == ""


# Memory.


@pytest.mark.skipif(sys.platform != "linux", reason="reads peak memory from /proc")
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "tp"), [(2, 1), (4, 2)], ids=["fsdp", "tp x fsdp"])
def test_an_export_holds_less_than_two_files(tmp_path: Path, ranks: int, tp: int) -> None:
    model = qwen2(hidden_size=512, intermediate_size=2048, num_hidden_layers=16, vocab_size=4096)
    num_bytes, shard_bytes = 4 * sum(parameter.numel() for parameter in model.parameters()), 24_000_000
    assert num_bytes > 10 * shard_bytes
    save(qwen2(), tmp_path / "small")
    save(model, tmp_path / "large")
    del model
    run_ranks(measure_ranks, (tmp_path, ranks, tp, shard_bytes), ranks)
    grown = int((tmp_path / "grown.txt").read_text())
    assert 0 < grown < 2 * shard_bytes
    expected, exported = read_weights(tmp_path / "large"), read_weights(tmp_path / "out")
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    # The checkpoints of these ranks are exported by one process.
    for name in ("full", "adapted"):
        run_ranks(measure_checkpoint, (tmp_path, name, shard_bytes), 1)
        assert 0 < int((tmp_path / f"{name}.txt").read_text()) < 2 * shard_bytes
        assert len(list((tmp_path / f"exported-large-{name}").glob("*.safetensors"))) > 10
