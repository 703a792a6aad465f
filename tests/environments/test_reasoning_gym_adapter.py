"""Tasks of reasoning-gym are environments of one turn."""

import pytest
import reasoning_gym

from flowrl.environments.base import ModelResponse
from flowrl.environments.reasoning_gym_adapter import ReasoningGymEnvironment
from flowrl.environments.requests import Reset, Step
from tests.environments.test_environment_host import ask, make_host, mark

__all__ = ["mark"]


def test_a_generated_task_is_scored_by_its_scorer() -> None:
    entry = reasoning_gym.create_dataset("leg_counting", seed=7, size=1)[0]
    for text, reward in ((f"<answer>{entry['answer']}</answer>", 1.0), ("<answer>-1</answer>", 0.0)):
        environment = ReasoningGymEnvironment("leg_counting")
        (message,) = environment.reset({"seed": 7})
        assert message["content"].startswith(entry["question"])
        observation = environment.step(ModelResponse(text))
        assert (observation.done, observation.reward) == (True, reward)


def test_a_row_of_the_data_source_is_used_as_it_is() -> None:
    entry = reasoning_gym.create_dataset("leg_counting", seed=7, size=1)[0]
    environment = ReasoningGymEnvironment()
    row = {"prompt": "How many legs?", "answer": entry["answer"], "metadata": entry["metadata"]}
    assert environment.reset(row) == [{"role": "user", "content": "How many legs?"}]
    assert environment.step(ModelResponse(entry["answer"])).reward == 1.0


@pytest.mark.usefixtures("mark")
def test_tasks_run_in_a_host() -> None:
    entry = reasoning_gym.create_dataset("basic_arithmetic", seed=3, size=1)[0]
    options = {"task": "basic_arithmetic"}
    with make_host("flowrl.environments.reasoning_gym_adapter:ReasoningGymEnvironment", options) as host:
        ask(host, Reset(0, {"seed": 3}))
        reply = ask(host, Step(0, ModelResponse(f"<answer>{entry['answer']}</answer>")))
        assert reply.observation is not None and (reply.observation.reward, reply.observation.done) == (1.0, True)
