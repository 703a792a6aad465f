"""Time of the host of environments per turn, and its throughput with tools that sleep.

    python -m tests.benchmarks.environments [--episodes 1024] [--workers 2]

The first table has the overhead: all episodes take their turns as fast as possible, with environments that return at
once. The second table has tools that sleep 0.05 to 1 s (log-normal). An episode sends its next response when it has an
observation, so the ideal time is that of the episode that sleeps longest.
"""

import argparse
import json
import math
import random
import sys
import threading
import time
from concurrent.futures import Future

from flowrl.environments.base import ModelResponse
from flowrl.environments.environment_host import EnvironmentHost
from flowrl.environments.requests import Close, EnvironmentLimits, EnvironmentSpec, Reply, Reset, Step

MODULE = "tests.environments.calculator"
TURNS = 3


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
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


if __name__ == "__main__":
    main()
