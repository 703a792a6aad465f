"""The shapes of public datasets, with rows as in the published files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from flowrl.data.messages import Message
from flowrl.data.reading.kinds import Kind, infer_kind, select_turns
from flowrl.data.reading.reader import read_conversations
from flowrl.data.reading.row_problems import RowProblem
from flowrl.data.reading.shapes import boxed, parse_row
from tests.errors import rejects

USER, BOT = Message("user", "u"), Message("assistant", "a")


def row(value: Any, **columns: str):
    return parse_row(value, columns, Path("f"), 1)


def test_the_documented_text_of_ptx_is_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/stages.md").read_text()
    (rows,) = (block for block in re.findall(r"```json\n(.*?)```", page, re.DOTALL) if '"Target"' in block)
    (tmp_path / "text.json").write_text(rows)
    (text,) = read_conversations(tmp_path / "text.json", kind="text")
    assert text.text == ("", json.loads(rows)[0]["Target"])


def turns(*pairs: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in (pair.split(":") for pair in pairs)]


SFT: list[Any] = [
    {"messages": [{"from": "human", "content": "u"}, {"from": "assistant", "content": "a"}]},
    {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]},
    {"messages": turns("user:u", "assistant:a")},
    turns("user:u", "assistant:a"),
    {"question": "u", "answer": "a"},
    {"problem": "u", "solution": "a"},
    {"instruction": "u", "input": "", "output": "a"},
    {"prompt": "u", "completion": "a"},
    {"prompt": turns("user:u"), "completion": turns("assistant:a")},
    {"messages": [{"from": None, "role": "user", "content": "u", "value": None}, {"from": "gpt", "value": "a"}]},
]


@pytest.mark.parametrize("value", SFT)
def test_shapes_with_responses_are_examples(value: Any) -> None:
    recognized = row(value)
    assert infer_kind(recognized) == "sft"
    assert select_turns(recognized, "sft").messages == (USER, BOT)


PAIRS: list[Any] = [
    {"context": turns("human:u"), "chosen": turns("assistant:a"), "rejected": turns("assistant:b")},
    {"prompt": "u", "chosen": turns("user:u", "assistant:a"), "rejected": turns("user:u", "assistant:b")},
    {"prompt": "u", "chosen": "a", "rejected": "b"},
    {"prompt": "\n\nHuman: u\n\nAssistant:", "response": " c", "chosen": " a", "rejected": " b"},
    {"chosen": "\n\nHuman: u\n\nAssistant: a", "rejected": "\n\nHuman: u\n\nAssistant: b"},
    {"chosen": turns("user:u", "assistant:a"), "rejected": turns("user:u", "assistant:b")},
]


@pytest.mark.parametrize("value", PAIRS)
def test_shapes_of_preference_pairs(value: Any) -> None:
    if "context" in value:
        value["context"][0] = {"from": "human", "content": "u"}
    recognized = row(value)
    assert infer_kind(recognized) == "preference"
    pair = select_turns(recognized, "preference")
    assert (pair.messages, pair.chosen, pair.rejected) == ((USER,), (BOT,), (Message("assistant", "b"),))
    assert select_turns(recognized, "sft").messages == (USER, BOT)
    assert select_turns(recognized, "prompts").messages == (USER,)
    assert dict(recognized.columns) == {}


def test_dialogues_share_all_but_the_last_turn() -> None:
    shared = "\n\nHuman: u\n\nAssistant: a\n\nHuman: v\n\nAssistant:"
    pair = select_turns(row({"chosen": f"{shared} x", "rejected": f"{shared} y"}), "preference")
    assert [m.content for m in (*pair.messages, *pair.chosen, *pair.rejected)] == ["u", "a", "v", "x", "y"]


def test_answers_of_math_problems_become_columns() -> None:
    assert row({"question": "u", "answer": "so\n#### 7"}).columns == {"answer": "7"}
    assert row({"problem": "u", "solution": r"is \boxed{\frac{1}{2}}.", "level": "5"}).columns == {
        "answer": r"\frac{1}{2}",
        "level": "5",
    }
    dapo = {"prompt": turns("user:u"), "reward_model": {"ground_truth": "34", "style": "rule"}, "data_source": "m"}
    assert row(dapo).columns == {"answer": "34", "data_source": "m"} and row(dapo).messages == (USER,)
    assert row({"messages": {"role": "user", "content": "u"}, "gt_answer": "3"}).columns == {"answer": "3"}
    assert boxed(r"\boxed{a} then \boxed{b{c}d}") == "b{c}d" and boxed("none") is None and boxed(r"\boxed{") is None


def test_labels_plain_text_and_alpaca_inputs() -> None:
    kto = row({"prompt": turns("user:u"), "completion": {"role": "assistant", "content": "a"}, "label": False})
    assert infer_kind(kto) == "kto" and select_turns(kto, "kto").label is False and kto.chosen == (BOT,)
    assert row({"source": "s", "Target": "t"}).text == ("s", "t")
    assert infer_kind(row({"text": "t"})) == "text" and row({"text": "t"}).text == ("", "t")
    assert row({"instruction": "i", "input": "x", "output": "o"}).messages[0].content == "i\n\nx"


def test_a_null_key_of_another_shape_is_not_a_column() -> None:
    merged = {"text": "t", "prompt": None, "chosen": None, "level": None}
    assert row(merged).columns == {"level": None}


def test_a_prompt_next_to_messages_is_not_a_column() -> None:
    ultrachat = {"prompt": "u", "prompt_id": "f0", "messages": turns("user:u", "assistant:a")}
    assert row(ultrachat).columns == {} and row(ultrachat).messages == (USER, BOT)


def test_a_column_mapping_renames_and_selects_nested_fields() -> None:
    value = {"ask": "u", "meta": {"gold": "7"}, "reply": "a", "kept": 1}
    mapped = row(value, prompt="ask", completion="reply", answer="meta.gold")
    assert mapped.messages == (USER,) and mapped.chosen == (BOT,)
    assert mapped.columns == {"answer": "7", "kept": 1, "meta": {"gold": "7"}}


def test_keys_without_a_meaning_are_not_refused() -> None:
    silent = {"tool_calls": [], "reasoning_content": None, "name": "", "weight": 1, "function_call": {}}
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a", **silent}]
    assert row({"messages": messages, "tools": None, "images": [], "system": ""}).messages == (USER, BOT)
    as_json = {"tool_calls": "[]", "reasoning_content": "null", "function_call": "{}"}
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a", **as_json}]
    assert row({"messages": messages, "tools": "[]", "documents": "null"}).messages == (USER, BOT)


def test_ignored_keys_of_turns_are_not_read() -> None:
    own = {"language": "en", "toxic": False, "tool_calls": CALL}
    messages = [{"role": "user", "content": "u", **own}, {"role": "assistant", "content": "a", **own}]
    for value in (
        {"messages": messages, "language": "en"},
        {"prompt": messages[:1], "completion": messages[1], "language": "en"},
        {"chosen": messages, "rejected": messages, "language": "en"},
    ):
        kept = parse_row(value, {}, Path("f"), 1, ["language", "toxic", "tool_calls"])
        assert (*kept.messages, *kept.chosen) == (USER, BOT) and kept.columns == {"language": "en"}
        with rejects("tool_calls", "ignored_message_keys", error=RowProblem):
            parse_row(value, {}, Path("f"), 1, ["language", "toxic"])


@pytest.mark.parametrize(
    ("turn", "facts"),
    [
        ({"role": "user", "text": "u"}, ("text", "content")),
        ({"from": "human", "value": "u", "lang": "en"}, ("lang", "value")),
        ({"role": "user", "content": None}, ("role", "content", "user", "null")),
        (7, ("role", "content", 7)),
    ],
)
def test_a_malformed_turn_is_reported_with_the_keys_to_write(turn: Any, facts: tuple[Any, ...]) -> None:
    with rejects(*facts, error=RowProblem):
        row({"messages": [turn]})


@pytest.mark.parametrize("name", ["tools", "system", "history"])
def test_a_key_of_the_prompt_can_be_kept_as_a_column(name: str) -> None:
    kept = row({"messages": turns("user:u"), name: ["x"]}, **{f"row_{name}": name})
    assert kept.messages == (USER,) and kept.columns == {f"row_{name}": ["x"]}


def test_plain_text_and_alpaca_rows_keep_their_own_keys() -> None:
    assert row({"text": "t", "tools": ["x"]}).columns == {"tools": ["x"]}
    assert row({"instruction": "u", "output": "a", "system": "s"}).messages[0] == Message("system", "s")


def test_tool_turns_are_kept() -> None:
    messages = select_turns(row({"messages": turns("user:u", "assistant:a", "tool:t", "assistant:a")}), "sft").messages
    assert [message.role for message in messages] == ["user", "assistant", "tool", "assistant"]


ONE = {"role": "user", "content": "u"}


def answer(**keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "a"} | keys


CALL = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
PROBLEMS: list[tuple[Any, Kind, str]] = [
    ({"messages": [ONE, answer(tool_calls=CALL), *turns("tool:t", "assistant:a")]}, "sft", "unknown_key"),
    ({"messages": [ONE, answer(content=None, tool_calls=CALL)]}, "sft", "unknown_key"),
    ({"messages": [{"role": "user", "text": "u"}]}, "prompts", "unknown_key"),
    ({"messages": [ONE, answer(reasoning_content="r")]}, "sft", "unknown_key"),
    ({"messages": [ONE, answer(weight=0)]}, "sft", "unknown_key"),
    ({"messages": [ONE, answer(value="b")]}, "sft", "unknown_key"),
    ({"conversations": [{"from": "human", "value": "u", "images": ["i"]}]}, "prompts", "unknown_key"),
    ([{**ONE, "name": "n"}], "prompts", "unknown_key"),
    ({"context": [ONE], "chosen": [answer(tool_calls=CALL)], "rejected": [answer()]}, "preference", "unknown_key"),
    ({"prompt": [ONE], "chosen": [answer()], "rejected": [answer(thought="r")]}, "preference", "unknown_key"),
    ({"prompt": [ONE], "completion": [answer(weight=0.5)], "label": True}, "kto", "unknown_key"),
    ({"messages": [ONE, answer()], "tools": CALL}, "sft", "unknown_key"),
    ({"conversations": [ONE, answer()], "system": "s"}, "sft", "unknown_key"),
    ({"messages": [ONE, answer()], "documents": ["d"]}, "sft", "unknown_key"),
    ({"messages": [ONE, answer()], "image": "i.png"}, "sft", "unknown_key"),
    ({"messages": [ONE, answer()], "audio": "a.wav"}, "sft", "unknown_key"),
    ({"messages": [ONE, answer()], "weight": 0}, "sft", "unknown_key"),
    ({"prompt": "u", "chosen": "a", "rejected": "b", "tools": CALL}, "preference", "unknown_key"),
    ({"prompt": "u", "completion": "a", "system_prompt": "s"}, "sft", "unknown_key"),
    ({"instruction": "u", "output": "a", "history": [["v", "b"]]}, "sft", "unknown_key"),
    ({"question": "u", "answer": "a", "functions": CALL}, "prompts", "unknown_key"),
    ({"messages": turns("user:u", "assistant: ")}, "sft", "empty_turn"),
    ({"messages": turns("user:", "assistant:a")}, "sft", "empty_turn"),
    ({"messages": []}, "sft", "empty_turn"),
    ({"messages": turns("robot:u", "assistant:a")}, "sft", "unknown_role"),
    ({"messages": [{"content": "u"}]}, "prompts", "unknown_role"),
    ({"messages": turns("user:u", "assistant:a", "assistant:a")}, "sft", "wrong_order"),
    ({"messages": turns("user:u", "user:u", "assistant:a")}, "sft", "wrong_order"),
    ({"messages": turns("assistant:a", "user:u", "assistant:a")}, "sft", "wrong_order"),
    ({"messages": turns("user:u", "system:s", "assistant:a")}, "sft", "wrong_order"),
    ({"messages": turns("assistant:a")}, "sft", "no_prompt"),
    ({"messages": turns("user:u")}, "sft", "no_answer"),
    ({"messages": turns("user:u", "assistant:a")}, "prompts", "trailing_assistant"),
    ({"messages": turns("user:u", "assistant:a")}, "preference", "no_answer"),
    ({"prompt": "u", "chosen": "a", "rejected": "a"}, "preference", "equal_pair"),
    ({"prompt": "u", "chosen": "a", "rejected": " "}, "preference", "empty_turn"),
    (
        {"chosen": turns("user:u", "assistant:a"), "rejected": turns("user:v", "assistant:b")},
        "preference",
        "different_prompts",
    ),
    (
        {"chosen": turns("system:s", "user:u", "assistant:a"), "rejected": turns("system:s", "user:v", "assistant:b")},
        "preference",
        "different_prompts",
    ),
    (
        {"prompt": "u", "chosen": turns("user:u", "assistant:a"), "rejected": turns("user:v", "assistant:b")},
        "preference",
        "wrong_order",
    ),
    ({"messages": [ONE, {"role": "assistant", "content": None}]}, "sft", "content_not_text"),
    ({"messages": [ONE, {"role": "assistant", "content": 7}]}, "sft", "content_not_text"),
    ({"messages": [ONE, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]}, "sft", "content_not_text"),
    ({"messages": [ONE, None]}, "sft", "content_not_text"),
    ({"messages": "u", "chosen": None, "rejected": None}, "sft", "no_answer"),
    ({"question": 3, "answer": "4"}, "sft", "content_not_text"),
    ({"prompt": 3, "chosen": "a", "rejected": "b"}, "preference", "content_not_text"),
    ({"messages": None, "other": {"messages": None}}, "sft", "unknown_shape"),
    ({}, "sft", "unknown_shape"),
    (7, "sft", "unknown_shape"),
    ({"messages": turns("user:\ud800", "assistant:a")}, "sft", "invalid_utf8"),
    ({"text": "t"}, "sft", "no_prompt"),
    ({"text": " "}, "text", "empty_turn"),
    ({"prompt": "u", "completion": "a", "label": "yes"}, "kto", "content_not_text"),
    ({"prompt": "u", "completion": "a"}, "kto", "unknown_shape"),
]


@pytest.mark.parametrize(("value", "kind", "reason"), PROBLEMS)
def test_a_malformed_row_has_a_reason(value: Any, kind: Kind, reason: str) -> None:
    with pytest.raises(RowProblem) as caught:
        select_turns(row(value), kind)
    assert caught.value.reason == reason


def test_a_trailing_response_of_a_prompt_can_be_removed() -> None:
    prompt = select_turns(row({"messages": turns("user:u", "assistant:a")}), "prompts", trailing_assistant="drop")
    assert prompt.messages == (USER,)


def test_an_empty_system_message_is_removed() -> None:
    assert select_turns(row({"messages": turns("system:", "user:u")}), "prompts").messages == (USER,)
