"""Converts rows of public datasets to conversations. The shape of a row is its set of keys.

docs/data.md lists the shapes.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.data.messages import ROLE_NAMES, Conversation, Message
from flowrl.data.reading.row_problems import RowProblem

Values = Mapping[str, Any]  # Any: the values of a JSON object

_SPEAKER = re.compile(r"\n\n(Human|Assistant):")
_DIALOGUE = re.compile(r"\s*(Human|Assistant):")


def parse_row(
    row: Any,  # Any: see `row` below
    columns: Mapping[str, str],
    file: Path,
    line: int,
    ignored_message_keys: Collection[str] = (),
    *,
    is_prepared: bool = False,
) -> Conversation:
    """Returns the conversation of a row. Its columns have the original values of the row, such as dates or bytes.

    Args:
        row: a JSON object or a list of turns, or a row of a table, whose values may have other types.
        columns: name of a field -> its name in the file, where dots select nested fields.
        file: the file of the row, for error messages.
        line: number of the row in the file, from 1.
        ignored_message_keys: keys of turns that are not read. Other unknown keys are a problem.
        is_prepared: True for a row of a prepared folder. Its keys next to the turns are then always columns.
    Raises:
        RowProblem: the row has no known shape, or a turn is malformed.
    """
    if isinstance(row, list):
        row = {"messages": row}
    if not isinstance(row, dict):
        raise RowProblem("unknown_shape", f"the row is {_show(row)}, but must be a JSON object")
    values = _rename(row, columns) if columns else row
    absent = find_absent(row, columns)
    shape = next((shape for shape in SHAPES if all(values.get(key) is not None for key in shape.keys)), None)
    if shape is None:
        keys = {name: value for name, value in values.items() if name not in absent}
        names = ", ".join(f"{name} (null)" if value is None else str(name) for name, value in keys.items()) or "none"
        raise RowProblem(
            "unknown_shape",
            f'the keys ({names[:200]}) match no known shape: use {{"messages": [{{"role": "user", "content": '
            f'"..."}}]}}, or name the keys in `columns` (docs/data.md)',
        )
    used = {*shape.keys, *shape.optional}
    if ignored_message_keys:
        values = {
            name: _without_keys(value, ignored_message_keys) if name in _TURNS else value
            for name, value in values.items()
        }
    parts = shape.convert(values)
    if parts.text is None and not is_prepared:
        _check_prompt_keys(values, used)
    # Tables store keys that a row of another shape has as null.
    extra = {
        name: value for name, value in values.items() if name not in used and not (value is None and name in _KEYS)
    }
    return Conversation(
        messages=parts.messages,
        columns={**extra, **parts.columns},
        file=file,
        line=line,
        chosen=parts.chosen,
        rejected=parts.rejected,
        label=parts.label,
        text=parts.text,
    )


_TURNS = ("messages", "conversations", "context", "prompt", "completion", "chosen", "rejected")
"""Keys whose values may be turns."""


def _without_keys(value: Any, names: Collection[str]) -> Any:  # Any: turns, one turn, or text
    """Returns turns without the keys `names`."""
    if isinstance(value, list):
        return [_without_keys(turn, names) for turn in value]
    return {name: part for name, part in value.items() if name not in names} if isinstance(value, dict) else value


_PROMPT_KEYS = ("system", "system_prompt", "history", "tools", "functions", "documents", "chat_template_kwargs",
                "image", "images", "video", "videos", "audio", "audios")  # fmt: skip
"""Keys next to the turns that belong to the prompt in public formats."""


def _check_prompt_keys(values: Values, used: set[str]) -> None:
    """Raises RowProblem if the shape ignores a key that belongs to the prompt or excludes the row from training."""
    name = next((name for name in _PROMPT_KEYS if name not in used and not _is_empty(values.get(name))), None)
    if name is not None:
        fix = "write it as the first turn" if name in ("system", "system_prompt") else "remove the key"
        raise RowProblem(
            "unknown_key",
            f"the key {name!r} ({_show(values[name])}) belongs to the prompt, but the model would not receive it: "
            f"{fix}, or set columns: {{row_{name}: {name}}} to keep it as a column",
        )
    if values.get("weight") == 0:
        raise RowProblem(
            "unknown_key",
            "the key 'weight' (0) excludes the row from training in other libraries, but flowrl would train it: remove "
            "the row, or set columns: {row_weight: weight} to keep it as a column",
        )


def _is_empty(value: Any) -> bool:  # Any: a value of the row
    """Returns whether a value is null or empty. Tables store keys that a row lacks as null, or as JSON text."""
    if isinstance(value, str):
        return value.strip() in _EMPTY_TEXT
    return value is None or (isinstance(value, list | dict) and not value)


_EMPTY_TEXT = ("", "null", "[]", "{}")


def _rename(row: Values, columns: Mapping[str, str]) -> dict[str, Any]:
    moved = {name: _select(row, source) for name, source in columns.items()}
    sources = set(columns.values())
    return {name: value for name, value in row.items() if name not in sources} | moved


def _select(row: Values, path: str) -> Any:  # Any: a value of the row
    if path in row:
        return row[path]
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def find_absent(row: Any, columns: Mapping[str, str]) -> dict[str, str]:  # Any: see `parse_row`
    """Returns the items of `columns` whose name in the file is not a key of the row. Null values count as keys."""
    return {name: source for name, source in columns.items() if isinstance(row, dict) and not _has_key(row, source)}


def _has_key(row: Values, path: str) -> bool:
    if path in row:
        return True
    parent, dot, name = path.rpartition(".")
    values = _select(row, parent) if dot else None
    return isinstance(values, dict) and name in values


# Conversations.


def read_turns(value: Any, key: str) -> tuple[Message, ...]:
    """Returns the messages in `value`: a list of turns, one turn, a dialogue as text, or the text of one user message.

    Raises RowProblem for a malformed turn.
    """
    if isinstance(value, str):
        return _parse_dialogue(value) if _DIALOGUE.match(value) else (_message("user", value, key),)
    turns = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list):
        raise RowProblem("content_not_text", f"{key} is {_show(value)}, but must be text or a list of turns")
    if not turns:
        raise RowProblem("empty_turn", f'"{key}" has no turns; write at least one')
    return tuple(_read_turn(turn, key) for turn in turns)


def _read_turn(turn: Any, key: str) -> Message:
    if not isinstance(turn, dict):
        raise RowProblem("content_not_text", f'a turn in "{key}" is {_show(turn)}, but must be {_TURN}')
    role_key = "role" if turn.get("from") is None else "from"
    content_key = "value" if turn.get("content") is None and "value" in turn else "content"
    role, content = turn.get(role_key), turn.get(content_key)
    if not isinstance(role, str) or role not in ROLE_NAMES:
        raise RowProblem("unknown_role", f"unknown message role {_show(role)}; allowed are {', '.join(ROLE_NAMES)}")
    for name, value in turn.items():
        if name not in (role_key, content_key) and not _is_empty(value) and (name, value) not in _DEFAULTS:
            raise RowProblem(
                "unknown_key",
                f'a turn in "{key}" has the key {name!r} ({_show(value)}), which flowrl does not read: write all text '
                f"that the model should read or generate in {content_key!r}, and remove the key or set "
                f"ignored_message_keys: [{name}]",
            )
    # After the unknown keys: in the format of OpenAI, the content of a message with `tool_calls` is null.
    if not isinstance(content, str):
        raise RowProblem(
            "content_not_text",
            f"the {content_key} from the {ROLE_NAMES[role]} is {_show(content)}, but a message is {_TURN}: write its "
            f"text, or remove the row",
        )
    return _message(role, content, key)


_TURN = '{"role": "user", "content": "text"}'

_DEFAULTS = (("weight", 1),)
"""(key, value) of turns that are allowed although the key is not read. A response is trained with weight 1 anyway."""


def _message(role: str, content: str, key: str) -> Message:
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise RowProblem("invalid_utf8", f"{key} is not UTF-8 text, or has an unpaired surrogate") from error
    return Message(ROLE_NAMES[role], content)


def _parse_dialogue(text: str) -> tuple[Message, ...]:
    """Returns the turns of a dialogue in the format of hh-rlhf. Omits the empty turn at the end of a prompt."""
    pieces = _SPEAKER.split("\n\n" + text.lstrip())
    turns = [
        _message(speaker.lower(), content.strip(), "dialogue")
        for speaker, content in zip(pieces[1::2], pieces[2::2], strict=True)
    ]
    if turns and turns[-1].role == "assistant" and not turns[-1].content:
        turns.pop()
    return tuple(turns)


def _read_reply(value: Any, key: str) -> tuple[Message, ...]:
    """Returns the turns of a continuation. Text is one message of the assistant."""
    return (_message("assistant", value, key),) if isinstance(value, str) else read_turns(value, key)


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise RowProblem("content_not_text", f"{key} is {_show(value)}, but must be text")
    return _message("user", value, key).content


def _show(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)[:80]


# Shapes.


@dataclass(frozen=True, slots=True)
class _Parts:
    messages: tuple[Message, ...] = ()
    chosen: tuple[Message, ...] = ()
    rejected: tuple[Message, ...] = ()
    label: bool | None = None
    text: tuple[str, str] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Shape:
    """A set of keys, and the function that converts a row with these keys to a conversation."""

    name: str
    keys: tuple[str, ...]
    """Required keys."""
    convert: Callable[[Values], _Parts]
    optional: tuple[str, ...] = ()
    """Keys that a row of this shape may have in addition, and that do not become columns. All other keys become
    columns.
    """


def _pair(row: Values) -> _Parts:
    name = "context" if row.get("context") is not None else "prompt"
    context = row.get(name)
    before = () if context is None else read_turns(context, name)
    chosen, rejected = (_read_continuation(row[key], key, has_prompt=bool(before)) for key in ("chosen", "rejected"))
    if before and chosen[: len(before)] == before == rejected[: len(before)]:
        return _Parts(before, chosen[len(before) :], rejected[len(before) :])
    if before:
        return _Parts(before, chosen, rejected)
    count = _common_prefix(chosen, rejected)
    return _Parts(chosen[:count], chosen[count:], rejected[count:])


def _read_continuation(value: Any, key: str, *, has_prompt: bool) -> tuple[Message, ...]:
    if has_prompt and isinstance(value, str) and not _DIALOGUE.match(value):
        # rm-static: the responses to a dialogue begin with a space
        return (_message("assistant", value.strip(), key),)
    return read_turns(value, key)


def _common_prefix(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Returns the number of equal turns at the start, without the last turn."""
    limit = max(min(len(chosen), len(rejected)) - 1, 0)
    return next((i for i in range(limit) if chosen[i] != rejected[i]), limit)


