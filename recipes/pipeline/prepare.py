"""Creates the inputs of the pipeline: stories, prompts, a tokenizer and a small untrained model."""

import random
from collections.abc import Sequence

from transformers import Qwen2Tokenizer

from flowrl.checkpoints.run_folder import replacing
from recipes.pipeline.config import PipelineConfig
from recipes.pipeline.stories import Prompt, all_prompts, tell
from recipes.quickstart.prepare import SPECIAL, save_model, write_lines

VOCABULARY = 600
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\n' }}{% endfor %}"
)


def prepare(pipeline: PipelineConfig) -> None:
    """Creates the folder `data` of the output folder atomically, unless it exists.

    Writes `sft.jsonl` and `sft_test.jsonl` (conversations), `prompts.jsonl` and `prompts_test.jsonl` (prompts), and
    `model/` (weights, config, tokenizer). The prompts of SFT, of the other stages and of the comparison are disjoint.
    """
    if (pipeline.output / "data").exists():
        return
    prompts, sizes = all_prompts(pipeline.seed), (pipeline.num_held_out, pipeline.num_pairs, pipeline.num_stories)
    held_out, rest = prompts[: sizes[0]], prompts[sizes[0] :]
    others, rest = rest[: sizes[1]], rest[sizes[1] :]
    generator = random.Random(f"stories {pipeline.seed}")
    stories = [example(prompt, generator) for prompt in (rest * -(-sizes[2] // len(rest)))[: sizes[2]]]
    with replacing(pipeline.output / "data") as folder:
        folder.mkdir(parents=True)
        write_lines(folder / "sft.jsonl", stories)
        write_lines(folder / "sft_test.jsonl", [example(prompt, generator) for prompt in held_out])
        write_lines(folder / "prompts.jsonl", [question(prompt) for prompt in others])
        write_lines(folder / "prompts_test.jsonl", [question(prompt) for prompt in held_out])
        tokenizer = train_tokenizer([turn["content"] for story in stories for turn in story["messages"]])
        tokenizer.save_pretrained(folder / "model")
        num_characters = len(tokenizer) - len(SPECIAL)
        save_model(folder / "model", pipeline.seed, num_characters=num_characters, hidden_size=96, max_tokens=128)


def question(prompt: Prompt) -> dict:
    """Returns a row with a prompt."""
    return {"messages": [{"from": "human", "content": prompt.text}]}


def example(prompt: Prompt, generator: random.Random) -> dict:
    """Returns a row with a prompt and a story."""
    return {"messages": [{"from": "human", "content": prompt.text}, *answer(tell(prompt, generator))]}


def answer(story: str) -> list[dict[str, str]]:
    return [{"from": "assistant", "content": story}]


def train_tokenizer(texts: Sequence[str]) -> Qwen2Tokenizer:
    """Returns a tokenizer with byte-level BPE, an end token, a padding token and a chat template."""
    pad, eos = SPECIAL
    vocabulary = {token: index for index, token in enumerate(SPECIAL)}
    empty = Qwen2Tokenizer(
        vocab=vocabulary, merges=[], unk_token=pad, pad_token=pad, eos_token=eos, chat_template=CHAT_TEMPLATE
    )
    return empty.train_new_from_iterator(texts, vocab_size=VOCABULARY)
