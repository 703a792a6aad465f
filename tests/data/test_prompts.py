import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flowrl.config import DifficultyConfig
from flowrl.data.batch.batch import Batch
from flowrl.data.chat import ChatTokenizer, DataError, Message
from flowrl.data.messages import Conversation
from flowrl.data.prompts import PromptStream, read_conversations, tokenize_prompts
from flowrl.data.template import ConversationTemplate
from recipes.quickstart.prepare import save_tokenizer
from tests.errors import rejects

NO_TWO = ConversationTemplate("{{ messages[0].content if messages[0].content != '2' else raise_exception('') }}")
"""Rejects the message 2."""

ASK = {"messages": [{"from": "human", "content": "1+1"}], "answer": "2"}


def write(folder: Path, *lines: Any) -> Path:
    file = folder / "data.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return ChatTokenizer(folder)


def stream(tokenizer: ChatTokenizer, num_prompts: int = 5, *, seed: int = 0, **settings: Any) -> PromptStream:
    conversations = [
        Conversation((Message("user", f"{n}+1"),), {"answer": str(n + 1)}, Path("sums"), n) for n in range(num_prompts)
    ]
    return PromptStream(conversations, tokenizer, seed=seed, max_prompt_tokens=8, **settings)


def prompts(rows: list[dict[str, Any]]) -> list[str]:
    return [row["prompt"] for row in rows]


def test_both_names_of_a_role_are_read(tmp_path: Path) -> None:
    turns = [
        {"from": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"from": "assistant", "content": "a"},
    ]
    conversation = read_conversations(write(tmp_path, {"messages": turns}))[0]
    assert [message.role for message in conversation.messages] == ["system", "user", "assistant"]


def test_other_keys_become_columns(tmp_path: Path) -> None:
    conversation = read_conversations(write(tmp_path, ASK, {**ASK, "data_source": "sums"}))[1]
    assert conversation.columns == {"answer": "2", "data_source": "sums"}
    assert conversation.location == f"{tmp_path / 'data.jsonl'}, line 2"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("", "empty"),
        ('{"messages": [', "column 15"),
        ([1], '"messages"'),
        ({"messages": []}, '"messages"'),
        ({"messages": ["hello"]}, '"hello"'),
        ({"messages": [{"from": "human"}]}, '"content"'),
        ({"messages": [{"from": "robot", "content": "x"}]}, '"robot"'),
        ({**ASK, "values": 1}, "'values'"),
        ({**ASK, "conversation": 1}, "'conversation'"),
        ({"messages": ASK["messages"]}, "'answer'"),
        ({**ASK, "messages": [{"from": "assistant", "content": "2"}]}, "assistant"),
        ({**ASK, "messages": [{"from": "human", "content": " \n"}]}, "user"),
        ({**ASK, "answer": None}, "'answer'"),
    ],
)
def test_an_error_in_a_line_names_the_file_the_line_and_the_value(tmp_path: Path, line: Any, named: str) -> None:
    file = write(tmp_path, ASK, line)
    with pytest.raises(DataError) as caught:
        read_conversations(file, last="user", needs=("answer",))
    location, _, message = str(caught.value).partition(": ")
    assert location == f"{file}, line 2"
    assert named in message


