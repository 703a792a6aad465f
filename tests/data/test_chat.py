import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse
from transformers import PreTrainedTokenizerFast, WhisperTokenizer

from flowrl.data.chat import ChatTokenizer, DataError, Message, MissingEmbeddingError
from flowrl.data.template import ConversationTemplate
from flowrl.environments.tool_calls import ToolCall, parse_response
from flowrl.rewards.text import has_tags
from recipes.quickstart.prepare import save_tokenizer
from tests.data.test_golden_templates import tokenizer
from tests.errors import rejects
from tests.inference.byte_tokenizer import BEGIN, END, save_byte_tokenizer

MARKED = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}"
    "{{ '</s>' if m['role'] == 'assistant' else '' }}|{% endfor %}"
    "{{ '<a>' if add_generation_prompt else '' }}"
)
"""Every turn ends with a bar; the assistant's has it after the end token, as many templates have a line break."""

ASKED = [Message("user", "ab")]
ANSWERED = [*ASKED, Message("assistant", "ba")]
TWICE = [*ANSWERED, Message("user", "a"), Message("assistant", "b")]


def make(folder: Path, template: str | None = MARKED, eos: str | None = "</s>") -> ChatTokenizer:
    vocabulary = {token: number for number, token in enumerate(["<pad>", "</s>", *"<>uas|b"])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="|"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = Fuse()
    saved = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, pad_token="<pad>", chat_template=template)
    saved.save_pretrained(folder)
    return ChatTokenizer(folder)


def text(chat: ChatTokenizer, ids: list[int]) -> str:
    return "".join(chat.tokenizer.convert_ids_to_tokens(ids))


def test_the_number_of_ids_includes_gaps(tmp_path: Path) -> None:
    assert make(tmp_path).num_ids == 9
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace('"b": 8', '"b": 20'))
    assert ChatTokenizer(tmp_path).num_ids == 21


def test_a_prompt_ends_where_the_assistant_begins(tmp_path: Path) -> None:
    chat = make(tmp_path)
    assert text(chat, chat.encode_prompt(ASKED)) == "<u>ab|<a>"


@pytest.mark.parametrize("template", ["<begin> $A", "<begin> $A <end>"])
def test_plain_text_begins_with_the_token_that_the_tokenizer_adds_once(tmp_path: Path, template: str) -> None:
    chat = ChatTokenizer(save_byte_tokenizer(tmp_path, text_template=template))
    (a,) = chat.encode("a")
    assert chat.encode_text("a") == ([BEGIN, a], [False, False])
    assert chat.encode_text("<begin>a", [(7, 8)]) == ([BEGIN, a], [False, True])
    assert chat.encode_text("aa<end>", [(1, 2)]) == ([BEGIN, a, a, END], [False, False, True, False])
    assert chat.encode_text("")[0] == [BEGIN]


@pytest.mark.parametrize("template", [None, "$A", "$A <end>"])
def test_plain_text_has_no_begin_token_that_the_tokenizer_does_not_add(tmp_path: Path, template: str | None) -> None:
    chat = ChatTokenizer(save_byte_tokenizer(tmp_path, text_template=template))
    assert chat.encode_text("ab")[0] == chat.encode("ab")


def test_an_end_token_before_a_text_counts_as_its_begin_token(tmp_path: Path) -> None:
    chat = ChatTokenizer(save_byte_tokenizer(tmp_path, text_template="<end> $A"))
    assert chat.encode_text("a")[0] == [END, *chat.encode("a")]


def test_an_example_trains_the_response_and_its_end_token(tmp_path: Path) -> None:
    chat = make(tmp_path)
    ids, mask = chat.encode_example(TWICE)
    assert text(chat, ids) == "<u>ab|<a>ba</s>|<u>a|<a>b</s>|"
    assert text(chat, [token for token, trained in zip(ids, mask, strict=True) if trained]) == "ba</s>b</s>"


