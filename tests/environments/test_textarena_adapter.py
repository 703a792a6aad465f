"""Games of textarena against a fixed opponent: moves, illegal moves, and the reward of the last turn."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from flowrl.environments.base import ModelResponse, Observation, Row
from flowrl.environments.requests import Reset, Step
from flowrl.environments.textarena_adapter import TextArenaEnvironment, random_opponent
from tests.environments.test_environment_host import ask, make_host, mark

__all__ = ["mark"]

MODULE = "tests.environments.test_textarena_adapter"


def first_free(environment: Any, cells: Sequence[int]) -> str:
    board = environment.state.game_state["board"]
    return next(f"[{cell}]" for cell in cells if not board[cell // 3][cell % 3])


def last_row(environment: Any) -> str:
    """Fills the last row of Tic Tac Toe."""
    return first_free(environment, (6, 7, 8, 3, 4, 5))


def center(environment: Any) -> str:
    return first_free(environment, (4, 2, 3, 7))


def illegal() -> str:
    return "pass"


def play(moves: list[str], opponent: str = "last_row", **options: Any) -> list[Observation]:
    environment = TextArenaEnvironment("TicTacToe-v0", f"{MODULE}:{opponent}", **options)
    environment.reset({"seed": 0})
    return [environment.step(ModelResponse(move, turn=turn)) for turn, move in enumerate(moves)]


def test_the_first_messages_are_the_rules_and_the_board() -> None:
    environment = TextArenaEnvironment("TicTacToe-v0", f"{MODULE}:last_row")
    (message,) = environment.reset({})
    assert message["role"] == "user"
    assert "You are Player 0 in Tic Tac Toe." in message["content"] and "'[8]'" in message["content"]


def test_an_observation_has_the_opponents_move_and_one_board() -> None:
    (observation,) = play(["I choose [0]."])
    (message,) = observation.messages
    assert not observation.done and observation.reward is None
    assert "[Player 1] [6]" in message["content"] and "I choose" not in message["content"]
    assert message["content"].count("Current Board") == 1


@pytest.mark.parametrize(
    ("moves", "options", "reward", "reason"),
    [
        (["[0]", "[1]", "[2]"], {}, 1.0, "win"),
        (["[0]", "[1]", "[2]"], {"win": 2.5}, 2.5, "win"),
        (["[0]", "[1]", "[3]"], {}, -1.0, "loss"),
        (["[0]", "[1]", "[6]", "[5]", "[8]"], {"opponent": "center", "draw": 0.5}, 0.5, "draw"),
        (["[0]", "hello", "hello"], {}, -1.0, "illegal_move"),
        (["[0]", "[0]"], {"max_illegal_moves": 0}, -1.0, "illegal_move"),
        (["[0]"], {"opponent": "illegal"}, 1.0, "opponent_illegal_move"),
        (["[0]"], {"opponent": "illegal", "player": 1}, 1.0, "opponent_illegal_move"),
        (["[0]", "[1]"], {"max_turns": 2, "draw": 0.25}, 0.25, "max_turns"),
    ],
)
def test_the_reward_is_that_of_the_result(
    moves: list[str], options: dict[str, Any], reward: float, reason: str
) -> None:
    *earlier, last = play(moves, **options)
    assert not any(observation.done for observation in earlier)
    assert (last.done, last.reward, last.info["reason"]) == (True, reward, reason)


def test_an_illegal_move_is_counted_and_can_be_corrected() -> None:
    first, second, third, last = play(["[0]", "[6]", "[1]", "[2]"])
    assert (first.info["counts"], second.info["counts"], third.info["counts"]) == ({}, {"illegal_move": 1}, {})
    assert "invalid move" in second.messages[0]["content"]
    assert last.info["reason"] == "win"


def test_the_opponent_may_begin_and_players_alternate() -> None:
    environment = TextArenaEnvironment("TicTacToe-v0", f"{MODULE}:last_row", player="alternate")
    assert "[Player 0] [6]" in environment.reset({"seed": 1})[0]["content"]
    assert "[Player" not in environment.reset({"seed": 2})[0]["content"]


def test_a_seed_determines_the_game_and_keeps_pythons_random_numbers() -> None:
    environment = TextArenaEnvironment(
        "TicTacToe-v0", "flowrl.environments.textarena_adapter:random_opponent", player=1
    )
    random.seed(1)
    state = random.getstate()
    texts = [environment.reset({"seed": seed})[0]["content"] for seed in (*range(8), *range(8))]
    assert texts[:8] == texts[8:] and len(set(texts)) > 1
    assert random.getstate() == state


def test_a_random_opponent_needs_a_list_of_moves() -> None:
    assert random_opponent("Available Moves: '[3]'", random.Random(0)) == "[3]"
    with pytest.raises(ValueError):
        random_opponent("Move!", random.Random(0))


class ShortNim(TextArenaEnvironment):
    """Nim with the piles of the row, of which the policy reads only the sizes."""

    def prepare(self, row: Row) -> None:
        self.game.initial_piles = list(row["piles"])

    def describe(self, text: str) -> str:
        assert "Current Pile" in text
        return " ".join(map(str, self.game.state.game_state["piles"]))


def test_a_subclass_sets_up_the_game_and_shortens_observations() -> None:
    environment = ShortNim("Nim-v0", f"{MODULE}:nim")
    (message,) = environment.reset({"piles": [3, 2]})
    assert message["content"] == "3 2"
    (message,) = environment.step(ModelResponse("[1 2]")).messages  # the opponent takes one of the first pile
    assert message["content"] == "2 0"


def test_an_unknown_game_is_an_error() -> None:
    with pytest.raises(ValueError):
        TextArenaEnvironment("NoGame-v0", f"{MODULE}:illegal")


@pytest.mark.usefixtures("mark")
def test_games_run_in_a_host() -> None:
    options = {"game": "Nim-v0", "opponent": f"{MODULE}:nim", "piles": [2, 1]}
    with make_host("flowrl.environments.textarena_adapter:TextArenaEnvironment", options) as host:
        for episode in range(20):
            ask(host, Reset(episode, {"seed": episode}))
        for episode in range(20):
            first = ask(host, Step(episode, ModelResponse("[0 1]"))).observation
            assert first is not None and not first.done
            last = ask(host, Step(episode, ModelResponse("[1 1]", turn=1))).observation
            assert last is not None and last.reward == 1.0


def nim(environment: Any) -> str:
    return "[0 1]"
