"""Renderings of public chat templates, with the text that is trained in double brackets.

The texts are those of the publishers or of independent implementations, which each case names. The brackets are added.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flowrl.data.chat import ChatTokenizer, DataError, Message
from flowrl.data.template import ConversationTemplate
from tests.errors import rejects

SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>",
    "<|end_header_id|>", "[gMASK]", "sop", "<|system|>", "<|user|>", "<|assistant|>", "<|endoftext|>",
)  # fmt: skip


def tokenizer(folder: Path, bos: str = "<s>", eos: str = "</s>", special: Sequence[str] = ()) -> Path:
    """Saves a tokenizer with one token per character, and the special tokens of all templates and `special`."""
    characters = [chr(code) for code in (10, *range(32, 127))]
    tokens = (*SPECIAL, *special, *characters)
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="</s>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    saved = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=bos, eos_token=eos, additional_special_tokens=[*SPECIAL, *special]
    )
    saved.save_pretrained(folder)
    return folder


def marked(chat: ChatTokenizer, messages: list[Message], first: int = 0) -> str:
    """Returns the text of an example from its tokens, with trained tokens in double brackets."""
    ids, mask = chat.encode_example(messages, first)
    trained = "".join("1" if value else "0" for value in mask)
    tokens = chat.tokenizer.convert_ids_to_tokens(ids)
    assert isinstance(tokens, list)
    parts = [
        ("".join(tokens[match.start() : match.end()]), match[0][0] == "1") for match in re.finditer(r"0+|1+", trained)
    ]
    return "".join(f"[[{text}]]" if is_trained else text for text, is_trained in parts)


def turns(*contents: str, system: str | None = None) -> list[Message]:
    spoken = [Message("assistant" if i % 2 else "user", content) for i, content in enumerate(contents)]
    return spoken if system is None else [Message("system", system), *spoken]


PIRATE = "You are a friendly chatbot who always responds in the style of a pirate"
# https://github.com/huggingface/huggingface.js, packages/jinja/test/e2e.test.js (commit 029db6b), which compares
# templates of models on the Hub with transformers. Its last turn is the user's.
HELLO = ("Hello, how are you?", "I'm doing great. How can I help you today?")
LAST = "I'd like to show off how chat templating works!"
# https://github.com/ggml-org/llama.cpp, tests/test-chat-template.cpp (commit 037af53).
LLAMA_CPP = ("Hello", "Hi there", "Who are you", "   I am an assistant   ")
HELPFUL = "You are a helpful assistant"

CASES = {
    "llama2": (  # huggingface.js, "llama"
        turns(*HELLO, LAST, system=PIRATE),
        f"<s>[INST] <<SYS>>\n{PIRATE}\n<</SYS>>\n\nHello, how are you? [/INST]"
        "[[ I'm doing great. How can I help you today? </s>]]"
        "<s>[INST] I'd like to show off how chat templating works! [/INST]",
    ),
    "llama3": (  # llama.cpp, "Llama 3", which has no bos token; Meta's prompt format begins with <|begin_of_text|>
        turns(*LLAMA_CPP, system=HELPFUL),
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nYou are a helpful assistant<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        "[[Hi there<|eot_id|>]]<|start_header_id|>user<|end_header_id|>\n\nWho are you<|eot_id|><|start_header_id|>"
        "assistant<|end_header_id|>\n\n[[I am an assistant<|eot_id|>]]",
    ),
    "chatml": (  # llama.cpp, "teknium/OpenHermes-2.5-Mistral-7B"; the same text as Qwen1.5 and Qwen2
        turns(*LLAMA_CPP, system=HELPFUL),
        "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>"
        "assistant\n[[Hi there<|im_end|>]]\n<|im_start|>user\nWho are you<|im_end|>\n<|im_start|>assistant\n"
        "[[   I am an assistant   <|im_end|>]]\n",
    ),
    "mistral": (  # huggingface.js, "mistralai/Mixtral-8x7B-Instruct-v0.1"
        turns(*HELLO, LAST),
        "<s>[INST] Hello, how are you? [/INST][[I'm doing great. How can I help you today?</s>]]"
        "[INST] I'd like to show off how chat templating works! [/INST]",
    ),
    "mistral-v3": (  # mistral_common 1.13, MistralTokenizer.v3: the system message is in the last turn of the user
        turns("Hello", "Hi there", "Who are you", "I am an assistant", "Another question", system=HELPFUL),
        "<s>[INST] Hello[/INST][[ Hi there</s>]][INST] Who are you[/INST][[ I am an assistant</s>]]"
        "[INST] You are a helpful assistant\n\nAnother question[/INST]",
    ),
    "chatglm3": (  # huggingface.js, "THUDM/chatglm3-6b"; PROMPT_en.md of the model has the roles
        turns(*HELLO, LAST, system=PIRATE),
        f"[gMASK]sop<|system|>\n {PIRATE}<|user|>\n Hello, how are you?<|assistant|>"
        "[[\n I'm doing great. How can I help you today?<|user|>]]\n I'd like to show off how chat templating works!",
    ),
    "zephyr": (  # huggingface.js, "HuggingFaceH4/zephyr-7b-beta (add_generation_prompt=false)"
        turns(*HELLO, LAST, system=PIRATE),
        f"<|system|>\n{PIRATE}</s>\n<|user|>\nHello, how are you?</s>\n<|assistant|>\n"
        "[[I'm doing great. How can I help you today?</s>]]\n<|user|>\n"
        "I'd like to show off how chat templating works!</s>\n",
    ),
}
TOKENS = {"llama3": ("<|begin_of_text|>", "<|eot_id|>"), "chatml": ("<|endoftext|>", "<|endoftext|>")}
"""Template -> bos and eos of the tokenizer. ChatML's end of turn differs from the eos here."""


