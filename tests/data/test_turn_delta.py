"""Tokens between turns extend the sampled tokens, and a template that rewrites earlier turns is rejected."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flowrl.data.chat import ChatTokenizer, DataError
from flowrl.data.template import INCLUDED, ConversationTemplate
from flowrl.data.turn_delta import TurnRewriteError, check_turn_template, make_turn_delta
from tests.data.test_golden_templates import REMOVES_THOUGHTS, TOKENS, tokenizer

KEEPS = sorted(set(INCLUDED) - {"mistral-v3"})
NO_SYSTEM = ("mistral", True)
"""The template rejects system messages."""

QWEN3_LIKE = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% if tools %}{{ '<|im_start|>system\\nTools: ' ~ tools[0].function.name ~ '<|im_end|>\\n' }}"
    "{% endif %}{% for m in messages %}{% set role = 'user' if m.role == 'tool' else m.role %}"
    "{% set content = '<tool_response>\\n' ~ m.content ~ '\\n</tool_response>' if m.role == 'tool' else m.content %}"
    "{% if m.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ '<|im_start|>' ~ role ~ '\\n' ~ content ~ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Removes the thoughts of responses before the last user message, but not of those before a tool's result."""

SYSTEM_LAST = (
    "{% for m in messages %}{% if m.role != 'system' %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '</s>' }}"
    "{% endif %}{% endfor %}{{ '<|system|>' ~ messages[0].content if messages[0].role == 'system' }}"
    "{{ '<|im_start|>assistant\\n' if add_generation_prompt }}"
)
NO_TOOLS = "{% for m in messages %}{{ raise_exception('no tools') if m.role == 'tool' else m.content }}{% endfor %}"


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def make_chat(name: str, folder: Path) -> ChatTokenizer:
    return ChatTokenizer(tokenizer(folder, *TOKENS.get(name, ("<s>", "</s>"))), ConversationTemplate(name))


def qwen(folder: Path) -> ChatTokenizer:
    path = tokenizer(folder, "<|endoftext|>", "<|im_end|>")
    return ChatTokenizer(path, ConversationTemplate(QWEN3_LIKE, end_of_assistant="<|im_end|>"))


def prompt_ids(chat: ChatTokenizer, messages: list[dict[str, str]]) -> list[int]:
    return chat.encode(chat.render(chat.with_system(messages), generate=True))


@pytest.mark.parametrize(("name", "has_system"), [(n, s) for n in KEEPS for s in (False, True) if (n, s) != NO_SYSTEM])
def test_tokens_of_three_turns_are_those_of_the_rendered_conversation(
    name: str, has_system: bool, tmp_path: Path
) -> None:
    chat = make_chat(name, tmp_path)
    messages = [{"role": "system", "content": "Be brief."}] * has_system + [user("a")]
    ids = prompt_ids(chat, messages)
    lead = " " if name == "llama2" else "\n " if name == "chatglm3" else ""
    for response, question in (("b one", "c"), ("d two", "e")):
        # The text that the policy generates includes what the template puts before and after a response.
        tail = " " if name == "llama2" else ""
        sampled = chat.encode(f"{lead}{response}{tail}{chat.template.end_of_assistant}")
        delta = make_turn_delta(chat, messages, sampled, [user(question)])
        ids += [*sampled, *delta.token_ids]
        messages = [*messages, {"role": "assistant", "content": response}, user(question)]
    assert chat.decode_all(ids) == chat.render(chat.with_system(messages), generate=True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", "<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"),
        ("llama2", " </s><s>[INST] c [/INST]"),
        (
            "llama3",
            "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nc<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("mistral", "</s>[INST] c [/INST]"),
        ("chatglm3", "<|user|>\n c<|assistant|>"),
        ("zephyr", "</s>\n<|user|>\nc</s>\n<|assistant|>\n"),
    ],
)
def test_a_truncated_response_gets_the_end_of_the_template(name: str, expected: str, tmp_path: Path) -> None:
    chat = make_chat(name, tmp_path)
    delta = make_turn_delta(chat, [user("a")], chat.encode("b"), [user("c")])
    assert (delta.text, chat.decode_all(delta.token_ids)) == (expected, expected)


def test_a_sampled_end_is_not_repeated(tmp_path: Path) -> None:
    chat = make_chat("chatml", tmp_path)
    delta = make_turn_delta(chat, [user("a")], chat.encode("b<|im_end|>"), [user("c")])
    assert delta.text == "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"


def test_an_end_token_that_is_not_the_templates_end_stays_and_the_end_follows(tmp_path: Path) -> None:
    chat = make_chat("chatml", tmp_path)
    delta = make_turn_delta(chat, [user("a")], chat.encode("b<|endoftext|>"), [user("c")])
    assert delta.text.startswith("<|im_end|>\n<|im_start|>user")
    assert delta.messages[1] == {"role": "assistant", "content": "b"}


