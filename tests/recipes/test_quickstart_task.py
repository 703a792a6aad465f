import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from flowrl.data.chat import ChatTokenizer, Message
from flowrl.data.prompts import PromptStream, read_conversations
from recipes.quickstart.prepare import main, prepare
from recipes.quickstart.task import Problem, deal, exact, score


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("quickstart") / "data"
    prepare(output, seed=0)
    return output


def test_no_problem_is_in_two_sets() -> None:
    problems = deal(seed=0)
    sets = (problems.examples, problems.prompts, problems.held_out)
    assert sum(len(part) for part in sets) == len(set().union(*sets)) == 16_200
    assert len(problems.held_out) >= 1_000


def test_the_same_seed_generates_the_same_problems() -> None:
    assert deal(seed=1) == deal(seed=1)
    assert deal(seed=1) != deal(seed=2)


def test_answers_are_correct() -> None:
    assert Problem(37, "+", 85).answer == "122"
    assert Problem(37, "-", 85).answer == "-48"
    assert Problem(37, "-", 85).prompt == "37-85"


@pytest.mark.parametrize(
    ("response", "expected"),
    [("122", 1.0), ("123", 1 / 3), ("12", 1 / 3), ("1222", 0.375), ("", 0.0), ("221", 1 / 6)],
)
def test_the_reward_is_half_the_share_of_correct_characters_and_half_an_exact_match(
    response: str, expected: float
) -> None:
    assert score("37+85", response, "122", data_source="sums") == pytest.approx(expected)


def test_the_evaluation_reward_requires_an_exact_match() -> None:
    assert [exact("37+85", response, "122") for response in ("122", "12", "1222")] == [1.0, 0.0, 0.0]


def test_prepared_files_are_read_as_prompts_and_examples(folder: Path) -> None:
    assert len(read_conversations(folder / "sft.jsonl", last="assistant")) == 2_000
    assert len(read_conversations(folder / "train.jsonl", last="user", needs=("answer",))) == 13_000
    held_out = read_conversations(folder / "test.jsonl", last="user", needs=("answer",))
    assert [c.messages[0].content for c in held_out] == [problem.prompt for problem in deal(0).held_out]


def test_a_prompt_is_six_tokens_and_an_example_ends_with_the_end_token(folder: Path) -> None:
    tokenizer = ChatTokenizer(folder / "model")
    ids, mask = tokenizer.encode_example([Message("user", "37-85"), Message("assistant", "-48")])
    assert tokenizer.tokenizer.convert_ids_to_tokens(ids) == [*"37-85=-48", "<eos>"]
    assert mask == [False] * 6 + [True] * 4
    assert tokenizer.decode(ids[6:]) == "-48"


def test_a_stream_over_the_prepared_prompts_returns_rows(folder: Path) -> None:
    stream = PromptStream(
        read_conversations(folder / "train.jsonl"), ChatTokenizer(folder / "model"), seed=0, max_prompt_tokens=6
    )
    assert {len(row["prompt_ids"]) for row in stream.take(100)} == {6}


def test_the_prepared_model_fits_its_tokenizer(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert model(input_ids=torch.tensor([[2, 3]])).logits.shape == (1, 2, len(ChatTokenizer(folder / "model")))


def test_preparing_again_with_the_same_seed_does_nothing(folder: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    assert not prepare(folder, seed=0)
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == before


def test_preparing_twice_writes_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    prepare(tmp_path / "again", seed=0)
    for file in (file for file in folder.rglob("*") if file.is_file()):
        assert file.read_bytes() == (tmp_path / "again" / file.relative_to(folder)).read_bytes(), file.name


def test_preparing_another_seed_in_the_same_folder_is_rejected(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--output", str(folder), "--seed", "1"]) == 2
    assert "seed 1" in capsys.readouterr().err
    assert json.loads((folder / "prepared.json").read_text())["seed"] == 0