@pytest.mark.parametrize(("first", "trained"), [(1, "ba</s>b</s>"), (2, "b</s>"), (3, "b</s>")])
def test_an_example_trains_the_responses_from_the_first_message_on(tmp_path: Path, first: int, trained: str) -> None:
    chat = make(tmp_path)
    ids, mask = chat.encode_example(TWICE, first)
    assert text(chat, [token for token, is_trained in zip(ids, mask, strict=True) if is_trained]) == trained


def test_an_example_begins_with_the_tokens_of_its_prompt(tmp_path: Path) -> None:
    chat = make(tmp_path)
    prompt = chat.encode_prompt(ASKED)
    ids, mask = chat.encode_example(ANSWERED)
    assert ids[: len(prompt)] == prompt
    assert not any(mask[: len(prompt)])


@pytest.mark.parametrize(
    "code", ["{{ raise_exception('no system turn') }}", "{{ messages[5]['content'].x }}", "{{ 1 / 0 }}"]
)
def test_a_template_that_raises_is_reported_with_its_folder_and_roles(tmp_path: Path, code: str) -> None:
    chat = make(tmp_path, template=code)
    with rejects(tmp_path, "user", error=DataError):
        chat.encode_prompt(ASKED)


def test_turns_after_the_last_answer_are_not_trained(tmp_path: Path) -> None:
    chat = make(tmp_path)
    ids, mask = chat.encode_example(TWICE[:3])
    assert text(chat, ids) == "<u>ab|<a>ba</s>|<u>a|"
    assert sum(mask) == 3


def test_decoding_omits_special_tokens(tmp_path: Path) -> None:
    chat = make(tmp_path)
    ids, mask = chat.encode_example(ANSWERED)
    assert chat.decode([token for token, trained in zip(ids, mask, strict=True) if trained]) == "ba"


def make_whisper(folder: Path) -> ChatTokenizer:
    """Returns a tokenizer that removes time stamps from the decoded text."""
    vocabulary = {"<|endoftext|>": 0, "a": 1, "b": 2, "<|0.00|>": 3}
    WhisperTokenizer(vocab=vocabulary, merges=[]).save_pretrained(folder)
    return ChatTokenizer(folder)


@pytest.mark.parametrize("kind", ["characters", "bytes", "decodes otherwise"])
def test_rows_decoded_together_have_the_text_of_each_alone(tmp_path: Path, kind: str) -> None:
    chat = {
        "characters": lambda: ChatTokenizer(tokenizer(tmp_path, special=TAGS)),
        "bytes": lambda: ChatTokenizer(save_byte_tokenizer(tmp_path, text_template="<begin> $A <end>")),
        "decodes otherwise": lambda: make_whisper(tmp_path),
    }[kind]()
    everything = list(range(len(chat)))
    rows = [[], everything, everything[::-1], everything[:1], everything[1:3], [chat.eos_id], [len(chat) + 5, 1]]
    for number in (0, 1, len(rows)):
        assert chat.decode_batch(rows[:number], keeps_special=True) == [chat.decode_all(ids) for ids in rows[:number]]
        assert chat.decode_batch(rows[:number], keeps_special=False) == [chat.decode(ids) for ids in rows[:number]]
    assert chat.decode_responses(rows) == [chat.decode_response(ids) for ids in rows]
    assert kind != "decodes otherwise" or chat.decode_batch([[1, 3, 2], [3]], keeps_special=True) == ["ab", ""]


THINKING = ConversationTemplate(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    end_of_assistant="<|im_end|>",
)
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def decode_tags(chat: ChatTokenizer, prompt: str, response: str) -> str:
    ids = chat.encode(response)
    return chat.decode_tags([chat.encode(prompt)], [ids], [chat.decode_response(ids)])[0]


