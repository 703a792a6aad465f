"""Dialogs of the policy with environment workers: requests, the tokens between turns, rewards and failures."""

import itertools
import math
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from flowrl.data.chat import ChatTokenizer
from flowrl.data.messages import DataError
from flowrl.data.turn_delta import ChatMessage, make_turn_delta
from flowrl.engines.rollout.base import Request, Response, Segment
from flowrl.environments.base import ModelResponse, Observation
from flowrl.environments.requests import Close, Reply, Reset, Step
from flowrl.rewards.reward_function import RewardError
from flowrl.rewards.row_scorer import RewardCall, RowScores
from flowrl.user_code.channel import RequestClient, ServerAddress

if TYPE_CHECKING:
    from flowrl.workers.episodes import Episode

NAME = "environment"
"""Name of the environment in `reward_calls` and metrics."""


TURN_REWARDS, EPISODE = "turn_rewards", "episode"
"""Columns of episodes: the reward of each turn at the turn's last token, and a record per row."""

MAX_TOKENS = "max_tokens"
"""Reason and event of an episode that ended at `rollout.max_response_tokens`, before its environment ended it."""

_MAX_BLAMELESS_RESTARTS = 100
"""Limit of restarts after losses that an episode cannot have caused. It ends episodes whose processes never survive."""


@dataclass(frozen=True)
class EnvironmentServers:
    """Addresses and settings of the environment workers of a run."""

    addresses: Sequence[ServerAddress]
    key: bytes
    max_prompt_tokens: int
    restarts: int
    stops_on_failure: bool


@dataclass
class Dialog:
    """State of the turns of one episode."""

    first: Request
    """Request of the first segment, with which a lost episode starts again."""
    server: int
    """Index of the environment worker."""
    messages: Sequence[ChatMessage] = ()
    """The conversation so far."""
    tools: Sequence[ChatMessage] = ()
    prompt: str | None = None
    """Last message that `reset` returned, or the text of its tokens; None until it has returned."""
    rewards: list[float] = field(default_factory=list)
    """Reward of each turn."""
    infos: list[Mapping[str, Any]] = field(default_factory=list)
    """`Observation.info` of each turn. If the length limit ended the episode, also an entry of this module."""
    seconds: float = 0.0
    """Total duration of the environment's calls."""
    num_restarts: int = 0
    num_blameless_restarts: int = 0
    """Restarts after losses that the episode cannot have caused. They do not count toward the limit of restarts."""
    response: Response | None = None
    """Response that the environment has received last."""


