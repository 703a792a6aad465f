"""Checks of a run's data and tokenizers before anything starts."""

import json
from pathlib import Path
from shutil import copytree

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flowrl.config import DataConfig, ModelConfig
from flowrl.data.chat import ChatTokenizer, DataError
from flowrl.data.reading.reader import count_rows
from flowrl.rewards.reward_function import RewardError
from flowrl.run.datasets import SftExamples, read_prompts
from flowrl.run.datasets.prompt_data import read_stream
from flowrl.run.datasets.tokenized_data import find_unknown, read_files
from recipes.grpo.config import GRPOConfig
from recipes.quickstart.prepare import save_tokenizer
from tests.configs import grpo_settings
from tests.errors import missing_facts, rejects
from tests.small_task import prepare_small


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("datasets") / "data"
    prepare_small(folder)
    return folder


def config_with_reward_model(data: Path, reward_model: Path) -> GRPOConfig:
    settings = grpo_settings(model=data / "model", reward={"model": {"path": reward_model}, "head": "fresh"})
    return GRPOConfig.model_validate(
        settings | {"data": {"train": next(data.glob("*train*")), "max_prompt_tokens": 32}}
    )


def needs_answer(prompt: str, response: str, answer: str, **columns: object) -> float:
    return 0.0


def needs_level(prompt: str, response: str, conversation: list, level: int, answer: str | None = None) -> float:
    return 0.0


def needs_nothing(prompt: str, response: str, **columns: object) -> float:
    return 0.0


def with_defaults(response: str, answr: str = "", level: int = 1) -> float:
    return 0.0


def with_options(response: str, answer: str = "", *, scale: float = 1.0) -> float:
    return 0.0


def needs_advantages(prompt: str, response: str, advantages: float, **columns: object) -> float:
    return 0.0


def only_columns(response: str, answer: str, difficulty: int) -> float:
    return 0.0


def lines(file: Path, *contents: str, **columns: object) -> Path:
    rows = [{"messages": [{"from": "human", "content": content}]} | columns for content in contents]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def config_with_reward(data: Path, train: Path, test: Path | None = None, **reward: str) -> GRPOConfig:
    files = {"train": train, "test": test, "max_prompt_tokens": 32}
    reward = {key: f"{__name__}:{function}" for key, function in reward.items()}
    return GRPOConfig.model_validate(grpo_settings(model=data / "model", reward=reward, data=files))


def test_a_run_ignores_the_listed_keys_of_turns(tmp_path: Path) -> None:
    turns = [{"role": role, "content": role, "language": "en"} for role in ("user", "assistant")]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    data = DataConfig(train=tmp_path / "a.jsonl", max_prompt_tokens=8, ignored_message_keys=("language",))
    (row,), _ = read_files(data.training_files, data, "sft")
    assert [message.content for message in row.messages] == ["user", "assistant"]
    assert count_rows(data.training_files, ignored_message_keys=data.ignored_message_keys) == 1
    assert count_rows(data.training_files) == 0


def test_a_row_without_a_column_of_the_reward_function_is_rejected(data: Path, tmp_path: Path) -> None:
    answered, unanswered = lines(tmp_path / "a", "1+1", answer="2"), lines(tmp_path / "b", "1+1", "2+2")
    with rejects("answer", unanswered, 1, error=DataError):
        read_prompts(config_with_reward(data, unanswered, function="needs_answer"))
    with rejects("answer", unanswered, 1, error=DataError):
        read_prompts(config_with_reward(data, answered, unanswered, function="needs_answer"))
    with rejects("level", answered, 1, error=DataError):
        read_prompts(config_with_reward(data, answered, function="needs_level"))
    with rejects("answer", unanswered, 1, error=DataError):
        read_prompts(
            config_with_reward(data, unanswered, unanswered, function="needs_nothing", evaluation="needs_answer")
        )


