"""Conversation template files, and ends of turns other than the eos."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from flowrl.config import UserError
from flowrl.data.chat import ChatTokenizer, DataError, Message, has_same_rendering
from flowrl.data.messages import Conversation
from flowrl.data.prompts import tokenize_prompts
from flowrl.data.template import (
    ConversationTemplate,
    TemplateTimeError,
    read_own_template,
    read_template,
    write_template,
)
from recipes.quickstart.prepare import save_tokenizer
from tests.data.test_golden_templates import CASES, marked, tokenizer, turns
from tests.errors import missing_facts, rejects


def file(folder: Path, **values: object) -> Path:
    path = folder / "t.json"
    path.write_text(json.dumps(values))
    return path


def test_the_keys_of_colossalchat_files_are_read_and_written_back(tmp_path: Path) -> None:
    path = file(tmp_path, chat_template="{{ 1 }}", system_message="s", end_of_assistant="</s>", stop_ids=[2])
    template = read_template(path)
    assert template == ConversationTemplate("{{ 1 }}", "s", "</s>", ((2,),))
    write_template(path, template)
    assert read_template(path) == template


def test_a_chat_template_is_text_a_file_a_model_or_a_name(tmp_path: Path) -> None:
    jinja = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    path = tokenizer(tmp_path / "plain")
    (tmp_path / "t.jinja").write_text(jinja)
    saved = tokenizer(tmp_path / "other")
    (saved / "chat_template.jinja").write_text(jinja)
    for value in (jinja, "t.jinja", str(tmp_path / "t.jinja"), str(saved)):
        chat = ChatTokenizer(path, file(tmp_path, chat_template=value))
        assert marked(chat, turns("a", "b")) == "a[[b</s>]]"
    named = ChatTokenizer(path, file(tmp_path, chat_template="zephyr"))
    assert marked(named, CASES["zephyr"][0]) == CASES["zephyr"][1]
    with rejects("zephir", error=DataError):
        ChatTokenizer(path, file(tmp_path, chat_template="zephir")).check_chat_template()


JINJA = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"


def own_template(folder: Path, chat_template: str) -> Path:
    """Saves a tokenizer whose folder has a conversation template file with this chat template."""
    saved = tokenizer(folder)
    file(saved, chat_template=chat_template).rename(saved / "conversation_template.json")
    return saved


@pytest.mark.parametrize("value", [JINJA, "t.jinja", "sub/t.jinja", "linked.jinja"])
def test_the_template_file_of_a_model_may_name_files_in_its_folder(value: str, tmp_path: Path) -> None:
    saved = own_template(tmp_path / "model", value)
    (saved / "sub").mkdir()
    for name in ("t.jinja", "sub/t.jinja"):
        (saved / name).write_text(JINJA)
    (saved / "linked.jinja").symlink_to(saved / "t.jinja")
    assert marked(ChatTokenizer(saved), turns("a", "b")) == "a[[b</s>]]"


@pytest.mark.parametrize("value", ["{outside}", "../outside.jinja", "linked.jinja", "linked/outside.jinja", "{model}"])
def test_the_template_file_of_a_model_cannot_name_other_files_or_models(value: str, tmp_path: Path) -> None:
    (tmp_path / "outside.jinja").write_text(JINJA)
    other = tokenizer(tmp_path / "other")
    (other / "chat_template.jinja").write_text(JINJA)
    value = value.format(outside=tmp_path / "outside.jinja", model=other)
    saved = own_template(tmp_path / "model", value)
    (saved / "linked.jinja").symlink_to(tmp_path / "outside.jinja")
    (saved / "linked").symlink_to(tmp_path)
    with rejects(saved / "conversation_template.json", value, "data.template", error=DataError):
        read_own_template(saved)
    with pytest.raises(DataError):
        ChatTokenizer(saved)


def test_a_file_that_the_template_file_of_a_model_names_must_have_jinja(tmp_path: Path) -> None:
    """Text without Jinja would otherwise be read as the name of another file."""
    (tmp_path / "outside.jinja").write_text(JINJA)
    saved = own_template(tmp_path / "model", "t.jinja")
    (saved / "t.jinja").write_text(str(tmp_path / "outside.jinja"))
    with rejects(saved / "t.jinja", "Jinja", error=DataError):
        ChatTokenizer(saved)


def test_the_templates_of_two_folders_determine_whether_a_model_reads_the_tokens_of_a_policy(tmp_path: Path) -> None:
    policy, other = tokenizer(tmp_path / "policy"), tokenizer(tmp_path / "other")
    template = file(tmp_path, chat_template="zephyr")
    assert has_same_rendering(policy, other, template)  # a folder without a chat template has that of the policy
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    assert not has_same_rendering(policy, other, template)
    file(other, chat_template="zephyr").rename(other / "conversation_template.json")
    assert has_same_rendering(policy, other, template)
    assert not has_same_rendering(policy, other, file(tmp_path, chat_template="zephyr", system_message="s"))


def test_an_error_of_a_chat_template_names_the_file_with_the_template(tmp_path: Path) -> None:
    path = tokenizer(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ 1 / 0 }}")
    broken = ChatTokenizer(path, file(tmp_path, chat_template="{% if %}"))
    with rejects(tmp_path / "t.json", "TemplateSyntaxError", error=DataError):
        broken.encode_prompt([Message("user", "a")])
    without = ChatTokenizer(path, file(tmp_path, system_message="s"))
    with rejects(path, "ZeroDivisionError", error=DataError):
        without.encode_prompt([Message("user", "a")])


def test_the_system_message_is_added_to_conversations_without_one(tmp_path: Path) -> None:
    chat = ChatTokenizer(tokenizer(tmp_path), file(tmp_path, chat_template="zephyr", system_message="s"))
    assert marked(chat, turns("a", "b")).startswith("<|system|>\ns</s>\n<|user|>\na</s>")
    assert marked(chat, turns("a", "b", system="t")).startswith("<|system|>\nt</s>")


def test_the_end_of_a_turn_is_inferred_if_it_is_a_special_token(tmp_path: Path) -> None:
    jinja = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    chat = ChatTokenizer(tokenizer(tmp_path, eos="<|endoftext|>"), ConversationTemplate(jinja))
    assert chat.end_of_assistant == "<|im_end|>"
    assert chat.template.stop_ids == ((chat.tokenizer.convert_tokens_to_ids("<|im_end|>"),),)


def test_an_end_of_a_turn_may_have_several_tokens(tmp_path: Path) -> None:
    jinja = "{% for m in messages %}{{ m.role }}:{{ m.content }}\nEND\n{% endfor %}"
    chat = ChatTokenizer(tokenizer(tmp_path), ConversationTemplate(jinja, end_of_assistant="END"))
    assert marked(chat, turns("a", "b")) == "user:a\nEND\n[[assistant:b\nEND]]\n"
    assert [len(ids) for ids in chat.template.stop_ids] == [3]


def test_stop_strings_become_token_sequences(tmp_path: Path) -> None:
    path = file(tmp_path, chat_template="zephyr", stop_strings=["\nHuman:"])
    template = ChatTokenizer(tokenizer(tmp_path), path).template
    assert [len(ids) for ids in template.stop_ids] == [1, 7]


def test_the_end_of_a_turn_is_a_stop_sequence_in_addition_to_stop_ids(tmp_path: Path) -> None:
    path = file(tmp_path, chat_template="zephyr", end_of_assistant="-", stop_ids=[[5]])
    chat = ChatTokenizer(tokenizer(tmp_path), path)
    assert chat.template.stop_ids == chat.stop_ids == (tuple(chat.encode("-")), (5,))


def test_a_flat_list_of_stop_ids_is_resolved_or_refused(tmp_path: Path) -> None:
    path = tokenizer(tmp_path)
    known = ChatTokenizer(path, ConversationTemplate("zephyr"))
    end, other = known.eos_id, known.eos_id + 1
    both = ChatTokenizer(path, file(tmp_path, chat_template="zephyr", end_of_assistant="</s>", stop_ids=[end, other]))
    assert both.template.stop_ids == ((end,), (other,))
    spelled = [known.encode(letter)[0] for letter in "END"]
    one = ChatTokenizer(path, file(tmp_path, chat_template="zephyr", end_of_assistant="END", stop_ids=spelled))
    assert one.template.stop_ids == (tuple(spelled),)
    with rejects(tmp_path / "t.json", error=DataError):
        _ = ChatTokenizer(path, file(tmp_path, chat_template="zephyr", stop_ids=[7, 8])).template


@pytest.mark.parametrize("values", [{"end_of_assistant": "é"}, {"stop_strings": ["1", "é"]}])
def test_an_end_without_tokens_would_end_every_response_and_is_rejected(values: Any, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    with rejects("é", tmp_path, error=DataError):
        _ = ChatTokenizer(tmp_path, file(tmp_path, **values)).template


def test_a_template_file_that_is_not_text_is_rejected(tmp_path: Path) -> None:
    path = tokenizer(tmp_path / "model")
    (tmp_path / "x.jinja").write_bytes(b"\xff{{ 1 }}")
    with rejects(tmp_path / "x.jinja", error=DataError):
        ChatTokenizer(path, file(tmp_path, chat_template="x.jinja")).check_chat_template()


def test_the_default_of_several_chat_templates_is_used(tmp_path: Path) -> None:
    path = tokenizer(tmp_path)
    saved = AutoTokenizer.from_pretrained(path)
    saved.chat_template = {"default": "{{ messages[0].content }}!", "tool_use": "{{ tools }}"}
    saved.save_pretrained(path)
    chat = ChatTokenizer(path)
    assert chat.decode_all(chat.encode_prompt([Message("user", "a")])) == "a!"


def test_a_stop_id_outside_of_the_vocabulary_is_rejected(tmp_path: Path) -> None:
    path = file(tmp_path, chat_template="zephyr", stop_ids=[[2, 9999]])
    with rejects(9999, path, error=DataError):
        _ = ChatTokenizer(tokenizer(tmp_path), path).template


@pytest.mark.parametrize(
    "values",
    [{"chat_tmplate": "x"}, {"system_message": 3}, {"stop_ids": "2"}, {"stop_ids": [[]]}, {"stop_strings": [""]}],
)
def test_an_invalid_file_is_rejected(values: dict[str, object], tmp_path: Path) -> None:
    with rejects(*values, tmp_path / "t.json", error=DataError):
        read_template(file(tmp_path, **values))


def test_a_file_that_cannot_be_read_is_rejected_with_its_fix(tmp_path: Path) -> None:
    path = tmp_path / "nope.json"
    with rejects(path, "exist", "data.template", error=DataError):
        read_template(path)
    with rejects(tmp_path, "folder", error=DataError):
        read_template(tmp_path)
    path.write_bytes(b"\x80\x00{}")
    with rejects(path, "UTF-8", "JSON", error=DataError) as caught:
        read_template(path)
    assert "codec" not in str(caught.value)
    path.write_text("{\n'a': 1}")
    with rejects(path, "JSON", "line", 2, error=DataError):
        read_template(path)


def test_a_model_folder_with_a_template_file_uses_it(tmp_path: Path) -> None:
    path = tokenizer(tmp_path)
    write_template(path / "conversation_template.json", ConversationTemplate("zephyr"))
    assert (
        ChatTokenizer(path)
        .decode_all(ChatTokenizer(path).encode_prompt([Message("user", "a")]))
        .endswith("<|assistant|>\n")
    )


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DEEP_MACRO = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"


@pytest.mark.parametrize(
    ("template", "fact"),
    [
        (ENDLESS, "0.2"),
        (DEEP_MACRO, "RecursionError"),
        ("{{ 'a' * 10 ** 18 }}", "MemoryError"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError"),
        ("{{ 1 }}" + " " * 300_000, "200000"),
    ],
)
def test_a_template_that_cannot_render_is_named(
    tmp_path: Path, template: str, fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrl.data.template._MAX_RENDER_S", 0.2)
    path = file(tmp_path, chat_template=template, end_of_assistant="</s>")
    chat = ChatTokenizer(tokenizer(tmp_path / "model"), path)
    with pytest.raises(UserError) as caught:
        chat.encode_prompt([Message("user", "a")])
    assert not missing_facts(str(caught.value).replace(",", ""), path, fact)


def test_a_template_that_is_slow_for_a_row_is_named_with_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrl.data.template._MAX_RENDER_S", 0.2)
    template = "{% if messages[0].content == 'slow' %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
    path = file(tmp_path, chat_template=template, end_of_assistant="</s>")
    chat = ChatTokenizer(tokenizer(tmp_path / "model"), path)
    rows = [
        Conversation((Message("user", text),), file=Path("a.jsonl"), line=i) for i, text in enumerate(("a", "slow"))
    ]
    with rejects("a.jsonl", 1, path, error=TemplateTimeError):
        tokenize_prompts(rows, chat, max_prompt_tokens=8, strict=False)


def test_the_message_of_a_template_is_one_short_line(tmp_path: Path) -> None:
    chat = ChatTokenizer(
        tokenizer(tmp_path / "model"),
        file(tmp_path, chat_template="{{ raise_exception('a\nb' * 1000000) }}", end_of_assistant="</s>"),
    )
    with pytest.raises(DataError) as caught:
        chat.encode_prompt([Message("user", "a")])
    assert len(str(caught.value)) < 2000 and "\n" not in str(caught.value)
