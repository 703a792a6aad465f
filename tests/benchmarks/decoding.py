"""Times the text of many responses: all rows at once, and row by row with transformers; see docs/benchmarks.md.

`python -m tests.benchmarks.decoding` prints one line of JSON per figure.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from flowrl.data.chat import ChatTokenizer
from tests.benchmarks.measure import Figure, paired, read_arguments

_ROOT = Path(__file__).parents[2]
_NUM_TOKENS = 1_000
_VOCABULARY = 8_000


def save_tokenizer(folder: Path, texts: Sequence[str]) -> None:
    """Saves a byte-level BPE tokenizer of these texts, with an end token and a special token for tool calls."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<end>", "<tool_call>"]
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>").save_pretrained(folder)


def decode_each(chat: ChatTokenizer, prompts: Sequence[list[int]], rows: Sequence[list[int]]) -> list[list[str]]:
    """Returns the texts and the tagged texts of responses, row by row."""
    texts = [chat.decode_response(ids) for ids in rows]
    tags = [
        chat.decode_tags([prompt], [ids], [text])[0] for prompt, ids, text in zip(prompts, rows, texts, strict=True)
    ]
    return [texts, tags]


def decode_together(chat: ChatTokenizer, prompts: Sequence[list[int]], rows: Sequence[list[int]]) -> list[list[str]]:
    """Returns the texts and the tagged texts of responses, all rows at once."""
    texts = chat.decode_responses(rows)
    return [texts, chat.decode_tags(prompts, rows, texts)]


def figures(num_rows: int, repeats: int) -> Iterator[Figure]:
    texts = [path.read_text() for path in sorted(_ROOT.glob("docs/*.md"))]
    with TemporaryDirectory() as folder:
        save_tokenizer(Path(folder), texts)
        chat = ChatTokenizer(folder)
    ids = chat.encode("".join(texts))
    starts = [row * 997 % (len(ids) - _NUM_TOKENS) for row in range(num_rows)]
    plain = [[*ids[start : start + _NUM_TOKENS - 1], chat.eos_id] for start in starts]
    (tool_call,) = chat.encode("<tool_call>")
    tagged = [[tool_call, *row[1:]] for row in plain]
    prompts = [row[:100] for row in plain]
    for name, rows in (("", plain), (" and a special token", tagged)):
        assert decode_together(chat, prompts, rows) == decode_each(chat, prompts, rows)
        for label, clock in (("CPU time", time.process_time), ("time", time.perf_counter)):
            yield paired(
                f"{num_rows} rows of {_NUM_TOKENS} tokens{name}, compared with row by row, {label}",
                lambda rows=rows: decode_together(chat, prompts, rows),
                lambda rows=rows: decode_each(chat, prompts, rows),
                repeats,
                clock=clock,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = read_arguments(parser, rows=8, repeats=1)
    sys.stdout.write(json.dumps({"load before": os.getloadavg()[0], "CPUs": os.cpu_count()}) + "\n")
    for figure in figures(arguments.rows, arguments.repeats):
        sys.stdout.write(json.dumps(figure) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
