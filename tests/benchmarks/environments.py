"""Time of the host of environments per turn, its throughput with tools that sleep, and how full a batch stays.

    python -m tests.benchmarks.environments [--episodes 1024] [--workers 2]

The first table has the overhead: all episodes take their turns as fast as possible, with environments that return at
once. The second table has tools that sleep 0.05 to 1 s (log-normal). An episode sends its next response when it has an
observation, so the ideal time is that of the episode that sleeps longest. The third table has a rollout worker that
streams (engine hf, 64 slots) episodes with and without such latency, without the scheduler: all episodes are queued at
the start. It shows the share of decode steps with at least 58 rows. Steps after the last prompt has left the queue are
not counted, because the batch then runs empty.
"""

import argparse
import json
import math
import random
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path

from flowrl import Batch, Cluster, Placement
from flowrl.config import EnvironmentConfig, ModelConfig, RolloutConfig
from flowrl.engines.rollout.hf.engine import HfRollout
from flowrl.environments.base import ModelResponse
from flowrl.environments.environment_host import EnvironmentHost
from flowrl.environments.requests import Close, EnvironmentLimits, EnvironmentSpec, Reply, Reset, Step
from flowrl.schedules.rewards import EnvironmentScoring
from flowrl.workers import EnvironmentWorker, Rollout
from recipes.reasoning.prepare import prepare
from tests.benchmarks.measure import read_arguments

MODULE = "tests.environments.calculator"
MODULE_OF_EPISODES = "tests.environments.episodes"
TURNS = 3
SLOTS, FULL = 64, 0.9
NUM_STOPS = 16
"""Tokens that end a response, of 256, so that the responses of a random model have about 16 tokens."""


def sleep_times(num_episodes: int) -> list[list[float]]:
    """Returns log-normal times from 0.05 to 1 s with the median 0.22 s, per episode and turn."""
    rng = random.Random(0)
    return [
        [min(1.0, max(0.05, math.exp(rng.gauss(math.log(0.22), 0.7)))) for _ in range(TURNS)]
        for _ in range(num_episodes)
    ]


def call_text(tool: str, **arguments: float) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def play(host: EnvironmentHost, texts: list[list[str]]) -> float:
    """Plays all episodes at the same time, and returns the seconds of their turns."""
    resets = [host.submit(Reset(i, {"prompt": "What is 1 + 2?", "answer": "3"})) for i in range(len(texts))]
    assert all(future.result().failure is None for future in resets)
    finished = threading.Semaphore(0)

    def step(episode: int, turn: int) -> None:
        future = host.submit(Step(episode, ModelResponse(texts[episode][turn], list(range(64)), "stop", turn)))
        future.add_done_callback(lambda reply: receive(episode, turn, reply))

    def receive(episode: int, turn: int, future: "Future[Reply]") -> None:
        assert future.result().failure is None, future.result().message
        if turn + 1 < TURNS:
            step(episode, turn + 1)
        else:
            finished.release()

    start_s = time.monotonic()
    for episode in range(len(texts)):
        step(episode, 0)
    for _ in texts:
        finished.acquire()
    seconds = time.monotonic() - start_s
    for future in [host.submit(Close(i)) for i in range(len(texts))]:
        future.result()
    return seconds


class CountingRollout(Rollout):
    """Records the number of decoding and of waiting rows of each decode step."""

    def __init__(self, config: RolloutConfig, model: ModelConfig, *, seed: int) -> None:
        super().__init__(config, model, seed=seed)
        assert isinstance(self.engine, HfRollout)
        batch = self.engine._batch
        step = batch._decoder.step

        def counted(version: int) -> list:
            counts.append((batch._decoder.num_rows, len(batch._waiting)))
            return step(version)

        batch._decoder.step = counted  # pyright: ignore[reportAttributeAccessIssue] (a wrapper of the same function)


counts: list[tuple[int, int]] = []
"""Rows that decode and rows that wait, per decode step of the current run."""