@pytest.mark.parametrize("name", CASES)
def test_a_template_renders_and_masks_the_published_text(name: str, tmp_path: Path) -> None:
    messages, expected = CASES[name]
    path = tokenizer(tmp_path, *TOKENS.get(name, ("<s>", "</s>")))
    assert marked(ChatTokenizer(path, ConversationTemplate(name)), messages) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("zephyr", "<|user|>\nWhy?</s>\n<|assistant|>\n"),
        ("llama2", "<s>[INST] Why? [/INST]"),
        ("chatglm3", "[gMASK]sop<|user|>\n Why?<|assistant|>"),
    ],
)
def test_a_prompt_ends_with_the_generation_prompt(name: str, expected: str, tmp_path: Path) -> None:
    chat = ChatTokenizer(tokenizer(tmp_path), ConversationTemplate(name))
    assert chat.decode_all(chat.encode_prompt(turns("Why?"))) == expected


def test_the_example_of_colossalchat(tmp_path: Path) -> None:
    """The example is in the README of ColossalChat, where sentencepiece has decoded spaces around special tokens."""
    chat = ChatTokenizer(tokenizer(tmp_path), ConversationTemplate("colossal-llama2"))
    text = marked(chat, turns("what are some pranks with a pen i can do?", "Are you looking for practical joke ideas?"))
    published = (
        "<s> A chat between a curious human and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the human's questions.\n\nHuman: <s> what are some pranks with a pen i can "
        "do?</s> Assistant: <s> Are you looking for practical joke ideas?</s>"
    )
    without_spaces = re.sub(r" ?(</?s>) ?", r"\1", published).removeprefix("<s>")  # the tokenizer adds the first one
    assert re.sub(r" ?(</?s>) ?", r"\1", text.replace("[[", "").replace("]]", "")) == without_spaces
    assert text.endswith("[[Are you looking for practical joke ideas?</s>]]")


def test_an_end_that_the_template_omits_is_appended_to_the_last_response(tmp_path: Path) -> None:
    chat = ChatTokenizer(tokenizer(tmp_path), ConversationTemplate("chatglm3"))
    assert marked(chat, turns("Hi", "Ho")) == "[gMASK]sop<|user|>\n Hi<|assistant|>[[\n Ho<|user|>]]"


def test_only_turns_from_the_first_on_are_trained(tmp_path: Path) -> None:
    chat = ChatTokenizer(tokenizer(tmp_path), ConversationTemplate("mistral"))
    messages = turns("a", "b", "c", "d")
    assert marked(chat, messages, first=2) == "<s>[INST] a [/INST]b</s>[INST] c [/INST][[d</s>]]"


