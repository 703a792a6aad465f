"""GRPO with a calculator: problems, model, an episode, a short run, and the script from end to end."""

import asyncio
import json
import re
import subprocess
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from flowrl.config import load
from flowrl.data.batch.tensordicts import lengths
from flowrl.data.chat import ChatTokenizer, Message
from flowrl.data.turn_delta import check_turn_template, make_turn_delta
from flowrl.environments.base import ModelResponse, Observation
from flowrl.environments.tool_environment import ToolEnvironment
from flowrl.environments.tools import Tool
from flowrl.run.datasets import read_prompts
from flowrl.run.loop import Run
from flowrl.workers import Actor, Rollout
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train
from recipes.quickstart.prepare import save_model, save_tokenizer
from recipes.reasoning.prepare import BYTES
from recipes.sft.config import SFTConfig
from recipes.tools.prepare import CALL_SHARE, CHAT_TEMPLATE, WORDS, main
from recipes.tools.task import NUM_HELD_OUT, deal, multiply
from tests.recipes.scripts import ROOT, read_steps, read_summary, run_script

FOLDER = ROOT / "recipes/tools"
SCRIPT = FOLDER / "run_calculator.sh"
CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 37, "b": 85}}</tool_call>'
ROW = {"prompt": "37*85", "answer": "3145"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools") / "data"
    assert main(["--output", str(folder), "--seed", "3"]) == 0
    return folder


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def question(row: dict) -> str:
    return row["messages"][0]["content"]


@pytest.mark.parametrize("seed", range(3))
def test_held_out_problems_do_not_occur_in_training_in_any_order(seed: int) -> None:
    problems, held_out = deal(seed)
    assert len(held_out) == NUM_HELD_OUT and len({*problems, *held_out}) == 90 * 90
    assert not {*problems, *((b, a) for a, b in problems)} & set(held_out)


def test_files_have_the_problems_of_their_sets_and_correct_answers(data: Path) -> None:
    problems, held_out = deal(3)
    assert [question(row) for row in read_rows(data / "test.jsonl")] == [f"{a}*{b}" for a, b in held_out]
    assert [row["answer"] for row in read_rows(data / "train.jsonl")] == [str(a * b) for a, b in problems]
    assert {question(row) for row in read_rows(data / "sft.jsonl")} <= {f"{a}*{b}" for a, b in problems}


def test_a_second_preparation_changes_nothing(data: Path) -> None:
    files = {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}
    assert main(["--output", str(data), "--seed", "4"]) == 0
    assert {path: path.read_bytes() for path in data.rglob("*") if path.is_file()} == files


def test_few_examples_call_the_tool_as_the_environment_does(data: Path) -> None:
    examples = read_rows(data / "sft.jsonl")
    calls = [example["messages"] for example in examples if len(example["messages"]) == 4]
    assert abs(len(calls) / len(examples) - CALL_SHARE) < 0.02
    for row, call, result, answer in calls[:20]:
        observation = play(row["content"], "", call["content"])[0]
        assert observation.messages[0]["content"] == result["content"] == answer["content"]


def test_the_template_appends_turns_with_the_tokens_of_the_warm_start(data: Path) -> None:
    tokenizer = ChatTokenizer(data / "model")
    check_turn_template(tokenizer, ("tool",), make_environment().tools)
    asked, *_ = messages = [
        {"role": "user", "content": "37*85"},
        {"role": "assistant", "content": CALL},
        {"role": "tool", "content": "3145"},
    ]
    ids = tokenizer.encode_prompt([Message("user", "37*85")])
    sampled = [*tokenizer.encode(CALL), tokenizer.eos_id]
    assert tokenizer.decode(sampled) == CALL
    delta = make_turn_delta(tokenizer, [asked], sampled, messages[2:], make_environment().tools)
    example = [Message(turn["role"], turn["content"]) for turn in messages]  # pyright: ignore[reportArgumentType]
    expected, _ = tokenizer.encode_example([*example, Message("assistant", "3145")])
    answer = [*tokenizer.encode("3145"), tokenizer.eos_id]
    assert [*ids, *sampled, *delta.token_ids, *answer] == expected


def test_conversations_fit_into_the_limits_of_tokens(data: Path) -> None:
    config, sft = load(FOLDER / "calculator.yaml", [], GRPOConfig), load(FOLDER / "sft.yaml", [], SFTConfig)
    tokenizer = ChatTokenizer(data / "model")
    for row in read_rows(data / "sft.jsonl")[:2000]:
        messages = [Message(turn["role"], turn["content"]) for turn in row["messages"]]
        num_tokens, asked = len(tokenizer.encode_example(messages)[0]), len(tokenizer.encode_prompt(messages[:1]))
        assert num_tokens <= sft.data.max_prompt_tokens and asked <= config.data.max_prompt_tokens
        assert num_tokens - asked <= config.rollout.max_response_tokens
    num_parameters = sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(data / "model").parameters())
    assert 300_000 < num_parameters < 1_000_000


def make_environment(**options: int) -> ToolEnvironment:
    environment = load(FOLDER / "calculator.yaml", [], GRPOConfig).environment
    assert environment is not None
    return ToolEnvironment(**{**environment.options, **options})  # pyright: ignore[reportArgumentType]