def stream(model: Path, num_episodes: int, workers: int, *, is_slow: bool) -> tuple[float, float, float]:
    """Streams episodes through a rollout worker. Returns the share of full decode steps, the mean number of decoding
    rows, and the seconds.
    """
    counts.clear()
    environment = EnvironmentConfig.model_validate(
        {"name": f"{MODULE_OF_EPISODES}:Slow", "options": {"turns": TURNS, "is_slow": is_slow}, "workers": workers}
    )
    rollout = RolloutConfig(
        max_response_tokens=400, max_num_seqs=SLOTS, stop_ids=tuple((65 + i,) for i in range(NUM_STOPS))
    )
    placement = Placement(pools={"b": [1], "c": [1]}, roles={"rollout": "b", "environment": "c"})
    with Cluster(placement, backend="inline", num_threads=2) as cluster:
        host = cluster.group("environment", EnvironmentWorker, environment)
        group = cluster.group("rollout", CountingRollout, rollout, ModelConfig(path=model), seed=0)
        scoring = EnvironmentScoring(environment, host, max_prompt_tokens=64)
        scoring.connect(group)
        rows = [
            {"prompt_ids": [66], "prompt_id": i, "sample": 0, "prompt": f"{i}", "number": i}
            for i in range(num_episodes)
        ]
        group.add(Batch.from_rows(rows), 1, **scoring.generate_arguments)
        start_s, done = time.monotonic(), 0
        while done < num_episodes:
            done += group.poll(1.0, **scoring.generate_arguments).num_rows
        seconds = time.monotonic() - start_s
    last = max(i for i, (_, waiting) in enumerate(counts) if waiting)
    busy = [rows for rows, _ in counts[: last + 1]]
    return sum(rows >= FULL * SLOTS for rows in busy) / len(busy), sum(busy) / len(busy), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=2)
    arguments = read_arguments(parser, episodes=SLOTS + 8, workers=1)
    count = arguments.episodes
    options = {"tools": [f"{MODULE}:add", f"{MODULE}:wait", f"{MODULE}:sleep"], "reward": f"{MODULE}:is_answer"}
    tools = EnvironmentSpec("flowrl.environments.tool_environment:ToolEnvironment", options)
    games = {name: EnvironmentSpec(f"tests.environments.episodes:{name}") for name in ("AsyncGame", "Game")}
    limits = EnvironmentLimits(workers=arguments.workers, threads=400)
    rows = [
        ("async environment", games["AsyncGame"], [["text"] * TURNS] * count),
        ("sync environment", games["Game"], [["text"] * TURNS] * count),
        ("tool that returns at once", tools, [[call_text("add", a=1, b=2)] * TURNS] * count),
    ]
    sys.stdout.write(
        f"{count} episodes of {TURNS} turns, {arguments.workers} processes\n\n| | ms per turn |\n|---|---|\n"
    )
    for name, spec, texts in rows:
        with EnvironmentHost(spec, limits) as host:
            play(host, texts)  # starts the processes
            sys.stdout.write(f"| {name} | {1000 * play(host, texts) / count / TURNS:.3f} |\n")
    times = sleep_times(count)
    ideal_s = max(map(sum, times))
    sys.stdout.write(f"\nideal: {ideal_s:.2f} s\n\n| | seconds | share of the ideal throughput |\n|---|---|---|\n")
    for name in ("wait", "sleep"):
        texts = [[call_text(name, seconds=seconds) for seconds in episode] for episode in times]
        with EnvironmentHost(tools, limits) as host:
            play(host, [[call_text("add", a=1)] * TURNS] * count)
            seconds = play(host, texts)
        kind = "async" if name == "wait" else "sync, in threads"
        sys.stdout.write(f"| {kind} tool | {seconds:.2f} | {ideal_s / seconds:.2f} |\n")
    sys.stdout.write("\n| tool latency | full decode steps | mean rows | seconds |\n|---|---|---|---|\n")
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder) / "model", seed=0)
        for is_slow in (False, True):
            share, mean_rows, seconds = stream(Path(folder) / "model", count, arguments.workers, is_slow=is_slow)
            name = "0.05 to 1 s" if is_slow else "none"
            sys.stdout.write(f"| {name} | {share:.3f} | {mean_rows:.1f} | {seconds:.1f} |\n")


if __name__ == "__main__":
    main()