@pytest.mark.parametrize("special", [(), TAGS])
def test_the_text_for_parsers_has_tags_that_the_prompt_opened_or_that_are_special(
    tmp_path: Path, special: Sequence[str]
) -> None:
    chat = ChatTokenizer(tokenizer(tmp_path, "<|endoftext|>", "<|im_end|>", special), THINKING)
    ids = chat.encode("a</think><tool_call>b</tool_call><|im_end|>")
    text = chat.decode_response(ids)
    assert text == ("ab" if special else "a</think><tool_call>b</tool_call>")
    expected = "<think>\na</think><tool_call>b</tool_call>"
    assert chat.decode_tags([chat.encode_prompt(ASKED)], [ids], [text]) == [expected]


def test_the_texts_for_parsers_of_several_rows_are_in_their_order(tmp_path: Path) -> None:
    chat = ChatTokenizer(tokenizer(tmp_path, "<|endoftext|>", "<|im_end|>", TAGS), THINKING)
    texts = ("a", "", "<tool_call>b</tool_call><|im_end|>", "c</think>")
    responses = [chat.encode(text) for text in texts]
    prompts = [chat.encode(text) for text in ("", "<think>", "", "<think>\n")]
    tagged = chat.decode_tags(prompts, responses, chat.decode_responses(responses))
    assert tagged == ["a", "<think>", "<tool_call>b</tool_call>", "<think>\nc</think>"]


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n", ""),
        ("a", ""),
        ("", ""),
        ("2 > 1", ""),
        ("2 >", ""),
        ("<think>\n\n</think>\n\n", ""),
        ("a <b>\n<think> \n", "<b>\n<think> \n"),
        ("<assistant>\n<think>\n", "<think>\n"),
        ("<reserved_107>", ""),
    ],
)
@pytest.mark.parametrize("response", ["c</b>", "<b></b>"])
def test_tags_at_the_end_of_a_prompt_are_open_if_the_response_closes_them(
    tmp_path: Path, prompt: str, opened: str, response: str
) -> None:
    chat = ChatTokenizer(tokenizer(tmp_path), ConversationTemplate("chatml"))
    assert decode_tags(chat, prompt, response) == f"{opened}{response}"


def test_a_thought_that_the_prompt_opened_is_open_without_its_end(tmp_path: Path) -> None:
    chat = ChatTokenizer(tokenizer(tmp_path), ConversationTemplate("chatml"))
    assert decode_tags(chat, "<think>\n<answer>", "a") == "<think>\na"


CALL = '{"name": "add", "arguments": {}}'


@pytest.mark.parametrize("prompt", ["<assistant>\n", "<reserved_107>"])
def test_a_role_tag_at_the_end_of_the_prompt_is_no_text_of_the_response(tmp_path: Path, prompt: str) -> None:
    chat = ChatTokenizer(tokenizer(tmp_path), ConversationTemplate("chatml"))
    call = decode_tags(chat, prompt, CALL)
    assert parse_response(call, "json").calls == parse_response(call, "llama3").calls == (ToolCall("add", {}),)
    response = "<answer>3</answer>"
    assert has_tags(response, decode_tags(chat, prompt, response), tags=("answer",)) == 1.0


def test_the_text_for_parsers_has_no_control_tokens(tmp_path: Path) -> None:
    chat = ChatTokenizer(tokenizer(tmp_path, "<s>", "</s>", TAGS), ConversationTemplate("chatml"))
    assert decode_tags(chat, "", "<|user|>a<s>b</s>c<|im_end|>") == "<|user|>abc"
    assert decode_tags(chat, "", "a<|endoftext|>") == "a"
    assert decode_tags(chat, "", "<tool_call>a</tool_call><|eot_id|>") == "<tool_call>a</tool_call>"
    assert decode_tags(chat, "", "ab") == "ab"


def test_the_end_token_and_the_size_of_the_vocabulary_are_known(tmp_path: Path) -> None:
    chat = make(tmp_path)
    assert (chat.eos_id, len(chat)) == (1, 9)


