"""Episodes: a prompt, the segments of its response, and its reward. The policy and an environment take turns."""

import itertools
import time
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from flowrl.data.batch.tensordicts import lengths, make_tensordict, num_rows, objects
from flowrl.data.chat import ChatTokenizer
from flowrl.engines.models.routing import ROUTES
from flowrl.engines.rollout.base import (
    GatheringEngine,
    Request,
    RequestBatch,
    Response,
    RolloutEngine,
    Segment,
    open_batch,
)
from flowrl.engines.rollout.response_tensors import Responses, stack_responses
from flowrl.rewards.row_scorer import CALLS, FAILED, RowScores
from flowrl.user_code.channel import RequestClient, ServerAddress
from flowrl.workers.dialogs import EPISODE, LOST, TURN_REWARDS, Dialog, Dialogs, EnvironmentServers, turn_columns

EPISODE_READS = ("prompt?", "conversation?", "answer?", "data_source?", "*")
"""Columns that environments and reward functions can receive, in the notation of `register`."""

_INTERNAL_COLUMNS = ("prompt_ids", "prompt_id", "sample", "length")
"""Row columns of a call that environments and reward functions do not receive."""

SEGMENTS = "segments"
"""Row column of responses with an environment: `describe_segments`."""

POLL_S = 0.05
"""Seconds between two checks for scores while the engine generates."""

Columns = Mapping[str, Any]
"""Row columns of one episode, by name."""


