"""Tokens and masks of single rows, with a tokenizer that adds a space at the start of a text."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flowrl.data.chat import ChatTokenizer
from flowrl.data.messages import Conversation
from flowrl.data.preparation.tokenized_rows import LengthLimits, tokenize_row


def test_the_trained_text_continues_its_source_without_a_space(tmp_path: Path) -> None:
    vocabulary = {token: i for i, token in enumerate(["<unk>", "</s>", "▁", "a", "b", "▁a"])}
    core = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>").save_pretrained(tmp_path)
    row = Conversation((), text=("b", "a"))
    (side,) = tokenize_row(row, "text", ChatTokenizer(tmp_path), LengthLimits()).sides
    assert (side.ids.tolist(), side.mask.tolist()) == ([2, 4, 3, 1], [False, False, True, True])
