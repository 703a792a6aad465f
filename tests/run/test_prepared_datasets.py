"""Runs on prepared folders, weighted files, invalid rows, and conversation templates."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from flowrl.cli.main import main
from flowrl.config import DataConfig, ModelConfig, PreferenceActorConfig, PreparationConfig, RewardModelConfig
from flowrl.data.chat import ChatTokenizer, DataError
from flowrl.data.preparation.prepare import prepare
from flowrl.data.template import read_template
from flowrl.run.datasets import SftExamples, read_prompts
from flowrl.run.datasets.prompt_data import read_stream
from flowrl.run.datasets.row_batches import RowBatches
from flowrl.run.datasets.templates import conversation_template, save_template
from flowrl.run.datasets.tokenized_data import read_rows
from flowrl.run.preferences.preference_examples import PreferenceExamples
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train
from recipes.quickstart.prepare import prepare as prepare_quickstart
from recipes.sft.config import SFTConfig
from recipes.sft.train import train as train_sft
from tests.configs import grpo_settings
from tests.errors import rejects
from tests.slow_cases import one_of


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task") / "data"
    prepare_quickstart(folder, seed=0)
    return folder


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ask(question: str, **columns: Any) -> dict[str, Any]:
    return {"messages": [{"from": "human", "content": question}], **columns}


def prepared(path: Path, output: Path, task: Path, **settings: Any) -> Path:
    config = {"files": [path], "tokenizer": task / "model", "output": output, **settings}
    prepare(PreparationConfig.model_validate(config))
    return output


def data_config(train: object, **settings: Any) -> DataConfig:
    return DataConfig.model_validate({"train": train, "max_prompt_tokens": 8, **settings})


def test_a_row_with_a_token_without_an_embedding_is_rejected_with_its_location(task: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    tokenizer.add_tokens(["<i>"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [ask(f"1+{text}") for text in ("1", "1", "<i>")]
    for row in rows:
        row["messages"].append({"from": "assistant", "content": "2"})
    file, model = write(tmp_path / "a.jsonl", *rows), ModelConfig(path=task / "model", tokenizer=tmp_path / "tokenizer")
    with rejects(file, 3, len(tokenizer) - 1, task / "model", error=DataError):
        SftExamples(file, model, max_tokens=8)
    settings = {"files": [file], "tokenizer": tmp_path / "tokenizer", "duplicates": "keep"}
    prepare(PreparationConfig.model_validate(settings | {"output": tmp_path / "out"}))
    with rejects(file, 3, len(tokenizer) - 1, task / "model", error=DataError):
        SftExamples(tmp_path / "out", model, max_tokens=8)
    write(file, *rows[:2])
    assert len(SftExamples(file, model, max_tokens=8)) == 2
    prepare(PreparationConfig.model_validate(settings | {"output": tmp_path / "small"}))
    assert len(SftExamples(tmp_path / "small", model, max_tokens=8)) == 2


def test_a_prepared_folder_has_the_rows_and_the_order_of_its_file(task: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", *(ask(f"{i}+1", answer=str(i + 1), level=i) for i in range(9)))
    folder = prepared(file, tmp_path / "out", task)
    tokenizer = ChatTokenizer(task / "model")
    raw, stored = (read_stream(path, data_config(path), tokenizer, seed=3) for path in (file, folder))
    assert stored.take(20) == raw.take(20) and stored.columns == raw.columns
    assert stored.evaluation_rows(4) == raw.evaluation_rows(4) and stored.location(3) == raw.location(3)
    resumed = read_stream(folder, data_config(folder), tokenizer, seed=3)
    resumed.restore(stored.state())
    assert resumed.take(5) == raw.take(5)
    with rejects("missing", folder, error=DataError):
        read_stream(folder, data_config(folder), tokenizer, seed=3, needs=("missing",))


def test_prepared_examples_equal_those_of_their_file(task: Path, tmp_path: Path) -> None:
    folder = prepared(task / "sft.jsonl", tmp_path / "out", task, duplicates="keep")
    both = [SftExamples(path, ModelConfig(path=task / "model"), max_tokens=16) for path in (task / "sft.jsonl", folder)]
    for raw, stored in zip(*(examples.batches(300, seed=1, shuffle=True, epochs=1) for examples in both), strict=True):
        for name in ("input_ids", "response_mask"):
            assert torch.equal(raw.get(name), stored.get(name))


def test_files_have_weights_and_column_mappings(task: Path, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", *(ask(f"{i}+1") for i in range(4)))
    write(tmp_path / "b.jsonl", *({"q": f"{i}-1", "gold": {"value": i}} for i in range(4)))
    files = [
        {"path": tmp_path / "a.jsonl", "weight": 2},
        {"path": tmp_path / "b.jsonl", "weight": 0.5, "columns": {"prompt": "q", "answer": "gold.value"}},
    ]
    data = data_config(files)
    assert data.files("data") == {
        f"data.train.{i}.path": tmp_path / name for i, name in enumerate(("a.jsonl", "b.jsonl"))
    }
    stream = read_stream(data.training_files, data, ChatTokenizer(task / "model"), seed=0)
    epochs = [stream.take(10), stream.take(10)]
    for rows in epochs:
        assert sorted(row["prompt"] for row in rows if "+" in row["prompt"]) == sorted([f"{i}+1" for i in range(4)] * 2)
    assert sorted(row["answer"] for rows in epochs for row in rows if "-" in row["prompt"]) == [0, 1, 2, 3]


def test_generated_rows_are_mixed_with_a_file_and_resumed(task: Path, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", *(ask(f"{i}+1", answer=str(i + 1), data_source="sums") for i in range(4)))
    generated = {"reasoning_gym": {"chain_sum": 1, "leg_counting": 1}, "rows": 6, "weight": 2}
    data = data_config([{"path": tmp_path / "a.jsonl"}, generated], max_prompt_tokens=4000)
    tokenizer = ChatTokenizer(task / "model")
    stream = read_stream(data.training_files, data, tokenizer, seed=0, needs=("answer",))
    epoch = stream.take(16)
    assert sum(row["data_source"] == "reasoning_gym" for row in epoch) == 12
    resumed = read_stream(data.training_files, data, tokenizer, seed=0)
    resumed.restore(stream.state())
    assert resumed.take(20) == stream.take(20)


def test_invalid_and_long_rows_are_dropped_and_reported(
    task: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "a.jsonl", ask("1+1"), ask(""), ask("123456789+1"), ask("2+2"))
    tokenizer = ChatTokenizer(task / "model")
    with rejects("2", file, error=DataError):
        read_stream(file, data_config(file), tokenizer, seed=0)
    loose = data_config(file, strict=False, too_long="drop")
    rows = read_stream(file, loose, tokenizer, seed=0).evaluation_rows()
    assert [row["prompt"] for row in rows] == ["1+1", "2+2"]
    assert any("empty_turn 1" in record.getMessage() for record in caplog.records)


def test_a_folder_of_another_kind_or_with_long_rows_is_rejected(
    task: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "a.jsonl", ask("1+1"), ask("11+11"))
    folder = prepared(file, tmp_path / "out", task)
    tokenizer = ChatTokenizer(task / "model")
    with rejects("prompts", "sft", folder, error=DataError):
        SftExamples(folder, ModelConfig(path=task / "model"), max_tokens=16)
    with rejects("6", "4", folder, error=DataError):
        read_stream(folder, data_config(folder, max_prompt_tokens=4), tokenizer, seed=0)
    short = read_stream(folder, data_config(folder, max_prompt_tokens=4, too_long="drop"), tokenizer, seed=0)
    assert [row["prompt"] for row in short.evaluation_rows()] == ["1+1"] and "1 of 2 rows dropped" in caplog.text
    with rejects(folder, 3, "data.max_prompt_tokens", error=DataError):
        read_stream(folder, data_config(folder, max_prompt_tokens=3, too_long="drop"), tokenizer, seed=0)


def any_score(response: str) -> float:
    return 0.0


def test_the_stop_ids_of_a_template_reach_the_rollout_and_the_saved_model(task: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", ask("1+1"))
    template = tmp_path / "t.json"
    jinja = "{% for m in messages %}{{ m.content }}{{ '-=' if m.role == 'assistant' else '=' }}{% endfor %}"
    template.write_text(json.dumps({"chat_template": jinja, "end_of_assistant": "-=", "stop_ids": [[13, 14]]}))
    data = {"train": file, "max_prompt_tokens": 8, "template": template}
    settings = grpo_settings(model=task / "model", reward={"function": f"{__name__}:any_score"}, data=data)
    config = GRPOConfig.model_validate(settings)
    assert config.rollout.template == template
    read_prompts(config)
    saved = tmp_path / "saved"
    saved.mkdir()
    save_template(conversation_template(config), saved)
    assert json.loads((saved / "conversation_template.json").read_text())["stop_ids"] == [[13, 14]]
    assert (saved / "chat_template.jinja").read_text() == jinja
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"end_of_assistant": "<eos>"}))
    with rejects("rollout.template", other, 13, 14, error=DataError):
        read_prompts(GRPOConfig.model_validate(settings | {"rollout": settings["rollout"] | {"template": other}}))
    template.write_text(json.dumps({"chat_template": jinja, "stop_ids": [[13, 99999]]}))
    with rejects(template, 99999, error=DataError):
        read_prompts(GRPOConfig.model_validate(settings))


def test_stop_ids_of_the_model_that_rollouts_lack_are_rejected_with_its_folder(task: Path, tmp_path: Path) -> None:
    model = copytree(task / "model", tmp_path / "model")
    (model / "conversation_template.json").write_text(json.dumps({"stop_ids": [[13, 14]]}))
    template = tmp_path / "t.json"
    template.write_text("{}")
    file = write(tmp_path / "a.jsonl", ask("1+1"))
    settings = grpo_settings(
        model=model,
        reward={"function": f"{__name__}:any_score"},
        data={"train": file, "max_prompt_tokens": 8},
        rollout={"max_response_tokens": 8, "template": template},
    )
    with rejects("rollout.template", template, model, 13, 14, error=DataError):
        read_prompts(GRPOConfig.model_validate(settings))


@pytest.mark.slow
def test_a_template_replaces_the_missing_chat_template_of_a_base_model(task: Path, tmp_path: Path) -> None:
    model = copytree(task / "model", tmp_path / "model")
    jinja = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").unlink()
    template = tmp_path / "template.json"
    template.write_text(json.dumps({"chat_template": jinja}))
    file = write(tmp_path / "a.jsonl", ask("1+1"), ask("2+2"))
    sizes = {"batch_size": 4, "minibatch_size": 4, "samples_per_prompt": 2, "steps": 1}
    reward = {"function": f"{__name__}:any_score"}

    def config(**data: Any) -> GRPOConfig:
        data = {"train": file, "max_prompt_tokens": 8, **data}
        settings = grpo_settings(model=model, output=tmp_path / "run", reward=reward, data=data, **sizes)
        return GRPOConfig.model_validate(settings)

    with rejects("chat_template", model, error=DataError):
        read_prompts(config())
    assert train(config(template=template))["steps"] == 1
    assert (tmp_path / "run" / "model" / "chat_template.jinja").read_text() == jinja


@pytest.mark.parametrize("has_file", one_of(True, False))
def test_checkpoints_and_exports_contain_the_template(has_file: bool, task: Path, tmp_path: Path) -> None:
    template, run = tmp_path / "t.json", tmp_path / "run"
    template.write_text(json.dumps({"system_message": "1"}))
    data = {"train": task / "sft.jsonl", "max_prompt_tokens": 24, "template": template if has_file else None}
    actor = {"model": {"path": task / "model", "dtype": "float32"}, "optimizer": {"lr": 1e-3}}
    sizes = {"batch_size": 4, "steps": 1, "checkpoint": {"every": 1}}
    placement = {"device": "cpu", "pools": {"main": [1]}, "roles": {"actor": "main"}}
    settings = {"actor": actor, "data": data, "placement": placement, "output": run, "backend": "inline", **sizes}
    train_sft(SFTConfig.model_validate(settings))
    assert main(["export", str(run)]) == 0
    saved = {read_template(path) for path in run.rglob("conversation_template.json")}
    (path,) = run.glob("checkpoints/*/conversation_template.json")
    assert saved == {read_template(path)} and len(list(run.rglob("conversation_template.json"))) == 3
    (values,) = saved
    assert values.chat_template == (task / "model/chat_template.jinja").read_text()
    expected = ("1" if has_file else None, "<eos>", ((1,),))
    assert (values.system_message, values.end_of_assistant, values.stop_ids) == expected
    assert "conversation_template.json" in json.loads((path.parent / "manifest.json").read_text())["files"]


@pytest.mark.parametrize("kind", ["preference", "kto"])
def test_prepared_preferences_equal_those_of_their_file(kind: str, task: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": f"{i}+1", "chosen": f"{i + 1}", "rejected": f"{i}", "margin": i / 2} for i in range(5)]
    file = write(tmp_path / "a.jsonl", *pairs)
    folder = prepared(file, tmp_path / "out", task, kind=kind)
    loss = "dpo" if kind == "preference" else "kto"
    role = PreferenceActorConfig.model_validate(
        {"model": {"path": task / "model"}, "optimizer": {"lr": 1}, "loss": loss}
    )
    both = [PreferenceExamples.read(data_config(path, max_prompt_tokens=16), role)[0] for path in (file, folder)]
    assert len(both[0]) == len(both[1]) == (5 if kind == "preference" else 10)
    raw, stored = (examples.batch() for examples in both)
    for name in ("input_ids", "response_mask", *(("margin", "pair") if kind == "preference" else ("desirable",))):
        assert torch.equal(raw.get(name), stored.get(name))


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_weight_without_a_row_is_rejected(is_prepared: bool, task: Path, tmp_path: Path) -> None:
    one, two = (write(tmp_path / f"{name}.jsonl", *(ask(f"{name}+{i}") for i in range(4))) for name in "12")
    paths = [prepared(path, tmp_path / path.stem, task) for path in (one, two)] if is_prepared else [one, two]
    files = [{"path": paths[0]}, {"path": paths[1], "weight": 0.1}]
    data, tokenizer = data_config(files), ChatTokenizer(task / "model")
    with rejects(paths[1], 0.1, 4, 0.25, error=DataError):
        read_stream(data.training_files, data, tokenizer, seed=0)
    pairs = [write(tmp_path / f"p{i}.jsonl", {"prompt": "1", "chosen": "2", "rejected": "3"}) for i in range(2)]
    files = [{"path": path, "weight": weight} for path, weight in zip(pairs, (1, 0.5), strict=True)]
    data = data_config(files, max_prompt_tokens=16)
    with rejects(pairs[1], 0.5, error=DataError):
        read_rows(data.training_files, tokenizer, "preference", data)


@pytest.mark.parametrize("weight", [1.0, 1.5])
def test_skipped_batches_read_no_rows(weight: float, task: Path, tmp_path: Path) -> None:
    rows = ({"prompt": f"{i}+1", "completion": str(i + 1)} for i in range(11))
    folder = prepared(write(tmp_path / "a.jsonl", *rows), tmp_path / "out", task)
    data = data_config([{"path": folder, "weight": weight}], max_prompt_tokens=16)
    examples = SftExamples(data.training_files, ModelConfig(path=task / "model"), max_tokens=16)
    complete = [batch.get("input_ids").tolist() for batch in examples.batches(3, seed=1, shuffle=True, epochs=3)]
    for skipped in range(len(complete) + 2):
        stream = examples.batches(3, seed=1, shuffle=True, epochs=3)
        stream.skip(skipped)
        assert [batch.get("input_ids").tolist() for batch in stream] == complete[skipped:]
    read: list[int] = []
    stream = RowBatches(examples.order(seed=1), 3, lambda indices: read.extend(indices) or examples.batch(indices))
    stream.skip(10**9)
    assert read == []
    next(stream)
    assert 0 < len(read) <= 3


def test_dropped_prompts_are_counted_with_their_reasons(
    task: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = tmp_path / "t.json"
    refuses = "{{ raise_exception('no') if messages[0].content == '9' else messages[0].content }}"
    template.write_text(json.dumps({"chat_template": refuses, "end_of_assistant": "<eos>"}))
    file = write(tmp_path / "a.jsonl", ask("1+1"), ask("1" * 20), ask("9"))
    tokenizer = ChatTokenizer(task / "model", template)
    data = data_config(file, too_long="drop", strict=False)
    prompts = read_stream(data.training_files, data, tokenizer, seed=0)
    assert [row["prompt"] for row in prompts.evaluation_rows()] == ["1+1"]
    assert f"too_long 1 (first: {file}, line 2" in caplog.text and f"template 1 (first: {file}, line 3" in caplog.text
    with rejects(file, 3, error=DataError):
        read_stream(data.training_files, data_config(file, too_long="drop"), tokenizer, seed=0)


def test_weights_repeat_pairs_in_an_epoch(task: Path, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", *({"prompt": f"{i}+1", "chosen": "2", "rejected": "3"} for i in range(2)))
    data = data_config([{"path": tmp_path / "a.jsonl", "weight": 2}], max_prompt_tokens=16)
    role = RewardModelConfig.model_validate({"model": {"path": task / "model"}, "optimizer": {"lr": 1}})
    examples, _ = PreferenceExamples.read(data, role)
    assert (len(examples), examples.num_rows) == (4, 2)
    assert [len(batch) for batch in examples.batches(3, seed=0, shuffle=True, epochs=1)] == [6, 2]