class Dialogs:
    """Runs the turns of episodes through environment workers.

    Args:
        tokenizer: tokenizer of the policy, with its chat template.
        client: connection to the environment workers, whose `lost_result` is `LOST`.
        max_response_tokens: largest number of tokens of all segments of a response.
        max_prompt_tokens: largest number of tokens of a prompt that `reset` returns.
        restarts: number of times that a lost episode starts again.
        stops_on_failure: whether a failed episode raises RewardError. Otherwise, its score is 0.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        client: RequestClient,
        *,
        max_response_tokens: int,
        max_prompt_tokens: int,
        restarts: int,
        stops_on_failure: bool,
    ) -> None:
        self.client = client
        self._tokenizer, self._max_response_tokens = tokenizer, max_response_tokens
        self._max_prompt_tokens = max_prompt_tokens
        self._restarts, self._stops_on_failure = restarts, stops_on_failure
        self._prefix = uuid.uuid4().hex
        """Distinguishes the episodes of this object from those of others on the same environment worker."""
        self._numbers = itertools.count()
        self._episodes: dict[int, Episode] = {}
        """Key of a request in flight -> its episode."""
        self._ended: list[str] = []

    def start(self, episodes: Sequence["Episode"]) -> list[Dialog]:
        """Sends the rows of episodes to their environments. Returns their state."""
        servers = self._send([(episode, Reset(self._id(episode), dict(episode.columns))) for episode in episodes])
        return [Dialog(episode.request, server) for episode, server in zip(episodes, servers, strict=True)]

    def _id(self, episode: "Episode") -> str:
        return f"{self._prefix}/{episode.id}"

    def _send(self, requests: Sequence[tuple["Episode", Any]], servers: Sequence[int] | None = None) -> list[int]:
        keys = [next(self._numbers) for _ in requests]
        self._episodes |= {key: episode for key, (episode, _) in zip(keys, requests, strict=True)}
        values = [(key, request) for key, (_, request) in zip(keys, requests, strict=True)]
        return self.client.send(values, servers)

    def send(self, finished: Sequence[tuple["Episode", Response]]) -> None:
        """Sends responses to their environments."""
        requests, servers = [], []
        ids = [response.token_ids for _, response in finished]
        texts = self._tokenizer.decode_responses(ids)
        contexts = [episode.request.context for episode, _ in finished]
        all_tagged = self._tokenizer.decode_tags(contexts, ids, texts)
        for (episode, response), text, tagged in zip(finished, texts, all_tagged, strict=True):
            dialog = _dialog(episode)
            dialog.response = response
            step = ModelResponse(
                text,
                tuple(response.token_ids),
                finish_reason="length" if response.truncated else "stop",
                turn=len(dialog.rewards),
                tagged_text=None if tagged == text else tagged,
            )
            requests.append((episode, Step(self._id(episode), step)))
            servers.append(dialog.server)
        self._send(requests, servers)

    def receive(self, timeout_s: float | None) -> list[Request]:
        """Returns the requests for the next segments of the episodes whose observation has arrived."""
        continued: list[Request] = []
        for key, reply in self.client.receive(timeout_s):
            episode = self._episodes.pop(int(str(key)))
            request = self._apply(episode, reply)
            if request is not None:
                episode.request = request
                continued.append(request)
        return continued

    def pop_ended(self) -> list[str]:
        """Returns the ids of the episodes that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _apply(self, episode: "Episode", reply: Reply) -> Request | None:
        """Applies a reply to an episode. Returns the request for its next segment, or None if it has ended or starts
        again.
        """
        dialog = _dialog(episode)
        dialog.seconds += reply.seconds
        if reply.failure == "lost" and self._can_restart(dialog, reply.is_blameless):
            return self._restart(episode, reply.is_blameless)
        if reply.failure is not None:
            return self._fail(episode, reply.failure, reply.message)
        try:
            if dialog.response is None:
                return self._first_request(episode, reply)
            assert reply.observation is not None
            return self._next_request(episode, dialog.response, reply.observation)
        except DataError as error:
            return self._fail(episode, "invalid", str(error))

    def _can_restart(self, dialog: Dialog, is_blameless: bool) -> bool:
        if is_blameless:
            return dialog.num_blameless_restarts < _MAX_BLAMELESS_RESTARTS
        return dialog.num_restarts - dialog.num_blameless_restarts < self._restarts

    def _restart(self, episode: "Episode", is_blameless: bool) -> None:
        dialog = _dialog(episode)
        fresh = Dialog(dialog.first, dialog.server, seconds=dialog.seconds, num_restarts=dialog.num_restarts + 1)
        fresh.num_blameless_restarts = dialog.num_blameless_restarts + is_blameless
        episode.dialog, episode.request = fresh, dialog.first
        self._send([(episode, Reset(self._id(episode), dict(episode.columns)))], [dialog.server])

    def _first_request(self, episode: "Episode", reply: Reply) -> Request:
        dialog = _dialog(episode)
        dialog.tools = reply.tools
        if reply.prompt_ids is not None:
            request = self._checked(dialog, reply.prompt_ids)
            dialog.prompt = self._tokenizer.decode(reply.prompt_ids)
            return request
        assert reply.observation is not None
        dialog.messages = tuple(reply.observation.messages)
        dialog.prompt = next((str(message.get("content")) for message in reversed(dialog.messages)), None)
        messages = self._tokenizer.with_system(dialog.messages)
        text = self._tokenizer.render(messages, generate=True, tools=dialog.tools)
        return self._checked(dialog, self._tokenizer.encode(text))

    def _checked(self, dialog: Dialog, token_ids: Sequence[int]) -> Request:
        """Returns the request for a prompt. Raises DataError if it is too long, or has an unknown token."""
        if len(token_ids) > self._max_prompt_tokens:
            raise DataError(
                f"the prompt that the environment returned has {len(token_ids)} tokens, more than "
                f"data.max_prompt_tokens ({self._max_prompt_tokens}): shorten it, or raise data.max_prompt_tokens"
            )
        if (largest := max(token_ids, default=0)) >= len(self._tokenizer):
            raise DataError(
                f"the prompt that the environment returned has the token id {largest}, but the vocabulary of the "
                f"policy has the ids 0 to {len(self._tokenizer) - 1}: return tokens of the policy's tokenizer"
            )
        self._tokenizer.check_ids(token_ids)
        return replace(dialog.first, token_ids=token_ids)

    def _next_request(self, episode: "Episode", response: Response, observation: Observation) -> Request | None:
        dialog = _dialog(episode)
        dialog.rewards.append(observation.reward or 0.0)
        dialog.infos.append(observation.info)
        if observation.done:
            self._close([episode])
            return self._end(episode, response)
        if response.truncated:
            return self._end_at_limit(episode, response)
        if not dialog.messages:
            raise DataError(
                "reset returned tokens, so the conversation is unknown: return messages, or end the episode"
            )
        delta = make_turn_delta(
            self._tokenizer, dialog.messages, response.token_ids, observation.messages, dialog.tools
        )
        dialog.messages = delta.messages
        segments = (*episode.request.segments, Segment.policy(response), Segment.environment(delta.token_ids))
        following = replace(episode.request, segments=segments)
        if following.num_response_tokens < self._max_response_tokens:
            return following
        response.truncated = True
        return self._end_at_limit(episode, response)

    def _end_at_limit(self, episode: "Episode", response: Response) -> None:
        """Ends an episode that its environment would continue, because no token is left for the next turn."""
        _dialog(episode).infos.append({"reason": MAX_TOKENS, "counts": {MAX_TOKENS: 1}})
        self._close([episode])
        self._end(episode, response)

    def _end(self, episode: "Episode", response: Response) -> None:
        dialog = _dialog(episode)
        episode.response = response
        self._ended.append(episode.id)
        score = math.fsum(dialog.rewards)
        episode.scores = RowScores({"scores": score}, {NAME: RewardCall(score, dialog.seconds)})

    def _fail(self, episode: "Episode", failure: str, message: str) -> None:
        if self._stops_on_failure:
            raise RewardError(f"environment: {message}")
        dialog = _dialog(episode)
        self._close([episode])
        if dialog.response is None:
            # A row needs a token. No version of the policy has sampled this one, so `response_mask` excludes it.
            dialog.response = Response(episode.id, [self._tokenizer.eos_id], [0.0], [-1], truncated=True)
        dialog.rewards = [0.0] * (len(_policy_segments(episode)) + 1)
        episode.response = dialog.response
        self._ended.append(episode.id)
        episode.scores = RowScores({"scores": 0.0}, {NAME: RewardCall(None, dialog.seconds, failure, message)})

    def _close(self, episodes: Iterable["Episode"]) -> None:
        episodes = list(episodes)
        servers = [_dialog(episode).server for episode in episodes]
        # Nobody waits for the replies.
        keys = [next(self._numbers) for _ in episodes]
        self.client.send([(k, Close(self._id(e))) for k, e in zip(keys, episodes, strict=True)], servers)
        self.client.drop(keys)

    def drop(self, episodes: Sequence["Episode"]) -> None:
        """Ends episodes without a result."""
        dropped = {id(episode) for episode in episodes}
        keys = [key for key, episode in self._episodes.items() if id(episode) in dropped]
        self.client.drop(keys)
        for key in keys:
            del self._episodes[key]
        self._close(episodes)