def play(prompt: str, answer: str, *responses: str, **options: int) -> list[Observation]:
    environment = make_environment(**options)

    async def run() -> list[Observation]:
        await environment.reset({"prompt": prompt, "answer": answer})
        return [await environment.step(ModelResponse(text, turn=turn)) for turn, text in enumerate(responses)]

    return asyncio.run(run())


def test_an_answer_counts_with_and_without_a_call() -> None:
    called = play("37*85", "3145", CALL, "3145")
    assert [turn.done for turn in called] == [False, True] and called[1].reward == 1.0
    assert [play("37*85", "3145", response)[0].reward for response in ("3145", "3146", "03145")] == [1.0, 0.0, 0.0]
    assert play("37*85", "3145", CALL, CALL)[1].reward == 0.0


def test_without_the_tool_a_call_gives_an_error() -> None:
    (observation,) = play("37*85", "3145", CALL, max_calls=0)
    assert observation.info["counts"] == {"tool_call": 0, "max_calls": 1}
    assert "3145" not in observation.messages[0]["content"]


@pytest.mark.slow
def test_a_short_run_logs_calls_and_evaluates_episodes(data: Path, tmp_path: Path) -> None:
    settings = [
        f"output={tmp_path / 'run'}",
        "backend=inline",
        f"actor.model.path={data / 'model'}",
        f"data.train={data / 'train.jsonl'}",
        f"data.test={data / 'test.jsonl'}",
        "steps=1",
        "evaluate_every=1",
        "batch_size=16",
        "minibatch_size=8",
        "rollout.max_response_tokens=8",
        "report={tensorboard: false}",
    ]
    train(load(FOLDER / "calculator.yaml", settings, GRPOConfig))
    (step,) = read_steps(tmp_path / "run")
    assert step["environment/tool_call"] == 0 and step["turns"] >= 1
    summary = read_summary(tmp_path / "run")
    assert summary["accuracy_before"] == summary["evaluation/environment/tool_call_before"] == 0
    assert summary["evaluation_rows"] == NUM_HELD_OUT


RENDERS_TOOLS = (
    "{% if tools %}<tools>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\n{% endif %}"
    + CHAT_TEMPLATE
)
"""The template of the recipe, with the schemas of the tools as in the templates of Hermes and Qwen."""


@pytest.mark.slow
def test_a_template_that_renders_tools_shows_their_schemas_to_the_policy(data: Path, tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "model", BYTES, RENDERS_TOOLS, words=WORDS)
    save_model(tmp_path / "model", 0, num_characters=len(BYTES) + len(WORDS), num_layers=1, max_tokens=1024)
    settings = [
        f"output={tmp_path / 'run'}",
        "backend=inline",
        f"actor.model.path={tmp_path / 'model'}",
        f"data.train={data / 'train.jsonl'}",
        "data.test=null",
        "evaluate_every=0",
        "data.max_prompt_tokens=800",
        "steps=1",
        "batch_size=16",
        "minibatch_size=8",
        "rollout.max_response_tokens=8",
        "report={tensorboard: false}",
    ]
    config = load(FOLDER / "calculator.yaml", settings, GRPOConfig)
    tokenizer = ChatTokenizer(tmp_path / "model")
    shown = []
    with Run(config) as run:
        prompts, _ = read_prompts(config)
        actor = run.group("actor", Actor, config.actor)
        rollout = run.group("rollout", Rollout, config.rollout, config.actor.model, seed=0)
        for batch in run.rollouts(rollout, prompts, policy=actor, reward=run.rewards()):
            table = batch.tensordict("input_ids", "response_mask")
            sizes = lengths(table).tolist()
            columns = (table["tokens", name].split(sizes) for name in ("input_ids", "response_mask"))
            for ids_T, mask_T in zip(*columns, strict=True):
                shown.append(tokenizer.decode(ids_T[: int(mask_T.int().argmax())].tolist()))
            run.sync_weights(actor, rollout)
    assert len(shown) == 16
    for prompt in shown:
        tools, text = prompt.removeprefix("<tools>\n").split("\n</tools>\n")
        assert json.loads(tools) == Tool(multiply).schema
        assert re.fullmatch(r"[0-9]{2}\*[0-9]{2}\n", text)


def test_the_script_is_valid() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calculator")


@pytest.mark.slow
@pytest.mark.timeout(3100)
@pytest.mark.parametrize("seed", range(3))
def test_the_model_learns_to_call_the_tool(output: Path, seed: int) -> None:
    run_script(SCRIPT, output, seed=seed)
    summary = read_summary(output / f"seed{seed}/grpo")
    assert summary["accuracy_before"] < 0.2 and summary["evaluation/environment/tool_call_before"] < 0.2
    assert summary["accuracy_after"] > 0.9 and summary["evaluation/environment/tool_call_after"] > 0.95


MAX_WITHOUT_TOOL = 0.1
"""Level below which the model stays without the tool; stated in recipes/tools/README.md."""


@pytest.mark.slow
@pytest.mark.timeout(3100)
@pytest.mark.parametrize("seed", range(3))
def test_the_model_does_not_learn_the_task_without_the_tool(output: Path, seed: int) -> None:
    run_script(SCRIPT, output, f"output={output / f'without{seed}'}", "environment.options.max_calls=0", seed=seed)
    assert read_summary(output / f"without{seed}")["accuracy_after"] < MAX_WITHOUT_TOOL