def test_a_reward_function_that_requires_a_column_of_the_run_is_rejected(data: Path, tmp_path: Path) -> None:
    with rejects("needs_advantages", "advantages", error=RewardError):
        read_prompts(config_with_reward(data, lines(tmp_path / "a", "1+1"), function="needs_advantages"))


def test_a_reward_function_may_name_only_the_columns_that_it_needs(data: Path, tmp_path: Path) -> None:
    read_prompts(
        config_with_reward(data, lines(tmp_path / "a", "1+1", answer="2", difficulty=1), function="only_columns")
    )
    file = lines(tmp_path / "b", "1+1", answer="2", level=1)
    with rejects("difficulty", file, 1, "answer", "level", "response", error=DataError):
        read_prompts(config_with_reward(data, file, function="only_columns"))


def test_a_reward_function_without_required_columns_reads_rows_without_answers(data: Path, tmp_path: Path) -> None:
    train, _ = read_prompts(config_with_reward(data, lines(tmp_path / "b", "1+1", "2+2"), function="needs_nothing"))
    assert [row["answer"] for row in train.take(2)] == [None, None]


def test_a_parameter_with_a_default_and_without_a_column_is_reported(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train, test = lines(tmp_path / "a", "1+1", level=1), lines(tmp_path / "b", "1+1", level=1, answr="2")
    read_prompts(config_with_reward(data, train, test, function="with_defaults"))
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("flowrl.run.datasets")]
    assert not missing_facts(message, "with_defaults", "answr", train, "answer", "level", "response")


@pytest.mark.parametrize(
    "function", [f"{__name__}:with_options", "flowrl.rewards.math:score", "flowrl.rewards.gsm8k:score"]
)
def test_options_of_a_reward_function_are_not_reported(
    function: str, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = {"train": lines(tmp_path / "a", "1+1", answer="2"), "max_prompt_tokens": 32}
    settings = grpo_settings(model=data / "model", reward={"function": function}, data=files)
    read_prompts(GRPOConfig.model_validate(settings))
    assert not [record for record in caplog.records if record.name.startswith("flowrl.run.datasets")]


@pytest.mark.slow
def test_reasoning_gym_scores_its_own_rows_without_a_warning(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"min_terms": 2, "max_terms": 2, "max_digits": 1, "allow_parentheses": False, "allow_negation": False}
    rows = {"reasoning_gym": {"basic_arithmetic": {"options": options}}, "rows": 2}
    files = {"train": [rows], "test": [rows | {"split": "test"}], "max_prompt_tokens": 48}
    reward = {"function": "flowrl.rewards.reasoning_gym:score"}
    read_prompts(GRPOConfig.model_validate(grpo_settings(model=data / "model", reward=reward, data=files)))
    assert not [record for record in caplog.records if record.name == "flowrl.run.datasets.reward_columns"]


@pytest.mark.parametrize(("num_known", "is_reported"), [(95, True), (600, False)])
def test_more_than_one_percent_of_unknown_tokens_is_reported(
    num_known: int, is_reported: bool, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    contents = [*(["1"] * num_known), "é+ü", "1é"]
    read_prompts(config_with_reward(data, lines(tmp_path / "a", *contents), function="needs_nothing"))
    examples = tmp_path / "sft"
    rows = [[{"from": "human", "content": text}, {"from": "assistant", "content": "2"}] for text in contents]
    examples.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    SftExamples(examples, ModelConfig(path=data / "model"), max_tokens=16)
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("flowrl.run.datasets")]
    assert len(messages) == 2 * is_reported
    for message, file in zip(messages, (tmp_path / "a", examples), strict=False):
        assert not missing_facts(message, file, num_known + 1, data / "model")
        assert "'é', 'ü'" in message


def test_dropped_characters_are_unknown_and_white_space_is_not(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    known, partly, none = find_unknown(ChatTokenizer(tmp_path), ["37+58", "37 é 5", "xy"])
    assert (known.num_tokens, known.parts) == (5, ())
    assert (partly.num_tokens, partly.parts) == (4, ("é",))
    assert (none.num_tokens, none.parts) == (2, ("x", "y"))


def test_characters_that_become_the_unknown_token_are_unknown(tmp_path: Path) -> None:
    core = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    saved = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", eos_token="</s>", chat_template="{{ messages[0]['content'] }}"
    )
    saved.save_pretrained(tmp_path)
    (unknown,) = find_unknown(ChatTokenizer(tmp_path), ["aéa"])
    assert (unknown.num_tokens, unknown.parts) == (3, ("é",))


def test_unknown_words_of_known_characters_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "b": 3, "ab": 4}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="</s>", chat_template=template
    ).save_pretrained(tmp_path)
    data = DataConfig(train=lines(tmp_path / "a", "ab a", "b ba"), max_prompt_tokens=32)
    read_stream(data.train, data, ChatTokenizer(tmp_path), seed=0)
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("flowrl.run.datasets")]
    assert not missing_facts(message, 2) and "'ba'" in message


