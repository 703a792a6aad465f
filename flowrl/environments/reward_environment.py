"""An environment of one turn, whose reward is that of a reward function."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.environments.base import ChatMessage, ModelResponse, Observation, Row, conversation_of
from flowrl.environments.user_calls import call_user
from flowrl.rewards.reward_function import accepted_columns, load_reward_function
from flowrl.rewards.scorer import check_score


class RewardEnvironment:
    """Scores the first response with a reward function, and ends the episode."""

    def __init__(self, function: str, **options: Any) -> None:  # Any: values of JSON
        """`function` is `module:function` or `file.py:function`. `options` are its further keyword arguments.

        Raises RewardError if the function cannot be loaded.
        """
        self._reward = LoadedReward(function, options)
        self._row: Row = {}

    async def reset(self, row: Row) -> Sequence[ChatMessage]:
        self._row = row
        return conversation_of(row)

    async def step(self, response: ModelResponse) -> Observation:
        columns = {**self._row, **response_columns(response)}
        return Observation(reward=await self._reward.score(columns), done=True)

    async def close(self) -> None:
        pass


class LoadedReward:
    """A reward function that is called with the columns that it accepts."""

    def __init__(self, name: str, options: Mapping[str, Any] | None = None) -> None:
        """Raises RewardError if the function cannot be loaded."""
        self._name, self._options = name, dict(options or {})
        self._function = _load(name) if not self._options else load_reward_function(name, self._options)

    async def score(self, columns: Row) -> float:
        """Returns the score of a row. Raises the exception of the function, and RewardError for an invalid score."""
        names = accepted_columns(self._function, columns)
        values = {name: columns[name] for name in names if name not in self._options}
        return check_score(await call_user(self._function, **values), self._name, values)


def response_columns(response: ModelResponse) -> dict[str, Any]:
    """Returns the columns of a response that a reward function can receive."""
    return {
        "response": response.text,
        "tagged_response": response.parsed_text,
        "token_ids": list(response.token_ids),
        "finish_reason": response.finish_reason,
    }


_load = functools.lru_cache(load_reward_function)
