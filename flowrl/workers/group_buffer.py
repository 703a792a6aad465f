"""Groups that a rollout works on as they come: all rows of a prompt, which leave together when each has its answer."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from tensordict import TensorDict

from flowrl.data.batch.tensordicts import objects
from flowrl.data.chat import ChatTokenizer
from flowrl.engines.rollout.requests import Prompt, Response, responses_of
from flowrl.engines.rollout.sampling import row_keys
from flowrl.workers.response_tensordict import response_table


@dataclass
class _Group:
    """The rows of one prompt."""

    prompt: Sequence[int]
    samples: dict[str, int] = field(default_factory=dict)
    """Name of a row's request -> which sample of the prompt it is."""
    answers: dict[str, Response] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.answers) == len(self.samples)


class Groups:
    """The groups that were given to a rollout and not given back."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        """By the identity of their prompt."""
        self._group_of: dict[str, int] = {}
        """Name of a request -> identity of its prompt."""

    @property
    def any_whole(self) -> bool:
        """Whether all rows of some group have their answers."""
        return any(group.is_complete for group in self._groups.values())

    def requests(self, batch: TensorDict, samples: int, seed: int) -> list[tuple[int, list[Prompt]]]:
        """The rows of a batch as requests, `<prompt_id>-<sample>`, for each `prompt_id` in the order of its first row.

        Raises:
            ValueError: a prompt has not so many rows in it.
        """
        prompt_id_B, sample_B = batch["rows", "prompt_id"], batch["rows", "sample"]
        found_U, counts_U = prompt_id_B.unique(return_counts=True)
        for number, count in zip(found_U.tolist(), counts_U.tolist(), strict=True):
            if count != samples:
                raise ValueError(
                    f"prompt {number} has {count} rows, and a group has {samples}: give all of them in one call"
                )
        keys = row_keys(seed, prompt_id_B, sample_B).tolist()
        found: dict[int, list[Prompt]] = {}
        for ids, key, (number, sample) in zip(objects(batch, "prompt_ids"), keys, _identities(batch), strict=True):
            found.setdefault(number, []).append(Prompt(_name(number, sample), ids, key))
        return list(found.items())

    def add(self, batch: TensorDict, taken: Container[int]) -> None:
        """Takes the groups of a batch, those whose requests an engine has taken."""
        for prompt, (number, sample) in zip(objects(batch, "prompt_ids"), _identities(batch), strict=True):
            if number not in taken:
                continue
            name = _name(number, sample)
            self._groups.setdefault(number, _Group(prompt)).samples[name] = sample
            self._group_of[name] = number

    def answered(self, answers: Iterable[Response]) -> None:
        """Keeps what an engine has answered."""
        for answer in answers:
            self._groups[self._group_of[answer.name]].answers[answer.name] = answer

    def pop_complete(self, tokenizer: ChatTokenizer) -> TensorDict:
        """The rows of all groups that are whole, which are forgotten: the `RESPONSE_COLUMNS`, `prompt_id` and `sample`.
        Groups in the order in which they came, rows of each too; a table without rows where none is whole."""
        whole = {number: group for number, group in self._groups.items() if group.is_complete}
        self._forget(whole)
        rows = [(number, group, name) for number, group in whole.items() for name in group.samples]
        return response_table(
            [group.prompt for _, group, _ in rows],
            responses_of([group.answers[name] for _, group, name in rows]),
            tokenizer,
            prompt_id=torch.tensor([number for number, _, _ in rows], dtype=torch.int64),
            sample=torch.tensor([group.samples[name] for _, group, name in rows], dtype=torch.int64),
        )

    def drop(self, prompt_ids: Iterable[int] | None = None) -> list[str]:
        """Forgets groups, whole or not, None is all; gives the names of their requests."""
        numbers = list(self._groups) if prompt_ids is None else [n for n in set(prompt_ids) if n in self._groups]
        names = [name for number in numbers for name in self._groups[number].samples]
        self._forget(numbers)
        return names

    def _forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            for name in self._groups.pop(number).samples:
                del self._group_of[name]


def _identities(batch: TensorDict) -> list[tuple[int, int]]:
    """Per row its prompt's identity, and which sample of it the row is."""
    columns = (batch["rows", "prompt_id"].tolist(), batch["rows", "sample"].tolist())
    return list(zip(*columns, strict=True))


def _name(prompt_id: int, sample: int) -> str:
    return f"{prompt_id}-{sample}"