@dataclass
class Episode:
    """The state of one response."""

    index: int
    """Index among the samples of the prompt."""
    request: Request
    """Request of the newest segment. It contains the earlier segments."""
    columns: Columns
    """Columns of the row, for the environment and the reward."""
    response: Response | None = None
    """Last segment; None until the response is complete."""
    texts: tuple[str, str] | None = None
    """Response and tagged response that the reward has received; None without a reward."""
    scores: RowScores | None = None
    """Result of the reward or the environment; None until it has arrived."""
    dialog: Dialog | None = None
    """State of the environment's turns; None without environment workers."""

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All segments of a complete response."""
        assert self.response is not None, "the response is complete"
        return *self.request.segments, Segment.policy(self.response)


def describe_segments(episodes: Sequence[Episode], tokenizer: ChatTokenizer) -> list[list[dict[str, Any]]]:
    """Returns the parts of each complete response, in order. Adjacent segments of one producer are one part.

    A part has `kind` (`policy` or `environment`), `start` and `end` (indices of response tokens) and `text`, with
    special tokens. A failed episode without tokens of the policy has no parts.
    """
    rows = [list(_merge_segments(episode)) for episode in episodes]
    texts = iter(tokenizer.decode_batch([ids for row in rows for _, ids in row], keeps_special=True))
    described = []
    for row in rows:
        ends = itertools.accumulate(len(ids) for _, ids in row)
        described.append(
            [
                {"kind": kind, "start": end - len(ids), "end": end, "text": next(texts)}
                for (kind, ids), end in zip(row, ends, strict=True)
            ]
        )
    return described


def _merge_segments(episode: Episode) -> Iterator[tuple[str, list[int]]]:
    """Yields the kind and the token ids of each part of a response."""
    segments = episode.segments
    if all(version < 0 for segment in segments for version in segment.versions or ()):
        return
    for is_policy, own in itertools.groupby(segments, lambda segment: segment.is_policy):
        if ids := [token for segment in own for token in segment.token_ids]:
            yield "policy" if is_policy else "environment", ids


class Episodes:
    """Unfinished episodes. Sends complete responses to the reward while the engine generates others.

    With environment workers (`dialogs`), an episode begins with their first messages, and each response is sent to
    them. Its next turn begins when their reply has arrived.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        reward: RequestClient | None = None,
        dialogs: Dialogs | None = None,
    ) -> None:
        self._tokenizer, self._reward, self._dialogs = tokenizer, reward, dialogs
        self._episodes: dict[Hashable, Episode] = {}
        """Request id -> episode without a complete response, or without scores."""
        self._ended: list[str] = []
        """Ids of the episodes whose last segment is complete, since the last call of `pop_ended`."""

    @property
    def num_waiting(self) -> int:
        """Number of episodes that wait for scores or for an environment."""
        client = self._reward if self._dialogs is None else self._dialogs.client
        return 0 if client is None else client.num_in_flight

    def is_unfinished(self, request_id: str) -> bool:
        """Returns whether an episode is not complete, or waits for its scores."""
        return request_id in self._episodes

    def add(self, episodes: Iterable[Episode]) -> list[Request]:
        """Adds episodes. Returns the requests of those whose prompt is known. Others wait for their environment."""
        episodes = list(episodes)
        self._episodes |= {episode.id: episode for episode in episodes}
        if self._dialogs is None:
            return [episode.request for episode in episodes]
        for episode, dialog in zip(episodes, self._dialogs.start(episodes), strict=True):
            episode.dialog = dialog
        return []

    def add_responses(self, responses: Iterable[Response]) -> list[Request]:
        """Adds finished segments. Returns the requests for the next segments of incomplete responses."""
        finished = [(self._episodes[response.request_id], response) for response in responses]
        if self._dialogs is not None:
            self._dialogs.send(finished)
            return []
        complete = [episode for episode, _ in finished]
        for episode, response in finished:
            episode.response = response
        ids = [episode.id for episode in complete]
        if self._reward is not None:
            self._reward.send(zip(ids, self._scored_rows(complete), strict=True))
        else:
            self._remove(ids)
        return []

    def _scored_rows(self, episodes: Sequence[Episode]) -> list[dict[str, Any]]:
        """Returns the columns that a reward function can receive, one mapping per complete episode."""
        ids = [[token for segment in episode.segments for token in segment.token_ids] for episode in episodes]
        texts = self._tokenizer.decode_responses(ids)
        prompts = [episode.request.token_ids for episode in episodes]
        tagged = self._tokenizer.decode_tags(prompts, ids, texts)
        for episode, both in zip(episodes, zip(texts, tagged, strict=True), strict=True):
            episode.texts = both
        return [
            {
                **episode.columns,
                "response": texts[row],
                "tagged_response": tagged[row],
                "token_ids": ids[row],
                "finish_reason": "length" if episode.response and episode.response.truncated else "stop",
            }
            for row, episode in enumerate(episodes)
        ]

    def receive(self, timeout_s: float | None) -> list[Request]:
        """Receives scores and observations. Returns the requests for the next segments of episodes that continue.

        Waits up to `timeout_s` seconds for the first result (None: no limit). Raises RequestError if a reward failed
        and `on_failure` is stop.
        """
        if self._dialogs is not None:
            requests = self._dialogs.receive(timeout_s)
            ended = self._dialogs.pop_ended()
            self._ended += ended
            self._remove(ended)
            return requests
        if self._reward is not None:
            for request_id, scores in self._reward.receive(timeout_s):
                self._episodes.pop(request_id).scores = scores
        return []

    def pop_ended(self) -> list[str]:
        """Returns the ids of the episodes that an environment has ended since the last call. The engine can release
        what it keeps for their next segments.
        """
        ended, self._ended = self._ended, []
        return ended

    def drop(self, request_ids: Iterable[str]) -> None:
        """Discards episodes. Ignores unknown ids."""
        dropped = [self._episodes[name] for name in request_ids if name in self._episodes]
        if self._dialogs is not None:
            self._dialogs.drop(dropped)
        elif self._reward is not None:
            self._reward.drop([episode.id for episode in dropped])
        self._remove([episode.id for episode in dropped])

    def close(self) -> None:
        """Closes the connections."""
        for client in (self._reward, None if self._dialogs is None else self._dialogs.client):
            if client is not None:
                client.close()

    def _remove(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._episodes.pop(request_id, None)


class EpisodeConnections:
    """Opens sets of episodes, with the connections of a rollout worker to its reward or environment workers."""

    def __init__(self, tokenizer: ChatTokenizer, max_response_tokens: int) -> None:
        self._tokenizer, self._max_response_tokens = tokenizer, max_response_tokens
        self.reward: tuple[Sequence[ServerAddress], bytes] | None = None
        """Addresses of the reward workers and the key of the run."""
        self.environment: EnvironmentServers | None = None
        self._shared: Episodes | None = None

    def open(self, *, is_scored: bool) -> Episodes:
        """Returns an empty set of episodes with its own connections."""
        if (servers := self.environment) is not None:
            dialogs = Dialogs(
                self._tokenizer,
                RequestClient(servers.addresses, servers.key, lost_result=LOST),
                max_response_tokens=self._max_response_tokens,
                max_prompt_tokens=servers.max_prompt_tokens,
                restarts=servers.restarts,
                stops_on_failure=servers.stops_on_failure,
            )
            return Episodes(self._tokenizer, dialogs=dialogs)
        if not is_scored:
            return Episodes(self._tokenizer)
        assert self.reward is not None, "connect_reward is called before responses are scored"
        return Episodes(self._tokenizer, RequestClient(*self.reward))

    @contextmanager
    def share(self, *, is_scored: bool) -> Iterator[Episodes]:
        """Yields an empty set of episodes, whose connections later blocks reuse. Blocks must complete all episodes."""
        if not is_scored and self.environment is None:
            yield self.open(is_scored=False)
            return
        if self._shared is None:
            self._shared = self.open(is_scored=True)
        try:
            yield self._shared
        except BaseException:  # requests may be in flight
            self.close()
            raise

    def close(self) -> None:
        """Closes the shared connections."""
        if self._shared is not None:
            self._shared.close()
            self._shared = None


def run_episodes(engine: RolloutEngine, own: Sequence[Episode], episodes: Episodes) -> None:
    """Generates the responses of all episodes, and waits for their scores. See `EpisodeRun`."""
    with engine.gathered_weights() if isinstance(engine, GatheringEngine) else nullcontext():
        # All ranks of a gathering engine must enter the block, including ranks without requests.
        EpisodeRun(engine, own, episodes).advance()


class EpisodeRun:
    """Generates the responses of episodes, in one call or in several.

    All unfinished responses share one batch of the engine. Each episode continues as soon as its own segment, score or
    observation has arrived.
    """

    def __init__(
        self, engine: RolloutEngine, own: Sequence[Episode], episodes: Episodes, max_running: int | None = None
    ) -> None:
        """Prepares the run, without a call of the engine.

        Args:
            engine: a serving engine.
            own: episodes without responses.
            episodes: processes the responses.
            max_running: largest number of episodes at a time. None runs all of them.
        """
        self.own = own
        self.version = engine.version
        """Weight version that samples all tokens."""
        self._engine, self._episodes, self._max_running = engine, episodes, max_running
        self._batch = open_batch(engine)
        self._waiting = deque(own)

    @property
    def is_done(self) -> bool:
        """Whether all responses and scores are complete."""
        return not (self._waiting or self._batch.num_running or self._episodes.num_waiting)

    def advance(self, duration_s: float | None = None) -> None:
        """Generates until all responses and scores are complete, or for `duration_s` seconds.

        Raises PromptError if a prompt is empty or too long.
        """
        assert self._engine.version == self.version, "the weights of a replica change only after its episodes"
        deadline_s = None if duration_s is None else time.monotonic() + duration_s
        while True:
            self._start_waiting()
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            if self.is_done or left_s == 0:
                return
            if self._batch.num_running:
                # Without results to receive, the engine returns only when a response has finished.
                longest_s = POLL_S if self._episodes.num_waiting else left_s
                responses = self._batch.poll(longest_s if left_s is None else min(longest_s or left_s, left_s))
                continue_episodes(self._batch, self._episodes, responses, 0)
            else:
                continue_episodes(self._batch, self._episodes, [], left_s)

    def _start_waiting(self) -> None:
        """Starts further episodes, up to `max_running`."""
        num_free = len(self._waiting)
        if self._max_running is not None:
            num_free = min(num_free, self._max_running - self._batch.num_running - self._episodes.num_waiting)
        if num_free > 0:
            self._batch.add(self._episodes.add([self._waiting.popleft() for _ in range(num_free)]))

    def close(self) -> None:
        """Drops all unfinished responses, and closes the connections."""
        self._batch.abort([episode.id for episode in self.own])
        self._episodes.close()


def continue_episodes(
    batch: RequestBatch, episodes: Episodes, responses: Sequence[Response], timeout_s: float | None
) -> None:
    """Processes finished segments, scores and observations. Adds the requests for the next segments to the batch, and
    releases what the batch keeps for ended episodes.

    Args:
        batch: generates the segments.
        episodes: processes the responses.
        responses: finished segments.
        timeout_s: `timeout_s` of `Episodes.receive`.
    """
    requests = episodes.add_responses(responses) if responses else []
    requests += episodes.receive(timeout_s)
    if ended := episodes.pop_ended():
        batch.abort(ended)
    if requests:
        batch.add(requests)


def episode_columns(batch: TensorDict) -> list[Columns]:
    """Returns the row columns that environments and rewards can receive, one mapping per row."""
    names = [name for name in batch["rows"].keys() if name not in _INTERNAL_COLUMNS]  # noqa: SIM118 (a TensorDict)
    columns = {name: objects(batch, name) for name in names}
    return [{name: values[row] for name, values in columns.items()} for row in range(num_rows(batch))]


def score_columns(scores: Sequence[RowScores | None], names: Sequence[str]) -> dict[str, Any]:
    """Returns the columns of the reward: a float column per name, `reward_failed` and `reward_calls`.

    Args:
        scores: results of the reward, one per row.
        names: names of the float columns; empty if the responses were not scored.
    """
    if not names:
        return {}
    rows = [row for row in scores if row is not None]
    assert len(rows) == len(scores), "every complete episode has scores"
    columns: dict[str, Any] = {
        name: torch.tensor([row.values[name] for row in rows], dtype=torch.float32) for name in names
    }
    calls = [{name: call.to_dict() for name, call in row.calls.items()} for row in rows]
    return columns | {FAILED: torch.tensor([row.is_failed for row in rows], dtype=torch.bool), CALLS: calls}


def episodes_to_tensordict(
    episodes: Sequence[Episode],
    tokenizer: ChatTokenizer,
    score: Sequence[str] = (),
    *,
    with_segments: bool = False,
    no_routes: np.ndarray | None = None,
    **columns: torch.Tensor,
) -> TensorDict:
    """Returns the columns of complete episodes, with those of the reward (`score`) and additional ones, [B].

    `with_segments` adds the column `segments`, and `no_routes` (`RoutingEngine.no_routes`) the column `routes`.
    """
    responses = [episode.response for episode in episodes if episode.response is not None]
    assert len(responses) == len(episodes), "every episode is complete"
    stacked = stack_responses(responses, [episode.request for episode in episodes])
    names = [name for name in score if name not in (TURN_REWARDS, EPISODE)]
    scores = score_columns([episode.scores for episode in episodes], names)
    prompts = [episode.request.token_ids for episode in episodes]
    segments = {SEGMENTS: describe_segments(episodes, tokenizer)} if with_segments else {}
    decoded = [episode.texts for episode in episodes if episode.texts is not None]
    if len(decoded) < len(episodes):
        ids = stacked.token_lists()
        texts = tokenizer.decode_responses(ids)
        decoded = list(zip(texts, tokenizer.decode_tags(prompts, ids, texts), strict=True))
    table = responses_to_tensordict(prompts, stacked, decoded, **scores, **segments, **columns)
    rows, tokens = dict(table["rows"].items()), dict(table["tokens"].items())
    if no_routes is not None:
        tokens[ROUTES] = _stack_routes(responses, lengths(table).tolist(), no_routes)
    if TURN_REWARDS in score:
        rewards_T, rows[EPISODE] = turn_columns(episodes)
        tokens[TURN_REWARDS] = torch.tensor(rewards_T)
    return make_tensordict(rows, tokens, lengths(table))


def _stack_routes(responses: Sequence[Response], num_tokens: Sequence[int], no_routes: np.ndarray) -> torch.Tensor:
    """Returns the routes of all rows, [T, M], with 0 for the tokens at the end of a row that the engine has not
    processed. `no_routes`: [0, M], so that a result without rows has the same columns.
    """
    rows = [no_routes]
    for response, length in zip(responses, num_tokens, strict=True):
        # An episode that fails before its first turn has no routes.
        routes = no_routes if response.routes is None else response.routes
        rows.append(np.pad(routes, ((0, length - len(routes)), (0, 0))))
    return torch.from_numpy(np.concatenate(rows))


def responses_to_tensordict(
    prompts: Sequence[Sequence[int]], responses: Responses, texts: Sequence[tuple[str, str]], **columns: Any
) -> TensorDict:
    """Combines prompts, responses with their texts and tagged texts, and additional row columns into a TensorDict.

    `response_mask` is true for tokens that the policy sampled, and false for those of the prompt and an environment.
    """
    prompt_lengths_B = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64)
    lengths_B = prompt_lengths_B + responses.lengths
    rows_T = torch.repeat_interleave(torch.arange(len(prompts)), lengths_B)
    positions_T = torch.arange(len(rows_T)) - (torch.cumsum(lengths_B, 0) - lengths_B)[rows_T]
    in_response_T = positions_T >= prompt_lengths_B[rows_T]
    input_ids_T = torch.empty(len(rows_T), dtype=torch.int64)
    input_ids_T[in_response_T] = responses.tokens
    input_ids_T[~in_response_T] = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int64)
    tokens = {
        "input_ids": input_ids_T,
        "response_mask": torch.zeros_like(in_response_T).masked_scatter(in_response_T, responses.is_policy),
        "rollout_logprobs": torch.zeros(len(rows_T)).masked_scatter(in_response_T, responses.logprobs.float()),
        "weight_version": torch.full(rows_T.shape, -1, dtype=torch.int32).masked_scatter(
            in_response_T, responses.versions
        ),
    }
    rows = {
        "truncated": responses.truncated,
        "response": [text for text, _ in texts],
        "tagged_response": [None if text == tagged else tagged for text, tagged in texts],
    }
    return make_tensordict({**rows, **columns}, tokens, lengths_B)