def test_contents_that_look_like_template_text_are_located(tmp_path: Path) -> None:
    chat = ChatTokenizer(tokenizer(tmp_path), ConversationTemplate("mistral"))
    messages = turns("say b</s>", "b</s>[INST] b", "b", "[/INST]b")
    text = "<s>[INST] say b</s> [/INST][[b</s>[INST] b</s>]][INST] b [/INST][[[/INST]b</s>]]"
    assert marked(chat, messages) == text


REMOVES_THOUGHTS = (
    "{% for m in messages %}{{ '<' ~ m.role ~ '>' }}"
    "{{ m.content.split('THINK')[-1] if m.role == 'assistant' and not loop.last else m.content }}"
    "{{ '</s>' if m.role == 'assistant' else '' }}{% endfor %}{{ '<assistant>' if add_generation_prompt }}"
)


def test_a_template_that_rewrites_earlier_responses_is_refused_or_trained_on_the_last_turn(tmp_path: Path) -> None:
    chat = ChatTokenizer(tokenizer(tmp_path), ConversationTemplate(REMOVES_THOUGHTS))
    messages = turns("a", "xTHINKb", "c", "yTHINKd")
    with rejects(tmp_path, error=DataError):
        chat.encode_example(messages)
    assert marked(chat, messages, first=2) == "<user>a<assistant>b</s><user>c<assistant>[[yTHINKd</s>]]"
    assert marked(chat, turns("a", "b", "c", "d")) == "<user>a<assistant>[[b</s>]]<user>c<assistant>[[d</s>]]"


ENDS_ONCE = (
    "{% for m in messages %}{{ '<' ~ m.role ~ '>' ~ m.content }}"
    "{{ '</s>' if m.role == 'assistant' and not m.content.endswith('</s>') else '' }}{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt }}"
)
NEVER_ENDS = ENDS_ONCE.replace("'</s>' if", "'' if")


def test_a_response_that_contains_the_end_of_its_turn_is_trained_completely(tmp_path: Path) -> None:
    chat = ChatTokenizer(tokenizer(tmp_path), ConversationTemplate(ENDS_ONCE))
    text = "<user>a<assistant>[[b</s>c</s>]]<user>d<assistant>[[e</s>]]"
    assert marked(chat, turns("a", "b</s>c", "d", "e</s>")) == text
    assert marked(chat, turns("a", "b</s>c</s>", "d", "e")) == text


def test_an_end_of_turn_in_a_response_does_not_replace_a_missing_one(tmp_path: Path) -> None:
    chat = ChatTokenizer(tokenizer(tmp_path), ConversationTemplate(NEVER_ENDS))
    for response in ("b</s>c", "b</s>"):
        with rejects("/s", error=DataError):
            chat.encode_example(turns("a", response))


ADDS_A_NOTE = (
    "{% for m in messages %}{{ 'A:' ~ m.content | upper ~ '\\n[note]\\n</s>' if m.role == 'assistant' else m.content }}"
    "{% endfor %}{{ 'A:' if add_generation_prompt }}"
)


@pytest.mark.parametrize("jinja", [ADDS_A_NOTE, ADDS_A_NOTE.replace(" | upper", "")])
def test_text_of_the_template_between_a_response_and_its_end_is_not_trained(jinja: str, tmp_path: Path) -> None:
    path = tokenizer(tmp_path)
    with rejects("note", "/s", error=DataError):
        ChatTokenizer(path, ConversationTemplate(jinja)).encode_example(turns("Hi", "Yo"))
    without_note = ChatTokenizer(path, ConversationTemplate(jinja.replace("[note]\\n", "")))
    response = "YO" if "upper" in jinja else "Yo"
    assert marked(without_note, turns("Hi", "Yo")) == f"HiA:[[{response}\n</s>]]"


def test_an_end_of_turn_is_appended_only_once(tmp_path: Path) -> None:
    chat = ChatTokenizer(tokenizer(tmp_path), ConversationTemplate("chatglm3"))
    for response in ("Ho", "Ho<|user|>"):
        assert marked(chat, turns("Hi", response)) == "[gMASK]sop<|user|>\n Hi<|assistant|>[[\n Ho<|user|>]]"