LOST = Reply(failure="lost", message="the environment worker was lost")
"""Result of a request whose connection was lost."""


def _dialog(episode: "Episode") -> Dialog:
    assert episode.dialog is not None, "the episode has an environment"
    return episode.dialog


def _policy_segments(episode: "Episode") -> list[Segment]:
    return [segment for segment in episode.request.segments if segment.is_policy]


def turn_columns(episodes: Sequence["Episode"]) -> tuple[list[float], list[dict[str, Any]]]:
    """Returns the columns of complete episodes.

    Returns:
        `turn_rewards`: a number for each token of prompts and responses, which is the reward of a turn at its last
            token and 0 elsewhere.
        `episode`: a record for each row, with `turns`, `restarts`, `counts` (of events) and `reason` (of the end), and
            `prompt` if `reset` has returned another prompt than that of the dataset.
    """
    rewards_T: list[float] = []
    records = []
    for episode in episodes:
        dialog, last = _dialog(episode), episode.response
        assert last is not None
        rewards_T += [0.0] * len(episode.request.token_ids)
        turns = iter(dialog.rewards)
        for segment in (*episode.request.segments, Segment.policy(last)):
            own = [0.0] * len(segment.token_ids)
            if segment.is_policy:
                own[-1] = next(turns)
            rewards_T += own
        counts: Counter[str] = Counter()
        for info in dialog.infos:
            counts.update(info.get("counts") or {})
        reason = dialog.infos[-1].get("reason") if dialog.infos else None
        record = {
            "turns": len(dialog.rewards),
            "restarts": dialog.num_restarts,
            "counts": dict(counts),
            "reason": reason,
        }
        if dialog.prompt not in (None, episode.columns.get("prompt")):
            record["prompt"] = dialog.prompt
        records.append(record)
    return rewards_T, records