def test_an_example_must_end_with_the_assistant(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 1: "):
        read_conversations(write(tmp_path, ASK), last="assistant")


def test_an_empty_dataset_is_not_reported_as_dropped_rows(tokenizer: ChatTokenizer) -> None:
    for tokenize in (tokenize_prompts, partial(PromptStream, seed=0)):
        with pytest.raises(DataError) as caught:
            tokenize([], tokenizer, max_prompt_tokens=8)
        assert "dropped" not in str(caught.value)


def test_an_empty_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.jsonl"):
        read_conversations(write(tmp_path))


def test_a_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        read_conversations(tmp_path / "nowhere.jsonl")


def test_a_file_that_is_not_text_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        read_conversations(tmp_path / "data.jsonl")


def test_rows_carry_the_tokens_of_the_prompt_and_the_columns(tokenizer: ChatTokenizer) -> None:
    row = stream(tokenizer, 1).take(1)[0]
    ids = tokenizer.encode_prompt([Message("user", "0+1")])
    conversation = [{"role": "user", "content": "0+1"}]
    assert row == {
        "prompt": "0+1",
        "conversation": conversation,
        "prompt_ids": ids,
        "answer": "1",
        "prompt_id": 0,
        "group": 0,
    }


def test_rows_have_the_full_conversation_and_every_dataset_column(tokenizer: ChatTokenizer) -> None:
    messages = (Message("user", "1+1"), Message("assistant", "2"), Message("user", "2+2"))
    columns = {"answer": "4", "data_source": "sums", "difficulty": 3}
    prompts = PromptStream([Conversation(messages, columns)], tokenizer, seed=0, max_prompt_tokens=99)
    for row in (*prompts.take(1), *prompts.evaluation_rows()):
        assert row["prompt"] == "2+2"
        assert [(turn["role"], turn["content"]) for turn in row["conversation"]] == [
            ("user", "1+1"),
            ("assistant", "2"),
            ("user", "2+2"),
        ]
        assert {name: row[name] for name in columns} == columns
        assert Batch.from_rows([row]).get("conversation") == [row["conversation"]]


def test_rows_of_uneven_lines_have_the_same_columns(tokenizer: ChatTokenizer) -> None:
    lines = [Conversation((Message("user", "1+1"),), columns) for columns in ({"answer": "2"}, {"data_source": "sums"})]
    rows = PromptStream(lines, tokenizer, seed=0, max_prompt_tokens=8).evaluation_rows()
    assert [(row["answer"], row["data_source"]) for row in rows] == [("2", None), (None, "sums")]


def test_every_epoch_has_every_prompt_once_and_indices_are_consecutive(tokenizer: ChatTokenizer) -> None:
    rows = stream(tokenizer).take(15)
    assert set(Counter(prompts(rows)).values()) == {3}
    assert {len(set(prompts(rows[start : start + 5]))) for start in (0, 5, 10)} == {5}
    assert [row["prompt_id"] for row in rows] == [row["group"] for row in rows] == list(range(15))


def test_epochs_and_seeds_differ_in_their_order(tokenizer: ChatTokenizer) -> None:
    first = prompts(stream(tokenizer, 9).take(18))
    assert first[:9] != first[9:]
    assert first[:9] != prompts(stream(tokenizer, 9, seed=1).take(9))


def test_without_shuffling_the_order_is_that_of_the_file(tokenizer: ChatTokenizer) -> None:
    assert prompts(stream(tokenizer, 2, order="file").take(3)) == ["0+1", "1+1", "0+1"]


def test_the_batch_size_does_not_change_the_order_of_prompts(tokenizer: ChatTokenizer) -> None:
    small, large = stream(tokenizer), stream(tokenizer)
    assert [row for size in (1, 6, 0, 4) for row in small.take(size)] == large.take(11)


def test_requeued_prompts_come_first_with_the_same_rows(tokenizer: ChatTokenizer) -> None:
    prompts = stream(tokenizer)
    rows = prompts.take(12)
    prompts.requeue([11, 3])
    prompts.requeue([7])
    assert prompts.take(2) == [rows[7], rows[11]]
    taken = prompts.take(2)
    assert taken[0] == rows[3] and taken[1]["prompt_id"] == 12


def test_a_restored_stream_begins_with_untrained_and_requeued_prompts(tokenizer: ChatTokenizer) -> None:
    first = stream(tokenizer)
    rows = first.take(4)
    first.requeue([1, 3])
    second = stream(tokenizer)
    second.restore(json.loads(json.dumps(first.state(untrained=[2]))))
    assert second.take(4) == [rows[2], rows[1], rows[3], *stream(tokenizer).take(5)[4:]]


def test_location_is_the_line_of_the_prompt(tokenizer: ChatTokenizer) -> None:
    first = stream(tokenizer)
    assert [first.location(prompt_id) for prompt_id in range(12)] == [
        f"sums, line {row['prompt'][0]}" for row in first.take(12)
    ]


def test_a_restored_stream_continues_at_its_position(tokenizer: ChatTokenizer) -> None:
    first, second = stream(tokenizer), stream(tokenizer)
    first.take(7)
    second.restore(json.loads(json.dumps(first.state())))
    assert first.take(6) == second.take(6)


def test_the_state_of_a_different_dataset_or_seed_is_rejected(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(DataError, match=r"num_prompts .*4"):
        stream(tokenizer).restore(stream(tokenizer, 4).state())
    with pytest.raises(DataError, match=r"seed .*1"):
        stream(tokenizer).restore(stream(tokenizer, seed=1).state())


def test_evaluation_reads_the_file_in_order_and_keeps_the_position(tokenizer: ChatTokenizer) -> None:
    test_set = stream(tokenizer, 3)
    assert prompts(test_set.evaluation_rows()) == ["0+1", "1+1", "2+1"]
    assert prompts(test_set.evaluation_rows(2)) == ["0+1", "1+1"]
    assert test_set.take(1)[0]["prompt_id"] == 0


def test_a_prompt_that_is_too_long_is_rejected_with_its_line(tokenizer: ChatTokenizer) -> None:
    long = Conversation((Message("user", "11111+1"),), {}, Path("data.jsonl"), 7)
    with rejects("data.jsonl", 7, 8, "data.max_prompt_tokens", "data.too_long", error=DataError):
        PromptStream([long], tokenizer, seed=0, max_prompt_tokens=7)


def test_each_of_many_prompts_has_the_tokens_that_it_has_alone(tokenizer: ChatTokenizer) -> None:
    rows = [Conversation((Message("user", f"{n}+1"),)) for n in range(1500)]
    encoded = tokenize_prompts(rows, tokenizer, max_prompt_tokens=8).rows
    assert [prompt.ids.tolist() for prompt in encoded] == [tokenizer.encode_prompt(row.messages) for row in rows]


def test_dropped_prompts_leave_the_others_with_their_tokens(tokenizer: ChatTokenizer) -> None:
    chat = ChatTokenizer(tokenizer.path, NO_TWO)
    rows = [Conversation((Message("user", str(n)),), line=n) for n in (1, 2, 33, 4)]
    left = tokenize_prompts(rows, chat, max_prompt_tokens=1, too_long="drop", strict=False)
    assert [(row.conversation.line, row.ids.tolist()) for row in left.rows] == [
        (n, chat.encode(str(n))) for n in (1, 4)
    ]


@pytest.mark.parametrize("texts", [["33", "2"], ["2", "33"]])
def test_the_first_of_two_unusable_prompts_is_reported(tokenizer: ChatTokenizer, texts: list[str]) -> None:
    rows = [Conversation((Message("user", text),), line=70 + n) for n, text in enumerate(["1", *texts])]
    with rejects(71, error=DataError):
        tokenize_prompts(rows, ChatTokenizer(tokenizer.path, NO_TWO), max_prompt_tokens=1)


def test_a_stream_rejects_a_conversation_that_ends_with_the_assistant(tokenizer: ChatTokenizer) -> None:
    answered = Conversation((Message("user", "1+1"), Message("assistant", "2")), {}, Path("data.jsonl"), 3)
    with pytest.raises(DataError, match=r"data.jsonl, line 3: "):
        PromptStream([answered], tokenizer, seed=0, max_prompt_tokens=9)


# Prompts by their success.


def test_a_curriculum_maps_drawn_prompts_to_the_same_rows_after_a_resume(tokenizer: ChatTokenizer) -> None:
    first = stream(tokenizer, 20, order="curriculum", samples=4)
    rows = first.take(30)
    first.record_success(range(30), [0.5 * (row["prompt"] < "2") for row in rows])
    state = json.loads(json.dumps(first.state(untrained=range(30))))
    second = stream(tokenizer, 20, order="curriculum", samples=4)
    second.restore(state)
    assert second.take(30) == rows
    assert [second.location(row["prompt_id"]) for row in rows] == [first.location(row["prompt_id"]) for row in rows]
    assert second.take(30) == first.take(30)


def test_a_column_of_the_dataset_is_the_initial_success(tokenizer: ChatTokenizer) -> None:
    rates = [0.0, 0.5, None, 1]
    rows = [Conversation((Message("user", f"{n}+1"),), {"rate": rate}) for n, rate in enumerate(rates)]
    difficulty = DifficultyConfig(column="rate", min=0.1, max=0.9, revisit=0.0)
    filtered = PromptStream(rows, tokenizer, seed=0, max_prompt_tokens=8, difficulty=difficulty)
    assert sorted(prompts(filtered.take(4))) == ["1+1", "1+1", "2+1", "2+1"]
    filtered.record_success([0, 1], [1.0, 1.0])
    assert filtered.needs_success and not stream(tokenizer).needs_success


@pytest.mark.parametrize(("value", "column"), [(1.5, "rate"), ("0.5", "rate"), (True, "rate"), (0.5, "rates")])
def test_an_initial_success_that_is_no_rate_is_rejected(tokenizer: ChatTokenizer, value: Any, column: str) -> None:
    rows = [Conversation((Message("user", "1+1"),), {"rate": value}, Path("sums"), 3)]
    difficulty = DifficultyConfig(column=column, min=0.1)
    with pytest.raises(DataError, match=column):
        PromptStream(rows, tokenizer, seed=0, max_prompt_tokens=8, difficulty=difficulty)


def test_the_state_of_a_stream_without_measured_success_is_rejected(tokenizer: ChatTokenizer) -> None:
    curriculum, shuffled = stream(tokenizer, order="curriculum"), stream(tokenizer)
    with pytest.raises(DataError, match=r"data\.order"):
        curriculum.restore(shuffled.state())
    with pytest.raises(DataError, match=r"data\.order"):
        shuffled.restore(curriculum.state())


def test_recorded_success_has_no_effect_on_a_shuffle(tokenizer: ChatTokenizer) -> None:
    first, second = stream(tokenizer), stream(tokenizer)
    first.take(5)
    first.record_success([0], [1.0])
    second.take(5)
    assert first.take(10) == second.take(10) and first.state() == second.state()
