"""Writes run folders with generated metrics, calls and rows, in the formats of a real run, for tests of the report."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowrl.checkpoints.run_folder import RunFolder, write_json
from flowrl.config import RolloutLogConfig
from flowrl.data.events import CallEvent, Counted
from flowrl.health.monitor import FILE, Finding, format_findings
from flowrl.report.chrome_trace import chrome_trace
from flowrl.report.rollout_log import RolloutLog, Row

ORIGIN_NS = 1_800_000_000_000_000_000
"""Time of the first call, in ns since the epoch."""

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>\u2028\x00"
"""Generated text that must not be executed."""


def write_run(
    folder: Path,
    *,
    num_steps: int = 200,
    num_rows: int = 8,
    every: int = 5,
    seed: int = 0,
    is_async: bool = True,
    num_token_rows: int = 2,
    settings: dict[str, Any] | None = None,
) -> Path:
    """Writes the folder of a complete run and returns it."""
    rng = random.Random(seed)
    config = make_config(folder, num_steps, seed, is_async) | (settings or {})
    run = RunFolder.create(folder, config)
    metrics = list(make_metrics(num_steps, rng, is_async))
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in metrics), encoding="utf-8")
    events = make_calls(min(num_steps, 400), rng, is_async)
    counts = [
        Counted(event.started_ns, {"waiting": i % 3, "running": 2 + i % 2, "complete": i % 5})
        for i, event in enumerate(events[::20])
    ]
    write_json(run.trace, chrome_trace(events, counts=counts if is_async else ()), indent=None)
    log = RolloutLog(run.rollouts, RolloutLogConfig(max_mb=None))
    for step in [1, *range(every, num_steps + 1, every)]:
        log.write("training", step, [make_row(step, i, rng, i < num_token_rows) for i in range(num_rows)])
    for step in (0, num_steps):
        log.write("evaluation", step, [evaluation_row(i, step, num_steps, rng) for i in range(40)])
    finding = Finding("gradient_spike", 31, 33, 7.4, 5.0, f"gradient norm is 7.4 {HOSTILE}", "actor.optimizer.lr")
    (folder / FILE).write_text(format_findings([finding]), encoding="utf-8")
    write_json(run.summary, make_summary(metrics, num_steps))
    return folder


def make_config(folder: Path, num_steps: int, seed: int, is_async: bool) -> dict[str, Any]:
    pools = {"makers": [2], "trainer": [1]} if is_async else {"main": [2]}
    roles = {"actor": "trainer", "rollout": "makers", "reference": "trainer", "reward": "trainer"}
    return {
        "recipe": "recipes.grpo.config:GRPOConfig",
        "output": str(folder),
        "steps": num_steps,
        "seed": seed,
        "placement": {
            "device": "cpu",
            "pools": pools,
            "roles": roles if is_async else dict.fromkeys(roles, "main"),
        },
        "schedule": {"kind": "async", "max_staleness": 2} if is_async else {"kind": "sync"},
        "actor": {"model": {"path": "runs/sft/model"}, "optimizer": {"lr": 3e-4 if seed == 0 else 1e-4}},
        "rollout": {"engine": "hf", "max_response_tokens": 64, "temperature": 1.0},
        "reference": {"model": {"path": "runs/sft/model"}},
        "reward": {"components": [{"name": "exact", "weight": 1.0}, {"name": "format", "weight": 0.2}]},
        "data": {"train": "data/train.jsonl", "test": "data/test.jsonl"},
        "report": {"rollouts": {"every": 5, "rows": 8}},
    }


def make_metrics(num_steps: int, rng: random.Random, is_async: bool) -> Iterator[dict[str, float | None]]:
    yield {
        "step": 0,
        "accuracy": 0.291,
        "evaluation/accuracy_low": 0.25,
        "evaluation/accuracy_high": 0.33,
        "evaluation/response_length": 41.0,
    }
    elapsed = 4.0
    for step in range(1, num_steps + 1):
        progress = 1 - math.exp(-3 * step / num_steps)
        seconds = rng.uniform(0.5, 0.7)
        elapsed += seconds
        reward = 0.3 + 0.4 * progress + rng.gauss(0, 0.03)
        record: dict[str, float | None] = {
            "step": step,
            "reward": reward,
            "reward_max": 1.2,
            "rewards/exact": reward - 0.15,
            "rewards/format": 0.5 + 0.45 * progress + rng.gauss(0, 0.02),
            "rewards/exact/seconds": rng.uniform(1e-4, 2e-4),
            "response_length": 42 - 6 * progress + rng.gauss(0, 1.5),
            "response_tokens": 512 * 40 + rng.randrange(900),
            "truncated_fraction": max(0.0, 0.08 - 0.07 * progress + rng.gauss(0, 0.01)),
            "kl": 0.03 * progress + abs(rng.gauss(0, 0.002)),
            "rollout_gap": abs(rng.gauss(2e-6, 1e-6)),
            "actor/loss": rng.gauss(0, 0.02),
            "actor/entropy": 1.4 - 0.7 * progress + rng.gauss(0, 0.02),
            "actor/grad_norm": abs(rng.gauss(0.6, 0.2)) * (12 if rng.random() < 0.004 else 1),
            "actor/lr": 3e-4 * (1 - step / num_steps),
            "actor/ratio_max": None if step % 97 == 0 else 1 + abs(rng.gauss(0.2, 0.1)),
            "actor/clip_fraction": abs(rng.gauss(0.05, 0.02)),
            "tokens_per_s": 512 * 40 / seconds,
            "seconds": seconds,
            "elapsed_s": elapsed,
            "memory_mb": 1900.0 + min(step, 50),
        }
        if is_async:
            staleness = [rng.uniform(0.1, 0.4), rng.uniform(0.3, 0.5)]
            record |= {
                "staleness": staleness[1] + 2 * (1 - sum(staleness)),
                "staleness_max": 2.0,
                **{f"staleness_{k}": share for k, share in enumerate([*staleness, 1 - sum(staleness)])},
                "buffer_depth": float(rng.randrange(0, 30)),
                "running_groups": float(rng.randrange(20, 64)),
                "idle_rollout": rng.uniform(0.0, 0.1),
                "idle_actor": rng.uniform(0.2, 0.4),
                "wait_data_s": rng.uniform(0.05, 0.2),
                "wait_weights_s": rng.uniform(0.0, 0.05),
            }
        if step % max(1, num_steps // 5) == 0:
            record |= {
                "evaluation/accuracy_low": 0.25 + 0.4 * progress,
                "evaluation/accuracy_high": 0.33 + 0.4 * progress,
            }
            record |= {"accuracy": 0.29 + 0.4 * progress, "evaluation/response_length": 42 - 6 * progress}
        yield record


def make_calls(num_steps: int, rng: random.Random, is_async: bool) -> list[CallEvent]:
    """Returns the calls of a run in which two replicas generate while a trainer updates."""
    events: list[CallEvent] = []
    clock = {("makers", 0): 0.0, ("makers", 1): 0.0, ("trainer", 0): 0.0}

    def call(role: str, method: str, pool: str, rank: int, milliseconds: float, inputs: tuple[int, ...] = ()) -> int:
        ready = max([clock[pool, rank], *(event.finished_ns / 1e6 for event in events if event.number in inputs)])
        start, end = ready + 0.3, ready + 0.3 + milliseconds
        clock[pool, rank] = end + 0.2
        times = (ready - rng.uniform(0, 5), start - 0.1, start, end, end + 0.2)
        device = f"cpu:{rank if pool == 'makers' else 2}"
        number = len(events) + 1
        nanoseconds = [round(time * 1e6) for time in times]
        events.append(CallEvent(number, inputs, role, rank, 0, device, pool, method, *nanoseconds))
        return number

    for _ in range(num_steps):
        made = tuple(
            call("rollout", method, "makers", rank, rng.uniform(lowest, 2 * lowest))
            for method, lowest in (("load_weights", 8), ("generate", 150))
            for rank in (0, 1)
        )[2:]
        scored = call("reward", "score", "trainer", 0, rng.uniform(5, 9), made)
        old = call("actor", "logprobs", "trainer", 0, rng.uniform(30, 45), made)
        reference = call("reference", "logprobs", "trainer", 0, rng.uniform(30, 45), made)
        advantages = call("tasks", "compute", "trainer", 0, rng.uniform(2, 4), (scored, old, reference))
        for _ in range(2):
            call("actor", "update", "trainer", 0, rng.uniform(40, 60), (advantages,))
    return [
        CallEvent(
            *(event.number, event.inputs, event.role, event.rank, event.node, event.device, event.pool, event.method),
            *(
                ORIGIN_NS + time
                for time in (
                    event.submitted_ns,
                    event.arrived_ns,
                    event.started_ns,
                    event.ended_ns,
                    event.finished_ns,
                )
            ),
        )
        for event in events
    ]


def make_row(step: int, i: int, rng: random.Random, has_tokens: bool = False) -> Row:
    left, right = rng.randrange(100), rng.randrange(100)
    score = rng.choice([0.0, 0.2, 1.0, 1.2])
    problem = (i // 4 + step) % 50
    words = [
        rng.choice(["so", " the", " sum", " of", " both", " is", " ", "12", "+", "-", ".", "\n"]) for _ in range(40)
    ]
    row: Row = {
        "row": i,
        "set": None,
        "prompt_id": problem,
        "sample": i % 4,
        "prompt": f"What is {problem * 7} + {problem * 3}? Explain your answer in one sentence.",
        "response": "".join(words) + f" The answer is {left + right}." + (HOSTILE if i == 3 else ""),
        "answer": str(problem * 10),
        "finish_reason": "length" if i == 7 else "stop",
        "response_length": 40,
        "environment_length": 0,
        "version": step - 1 - i % 3,
        "newest_version": step - 1,
        "score": score,
        "rewards": {"exact": float(score >= 1), "format": float(score in (0.2, 1.2))},
        "other_scores": {},
        "reward_failures": {},
        "advantage": score - 0.6,
        "staleness": i % 3,
        "segments": [{"kind": "policy", "start": 0, "end": 40, "text": "".join(words)}],
        "tokens": None,
    }
    if has_tokens:
        policy = [-rng.expovariate(1.5) for _ in words]
        rollout = [value + rng.gauss(0, 0.05) for value in policy]
        row["tokens"] = {
            "text": words,
            "ids": [rng.randrange(1000) for _ in words],
            "mask": [1] * len(words),
            "logprobs": policy,
            "rollout_logprobs": rollout,
            "advantages": [score - 0.6 + rng.gauss(0, 0.1) for _ in words],
            "ratios": [math.exp(a - b) for a, b in zip(policy, rollout, strict=True)],
            "versions": [step - 1 - i % 3] * len(words),
        }
    return row


def evaluation_row(i: int, step: int, num_steps: int, rng: random.Random) -> Row:
    row = make_row(step, i, rng)
    return row | {"score": float(rng.random() < (0.3 if step < num_steps else 0.68)), "advantage": None, "prompt_id": i}


def make_summary(metrics: list[dict[str, Any]], num_steps: int) -> dict[str, Any]:
    return {
        "steps": num_steps,
        "busy_fraction": {"node0/cpu:0": 0.93},
        "steps_requested": num_steps,
        "interrupted_by": None,
        "restarts": 0,
        "seconds": metrics[-1]["elapsed_s"],
        "peak_memory_mb": 1950.0,
        "accuracy_before": metrics[0]["accuracy"],
        "accuracy_after": metrics[-1]["accuracy"],
        "evaluation_rows": 40,
    }
