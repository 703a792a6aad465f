"""Tokens and masks of single rows, with a tokenizer that adds a space at the start of a text."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flowrl.data.chat import ChatTokenizer
from flowrl.data.messages import Conversation, Message
from flowrl.data.preparation.check_rows import marked_text
from flowrl.data.preparation.tokenized_rows import LengthLimits, tokenize_row
from flowrl.data.reading.row_problems import RowProblem
from flowrl.data.template import ConversationTemplate
from recipes.quickstart.prepare import save_tokenizer
from tests.inference.byte_tokenizer import BEGIN, END, save_byte_tokenizer


def test_the_trained_text_continues_its_source_without_a_space(tmp_path: Path) -> None:
    vocabulary = {token: i for i, token in enumerate(["<unk>", "</s>", "▁", "a", "b", "▁a"])}
    core = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>").save_pretrained(tmp_path)
    row = Conversation((), text=("b", "a"))
    (side,) = tokenize_row(row, "text", ChatTokenizer(tmp_path), LengthLimits()).sides
    assert (side.ids.tolist(), side.mask.tolist()) == ([2, 4, 3, 1], [False, False, True, True])


@pytest.mark.parametrize("template", ["<begin> $A", "<begin> $A <end>"])
@pytest.mark.parametrize("text", ["ab", "<begin>ab", "ab<end>", "<begin>ab<end>"])
def test_a_text_has_one_begin_and_one_end_token_and_trains_all_but_the_first(
    tmp_path: Path, template: str, text: str
) -> None:
    tokenizer = ChatTokenizer(save_byte_tokenizer(tmp_path, text_template=template))
    (side,) = tokenize_row(Conversation((), text=("", text)), "text", tokenizer, LengthLimits()).sides
    assert side.ids.tolist() == [BEGIN, *tokenizer.encode("ab"), END]
    assert side.mask.tolist() == [False, True, True, True]


def test_the_text_before_the_trained_text_follows_the_begin_token(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(save_byte_tokenizer(tmp_path, text_template="<begin> $A"))
    limits = LengthLimits(max_tokens=3, too_long="truncate")
    row = tokenize_row(Conversation((), text=("a", "b")), "text", tokenizer, limits)
    assert row.sides[0].ids.tolist() == [BEGIN, *tokenizer.encode("ab")]
    assert row.sides[0].mask.tolist() == [False, False, True]


def test_the_first_token_of_a_text_is_not_trained_and_not_counted(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer, row = ChatTokenizer(tmp_path), Conversation((), text=("", "1+1"))
    (side,) = tokenize_row(row, "text", tokenizer, LengthLimits(min_response_tokens=3)).sides
    assert (side.mask.tolist(), side.num_trained) == ([False, True, True, True], 3)
    assert marked_text(side, tokenizer) == "1[[+1<eos>]]"
    with pytest.raises(RowProblem) as caught:
        tokenize_row(row, "text", tokenizer, LengthLimits(min_response_tokens=4))
    assert caught.value.reason == "short_response"


def test_the_first_token_of_a_response_without_a_prompt_is_not_trained(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    jinja = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}<eos>{% endfor %}"
    tokenizer = ChatTokenizer(tmp_path, ConversationTemplate(jinja))
    row = Conversation((Message("user", "1"), Message("assistant", "2")))
    (side,) = tokenize_row(row, "sft", tokenizer, LengthLimits()).sides
    assert side.mask.tolist() == [False, True]
