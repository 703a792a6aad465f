"""Two-player text games of the library textarena, against a fixed opponent. Needs the extra `environments`."""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from flowrl.config import import_function
from flowrl.environments.base import ChatMessage, ModelResponse, Observation, Row
from flowrl.rewards.reward_function import accepted_columns

try:
    import textarena
    from textarena.core import GAME_ID, ObservationType
    from textarena.envs.registration import ENV_REGISTRY
except ImportError as error:
    raise ImportError(
        f"flowrl.environments.textarena_adapter needs the library textarena ({error}): "
        "pip install 'flowrl[environments]'"
    ) from error

_random_lock = threading.Lock()
_Result = Literal["win", "draw", "loss", "illegal_move", "opponent_illegal_move", "max_turns"]


class TextArenaEnvironment:
    """A game in which the policy is one player and a function the other. Games run in threads.

    A subclass can override `prepare`, to set up the game from the row, and `describe`, to shorten the observations.
    The attribute `game` is the game of textarena.
    """

    observation_roles = ("user",)

    def __init__(
        self,
        game: str,
        opponent: str,
        *,
        player: Literal[0, 1, "alternate"] = 0,
        max_illegal_moves: int = 1,
        max_turns: int = 30,
        win: float = 1.0,
        draw: float = 0.0,
        loss: float = -1.0,
        **options: Any,  # Any: arguments of the game
    ) -> None:
        """Creates the game.

        Args:
            game: name of a two-player game, such as `TicTacToe-v0`.
            opponent: `module:function` that returns a move. It receives those of these parameters that it names:
                `observation` (text since its last move), `environment` (the game of textarena), `player` (its number)
                and `rng` (a random.Random with the seed of the row).
            player: number of the policy. Player 0 begins. alternate: the parity of the column `seed`.
            max_illegal_moves: number of illegal moves in a row that a player may correct. The next one loses.
            max_turns: number of responses, after which the game is a draw.
            win, draw, loss: rewards of the last turn.
            options: further arguments of the game.
        Raises:
            ValueError: textarena does not have the game, or it needs another number of players.
        """
        names = [f"{game}-raw", game]
        name = next((name for name in names if name in ENV_REGISTRY), None)
        if name is None:
            raise ValueError(f"textarena has no game {game!r}: use a name such as TicTacToe-v0 or Nim-v0")
        self.game: Any = textarena.make(name, **options)  # Any: textarena has no types
        self._opponent: Callable[..., str] = import_function(opponent)
        self._player_setting: Literal[0, 1, "alternate"] = player
        self._player = 0
        self._max_illegal_moves, self._max_turns = max_illegal_moves, max_turns
        self._rewards = {"win": win, "draw": draw, "loss": loss}
        self._rng = random.Random(0)
        self._random_state: Any = None
        self._is_over = False
        """Whether the opponent has ended the game before the first move of the policy."""

    def reset(self, row: Row) -> Sequence[ChatMessage]:
        seed = int(row.get("seed", 0))
        self._rng = random.Random(seed)
        self._player = seed % 2 if self._player_setting == "alternate" else self._player_setting
        self._random_state = random.Random(seed).getstate()
        self.prepare(row)
        with self._own_random():
            self.game.reset(num_players=2, seed=seed)
        self.game.state.error_allowance = self._max_illegal_moves
        self._is_over = self._play_opponent()
        return [{"role": "user", "content": self._observe()}]

    def prepare(self, row: Row) -> None:
        """Sets up `game` before it starts. Does nothing here."""

    def describe(self, text: str) -> str:
        """Returns the observation of the policy for the text of textarena, which has the messages since its last move.
        Returns the same text here.
        """
        return text

    def step(self, response: ModelResponse) -> Observation:
        is_done = self._is_over or self._move(response.text)
        counts = {"illegal_move": 1} if self._is_illegal() else {}
        if not is_done:
            is_done = self._play_opponent()
        if not is_done and response.turn + 1 < self._max_turns:
            return Observation([{"role": "user", "content": self._observe()}], info={"counts": counts})
        reason = self._result() if is_done else "max_turns"
        outcome = {"illegal_move": "loss", "opponent_illegal_move": "win", "max_turns": "draw"}.get(reason, reason)
        return Observation(
            reward=self._rewards[outcome], done=True, info={"reason": reason, "counts": {**counts, reason: 1}}
        )

    def close(self) -> None:
        pass

    def _move(self, action: str) -> bool:
        """Makes a move of the current player. Returns whether the game has ended."""
        with self._own_random():
            return bool(self.game.step(action)[0])

    def _play_opponent(self) -> bool:
        """Makes moves of the opponent until it is the policy's turn. Returns whether the game has ended."""
        while self.game.state.current_player_id != self._player:
            player, messages = self.game.get_observation()
            values = {
                "observation": self._text(player, messages),
                "environment": self.game,
                "player": player,
                "rng": self._rng,
            }
            names = accepted_columns(self._opponent, values)
            if self._move(self._opponent(**{name: values[name] for name in names})):
                return True
        return False

    def _is_illegal(self) -> bool:
        """Returns whether the last move of the policy was illegal."""
        state = self.game.state
        return bool(state.game_info[self._player]["invalid_move"]) or (
            state.current_player_id == self._player and state.error_count > 0
        )

    def _result(self) -> _Result:
        rewards, info = self.game.close()
        own, other = rewards[self._player], rewards[1 - self._player]
        if info[self._player]["invalid_move"]:
            return "illegal_move"
        if info[1 - self._player]["invalid_move"]:
            return "opponent_illegal_move"
        return "win" if own > other else "loss" if own < other else "draw"

    def _observe(self) -> str:
        return self.describe(self._text(self._player, self.game.get_observation()[1]))

    def _text(self, player: int, messages: Sequence[tuple[int, str, Any]]) -> str:
        """Returns the messages to a player, without its own moves and with the newest board only."""
        boards = [i for i, (_, _, kind) in enumerate(messages) if kind == ObservationType.GAME_BOARD]
        lines = []
        for index, (sender, text, kind) in enumerate(messages):
            is_own = sender == player and kind == ObservationType.PLAYER_ACTION
            if not is_own and (index not in boards or index == boards[-1]):
                lines.append(text if sender == GAME_ID else f"[Player {sender}] {text}")
        return "\n".join(lines)

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        """Replaces Python's global random numbers, which games use, by those of this game."""
        with _random_lock:
            others = random.getstate()
            random.setstate(self._random_state)
            try:
                yield
            finally:
                self._random_state = random.getstate()
                random.setstate(others)


def random_opponent(observation: str, rng: random.Random) -> str:
    """Returns a random move of those that the game lists as available."""
    _, found, listed = observation.rpartition("Available Moves:")
    moves = [part.strip(" '\"") for part in listed.splitlines()[0].split(",")] if found else []
    if not moves:
        raise ValueError("the game does not list available moves: write an opponent for this game")
    return rng.choice(moves)
