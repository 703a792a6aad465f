"""A tokenizer whose tokens are single bytes, and special tokens for the start and the end of a text."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

BEGIN, END = 257, 0
"""Ids of `<begin>` and `<end>`."""


def save_byte_tokenizer(folder: Path, *, text_template: str | None = None) -> Path:
    """Saves the tokenizer. A text template such as `<begin> $A` determines the special tokens of plain text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({"<end>": END, **{letter: i for i, letter in enumerate(alphabet, start=1)}}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": "<end>"}
    if text_template is not None:
        tokenizer.add_special_tokens(["<begin>", "<end>"])
        tokenizer.post_processor = TemplateProcessing(
            single=text_template, special_tokens=[("<begin>", BEGIN), ("<end>", END)]
        )
        special["bos_token"] = "<begin>"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder
