"""Time of a training step of PPO and GRPO, compared with TRL, and of Ray, compared with the inline backend.

python -m tests.benchmarks.step [--parts grpo ppo samples ray plain] [--models 81k 2.9M] [--rounds N] [--table]

| part | step | baseline |
|---|---|---|
| grpo | 4 prompts x 8 samples, 8 + 32 tokens, k3 KL to a reference | TRL 1.16 |
| ppo | 32 prompts, 8 + 32 tokens; critic, reference, reward model | TRL 1.12, with and without its garbage collection |
| samples | GRPO with 4 prompts x 8 samples, 128 + 32 tokens | TRL 1.16 |
| ray | GRPO and PPO on Ray with one process | flowrl with `backend: inline` |
| plain | GRPO and PPO | the same passes with plain torch and transformers (plain_steps.py) |

Each side is a program of its own: the recipe of flowrl, or TRL's trainer. Both have the same random Qwen2 model in
float32, one thread, the same prompts, and one update of 32 rows per step. The end token is not in the vocabulary of
the model, so that every response has 32 tokens. A round lets each side take some steps, in rotating order, while the
other sides wait. CPU time includes the child processes of a program. Ratios are medians over the rounds.

The benchmark installs TRL into environments in `--trl-env` (1.5 GB), with the versions of torch and transformers that
run it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification, Qwen2Tokenizer
from transformers.utils.logging import disable_progress_bar

from flowrl.report.chrome_trace import read_trace
from tests.benchmarks.measure import machine, print_lines, read_arguments
from tests.benchmarks.reward_functions import RESPONSE
from tests.benchmarks.turns import TurnServer

ROOT = Path(__file__).parents[2]
TRL_ENVIRONMENTS = Path.home() / ".cache" / "flowrl" / "trl"
GRPO_VERSION, PPO_VERSION = "1.16.0", "1.12.0"  # 1.12 is the last version with PPO

ROWS, SAMPLES = 32, 8
STEPS_PER_TURN = {"81k": 10, "2.9M": 3}
WARMUP_TURNS = 1
START_TIMEOUT_S = 300.0

CHARACTERS = [chr(code) for code in (*range(33, 127), *range(161, 165))]
PROMPT_CHARACTERS = CHARACTERS[15:75]
END = "<eos>"
MODELS = {
    "81k": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    "2.9M": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4},
}
TARGETS = {
    ("grpo", "trl"): {"81k": 0.85, "2.9M": 0.97},
    ("ppo", "trl, no gc"): {"81k": 1.0, "2.9M": 1.0},
    ("samples", "trl"): {"81k": 0.7, "2.9M": 0.7},
    ("ray, grpo", "inline"): {"81k": 1.1, "2.9M": 1.1},
    ("ray, ppo", "inline"): {"81k": 1.1, "2.9M": 1.1},
}
"""(part, baseline) -> model -> largest ratio of CPU and wall times."""


# Models and data.


def model_config(size: str, **settings: Any) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=len(CHARACTERS) + 1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=len(CHARACTERS),
        eos_token_id=len(CHARACTERS),
        bos_token_id=None,
        **MODELS[size],
        **settings,
    )


def write_inputs(folder: Path, size: str, prompt_tokens: int) -> None:
    """Writes the policy, a model with a scalar head, the tokenizer and 512 prompts."""
    vocabulary = {token: index for index, token in enumerate((*CHARACTERS, END))}
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary, merges=[], unk_token=END, pad_token=END, eos_token=END, chat_template=template
    )
    torch.manual_seed(0)
    policy = Qwen2ForCausalLM(model_config(size))
    with torch.no_grad():
        # The first component dominates all hidden states, so the end token has a logit of about -60 relative to others.
        policy.model.embed_tokens.weight[:, 0] = 1.0
        policy.model.embed_tokens.weight[vocabulary[END], 0] = -6.0
    scorer = Qwen2ForSequenceClassification(model_config(size, num_labels=1))
    for name, model in (("policy", policy), ("scorer", scorer)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    drawn = torch.randint(len(PROMPT_CHARACTERS), (512, prompt_tokens)).tolist()
    prompts = ("".join(PROMPT_CHARACTERS[index] for index in row) for row in drawn)
    lines = [json.dumps({"messages": [{"from": "human", "content": prompt}]}) for prompt in prompts]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def flowrl_settings(folder: Path, algorithm: str, backend: str, steps: int, prompt_tokens: int) -> dict[str, Any]:
    """Returns the settings of a recipe, except for the output folder and the engine."""
    policy, optimizer = {"path": str(folder / "policy")}, {"lr": 1e-4}
    scorer = {"path": str(folder / "scorer")}
    roles = ["actor", "rollout", "reference", "reward"]
    settings: dict[str, Any] = {
        "recipe": "recipes.grpo.config:GRPOConfig",
        "backend": backend,
        "threads": 1,
        "steps": steps,
        "evaluate_every": 0,
        "batch_size": ROWS,
        "minibatch_size": ROWS,
        "samples_per_prompt": SAMPLES,
        "actor": {"model": policy, "optimizer": optimizer, "kl_loss_coef": 0.04, "kl_loss_kind": "k3"},
        "reference": {"model": policy},
        "reward": {"function": "tests.benchmarks.reward_functions:score"},
        "algorithm": {"estimator": "grpo"},
        "data": {"train": str(folder / "prompts.jsonl"), "max_prompt_tokens": prompt_tokens},
        "report": {"tensorboard": False, "rollouts": None},
    }
    if algorithm == "ppo":
        roles.append("critic")
        settings |= {
            "recipe": "recipes.ppo.config:PPOConfig",
            "samples_per_prompt": 1,
            "actor": {"model": policy, "optimizer": optimizer},
            "critic": {"model": scorer, "optimizer": optimizer},
            "reward": {"model": scorer},
            "algorithm": {"estimator": "gae", "lam": 0.95, "whiten": True, "kl_coef": 0.05},
        }
    placement = {"device": "cpu", "pools": {"main": [1]}, "roles": dict.fromkeys(roles, "main")}
    return settings | {"placement": placement}


# Environments of TRL.


def has_trl(environments: Path, trl: str) -> bool:
    """Returns whether the environment of a version of TRL exists with the packages of this one."""
    done = environments / trl / "installed.json"
    return done.exists() and json.loads(done.read_text()) == trl_packages(trl)


def trl_packages(trl: str) -> dict[str, str]:
    """Returns the versions of the packages of an environment: those of this one, and TRL."""
    return {"trl": trl} | {name: version(name).split("+")[0] for name in ("torch", "transformers", "numpy")}


def trl_python(environments: Path, trl: str) -> Path:
    """Returns the interpreter of an environment with a version of TRL. Creates the environment if it does not exist."""
    environment = environments / trl
    python = environment / "bin" / "python"
    if not has_trl(environments, trl):
        sys.stderr.write(f"installing TRL {trl} into {environment}\n")
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        packages = trl_packages(trl)
        pinned = [f"{name}=={number}" for name, number in packages.items()]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *pinned], check=True)
        (environment / "installed.json").write_text(json.dumps(packages))
    return python


# Measurements.


Side = Callable[[Path, Path, int], list[str]]
"""Function of (folder of the inputs, socket, steps) that returns the command of a program."""


@dataclass(frozen=True)
class Case:
    """The programs that a part compares on one model."""

    part: str
    size: str
    prompt_tokens: int
    sides: Mapping[str, Side]
    """Name -> program. The first side is compared with the others."""


@dataclass(frozen=True)
class Line:
    """One row of the table. Times are medians in milliseconds per step."""

    part: str
    size: str
    baseline: str
    ms: float
    baseline_ms: float
    ratio: float
    cpu_ms: float
    baseline_cpu_ms: float
    cpu_ratio: float
    target: float | None
    ratios: list[float] = field(repr=False)
    """Ratio of wall times of each round."""
    cpu_ratios: list[float] = field(repr=False)
    calls: dict[str, float] = field(repr=False)
    """Wall time of each call of flowrl, median in milliseconds. Reward functions score responses in `generate`."""


def flowrl(algorithm: str, prompt_tokens: int = 8, backend: str = "inline", *, threads: int | None = 1) -> Side:
    def command(folder: Path, socket: Path, steps: int) -> list[str]:
        settings = flowrl_settings(folder, algorithm, backend, steps, prompt_tokens) | {"threads": threads}
        name = socket.stem
        engine = {"engine": "tests.benchmarks.step_engine:SteppedEngine", "options": {"socket": str(socket)}}
        settings |= {"output": str(folder / f"run-{name}"), "rollout": engine | {"max_response_tokens": RESPONSE}}
        config = folder / f"{name}.yaml"
        config.write_text(yaml.safe_dump(settings))
        return [sys.executable, "-m", f"recipes.{algorithm}.train", str(config)]

    return command


def trl(environments: Path, algorithm: str, *options: str) -> Side:
    python = trl_python(environments, PPO_VERSION if algorithm == "ppo" else GRPO_VERSION)
    script = str(Path(__file__).with_name("trl_steps.py"))
    return lambda folder, socket, steps: [
        str(python),
        script,
        algorithm,
        str(folder),
        str(socket),
        str(steps),
        *options,
    ]


def plain(algorithm: str) -> Side:
    program = [sys.executable, "-m", "tests.benchmarks.plain_steps", algorithm]
    return lambda folder, socket, steps: [*program, str(folder), str(socket), str(steps)]


def cases_of(part: str, environments: Path) -> Iterator[tuple[str, int, Mapping[str, Side]]]:
    """Yields the name, the number of prompt tokens and the sides of each case of a part."""
    samples = ("--num-generations", str(SAMPLES))
    if part == "grpo":
        yield part, 8, {"flowrl": flowrl("grpo"), "trl": trl(environments, "grpo", *samples)}
    elif part == "ppo":
        baselines = {"trl": trl(environments, "ppo"), "trl, no gc": trl(environments, "ppo", "--no-gc")}
        yield part, 8, {"flowrl": flowrl("ppo"), **baselines}
    elif part == "samples":
        yield part, 128, {"flowrl": flowrl("grpo", 128), "trl": trl(environments, "grpo", *samples)}
    elif part == "ray":
        for algorithm in ("grpo", "ppo"):
            yield f"ray, {algorithm}", 8, {"ray": flowrl(algorithm, backend="ray"), "inline": flowrl(algorithm)}
    else:
        for algorithm in ("grpo", "ppo"):
            yield f"plain, {algorithm}", 8, {"flowrl": flowrl(algorithm), "plain": plain(algorithm)}


def cases(parts: Sequence[str], sizes: Sequence[str], environments: Path = TRL_ENVIRONMENTS) -> Iterator[Case]:
    for size in sizes:
        for part in parts:
            for name, prompt_tokens, sides in cases_of(part, environments):
                yield Case(name, size, prompt_tokens, sides)


def cpu_seconds(process: psutil.Process) -> float:
    """Returns the CPU time of a process and its living descendants."""
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        try:
            times = each.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


@contextmanager
def started(
    command: list[str], server: TurnServer, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[psutil.Process]:
    """Starts a program and waits until it is about to take its first step. By default, the program has one thread."""
    if environment is None:
        environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    offline = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env={**environment, **offline}
        )
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while True:
                try:
                    server.accept(1.0)
                    break
                except TimeoutError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"{' '.join(command)} did not start:\n{log.read_text()[-3000:]}") from None
            server.set_timeout(START_TIMEOUT_S)
            yield psutil.Process(process.pid)
            server.permit()  # the end of the run
            process.wait(START_TIMEOUT_S)
        finally:
            server.close()
            if process.poll() is None:
                process.terminate()
                process.wait(60)


def call_ms(run: Path) -> dict[str, float]:
    """Returns the median milliseconds of each call of a finished run that takes at least 1 ms."""
    times = defaultdict[str, list[int]](list)
    for event in read_trace(run).events:
        times[f"{event.role}.{event.method}"].append(event.ended_ns - event.started_ns)
    medians = {name: statistics.median(own) / 1e6 for name, own in times.items() if len(own) > 2}
    return {name: round(ms, 1) for name, ms in medians.items() if ms >= 1}


def measure(case: Case, rounds: int) -> list[Line]:
    """Runs all programs of a case in turns."""
    count = STEPS_PER_TURN[case.size]
    steps = 1 + count * (WARMUP_TURNS + rounds)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in case.sides}
    with tempfile.TemporaryDirectory(prefix="step-") as name:
        folder = Path(name)
        write_inputs(folder, case.size, case.prompt_tokens)
        with ExitStack() as stack:
            sides = {}
            for number, (side, command) in enumerate(case.sides.items()):
                server = TurnServer(folder / f"{number}.sock")
                arguments = command(folder, server.path, steps)
                sides[side] = server, stack.enter_context(started(arguments, server, folder / f"{number}.log"))
            names = list(sides)
            for turn in range(WARMUP_TURNS + rounds):
                first = turn % len(names)
                for side in (*names[first:], *names[:first]):
                    server, process = sides[side]
                    start_cpu_s, start_s = cpu_seconds(process), time.perf_counter()
                    server.run_steps(count)
                    seconds = time.perf_counter() - start_s
                    if turn >= WARMUP_TURNS:
                        times[side].append((seconds / count, (cpu_seconds(process) - start_cpu_s) / count))
        calls = call_ms(folder / "run-0")
    ours, *baselines = case.sides
    return [_line(case, baseline, times[ours], times[baseline], calls) for baseline in baselines]


def _line(
    case: Case,
    baseline: str,
    ours: Sequence[tuple[float, float]],
    theirs: Sequence[tuple[float, float]],
    calls: dict[str, float],
) -> Line:
    ratios, cpu_ratios = ([a[i] / b[i] for a, b in zip(ours, theirs, strict=True)] for i in (0, 1))

    def median_ms(times: Sequence[tuple[float, float]], index: int) -> float:
        return round(1e3 * statistics.median(time[index] for time in times), 1)

    return Line(
        case.part,
        case.size,
        baseline,
        median_ms(ours, 0),
        median_ms(theirs, 0),
        round(statistics.median(ratios), 3),
        median_ms(ours, 1),
        median_ms(theirs, 1),
        round(statistics.median(cpu_ratios), 3),
        TARGETS.get((case.part, baseline), {}).get(case.size),
        [round(ratio, 3) for ratio in ratios],
        [round(ratio, 3) for ratio in cpu_ratios],
        calls,
    )


HEAD = (
    "| step | model | baseline | wall time | baseline | ratio | CPU time | baseline | ratio | target | calls, ms |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|\n"
)


def row_of(line: Line) -> str:
    """Returns a row of the Markdown table."""
    target = "" if line.target is None else f"{line.target:g}"
    return (
        f"| {line.part} | {line.size} | {line.baseline} | {line.ms:.0f} ms | {line.baseline_ms:.0f} ms | "
        f"{line.ratio:.2f} | {line.cpu_ms:.0f} ms | {line.baseline_cpu_ms:.0f} ms | {line.cpu_ratio:.2f} | {target} | "
        f"{', '.join(f'{name} {ms:.0f}' for name, ms in line.calls.items())} |\n"
    )


def main() -> None:
    """Prints the figures. The target is the largest ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["grpo", "ppo", "samples", "ray", "plain"]
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trl-env", type=Path, default=TRL_ENVIRONMENTS, help="folder of the environments of TRL")
    parser.add_argument("--table", action="store_true")
    arguments = read_arguments(parser, parts=["plain"], models=["81k"], rounds=1)
    disable_progress_bar()
    ran_on = machine() | {"transformers": version("transformers")}
    lines = (
        line
        for case in cases(arguments.parts, arguments.models, arguments.trl_env)
        for line in measure(case, arguments.rounds)
    )
    print_lines(lines, ran_on, HEAD, row_of, is_table=arguments.table)


if __name__ == "__main__":
    main()