@pytest.mark.parametrize("kind", ["plain", "adds_a_space", "splits_special_tokens", "truncates_and_pads"])
def test_texts_encoded_together_have_the_ids_that_transformers_gives_to_each_alone(tmp_path: Path, kind: str) -> None:
    vocabulary = {token: number for number, token in enumerate(["<unk>", "</s>", "▁", "a", "b", "▁a", *"<>/s"])}
    core = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>"))
    scheme = "always" if kind == "adds_a_space" else "never"
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    if kind == "truncates_and_pads":
        core.enable_truncation(2)
        core.enable_padding(length=4)
    PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="</s>", unk_token="<unk>", split_special_tokens=kind == "splits_special_tokens"
    ).save_pretrained(tmp_path)
    chat = ChatTokenizer(tmp_path)
    texts = ["", "a", "ab", " a b", "a</s>b", "ba" * 50]
    together = chat.encode_all(texts)
    assert together == [chat.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert together[2] == ([5, 4] if kind == "adds_a_space" else [3, 4])


def make_larger(folder: Path, template: str = MARKED, eos: str = "</s>") -> ChatTokenizer:
    """Returns a tokenizer with the added token <i>, id 9, of a model with embeddings for the ids 0 to 8."""
    tokenizer = make(folder, template).tokenizer
    tokenizer.add_tokens(["<i>"])
    tokenizer.eos_token = eos
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 9}))
    return ChatTokenizer(folder)


def test_a_text_with_a_token_without_an_embedding_is_rejected(tmp_path: Path) -> None:
    chat, image = make_larger(tmp_path), [Message("user", "a<i>b")]
    chat.check_chat_template()
    assert text(chat, chat.encode_prompt(ASKED)) == "<u>ab|<a>"
    for encode in (
        lambda: chat.encode("a<i>"),
        lambda: chat.encode_text("a<i>"),
        lambda: chat.encode_prompt(image),
        lambda: chat.encode_example([*image, Message("assistant", "a")]),
    ):
        with rejects(tmp_path, 9, 8, error=MissingEmbeddingError):
            encode()


def test_a_template_or_an_end_token_without_an_embedding_is_rejected(tmp_path: Path) -> None:
    chat = make_larger(tmp_path / "template", MARKED + "{{ '<i>' if add_generation_prompt else '' }}")
    with rejects(tmp_path / "template", 9, error=MissingEmbeddingError):
        chat.check_chat_template()
    with rejects(tmp_path / "end", 9, error=MissingEmbeddingError):
        make_larger(tmp_path / "end", eos="<i>")


def test_a_folder_without_a_tokenizer_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=str(tmp_path / "nowhere")):
        ChatTokenizer(tmp_path / "nowhere")


def test_a_tokenizer_without_a_chat_template_is_rejected(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, template=None)
    assert tokenizer.decode(tokenizer.encode("a")) == "a"
    with pytest.raises(DataError, match=r"chat template|chat_template"):
        tokenizer.check_chat_template()


def test_a_tokenizer_without_an_end_token_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"end token|eos_token"):
        make(tmp_path, eos=None)


def test_a_template_without_an_end_of_turn_is_rejected_for_examples(tmp_path: Path) -> None:
    chat = make(tmp_path, template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with rejects("template", tmp_path, "/s", error=DataError):
        chat.encode_example(ANSWERED)


def test_a_template_that_rewrites_earlier_turns_is_rejected_for_two_responses(tmp_path: Path) -> None:
    chat = make(tmp_path, template="{% for m in messages[-2:] %}{{ m['content'] }}{% endfor %}</s>")
    with rejects("template", tmp_path, "earlier", error=DataError):
        chat.encode_example(TWICE)


@pytest.mark.parametrize("content", ["[" * 200_000, "[]", "null", "{}"])
def test_a_tokenizer_file_with_other_content_is_rejected(tmp_path: Path, content: str) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with rejects(tmp_path, "tokenizer.json", error=DataError):
        ChatTokenizer(tmp_path)
