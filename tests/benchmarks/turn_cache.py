"""Time that engine hf needs for episodes of several turns, with and without kept KV caches.

    python -m tests.benchmarks.turn_cache [--episodes 64] [--repeats 5] [--threads 1]

Each episode has a prompt of 32 to 64 tokens, responses of 8 to 24 tokens, and observations of 8 to 24 or 128 tokens. An
environment replies at once, so the time is that of the engine. `rollout.keep_turn_cache` true and false alternate. The
model counts down to the end token, so both generate the same tokens (tests/benchmarks/bench_rollouts.py).
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flowrl.config import RolloutConfig
from flowrl.engines.rollout.base import Request, Segment
from flowrl.engines.rollout.hf.engine import HfRollout, SeparateBatch
from tests.benchmarks.bench_rollouts import END, FIRST, LAST, count_down_model, count_down_tokenizer
from tests.benchmarks.measure import WARMUP, machine, read_arguments

SIZES = {"0.2M": (64, 2, 4, 1024), "1M": (128, 4, 4, 1024), "7M": (256, 8, 8, 1024)}
"""Name -> width, number of layers, number of heads, and vocabulary size."""

CASES = [("0.2M", 3, 16), ("0.2M", 8, 16), ("1M", 3, 16), ("1M", 8, 16), ("1M", 8, 128), ("7M", 8, 16)]
"""Model, number of turns, and number of tokens of an observation. 16 stands for 8 to 24."""


@dataclass(frozen=True)
class Script:
    """Tokens of an episode that the policy does not sample."""

    prompt: list[int]
    observations: list[list[int]]


def make_scripts(num_episodes: int, turns: int, observed: int) -> list[Script]:
    chance = random.Random(0)

    def tokens(num: int) -> list[int]:
        """Returns tokens after which the response has 8 to 24 tokens."""
        return [*(chance.randint(FIRST, LAST) for _ in range(num - 1)), END + chance.randint(8, 24)]

    def length() -> int:
        return chance.randint(8, 24) if observed == 16 else observed

    return [
        Script(tokens(chance.randint(32, 64)), [tokens(length()) for _ in range(turns - 1)])
        for _ in range(num_episodes)
    ]


def play(engine: HfRollout, scripts: Sequence[Script]) -> tuple[list[int], int]:
    """Plays all episodes. Returns the number of response tokens of each, and the largest number of kept caches."""
    batch: SeparateBatch = engine.open_batch()
    current = {str(row): Request(str(row), script.prompt, row, 0.0, (), True) for row, script in enumerate(scripts)}
    batch.add(current.values())
    lengths, num_kept = [0] * len(scripts), 0
    while batch.num_running:
        responses = batch.poll()
        num_kept = max(num_kept, batch.num_kept)
        following = []
        for response in responses:
            request, row = current[response.request_id], int(response.request_id)
            lengths[row] += len(response.token_ids)
            turn = len(request.segments) // 2
            if turn == len(scripts[row].observations):
                batch.abort([request.request_id])
                continue
            observation = Segment.environment(scripts[row].observations[turn])
            request = replace(request, segments=(*request.segments, Segment.policy(response), observation))
            current[request.request_id] = request
            following.append(request)
        batch.add(following)
    assert batch.num_kept == 0
    return lengths, num_kept


def measure(size: str, turns: int, observed: int, num_episodes: int, repeats: int) -> str:
    """Returns a row of the table."""
    _, _, _, vocabulary = SIZES[size]
    scripts = make_scripts(num_episodes, turns, observed)
    limit = turns * (24 + max(observed, 24))
    engines = [
        HfRollout(
            count_down_model(*SIZES[size]),
            count_down_tokenizer(vocabulary),
            RolloutConfig(max_response_tokens=limit, max_num_seqs=64, keep_turn_cache=keeps),
        )
        for keeps in (True, False)
    ]
    seconds: tuple[list[float], list[float]] = ([], [])
    lengths = []
    for number in range(WARMUP + repeats):
        for side in (0, 1) if number % 2 else (1, 0):
            start_s = time.process_time()
            lengths.append(play(engines[side], scripts)[0])
            if number >= WARMUP:
                seconds[side].append(time.process_time() - start_s)
    assert all(own == lengths[0] for own in lengths), "both generate the same responses"
    kept, prefilled = map(statistics.median, seconds)
    ratios = [own / other for own, other in zip(*seconds, strict=True)]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    context = statistics.mean(len(s.prompt) + sum(map(len, s.observations)) for s in scripts) + statistics.mean(
        lengths[0]
    )
    return (
        f"| {size} | {turns} | {observed} | {context:.0f} | {kept:.2f} s | {prefilled:.2f} s "
        f"| {statistics.median(ratios):.2f} ({spread}) |\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = read_arguments(parser, episodes=2, repeats=1)
    torch.set_num_threads(arguments.threads)
    sys.stdout.write(f"{machine()}\n\n")
    sys.stdout.write("| parameters | turns | observation | tokens of a row | kept | prefilled | ratio |\n")
    sys.stdout.write("|---|---|---|---|---|---|---|\n")
    for size, turns, observed in CASES[:1] if arguments.smoke else CASES:
        sys.stdout.write(measure(size, turns, observed, arguments.episodes, arguments.repeats))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