def _completion(row: Values) -> _Parts:
    label = row.get("label")
    if label is not None and not isinstance(label, bool):
        raise RowProblem("content_not_text", f"label is {_show(label)}, but must be true or false")
    return _Parts(read_turns(row["prompt"], "prompt"), _read_reply(row["completion"], "completion"), label=label)


def _conversation(key: str) -> Callable[[Values], _Parts]:
    def convert(row: Values) -> _Parts:
        answer = {"answer": row["gt_answer"]} if row.get("gt_answer") is not None else {}
        label = row.get("label") if isinstance(row.get("label"), bool) else None
        return _Parts(read_turns(row[key], key), label=label, columns=answer)

    return convert


def _prompt(row: Values) -> _Parts:
    model = row.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, dict) else None
    columns = ({} if model is None else {"reward_model": model}) if truth is None else {"answer": truth}
    return _Parts(read_turns(row["prompt"], "prompt"), columns=columns)


def _question(row: Values) -> _Parts:
    solution = _text(row["answer"], "answer")
    return _with_response(_text(row["question"], "question"), solution, answer=solution.rpartition("####")[2].strip())


def _problem(row: Values) -> _Parts:
    solution = _text(row["solution"], "solution")
    answer = boxed(solution) if row.get("answer") is None else row["answer"]
    return _with_response(_text(row["problem"], "problem"), solution, answer=answer)


