"""Rows and tokens of the prompts of `flowrl generate`."""

from io import BytesIO
from pathlib import Path

import pytest

from flowrl.data.chat import ChatTokenizer
from flowrl.data.messages import Conversation, DataError
from flowrl.data.preparation.tokenized_rows import LengthLimits, tokenize_row
from flowrl.inference.prompt_file import STDIN, read_prompt_rows, tokenize_rows
from tests.errors import rejects
from tests.inference.byte_tokenizer import BEGIN, save_byte_tokenizer


@pytest.mark.parametrize("text", ["ab", "<begin>ab"])
def test_a_raw_prompt_has_the_tokens_of_a_trained_text_without_its_end(tmp_path: Path, text: str) -> None:
    chat = ChatTokenizer(save_byte_tokenizer(tmp_path, text_template="<begin> $A <end>"))
    rows = read_prompt_rows(STDIN, BytesIO(text.encode()))
    (prompt,) = tokenize_rows(rows, chat, max_length=8, max_tokens=1, is_raw=True)
    (trained,) = tokenize_row(Conversation((), text=("", text)), "text", chat, LengthLimits()).sides
    assert list(prompt.token_ids) == [BEGIN, *chat.encode("ab")] == trained.ids.tolist()[:-1]


@pytest.mark.parametrize(("value", "fact"), [("NaN", "NaN"), ('1, "answer": 2', "twice")])
def test_a_prompt_with_nan_or_a_repeated_key_is_rejected(value: str, fact: str) -> None:
    content = f'{{"prompt": "1+1="}}\n{{"prompt": "2+2=", "answer": {value}}}\n'
    with rejects("line", 2, "answer", fact, error=DataError):
        read_prompt_rows(STDIN, BytesIO(content.encode()))
