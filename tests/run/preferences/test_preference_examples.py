"""Batches of pairs and labeled responses, and the inputs of their losses."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch

from flowrl import Batch, Cluster, Placement
from flowrl.config import DataConfig, ModelConfig, OptimizerConfig, PreferenceActorConfig, ReferenceConfig
from flowrl.data.chat import ChatTokenizer, DataError
from flowrl.run.datasets.tokenized_data import read_rows
from flowrl.run.preferences.preference_examples import PreferenceExamples
from flowrl.run.preferences.preference_inputs import preference_inputs
from flowrl.workers import Actor, Reference
from recipes.quickstart.prepare import prepare
from tests.engines.closeness import FLOAT64_RTOL
from tests.errors import rejects


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


Row = dict[str, Any]
Reader = Callable[..., PreferenceExamples]

PAIRS: list[Row] = [
    {"prompt": [user("1+1")], "chosen": [assistant("2")], "rejected": [assistant("11")], "margin": 0.5},
    {
        "prompt": [user("2+2"), assistant("4"), user("3+3")],
        "chosen": [assistant("6")],
        "rejected": [assistant("7")],
        "margin": 1.5,
    },
    {
        "prompt": [user("5")],
        "chosen": [assistant("1"), user("2"), assistant("345")],
        "rejected": [assistant("1")],
        "margin": 0.0,
    },
]
ANSWERS: list[Row] = [{"prompt": f"{n}", "completion": f"{n}" * n, "label": n % 2 == 0} for n in range(1, 6)]

DIGITS = ("11", "22", "33", "44")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples") / "data"
    prepare(folder, seed=0)
    return folder / "model"


@pytest.fixture
def read(folder: Path, tmp_path: Path) -> Reader:
    """Returns a function that writes rows to a file and reads them."""

    def read_file(rows: list[Row], *, max_tokens: int, model: Path = folder) -> PreferenceExamples:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        is_paired = "chosen" in rows[0]
        data = DataConfig(train=path, max_prompt_tokens=max_tokens)
        tokens = read_rows(path, ChatTokenizer(model), "preference" if is_paired else "kto", data)
        return PreferenceExamples(tokens, is_paired=is_paired, max_tokens=max_tokens)

    return read_file


def texts(batch: Batch, tokenizer: ChatTokenizer) -> list[tuple[str, str]]:
    """Returns the text of each row, and the part that is trained."""
    lengths = batch.lengths().tolist()
    ids, masks = batch.get("input_ids").split(lengths), batch.get("response_mask").split(lengths)
    decode = tokenizer.tokenizer.decode
    return [(str(decode(row)), str(decode(row[mask]))) for row, mask in zip(ids, masks, strict=True)]


def test_only_the_last_turn_is_trained_and_a_row_ends_with_its_end_token(folder: Path, read: Reader) -> None:
    tokenizer = ChatTokenizer(folder)
    batch = read(PAIRS, max_tokens=64).batch()
    assert texts(batch, tokenizer) == [
        ("1+1=2<eos>", "2<eos>"),
        ("1+1=11<eos>", "11<eos>"),
        ("2+2=4<eos>3+3=6<eos>", "6<eos>"),
        ("2+2=4<eos>3+3=7<eos>", "7<eos>"),
        ("5=1<eos>2=345<eos>", "345<eos>"),
        ("5=1<eos>", "1<eos>"),
    ]
    assert batch.get("pair").tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.get("margin").tolist() == [0.5, 0.5, 1.5, 1.5, 0.0, 0.0]


def test_tokens_after_the_end_token_are_dropped(folder: Path, read: Reader, tmp_path: Path) -> None:
    copy = copytree(folder, tmp_path / "model")
    template = (copy / "chat_template.jinja").read_text()
    assert "{% endfor %}" in template
    (copy / "chat_template.jinja").write_text(template.replace("eos_token", "eos_token + '+'"))
    tokenizer = ChatTokenizer(copy)
    batch = read(PAIRS[:1], max_tokens=64, model=copy).batch()
    assert texts(batch, tokenizer) == [("1+1=2<eos>", "2<eos>"), ("1+1=11<eos>", "11<eos>")]


def test_mismatched_rows_have_the_response_of_the_next_row(folder: Path, read: Reader) -> None:
    tokenizer = ChatTokenizer(folder)
    examples = read(ANSWERS, max_tokens=8)
    batch = examples.batch(np.array([2, 0, 1]))
    assert texts(batch, tokenizer) == [
        ("3=333<eos>", "333<eos>"),
        ("1=1<eos>", "1<eos>"),
        ("2=22<eos>", "22<eos>"),
        ("3=1<eos>", "1<eos>"),
        ("1=22<eos>", "22<eos>"),
        ("2=333<eos>", "333<eos>"),
    ]
    assert batch.get("mismatched").tolist() == [False] * 3 + [True] * 3
    assert batch.get("desirable").tolist() == [False, False, True] * 2


def test_a_batch_of_one_response_is_mismatched_with_the_next_row_of_the_file(folder: Path, read: Reader) -> None:
    tokenizer = ChatTokenizer(folder)
    examples = read(ANSWERS[:3], max_tokens=8)
    assert texts(examples.batch(np.array([2])), tokenizer)[1] == ("3=1<eos>", "1<eos>")


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ([0, 1, 2, 3], ["33", "33", "11", "11"]),  # the answers to each prompt are adjacent
        ([2, 0, 3, 1], ["11", "44", "22", "33"]),
        ([0, 0, 2, 0], ["33", "33", "11", "33"]),  # row 0 has a weight of 3
        ([0, 1], ["33", "33"]),  # no other prompt in the step
        ([3], ["11"]),
    ],
)
def test_a_mismatched_row_has_the_response_to_another_prompt(
    folder: Path, read: Reader, order: list[int], expected: list[str]
) -> None:
    rows = [{"prompt": prompt, "completion": text, "label": True} for prompt, text in zip("5566", DIGITS, strict=True)]
    batch = read(rows, max_tokens=8).batch(np.array(order))
    mismatched = texts(batch, ChatTokenizer(folder))[len(order) :]
    assert mismatched == [
        (f"{rows[index]['prompt']}={text}<eos>", f"{text}<eos>") for index, text in zip(order, expected, strict=True)
    ]


def test_responses_to_one_prompt_only_are_rejected(read: Reader) -> None:
    with rejects(1, "prompt", error=DataError):
        read([{"prompt": "5", "completion": text, "label": True} for text in DIGITS], max_tokens=8)


def test_a_mismatched_row_has_at_most_the_allowed_tokens(folder: Path, read: Reader) -> None:
    tokenizer = ChatTokenizer(folder)
    long = {"prompt": "123", "completion": "1", "label": True}
    examples = read([long, ANSWERS[3]], max_tokens=7)
    assert texts(examples.batch(), tokenizer)[2] == ("123=444", "444")


def test_a_row_that_is_too_long_and_too_few_responses_are_rejected(read: Reader) -> None:
    with rejects(2, 12, 11, "data.max_prompt_tokens", error=DataError):
        read(PAIRS, max_tokens=11)
    with rejects(1, error=DataError):
        read(ANSWERS[:1], max_tokens=12)


def test_every_pair_is_in_one_batch_of_an_epoch(folder: Path, read: Reader) -> None:
    examples = read(PAIRS, max_tokens=64)
    batches = list(examples.batches(2, seed=1, shuffle=True, epochs=2))
    assert [len(batch) for batch in batches] == [4, 2, 4, 2]
    margins = [batch.get("margin").tolist()[::2] for batch in batches]
    assert sorted(margins[0] + margins[1]) == sorted(margins[2] + margins[3]) == [0.0, 0.5, 1.5]


def test_a_margin_in_some_rows_only_is_rejected(read: Reader) -> None:
    with rejects(2, "margin", error=DataError):
        read([PAIRS[0], {name: value for name, value in PAIRS[1].items() if name != "margin"}], max_tokens=64)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    placement = Placement(pools={"main": [1]}, roles=dict.fromkeys(("actor", "reference"), "main"))
    with Cluster(placement, backend="inline", num_threads=1) as started:
        yield started


def test_the_inputs_of_kto_are_computed_over_the_whole_batch(folder: Path, read: Reader, cluster: Cluster) -> None:
    model = ModelConfig(path=folder, dtype="float64")
    settings: dict[str, Any] = {"model": model, "optimizer": OptimizerConfig(lr=0.01), "loss": "kto"}
    actor = cluster.group("actor", Actor, PreferenceActorConfig.model_validate(settings))
    reference = cluster.group("reference", Reference, ReferenceConfig(model=model))
    examples = read(ANSWERS, max_tokens=16)
    estimates = []
    for _ in range(3):
        batch = examples.batch()
        inputs = preference_inputs(batch, actor, reference)
        assert "mismatched" not in inputs and len(inputs) == 5
        ratio = actor.response_logprobs(batch).get("response_logprobs") - batch.get("ref_response_logprobs")
        expected = ratio[5:].mean().clamp(min=0).item()
        assert inputs.get("reference_kl").tolist() == pytest.approx([expected] * 5, rel=FLOAT64_RTOL, abs=1e-12)
        estimates.append(expected)
        actor.update(batch.rows(slice(5, None)), raise_all).get()
    assert estimates[0] == pytest.approx(0, abs=1e-9) and estimates[2] > 0


def raise_all(logprobs: torch.Tensor) -> torch.Tensor:
    """A loss that raises the probability of every response."""
    return -logprobs
