"""The conversation template file (chat template, system message, end of the assistant's turn, stop tokens), and
rendering with a chat template.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from flowrl.config.data.data_settings import TEMPLATE_FILE
from flowrl.config.source import InputFileError, read_json, read_text
from flowrl.config.user_errors import UserError
from flowrl.data.console import shorten
from flowrl.data.messages import DataError
from flowrl.data.time_limit import TimeLimitError, time_limit

_MAX_RENDER_S = 5.0
"""Seconds in which a chat template must render a conversation. Normal templates need less than a millisecond."""

_MAX_TEMPLATE = 200_000
"""Maximum number of characters of a chat template. Published templates have up to 20,000."""

_MAX_REASON = 1_000
"""Maximum number of characters of a chat template's error message."""

_ERRORS = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError,
)  # fmt: skip
"""Errors that an expression of a chat template can raise."""

_IGNORED = ("response_format_tags",)
"""Keys of ColossalChat's files that flowrl does not use."""


class TemplateTimeError(UserError):
    """Raised if a chat template takes too long. Not a DataError, because the template is invalid, not the row."""


@dataclass(frozen=True)
class ConversationTemplate:
    """The content of a conversation template file."""

    chat_template: str | None = None
    """Jinja text, the path of a `.jinja` file, a model's folder or Hub name, or the name of an included template. None
    selects the chat template of the tokenizer. See `read_own_template` for the file of a model."""
    system_message: str | None = None
    """System message for conversations that have none."""
    end_of_assistant: str | None = None
    """Text that ends a turn of the assistant. If None, it is inferred from the chat template."""
    stop_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that end a response, in addition to the tokens of `end_of_assistant`."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a response. Each is converted to the token sequence that encodes it."""
    is_flat: bool = False
    """Whether the file has a flat list of several ids, which may be one sequence or alternatives. `stop_ids` contains
    the list as one sequence until `resolve_flat_stop_ids` selects the meaning."""


def read_template(path: Path) -> ConversationTemplate:
    """Reads a conversation template file that the user has set. Raises DataError if it is invalid."""
    template = _read_file(path)
    return replace(template, chat_template=_resolve_path(template.chat_template, path.parent))


def read_own_template(folder: Path) -> ConversationTemplate | None:
    """Reads the conversation template file in the folder of a model, a checkpoint or a dataset.

    The folder may be from an untrusted source, and its chat template becomes part of prompts and checkpoints. The file
    can therefore name no files outside of the folder.

    Returns: the template, whose `chat_template` is Jinja text, the name of an included template, or None. Returns None
        if the folder has no such file.
    Raises: DataError if the file is invalid, or names a file outside of the folder or a model.
    """
    path = folder / TEMPLATE_FILE
    if not path.is_file():
        return None
    template = _read_file(path)
    name = template.chat_template
    if name is None or name in INCLUDED or is_jinja(name):
        return template
    file = folder / name
    if not file.is_file() or not file.resolve().is_relative_to(folder.resolve()):
        raise DataError(
            f"{path}: chat_template {name!r} must be Jinja text, a file in {folder}, or an included template "
            f"({', '.join(INCLUDED)}): correct it, or name another file or model in a file for the setting "
            f"data.template"
        )
    text = read_chat_template(file, path)
    if not is_jinja(text):
        raise DataError(f"{path}: chat_template {file} has no Jinja syntax, {{{{ or {{%: correct the file")
    return replace(template, chat_template=text)


