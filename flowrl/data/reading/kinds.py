"""Selects the turns of a conversation that each kind of training needs, and checks the order of turns."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from flowrl.data.messages import Conversation, Message
from flowrl.data.reading.row_problems import RowProblem

Kind = Literal["prompts", "sft", "preference", "kto", "text"]
KINDS: tuple[Kind, ...] = ("prompts", "sft", "preference", "kto", "text")
"""`prompts` is for reinforcement learning. `sft` has responses to train on. `preference` has two responses to compare.
`kto` has one labeled response. `text` has plain text, or the conversations of `sft`."""

_FOLLOWERS = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
"""Role -> roles of the next message. None stands for the start of a conversation."""


def infer_kind(row: Conversation) -> Kind:
    """Returns the kind of training that the content of a row matches."""
    if row.rejected:
        return "preference"
    if row.text is not None:
        return "text"
    if row.label is not None:
        return "kto"
    return "sft" if row.chosen or row.messages[-1].role == "assistant" else "prompts"


def split_pair(row: Conversation, kind: Kind | None) -> tuple[Conversation, ...]:
    """Returns the row. For a pair with kind kto, returns two rows: the desirable and the undesirable response.

    Raises RowProblem if the responses of the pair have different prompts.
    """
    if kind != "kto" or not row.rejected:
        return (row,)
    _check_same_prompt(row, row.messages)
    return (
        replace(row, rejected=(), label=True),
        replace(row, chosen=row.rejected, rejected=(), label=False),
    )


def select_turns(
    row: Conversation, kind: Kind, *, trailing_assistant: Literal["refuse", "drop"] = "refuse"
) -> Conversation:
    """Returns the row with the turns of `kind`.

    `prompts` have only `messages`, which end with the user. `sft` has only `messages`, which end with the assistant.
    `preference` and `kto` keep `messages` as the prompt, and `chosen` and `rejected` as continuations. A pair
    may have a column `margin`, the strength of the preference.

    Raises RowProblem if the row lacks turns, has empty turns, or has them in the wrong order.
    """
    if row.text is not None:
        return _check_text(row, row.text[1], kind)
    messages = tuple(message for message in row.messages if message.role != "system" or message.content.strip())
    if kind == "prompts":
        return replace(row, messages=_prompt_turns(messages, trailing_assistant), chosen=(), rejected=())
    if kind in ("sft", "text"):
        return replace(row, messages=_example_turns((*messages, *row.chosen)), chosen=(), rejected=())
    if kind == "kto" and not row.chosen and messages and messages[-1].role == "assistant":
        row, messages = replace(row, chosen=messages[-1:]), messages[:-1]
    if not (row.rejected if kind == "preference" else row.chosen):
        raise _missing_responses(row, kind)
    _check_continuations(row, messages, ("chosen", "rejected") if kind == "preference" else ("chosen",))
    if kind == "kto" and row.label is None:
        raise RowProblem("unknown_shape", "kto needs a key `label`, which is true or false")
    return replace(row, messages=messages)


def _check_text(row: Conversation, text: str, kind: Kind) -> Conversation:
    if kind != "text":
        raise RowProblem("no_prompt", f"the row is plain text, but {kind} needs messages")
    if not text.strip():
        raise RowProblem("empty_turn", "the text is empty")
    return row


def _example_turns(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    check_order(messages)
    if messages[-1].role != "assistant":
        raise RowProblem(
            "no_answer",
            f"the last message is from the {messages[-1].role}; add the assistant's response",
        )
    return messages


def _check_continuations(row: Conversation, messages: tuple[Message, ...], names: Sequence[str]) -> None:
    for name in names:
        turns = row.chosen if name == "chosen" else row.rejected
        if not turns or turns[-1].role != "assistant":
            end = f"ends with a message of the {turns[-1].role}" if turns else "has no message after the prompt"
            raise RowProblem("no_answer", f"{name} {end}: add a response of the assistant, or remove the row")
        check_order((*messages, *turns))
    if "rejected" not in names:
        return
    _check_same_prompt(row, messages)
    if row.chosen == row.rejected:
        raise RowProblem("equal_pair", "chosen and rejected are equal, so there is nothing to prefer; remove the row")
    margin = row.columns.get("margin")
    if margin is not None and (isinstance(margin, bool) or not isinstance(margin, int | float) or not margin >= 0):
        raise RowProblem("wrong_margin", f"margin is {margin!r}, but must be a number of at least 0")


def _missing_responses(row: Conversation, kind: Kind) -> RowProblem:
    """Returns the problem of a row without the responses that `preference` or `kto` needs."""
    if kind == "kto":
        return RowProblem(
            "no_answer", "the row has no response to train on: add completion and label, or chosen and rejected"
        )
    if row.label is not None:
        return RowProblem(
            "no_answer",
            "the row has one response with a label, but this training needs pairs: add chosen and rejected, or train "
            "with kto (loss: kto)",
        )
    # A row with one of the two keys has another shape, in which this key is a column.
    has = [name for name in ("chosen", "rejected") if row.columns.get(name) is not None]
    other = {"chosen": "rejected", "rejected": "chosen"}
    found = f"the row has {has[0]}, but no {other[has[0]]}" if len(has) == 1 else "the row is not a pair of responses"
    return RowProblem(
        "no_answer",
        f"{found}, which this training compares: add a prompt with chosen and rejected, name their keys in `columns`, "
        "or use the row for sft",
    )


def _check_same_prompt(row: Conversation, messages: Sequence[Message]) -> None:
    """Raises RowProblem if two dialogues of a pair differ before a response of the assistant."""
    if not any(message.role == "user" for message in (*messages, *row.chosen)):
        return  # `check_order` reports that there is no prompt.
    pairs = zip(row.chosen, row.rejected, strict=False)
    different = next(((chosen, rejected) for chosen, rejected in pairs if chosen != rejected), ())
    if messages and all(turn.role == "assistant" for turn in different):
        return
    turns = " and ".join(f"{turn.content[:40]!r} from the {turn.role}" for turn in different)
    raise RowProblem(
        "different_prompts",
        f"chosen and rejected have different prompts{f' ({turns})' if turns else ''}: use one prompt for both, so that "
        "only the responses of the assistant differ, or remove the row",
    )


def _prompt_turns(messages: tuple[Message, ...], trailing_assistant: Literal["refuse", "drop"]) -> tuple[Message, ...]:
    while trailing_assistant == "drop" and messages and messages[-1].role == "assistant":
        messages = messages[:-1]
    check_order(messages)
    if messages[-1].role == "assistant":
        raise RowProblem(
            "trailing_assistant",
            "the last message is from the assistant, not from the user; remove it from a file of prompts, or set "
            "trailing_assistant: drop",
        )
    if messages[-1].role == "system":
        raise RowProblem("no_prompt", "the last message is from the system, not from the user; add a prompt")
    return messages


def check_order(messages: Sequence[Message]) -> None:
    """Raises RowProblem if a turn is empty, or if the turns of user and assistant do not alternate."""
    if not any(message.role == "user" for message in messages):
        roles = ", ".join(message.role for message in messages) or "no messages"
        raise RowProblem("no_prompt", f"there is no message from the user ({roles}); add the prompt, or remove the row")
    before = None
    for number, message in enumerate(messages, start=1):
        if not message.content.strip():
            raise RowProblem(
                "empty_turn",
                f"message {number}, from the {message.role}, is empty: write the message, or remove the row",
            )
        if message.role not in _FOLLOWERS[before]:
            expected = " or ".join(_FOLLOWERS[before])
            where = "at the start" if before is None else f"after the {before}"
            raise RowProblem(
                "wrong_order", f"message {number} {where} is from the {message.role}, but must be from the {expected}"
            )
        before = message.role