def test_an_empty_response_and_one_with_an_end_within_are_continued(tmp_path: Path) -> None:
    chat = make_chat("chatml", tmp_path)
    for response in ("", "b<|im_end|>c", "\n b \n"):
        delta = make_turn_delta(chat, [user("a")], chat.encode(response), [user("c")])
        assert delta.text == "<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"


def test_white_space_that_a_template_strips_from_a_response_stays_in_the_tokens(tmp_path: Path) -> None:
    chat = make_chat("llama3", tmp_path)
    sampled = chat.encode("  b  <|eot_id|>")
    delta = make_turn_delta(chat, [user("a")], sampled, [user("c")])
    assert delta.text.startswith("<|start_header_id|>user")
    assert make_turn_delta(chat, delta.messages, chat.encode("d"), [user("e")]).text.startswith("<|eot_id|>")


def test_several_messages_and_fields_of_tools_are_rendered(tmp_path: Path) -> None:
    chat = qwen(tmp_path)
    observation = [{"role": "tool", "name": "add", "content": "3"}, {"role": "tool", "name": "add", "content": "4"}]
    schema = {"type": "function", "function": {"name": "add", "parameters": {}}}
    delta = make_turn_delta(chat, [user("a")], chat.encode("b<|im_end|>"), observation, [schema])
    assert delta.text == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_removes_thoughts_continues_with_tool_messages_only(tmp_path: Path) -> None:
    chat = qwen(tmp_path)
    thought = chat.encode("<think>\nx\n</think>\n\nb<|im_end|>")
    delta = make_turn_delta(chat, [user("a")], thought, [{"role": "tool", "content": "3"}])
    with pytest.raises(TurnRewriteError) as raised:
        make_turn_delta(chat, [user("a")], thought, [user("c")])
    assert raised.value.turn == 1
    with pytest.raises(TurnRewriteError) as raised:  # the thought before the tool's result
        make_turn_delta(chat, delta.messages, chat.encode("d"), [user("c")])
    assert raised.value.turn == 1
    assert make_turn_delta(chat, [user("a")], chat.encode("b"), [user("c")]).text.endswith("assistant\n")


def test_the_check_finds_templates_that_remove_thoughts(tmp_path: Path) -> None:
    chat = qwen(tmp_path)
    check_turn_template(chat, ("tool",))
    with pytest.raises(TurnRewriteError):
        check_turn_template(chat, ("user",))
    check_turn_template(make_chat("chatml", tmp_path / "chatml"), ("user",))


def test_other_rewriting_templates_are_rejected_with_the_changed_turn(tmp_path: Path) -> None:
    removing = ChatTokenizer(tokenizer(tmp_path / "1"), ConversationTemplate(REMOVES_THOUGHTS))
    with pytest.raises(TurnRewriteError) as raised:
        make_turn_delta(removing, [user("a")], removing.encode("xTHINKb"), [user("c")])
    assert raised.value.turn == 1
    messages = [{"role": "system", "content": "Be brief."}, user("a")]
    moving = make_chat("mistral-v3", tmp_path / "2")
    with pytest.raises(TurnRewriteError) as raised:
        make_turn_delta(moving, messages, moving.encode("b"), [user("c")])
    assert raised.value.turn == 0
    last = ChatTokenizer(tokenizer(tmp_path / "3"), ConversationTemplate(SYSTEM_LAST))
    with pytest.raises(TurnRewriteError):
        make_turn_delta(last, messages, last.encode("b"), [user("c")])


def test_a_role_that_the_template_rejects_and_an_empty_observation_are_errors(tmp_path: Path) -> None:
    chat = ChatTokenizer(tokenizer(tmp_path), ConversationTemplate(NO_TOOLS))
    with pytest.raises(DataError):
        make_turn_delta(chat, [user("a")], chat.encode("b"), [{"role": "tool", "content": "3"}])
    with pytest.raises(DataError):
        make_turn_delta(chat, [user("a")], chat.encode("b"), [])


def test_a_tokenizer_that_adds_a_space_at_the_start_of_a_text_adds_none_between_turns(tmp_path: Path) -> None:
    tokens = ["</s>", "<|im_start|>", "<|im_end|>", "▁", *map(chr, range(33, 127)), "\n"]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="</s>"))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.Split("", "isolated")]
    )
    core.decoder = decoders.Metaspace()
    PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="</s>", additional_special_tokens=["<|im_start|>", "<|im_end|>"]
    ).save_pretrained(tmp_path)
    chat = ChatTokenizer(tmp_path, ConversationTemplate("chatml"))
    delta = make_turn_delta(chat, [user("a")], [tokens.index("b")], [user("c")])
    names = [tokens[token] for token in delta.token_ids]
    start, end = "<|im_start|>", "<|im_end|>"
    assert names == [end, "\n", start, *"user", "\n", "c", end, "\n", start, *"assistant", "\n"]