def test_a_reward_model_with_the_actors_vocabulary_is_accepted(data: Path, tmp_path: Path) -> None:
    folder = copytree(data / "model", tmp_path / "reward")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=4))  # other bytes, same vocabulary
    read_prompts(config_with_reward_model(data, folder))


def test_a_reward_model_with_another_vocabulary_needs_a_chat_template(data: Path, tmp_path: Path) -> None:
    folder = copytree(data / "model", tmp_path / "reward")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [token for token in vocabulary if token.isdigit()][:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    read_prompts(config_with_reward_model(data, folder))  # the text is rendered again
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match=r"reward\.model\.path"):
        read_prompts(config_with_reward_model(data, folder))


def test_a_reward_model_without_a_tokenizer_is_rejected(data: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"reward\.model\.path"):
        read_prompts(config_with_reward_model(data, tmp_path))


def test_every_evaluation_file_is_read_and_named(data: Path, tmp_path: Path) -> None:
    test, hard = lines(tmp_path / "test", "1+1", "2+2", "3+3"), lines(tmp_path / "hard", "4+4")
    files = {"train": data / "train.jsonl", "test": test, "tests": {"hard": hard}, "max_prompt_tokens": 32}
    settings = grpo_settings(model=data / "model", reward={"function": "tests.run.test_datasets:needs_nothing"})
    _, held_out = read_prompts(GRPOConfig.model_validate(settings | {"data": files | {"evaluation_rows": 2}}))
    assert {name: len(prompts) for name, prompts in held_out.items()} == {"": 2, "hard": 1}
    (prompt,) = held_out["hard"].get("prompt")
    assert "4+4" in prompt
    broken = lines(tmp_path / "broken", "7" * 99)
    with rejects(broken, 1, "data.max_prompt_tokens", "data.too_long", error=DataError):
        read_prompts(
            GRPOConfig.model_validate(settings | {"data": files | {"tests": {"hard": hard, "broken": broken}}})
        )


def test_every_evaluation_file_of_examples_is_read_and_named(data: Path) -> None:
    file = data / "sft.jsonl"
    files = {"train": file, "test": file, "tests": {"again": {"files": file, "rows": 2}}, "max_prompt_tokens": 32}
    examples, held_out = SftExamples.read(
        DataConfig.model_validate(files | {"evaluation_rows": 3}), ModelConfig(path=data / "model")
    )
    assert len(examples) > 3 and {name: len(rows) for name, rows in held_out.items()} == {"": 3, "again": 2}


def test_examples_come_once_per_epoch(data: Path) -> None:
    examples = SftExamples(data / "sft.jsonl", ModelConfig(path=data / "model"), max_tokens=16)
    batches = list(examples.batches(300, seed=1, shuffle=True, epochs=1))
    assert sum(len(batch) for batch in batches) == len(examples) == 2000
    assert len(batches[-1]) == 200
    first, second = (next(examples.batches(2000, seed=s, shuffle=True)).get("input_ids") for s in (1, 2))
    assert not torch.equal(first, second) and torch.equal(first.sort().values, second.sort().values)
