"""A reward function is an environment of one turn."""

import asyncio

import pytest

from flowrl.environments.base import ModelResponse, conversation_of
from flowrl.environments.reward_environment import RewardEnvironment
from flowrl.rewards.reward_function import RewardError

MODULE = "tests.environments.calculator"


def test_one_response_is_scored_with_the_columns_that_the_function_accepts() -> None:
    environment = RewardEnvironment(f"{MODULE}:is_answer", bonus=0.5)
    conversation = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]

    async def play() -> None:
        assert await environment.reset({"conversation": conversation, "answer": "3", "other": 1}) == conversation
        observation = await environment.step(ModelResponse("3"))
        assert (observation.reward, observation.done, list(observation.messages)) == (1.5, True, [])

    asyncio.run(play())


def test_a_function_that_cannot_be_loaded_is_an_error() -> None:
    with pytest.raises(RewardError):
        RewardEnvironment(f"{MODULE}:nothing")


def test_the_conversation_of_a_row_is_its_prompt_or_its_conversation() -> None:
    assert conversation_of({"prompt": "a"}) == [{"role": "user", "content": "a"}]
    with pytest.raises(ValueError):
        conversation_of({"answer": "a"})