def read_chat_template(file: Path, named_by: Path) -> str:
    """Returns the text of a file with a chat template. Raises DataError if the file cannot be read."""
    try:
        return read_text(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{named_by}: chat_template {file} cannot be read ({error}): correct the file") from error


def _read_file(path: Path) -> ConversationTemplate:
    """Returns the values of a conversation template file. Raises DataError if it is invalid."""
    try:
        values = read_json(path)
    except InputFileError as error:
        raise DataError(f"conversation template {error}; it must be a JSON object") from error
    except OSError as error:
        raise DataError(f"conversation template {path} {_read_problem(error)}") from error
    if not isinstance(values, dict):
        raise DataError(f"conversation template {path} is a {type(values).__name__}, but must be a JSON object")
    known = [name for name in ConversationTemplate.__dataclass_fields__ if name != "is_flat"]
    for name, value in values.items():
        if name not in (*known, *_IGNORED):
            raise DataError(f"conversation template {path}: unknown key {name!r}; allowed are {', '.join(known)}")
        if name in known[:3] and not isinstance(value, str | None):
            raise DataError(f"conversation template {path}: {name} is {value!r}, but must be text or null")
    stop_ids, is_flat = _read_stop_ids(values.get("stop_ids"), path)
    strings = values.get("stop_strings") or ()
    if not isinstance(strings, list | tuple) or not all(isinstance(text, str) and text for text in strings):
        raise DataError(f"conversation template {path}: stop_strings is {strings!r}, but must be a list of texts")
    return ConversationTemplate(
        chat_template=values.get("chat_template"),
        system_message=values.get("system_message"),
        end_of_assistant=values.get("end_of_assistant"),
        stop_ids=stop_ids,
        stop_strings=tuple(strings),
        is_flat=is_flat,
    )


def _read_problem(error: OSError) -> str:
    """Returns the reason for which a template file cannot be read, and the fix."""
    if isinstance(error, FileNotFoundError):
        return (
            "does not exist: correct the path in the setting `template` (such as data.template), or omit the setting "
            "to use the template of the model's folder"
        )
    if isinstance(error, IsADirectoryError):
        return "is a folder: set the path of a file in it"
    return f"cannot be read ({error.strerror}): make the file readable"


def _resolve_path(chat_template: str | None, folder: Path) -> str | None:
    """Returns the path `folder / chat_template` if it exists. Returns all other values unchanged."""
    if chat_template is None or is_jinja(chat_template) or Path(chat_template).exists():
        return chat_template
    return str(folder / chat_template) if (folder / chat_template).exists() else chat_template


def find_named_template(path: Path, *, is_own: bool = False) -> Path | None:
    """Returns the path of the file or the folder that a conversation template file names as its chat template.

    Returns None if the file is invalid or names no existing path. `is_own` is True for a file in a model's folder.
    """
    try:
        name = _read_file(path).chat_template if is_own else read_template(path).chat_template
    except DataError:
        return None
    if name is None or name in INCLUDED or is_jinja(name):
        return None
    named = path.parent / name if is_own else Path(name)
    return named if named.exists() else None


def is_jinja(text: str) -> bool:
    """Returns whether a chat template is Jinja text instead of a path or a name."""
    return "{{" in text or "{%" in text


def _read_stop_ids(value: Any, path: Path) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """Returns stop sequences, and whether they are one flat list whose meaning depends on the tokenizer."""

    def is_ids(ids: object) -> bool:
        return isinstance(ids, list) and bool(ids) and all(type(i) is int and i >= 0 for i in ids)

    if value is None or value == []:
        return (), False
    if is_ids(value):
        return (tuple(value),), len(value) > 1
    if isinstance(value, list) and all(is_ids(ids) for ids in value):
        return tuple(tuple(ids) for ids in value), False
    raise DataError(
        f"conversation template {path}: stop_ids is {json.dumps(value)[:80]}, but must be a list of token sequences, "
        f"such as [[2], [7, 8]]"
    )


def resolve_flat_stop_ids(ids: Sequence[int], end_ids: Sequence[int], path: Path) -> tuple[tuple[int, ...], ...]:
    """Returns the stop sequences of a flat list. `end_ids` are the tokens of `end_of_assistant`.

    A flat list in ColossalChat's files is one sequence, or several alternative ids. Raises DataError if both are
    possible.
    """
    if list(ids) == list(end_ids):
        return (tuple(ids),)
    if len(end_ids) == 1 and end_ids[0] in ids:
        return tuple((token,) for token in ids)
    raise DataError(
        f"conversation template {path}: stop_ids {list(ids)} can be one sequence or alternatives, because "
        f"end_of_assistant has the tokens {list(end_ids)}: write {[list(ids)]} for one sequence, or "
        f"{[[token] for token in ids]} for alternatives"
    )


def render_conversation(
    tokenizer: Any,  # Any: transformers types token ids too loosely
    template: str,
    messages: Sequence[Mapping[str, Any]],
    source: Path,
    *,
    generate: bool,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Returns the text of a conversation, rendered with the Jinja text of a chat template.

    Raises DataError if the template rejects the conversation, and TemplateTimeError if it needs more than
    `_MAX_RENDER_S` seconds in the main thread. `source` is the file or folder with the template.
    """
    name = f"the chat template in {source}"
    if len(template) > _MAX_TEMPLATE:
        raise DataError(f"{name} has {len(template):,} characters, more than {_MAX_TEMPLATE:,}: use a shorter one")
    options: dict[str, Any] = {"tools": list(tools)} if tools else {}
    speakers = shorten(", ".join(str(message["role"]) for message in messages), _MAX_REASON)
    try:
        with time_limit(_MAX_RENDER_S):
            return tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generate, chat_template=template, **options
            )
    except TimeLimitError as error:
        raise TemplateTimeError(
            f"{name} took more than {_MAX_RENDER_S:g} s for a conversation of {speakers}: remove nested loops from the "
            f"template"
        ) from error
    except _ERRORS as error:
        reason = shorten(" ".join(str(error).split()), _MAX_REASON)
        raise DataError(
            f"{name} raised {type(error).__name__} for a conversation of {speakers}: {reason}; correct the template or "
            f"the conversation"
        ) from error


@contextmanager
def naming_row(location: str) -> Iterator[None]:
    """Adds the location of a row to a TemplateTimeError of the block."""
    try:
        yield
    except TemplateTimeError as error:
        raise TemplateTimeError(f"{location}: {error}") from error


def template_values(template: ConversationTemplate) -> Mapping[str, Any]:
    """Returns the JSON object of a template."""
    return {
        "chat_template": template.chat_template,
        "system_message": template.system_message,
        "end_of_assistant": template.end_of_assistant,
        "stop_ids": [list(ids) for ids in template.stop_ids],
        "stop_strings": list(template.stop_strings),
    }


def template_text(template: ConversationTemplate) -> str:
    """Returns the content of a conversation template file."""
    return json.dumps(template_values(template), indent=2, ensure_ascii=False) + "\n"


def write_template(path: Path, template: ConversationTemplate) -> None:
    """Writes a conversation template file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(template_text(template), encoding="utf-8")


_ALTERNATING = (
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns of user and assistant must alternate') }}{% endif %}"
)

INCLUDED: Mapping[str, ConversationTemplate] = {
    "chatml": ConversationTemplate(
        "{% for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        end_of_assistant="<|im_end|>",
    ),
    "llama2": ConversationTemplate(
        "{% set system = messages[0].content if messages[0].role == 'system' else none %}"
        "{% set turns = messages[1:] if system is not none else messages %}"
        "{% for message in turns %}" + _ALTERNATING +
        "{% if message.role == 'user' %}"
        "{% set text = '<<SYS>>\\n' ~ system ~ '\\n<</SYS>>\\n\\n' ~ message.content "
        "if loop.first and system is not none else message.content %}"
        "{{ bos_token ~ '[INST] ' ~ text.strip() ~ ' [/INST]' }}"
        "{% else %}{{ ' ' ~ message.content.strip() ~ ' ' ~ eos_token }}{% endif %}{% endfor %}",
        end_of_assistant="</s>",
    ),
    "llama3": ConversationTemplate(
        "{{ bos_token }}{% for message in messages %}"
        "{{ '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' }}{{ message.content.strip() }}<|eot_id|>"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
        "{% endif %}",
        end_of_assistant="<|eot_id|>",
    ),
    "mistral": ConversationTemplate(
        "{{ bos_token }}{% for message in messages %}" + _ALTERNATING +
        "{% if message.role == 'user' %}{{ '[INST] ' ~ message.content ~ ' [/INST]' }}"
        "{% else %}{{ message.content ~ eos_token }}{% endif %}{% endfor %}",
        end_of_assistant="</s>",
    ),
    "mistral-v3": ConversationTemplate(
        # The system message is in the last user turn, so a longer conversation does not begin with a shorter one.
        "{% set system = messages[0].content if messages[0].role == 'system' else none %}"
        "{% set turns = messages[1:] if system is not none else messages %}"
        "{% set last = turns | selectattr('role', 'equalto', 'user') | list | length %}"
        "{% set count = namespace(users=0) %}"
        "{{ bos_token }}{% for message in turns %}" + _ALTERNATING +
        "{% if message.role == 'user' %}{% set count.users = count.users + 1 %}"
        "{% set prefix = system ~ '\\n\\n' if system is not none and count.users == last else '' %}"
        "{{ '[INST] ' ~ prefix ~ message.content ~ '[/INST]' }}"
        "{% else %}{{ ' ' ~ message.content.strip() ~ eos_token }}{% endif %}{% endfor %}",
        end_of_assistant="</s>",
    ),
    "chatglm3": ConversationTemplate(
        "[gMASK]sop{% for message in messages %}"
        "{{ '<|' ~ ('observation' if message.role == 'tool' else message.role) ~ '|>\\n ' ~ message.content }}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
        # A turn has no end token: the model ends it by generating the first token of the next turn.
        end_of_assistant="<|user|>",
    ),
    "zephyr": ConversationTemplate(
        "{% for message in messages %}{{ '<|' ~ message.role ~ '|>\\n' ~ message.content ~ eos_token ~ '\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
        end_of_assistant="</s>",
    ),
    "colossal-llama2": ConversationTemplate(
        "{% for message in messages %}"
        "{% if message.role == 'system' %}{{ message.content.strip() ~ '\\n\\n' }}"
        "{% else %}{{ ('Human: ' if message.role == 'user' else 'Assistant: ') ~ bos_token ~ message.content.strip() "
        "~ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' ~ bos_token }}{% endif %}",
        system_message="A chat between a curious human and an artificial intelligence assistant. The assistant gives "
        "helpful, detailed, and polite answers to the human's questions.\n\n",
        end_of_assistant="</s>",
    ),
}  # fmt: skip
"""Included templates by name. tests/data/test_golden_templates.py names the sources of their formats."""
