"""Tasks of reasoning-gym as environments of one turn. Needs the extra `rewards`."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.environments.base import ChatMessage, ModelResponse, Observation, Row, conversation_of
from flowrl.rewards import reasoning_gym as scorer


class ReasoningGymEnvironment:
    """Scores the first response with the scorer of a task, and ends the episode.

    A row of the data source `reasoning_gym` has its task. For other rows, the task is generated from the column `seed`.
    """

    def __init__(
        self,
        task: str | None = None,
        *,
        instruction: str = "Write the final answer as <answer>...</answer>.",
        options: Mapping[str, Any] | None = None,
        only_tagged: bool = False,
    ) -> None:
        """Stores the task.

        Args:
            task: name of the task that is generated, such as `leg_counting`.
            instruction: text after the question of a generated task.
            options: options of the generated task.
            only_tagged: scores a response without `<answer>...</answer>` as an empty answer.
        """
        self._task, self._instruction, self._options = task, instruction, dict(options or {})
        self._only_tagged = only_tagged
        self._columns: dict[str, Any] = {}

    def reset(self, row: Row) -> Sequence[ChatMessage]:
        if self._task is None:
            names = ("metadata", "answer", "task", "task_options")
            self._columns = {name: row[name] for name in names if name in row}
            return conversation_of(row)
        dataset = scorer.reasoning_gym.create_dataset(self._task, seed=int(row.get("seed", 0)), size=1, **self._options)
        entry = dataset[0]
        self._columns = {
            "metadata": entry["metadata"],
            "answer": entry["answer"],
            "task": self._task,
            "task_options": self._options,
        }
        return [{"role": "user", "content": f"{entry['question']}\n\n{self._instruction}".strip()}]

    def step(self, response: ModelResponse) -> Observation:
        tagged = response.parsed_text
        reward = scorer.score(response.text, only_tagged=self._only_tagged, tagged_response=tagged, **self._columns)
        return Observation(reward=reward, done=True)

    def close(self) -> None:
        pass
