"""Measures the speed and memory of `flowrl data prepare`, and the start of a run on the prepared folder.

Usage: python -m tests.benchmarks.data [--rows 20000] [--repeats 3] [--memory-rows 1000000] [--near-duplicates]

The baseline is a loop of `json.loads` and `apply_chat_template(tokenize=True)` on one core. Rates of one process are
per second of CPU time, which other programs on the machine affect least. The rate of two processes is per second of
wall time, and is compared with the loop in wall time. Each is the best of several interleaved repeats.
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests.benchmarks.measure import read_arguments

SPEAKERS = ("Natalia", "Weng", "Betty", "Julie", "James", "Mark", "Albert", "Ken", "Alexis", "Tina")
THINGS = ("clips", "apples", "books", "marbles", "letters", "flowers", "pages", "toys", "coins", "stickers")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_rows(count: int, seed: int) -> Iterator[dict]:
    """Yields word problems with solutions, about as long as those of GSM8K."""
    rng = random.Random(seed)
    for _ in range(count):
        who, what = rng.choice(SPEAKERS), rng.choice(THINGS)
        numbers = [rng.randint(2, 900) for _ in range(5)]
        question = (
            f"{who} has {numbers[0]} {what} and buys {numbers[1]} more in April. In May, {who} gives away "
            f"{numbers[2]} {what}, and then {numbers[3]} friends each bring {numbers[4]} {what}. "
            f"How many {what} does {who} have at the end?"
        )
        steps = [numbers[0] + numbers[1]]
        steps.append(steps[0] - numbers[2])
        steps.append(numbers[3] * numbers[4])
        answer = (
            f"{who} starts with {numbers[0]} + {numbers[1]} = <<{numbers[0]}+{numbers[1]}={steps[0]}>>{steps[0]} "
            f"{what}.\nAfter the gift, {steps[0]} - {numbers[2]} = {steps[1]} {what} are left.\nThe friends bring "
            f"{numbers[3]} * {numbers[4]} = {steps[2]} {what}.\nIn total, {who} has {steps[1] + steps[2]} {what}.\n"
            f"#### {steps[1] + steps[2]}"
        )
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield {"messages": turns}


def write_rows(path: Path, count: int, seed: int = 0) -> Path:
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in make_rows(count, seed))
    return path


def save_tokenizer(folder: Path) -> Path:
    """Saves a byte-level BPE tokenizer of 8,000 tokens, with the tokens and template of ChatML, and a model config."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415 (after TOKENIZERS_...)
    from transformers import PreTrainedTokenizerFast, Qwen2Config  # noqa: PLC0415

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=special, initial_alphabet=alphabet)
    core.train_from_iterator((turn["content"] for row in make_rows(3000, 1) for turn in row["messages"]), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", chat_template=CHATML)
    tokenizer.save_pretrained(folder)
    Qwen2Config(vocab_size=8000, max_position_embeddings=4096).save_pretrained(folder)  # a run reads these sizes
    return folder


Clock = Callable[[], float]


def baseline(path: Path, tokenizer_path: Path, clock: Clock) -> int:
    from transformers import AutoTokenizer  # noqa: PLC0415 (see above)

    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_path))
    begun = clock()
    count = 0
    with path.open() as file:
        for line in file:
            tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=True)
            count += 1
    return round(count / (clock() - begun))


def prepared(path: Path, tokenizer_path: Path, output: Path, clock: Clock, **settings: object) -> int:
    """Returns rows per second from the first report on, which excludes the imports of the first process."""
    from flowrl.config import PreparationConfig  # noqa: PLC0415 (see above)
    from flowrl.data.preparation.prepare import prepare  # noqa: PLC0415 (see above)

    config = PreparationConfig.model_validate(
        {"files": [path], "tokenizer": tokenizer_path, "output": output, "duplicates": "keep", **settings}
    )
    begun, first, rows = 0.0, 0, 0

    def report(_: int, num_rows: int) -> None:
        nonlocal begun, first, rows
        rows += num_rows
        if not begun:
            begun, first = clock(), rows

    prepare(config, report)
    return round((rows - first) / (clock() - begun))


def on_one_core(function: Callable[..., int], *arguments: object, **settings: object) -> int:
    """Returns the result of a function in a new process that may use one core."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1, initializer=os.sched_setaffinity, initargs=(0, {0})) as pool:
        return pool.apply(function, arguments, settings)


def rate_and_memory_growth(path: Path, tokenizer_path: Path, output: Path) -> tuple[int, float]:
    """Prepares rows. Returns rows per second, and the growth of the memory in MB after the first tenth of the rows."""
    from flowrl.config import PreparationConfig  # noqa: PLC0415 (see above)
    from flowrl.data.preparation.prepare import prepare  # noqa: PLC0415 (see above)

    process, sizes, begun = psutil.Process(), [], time.perf_counter()
    config = PreparationConfig.model_validate({"files": [path], "tokenizer": tokenizer_path, "output": output})
    manifest = prepare(config, lambda *_: sizes.append(process.memory_info().rss))
    rate = round(manifest["num_read"] / (time.perf_counter() - begun))
    return rate, (max(sizes) - sizes[len(sizes) // 10]) / 1e6


def start_seconds(folder: Path, tokenizer_path: Path) -> float:
    """Returns the seconds from the path of a prepared folder to the first batch."""
    from flowrl.config import ModelConfig  # noqa: PLC0415 (see above)
    from flowrl.run.datasets import SftExamples  # noqa: PLC0415 (see above)

    begun = time.perf_counter()
    examples = SftExamples(folder, ModelConfig(path=tokenizer_path), max_tokens=4096)
    next(examples.batches(64, seed=0, shuffle=True))
    return time.perf_counter() - begun


def show(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory-rows", type=int, default=0, help="also measure memory and run start with N rows")
    parser.add_argument("--near-duplicates", action="store_true", help="also measure with near_duplicates: 0.8")
    options = read_arguments(parser, rows=500, repeats=1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer, path = save_tokenizer(folder / "tokenizer"), write_rows(folder / "rows.jsonl", options.rows)
        best: dict[str, int] = {}
        for repeat in range(options.repeats):
            cpu, wall = time.process_time, time.perf_counter
            rates = {
                "loop, CPU time": on_one_core(baseline, path, tokenizer, cpu),
                "one process, CPU time": on_one_core(prepared, path, tokenizer, folder / f"one{repeat}", cpu),
                "loop": on_one_core(baseline, path, tokenizer, wall),
                "two processes": prepared(path, tokenizer, folder / f"two{repeat}", wall, processes=2),
            }
            if options.near_duplicates:
                rates["near_duplicates 0.8, CPU time"] = on_one_core(
                    prepared, path, tokenizer, folder / f"near{repeat}", cpu, near_duplicates=0.8
                )
            best = {name: max(rate, best.get(name, 0)) for name, rate in rates.items()}
        for name, rate in best.items():
            base = best["loop, CPU time" if "CPU" in name else "loop"]
            show(f"{name}: {rate:,} rows/s, {rate / base:.2f} of the loop")
        if options.memory_rows:
            many = write_rows(folder / "many.jsonl", options.memory_rows)
            rate, grown = rate_and_memory_growth(many, tokenizer, folder / "many")
            show(f"{options.memory_rows:,} rows: {rate:,} rows/s, memory grows by {grown:.0f} MB after the first tenth")
            begun = start_seconds(folder / "many", tokenizer)
            show(f"first batch of the prepared folder after {begun:.2f} s")


if __name__ == "__main__":
    main()
