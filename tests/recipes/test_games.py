"""GRPO on Nim against a fixed opponent: starts, opponent, games, a short run, and the script from end to end."""

import json
import random
import subprocess
from functools import reduce
from operator import xor
from pathlib import Path

import pytest

from flowrl.config import load
from flowrl.data.chat import ChatTokenizer, Message
from flowrl.data.turn_delta import check_turn_template
from flowrl.environments.base import ModelResponse
from recipes.games.nim import Nim, moves, opponent, perfect_moves, show, starts
from recipes.games.prepare import NUM_HELD_OUT_GAMES, main
from recipes.grpo.config import GRPOConfig
from recipes.grpo.train import train
from recipes.sft.config import SFTConfig
from tests.recipes.scripts import ROOT, read_steps, read_summary, run_script

FOLDER = ROOT / "recipes/games"
SCRIPT = FOLDER / "run_nim.sh"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("games") / "data"
    assert main(["--output", str(folder), "--seed", "3"]) == 0
    return folder


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_perfect_move_leaves_no_perfect_move() -> None:
    for piles in starts():
        for pile, quantity in perfect_moves(piles):
            rest = list(piles)
            rest[pile] -= quantity
            assert min(rest) >= 0 and reduce(xor, rest) == 0 and not perfect_moves(rest)
        assert set(perfect_moves(piles)) <= set(moves(piles))


def test_files_have_games_with_their_starts_and_seeds(data: Path) -> None:
    train_rows, test_rows = read_rows(data / "train.jsonl"), read_rows(data / "test.jsonl")
    assert {tuple(row["piles"]) for row in train_rows} == set(starts())
    assert {row["messages"][0]["content"] for row in test_rows} <= {show(piles) for piles in starts()}
    seeds = [row["seed"] for row in (*train_rows, *test_rows)]
    assert len(set(seeds)) == len(seeds) and len(test_rows) == NUM_HELD_OUT_GAMES


def test_the_warm_start_shows_legal_moves(data: Path) -> None:
    for row in read_rows(data / "sft.jsonl")[:500]:
        for asked, answered in zip(row["messages"][::2], row["messages"][1::2], strict=True):
            piles = [int(size) for size in asked["content"].split()]
            assert answered["content"] in {f"[{pile} {quantity}]" for pile, quantity in moves(piles)}


def play(start: list[int], seed: int, *, is_perfect: bool) -> tuple[float, str]:
    """Plays a game. Returns its reward and the reason of its end."""
    environment, rng = Nim(), random.Random(seed)
    (message,) = environment.reset({"piles": start, "seed": seed})
    for turn in range(20):
        piles = [int(size) for size in message["content"].split()]
        pile, quantity = rng.choice(perfect_moves(piles) if is_perfect else moves(piles))
        observation = environment.step(ModelResponse(f"[{pile} {quantity}]", turn=turn))
        if observation.done:
            assert observation.reward is not None
            return observation.reward, observation.info["reason"]
        (message,) = observation.messages
    raise AssertionError("the game has no end")


def test_a_perfect_player_wins_every_start_and_a_random_player_does_not() -> None:
    assert all(play(list(piles), seed, is_perfect=True) == (1.0, "win") for seed, piles in enumerate(starts()))
    games = [play(list(starts()[seed % len(starts())]), seed, is_perfect=False) for seed in range(300)]
    assert {reason for _, reason in games} == {"win", "loss"}
    assert 0.15 < sum(reward for reward, _ in games) / len(games) < 0.55


@pytest.mark.parametrize("text", ["[0 2]", "[0 0]", "0 1", "[0 1] ", "I remove [0 1]", ""])
def test_other_text_than_a_legal_move_loses(text: str) -> None:
    environment = Nim()
    environment.reset({"piles": [1, 2], "seed": 0})
    observation = environment.step(ModelResponse(text))
    assert observation.done and observation.reward == 0.0 and observation.info["reason"] == "illegal_move"


def test_the_seed_determines_the_moves_of_the_opponent() -> None:
    environment = Nim()

    def reply(seed: int) -> str:
        environment.reset({"piles": [6, 4], "seed": seed})
        return environment.step(ModelResponse("[0 1]")).messages[0]["content"]

    assert len({reply(seed) for seed in range(10)}) > 1
    assert [reply(seed) for seed in range(10)] == [reply(seed) for seed in range(10)]


def test_the_opponent_moves_perfectly_more_often_than_by_chance() -> None:
    rng = random.Random(0)
    replies = [opponent("Current Pile:\n  pile 0: 6\n  pile 1: 4", rng) for _ in range(1000)]
    num_perfect = replies.count("[0 2]")
    assert 400 < num_perfect < 700


def test_games_fit_into_the_limits_of_tokens(data: Path) -> None:
    config, sft = load(FOLDER / "nim.yaml", [], GRPOConfig), load(FOLDER / "sft.yaml", [], SFTConfig)
    tokenizer = ChatTokenizer(data / "model")
    check_turn_template(tokenizer)
    for row in read_rows(data / "sft.jsonl")[:2000]:
        messages = [Message(turn["role"], turn["content"]) for turn in row["messages"]]
        num_tokens, asked = len(tokenizer.encode_example(messages)[0]), len(tokenizer.encode_prompt(messages[:1]))
        assert num_tokens <= sft.data.max_prompt_tokens and asked <= config.data.max_prompt_tokens
        assert num_tokens - asked <= config.rollout.max_response_tokens


@pytest.mark.slow
def test_a_short_run_plays_and_evaluates_games(data: Path, tmp_path: Path) -> None:
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
        "rollout.max_response_tokens=6",
        "report={tensorboard: false}",
    ]
    train(load(FOLDER / "nim.yaml", settings, GRPOConfig))
    (step,) = read_steps(tmp_path / "run")
    # The untrained model makes no legal moves.
    assert step["environment/illegal_move"] == 16 and step["reward"] == 0
    summary = read_summary(tmp_path / "run")
    assert summary["evaluation/environment/illegal_move_before"] == 1.0 and summary["accuracy_before"] == 0
    assert summary["evaluation_rows"] == NUM_HELD_OUT_GAMES


def test_the_script_is_valid() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)


MIN_GAIN = 0.3
"""Smallest gain of the win rate in held-out games. The seeds 0, 1 and 2 gain 0.465, 0.467 and 0.630."""


@pytest.mark.slow
@pytest.mark.timeout(3100)
@pytest.mark.parametrize("seed", range(3))
def test_the_model_wins_more_held_out_games(tmp_path: Path, seed: int) -> None:
    run_script(SCRIPT, tmp_path, seed=seed)
    summary = read_summary(tmp_path / f"seed{seed}/grpo")
    assert summary["accuracy_after"] > summary["accuracy_before"] + MIN_GAIN
    assert summary["evaluation/environment/win_after"] == pytest.approx(summary["accuracy_after"])  # of float32 values