def _instruction(row: Values) -> _Parts:
    instruction, context = _text(row["instruction"], "instruction"), row.get("input")
    text = f"{instruction}\n\n{_text(context, 'input')}" if context else instruction
    parts = _with_response(text, _text(row["output"], "output"))
    if not (system := row.get("system")):
        return parts
    return _Parts((_message("system", _text(system, "system"), "system"), *parts.messages), parts.chosen)


def _with_response(question: str, response: str, **columns: Any) -> _Parts:
    known = {name: value for name, value in columns.items() if value is not None}
    return _Parts((Message("user", question),), (Message("assistant", response),), columns=known)


def _source(row: Values) -> _Parts:
    source = row.get("source")
    target = next(row[key] for key in ("Target", "target") if row.get(key) is not None)
    return _Parts(text=("" if source is None else _text(source, "source"), _text(target, "Target")))


def _plain(row: Values) -> _Parts:
    return _Parts(text=("", _text(row["text"], "text")))


def boxed(solution: str) -> str | None:
    r"""Returns the content of the last \boxed{...} of a solution, or None."""
    start = solution.rfind(r"\boxed{")
    if start < 0:
        return None
    depth = 0
    begin = start + len(r"\boxed{")
    for position in range(begin, len(solution)):
        if solution[position] == "{":
            depth += 1
        elif solution[position] == "}":
            if depth == 0:
                return solution[begin:position]
            depth -= 1
    return None


SHAPES: tuple[Shape, ...] = (
    Shape("context, chosen and rejected (ColossalChat)", ("context", "chosen", "rejected"), _pair),
    Shape(
        "prompt, chosen and rejected (rm-static, UltraFeedback, TRL)",
        ("prompt", "chosen", "rejected"),
        _pair,
        ("response", "messages", "prompt_id"),
    ),
    Shape("chosen and rejected dialogues (hh-rlhf, TRL)", ("chosen", "rejected"), _pair, ("prompt", "context")),
    Shape("prompt and completion (TRL, KTO)", ("prompt", "completion"), _completion, ("label",)),
    Shape(
        "messages (ColossalChat, TRL, UltraChat)",
        ("messages",),
        _conversation("messages"),
        ("gt_answer", "prompt", "prompt_id"),
    ),
    Shape("conversations (ShareGPT)", ("conversations",), _conversation("conversations"), ("gt_answer",)),
    Shape("prompt (DAPO-Math, TRL)", ("prompt",), _prompt, ("reward_model",)),
    Shape("question and answer (GSM8K)", ("question", "answer"), _question),
    Shape("problem and solution (MATH)", ("problem", "solution"), _problem, ("answer",)),
    Shape("instruction, input and output (alpaca)", ("instruction", "output"), _instruction, ("input", "system")),
    Shape("source and Target (ColossalChat)", ("Target",), _source, ("source",)),
    Shape("source and target", ("source", "target"), _source),
    Shape("text (TRL)", ("text",), _plain),
)
"""Known shapes. A row has the first shape whose keys it contains."""

_KEYS = frozenset(key for shape in SHAPES for key in (*shape.keys, *shape.optional))
"""Keys of all shapes."""
