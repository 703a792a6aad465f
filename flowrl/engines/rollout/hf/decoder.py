"""Rows that decode together: they join with a prefill, say one token per step, and leave when their response ends.

Shape suffixes: R places of the cache, N rows of a call, U different rows of a prefill, L tokens, V vocabulary.

What a row says is a function of the weights, its prompt and its key, and of nothing beside it: random numbers are
keyed (`sampling`), a row's tokens stand in the same slots in any place (`kv_cache`), and shapes are chosen so that the
same arithmetic runs for few rows as for many. On the CPU in float32 this holds bit for bit where it was tried: rows of
up to a hundred tokens, layer widths that are multiples of 32 (others now and then differ in the last bit of a
log-probability). Rows are prefilled without their last token, once where they are alike; the last token is fed in the
next step beside those of the rows that are there, so that every sampled token comes out of the same code.

A row that leaves is a place for another. It goes on through the model until then, with its results thrown away: a place
less means a copy of all keys and values.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flowrl.config import RolloutConfig
from flowrl.engines.rollout.hf.kv_cache import SlotCache, round_up
from flowrl.engines.rollout.requests import Prompt, Response
from flowrl.engines.rollout.sampling import sample_tokens, uniforms

_MIN_ROWS = 16
"""Fewer places are filled up to this: CPU matrix products sum in another order for a dozen rows or less."""

_PROMPT_MULTIPLE = 16
"""Prefills are padded to a multiple of this, for the same reason."""

_PREFILL_TOKENS = 16384
"""Tokens of one forward pass of a prefill, padding included."""

_LEAVE_SHARE = 0.75
"""Places go when at most this share of them is taken: that copies the cache of the others."""

History = tuple[int, ...]
"""A row's tokens so far, those of its prompt and those that it has said."""


@dataclass
class Row:
    """A request at work."""

    prompt: Prompt
    answer: Response
    """What it had said when it joined, and all of it when it has left."""

    @property
    def history(self) -> History:
        """Its tokens, prompt first; while it decodes those that it had when it joined."""
        return (*self.prompt.token_ids, *self.answer.token_ids)


@dataclass
class _Places:
    """Where the row of each place of the cache is. In a free one the first slot is written again and again."""

    is_taken: Tensor
    """bool [R]."""
    key: Tensor
    """int64 [R], of `sampling.row_keys`."""
    fed: Tensor
    """int64 [R], the token that is run next."""
    position: Tensor
    """int64 [R], where it stands; 0 in a free place."""
    count: Tensor
    """int64 [R], tokens of the response so far; 0 in a free place."""
    tokens: Tensor
    """int64 [R, P + max_response_tokens], the response after P times -1, which is no token: P is one less than the
    longest stop has, and so none ends before the response begins."""
    logprobs: Tensor
    """float32 [R, max_response_tokens], of the tokens that were said since the row joined."""

    @staticmethod
    def free(num_places: int, padding: int, limit: int, device: torch.device) -> "_Places":
        zeros = torch.zeros(num_places, dtype=torch.int64, device=device)
        return _Places(
            is_taken=zeros.bool(),
            key=zeros,
            fed=zeros.clone(),
            position=zeros.clone(),
            count=zeros.clone(),
            tokens=torch.full((num_places, padding + limit), -1, device=device),
            logprobs=torch.zeros(num_places, limit, device=device),
        )

    def take(self, index: Tensor) -> "_Places":
        return _Places(*(getattr(self, field.name)[index] for field in fields(self)))

    def plus(self, others: "_Places") -> "_Places":
        pairs = ((getattr(self, field.name), getattr(others, field.name)) for field in fields(self))
        return _Places(*map(torch.cat, pairs))

    def give_up(self, index: Tensor) -> None:
        for column in (self.is_taken, self.position, self.count):
            column[index] = 0


class Decoder:
    """Rows in one cache of keys and values. It holds no memory while it has none."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: RolloutConfig,
        end_ids: Sequence[int],
        max_length: int,
        device: torch.device,
    ) -> None:
        """Nothing is computed yet.

        Args:
            model: framed by `with_slot_attention`.
            config: how it samples.
            end_ids: tokens that end a response, beside `config.stop_ids`.
            max_length: tokens of the longest row that the model takes.
            device: where the model is.
        """
        self._model, self._config, self._device, self._max_length = model, config, device, max_length
        self._num_layers: int = model.config.get_text_config().num_hidden_layers
        self._end_ids = torch.tensor(list(end_ids), dtype=torch.int64, device=device)
        self._stops = [torch.tensor(stop, dtype=torch.int64, device=device) for stop in config.stop_ids]
        self._padding = max((len(stop) for stop in config.stop_ids), default=1) - 1
        self._clear()

    def _clear(self) -> None:
        self._rows: list[Row | None] = []
        """The row of each place; None where it is free."""
        self._cache: SlotCache | None = None
        self._places = _Places.free(0, self._padding, self._config.max_response_tokens, self._device)
        self.num_rows = 0
        """Rows that are decoding."""
        self._num_greedy = 0
        self._longest = 0
        """Tokens of the longest row, the one that is fed next included."""

    # Rows join.

    def join(self, rows: Sequence[Row]) -> None:
        """Takes rows in beside those that are there: computes keys and values of all they are so far."""
        histories = [row.history for row in rows]
        numbers = self._free_places(len(rows), max(map(len, histories)))
        first: dict[History, int] = {}
        for history, number in zip(histories, numbers, strict=True):
            first.setdefault(history, number)
        assert self._cache is not None
        self._prefill(self._cache, first)
        alike = [(first[h], number) for h, number in zip(histories, numbers, strict=True) if first[h] != number]
        if alike:
            sources, targets = torch.tensor(alike, device=self._device).unbind(1)
            self._cache.copy(sources, targets, max(map(len, histories)))
        self._begin(rows, histories, numbers)

    def _free_places(self, count: int, longest: int) -> list[int]:
        """Places for so many rows, of up to so many tokens; where there are too few, more are made."""
        free = [number for number, row in enumerate(self._rows) if row is None]
        missing = max(count - len(free), _MIN_ROWS - len(self._rows), 0)
        if self._cache is None:
            self._cache = SlotCache(self._num_layers, missing, longest, self._device)
        self._cache.grow(len(self._rows) + missing, longest)
        free += range(len(self._rows), len(self._rows) + missing)
        self._rows += [None] * missing
        if missing:
            added = _Places.free(missing, self._padding, self._config.max_response_tokens, self._device)
            self._places = self._places.plus(added)
        return free[:count]

    def _prefill(self, cache: SlotCache, places: Mapping[History, int]) -> None:
        """Computes keys and values of all tokens but the last, each history in its place."""
        for part in self._parts(sorted(places, key=len)):
            width = self._width(part[-1])
            if width == 0:
                continue
            lengths_U = torch.tensor([min(len(history), width) for history in part])
            ids_UL = torch.zeros(len(part), width, dtype=torch.int64)
            is_token_UL = torch.arange(width) < lengths_U[:, None]
            ids_UL[is_token_UL] = torch.tensor([token for history in part for token in history[:width]])
            cache.begin_prefill(torch.tensor([places[history] for history in part], device=self._device))
            self._model.base_model(input_ids=ids_UL.to(self._device), past_key_values=cache, use_cache=True)

    def _parts(self, histories: Sequence[History]) -> Iterator[list[History]]:
        """Of histories that get longer those that fit into a forward pass together."""
        part: list[History] = []
        for history in histories:
            if part and (len(part) + 1) * self._width(history) > _PREFILL_TOKENS:
                yield part
                part = []
            part.append(history)
        yield part

    def _width(self, history: History) -> int:
        """Columns of its prefill."""
        return min(round_up(len(history) - 1, _PROMPT_MULTIPLE), self._max_length)

    def _begin(self, rows: Sequence[Row], histories: Sequence[History], numbers: Sequence[int]) -> None:
        places, device = self._places, self._device
        index_N = torch.tensor(numbers, device=device)
        lengths_N = torch.tensor([len(history) for history in histories], device=device)
        places.is_taken[index_N] = True
        places.key[index_N] = torch.tensor([row.prompt.key for row in rows], device=device)
        places.fed[index_N] = torch.tensor([history[-1] for history in histories], device=device)
        places.position[index_N] = lengths_N - 1
        places.count[index_N] = torch.tensor([len(row.answer.token_ids) for row in rows], device=device)
        for number, row in zip(numbers, rows, strict=True):
            self._rows[number] = row
            if said := row.answer.token_ids:
                places.tokens[number, self._padding : self._padding + len(said)] = torch.tensor(said, device=device)
        self._longest = max(self._longest, int(lengths_N.max()))
        self.num_rows += len(rows)
        self._num_greedy += sum(row.prompt.greedy for row in rows)

    # Rows decode.

    def step(self, version: int) -> list[Row]:
        """Every row says a token more; gives those whose response that ends, which have left.

        Args:
            version: of the weights.
        """
        places, cache = self._places, self._cache
        assert cache is not None, "no row has joined"
        tokens_R, logprobs_R = self._choose(self._forward(cache))
        places.tokens[cache.row_numbers, self._padding + places.count] = tokens_R
        places.logprobs[cache.row_numbers, places.count] = logprobs_R.float()
        is_stop_R = self._ends(tokens_R, cache.row_numbers)
        places.fed = tokens_R
        places.count += places.is_taken
        places.position += places.is_taken
        self._longest += 1
        is_full_R = places.count == self._config.max_response_tokens
        index_N = (places.is_taken & (is_stop_R | is_full_R)).nonzero().squeeze(1)
        if not len(index_N):
            return []
        is_stop_N = is_stop_R[index_N].tolist()
        rows = self._leave(index_N, version)
        for row, is_stop in zip(rows, is_stop_N, strict=True):
            row.answer.truncated = not is_stop
        return rows

    def _forward(self, cache: SlotCache) -> Tensor:
        """Feeds one token per row and gives the logits [R, V] of the next."""
        position_R = self._places.position.clone()
        cache.begin_step(position_R, self._longest)
        output = self._model(
            input_ids=self._places.fed[:, None],
            position_ids=position_R[:, None],
            attention_mask=cache.mask(self._model.dtype),
            past_key_values=cache,
            use_cache=True,
        )
        return output.logits[:, -1]

    def _choose(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        config = self._config
        numbers_R = uniforms(self._places.key, self._places.position + 1)
        likeliest = sample_tokens(logits_RV, numbers_R, temperature=0) if self._num_greedy else None
        if likeliest is not None and self._num_greedy == self.num_rows:
            return likeliest
        sampled = sample_tokens(
            logits_RV, numbers_R, temperature=config.temperature, top_k=config.top_k, top_p=config.top_p
        )
        if likeliest is None:
            return sampled
        is_greedy = [row is not None and row.prompt.greedy for row in self._rows]
        is_greedy_R = torch.tensor(is_greedy, device=self._device)
        return torch.where(is_greedy_R, likeliest[0], sampled[0]), torch.where(is_greedy_R, likeliest[1], sampled[1])

    def _ends(self, tokens_R: Tensor, row_numbers: Tensor) -> Tensor:
        """Bool [R]: the token that was just said ends the response, by itself or as the end of a stop sequence."""
        ends_R = torch.isin(tokens_R, self._end_ids)
        for stop in self._stops:
            last_RL = self._padding + self._places.count[:, None] + torch.arange(1 - len(stop), 1, device=self._device)
            ends_R |= (self._places.tokens[row_numbers[:, None], last_RL] == stop).all(-1)
        return ends_R

    # Rows leave.

    def drop(self, names: Collection[str]) -> None:
        """Has the rows of these requests leave, whatever they have said."""
        numbers = [number for number, row in enumerate(self._rows) if row is not None and row.prompt.name in names]
        if numbers:
            self._leave(torch.tensor(numbers, device=self._device), 0)

    def leave(self, version: int) -> list[Row]:
        """All rows leave as they are, in the middle of what they say. They may join again, and go on from there.

        Args:
            version: of the weights, which all they have said since they joined is of.
        """
        numbers = [number for number, row in enumerate(self._rows) if row is not None]
        return self._leave(torch.tensor(numbers, device=self._device), version) if numbers else []

    def _leave(self, index_N: Tensor, version: int) -> list[Row]:
        """Makes places free, and gives the rows that were there, with what they have said."""
        places = self._places
        counts = places.count[index_N].tolist()
        tokens = places.tokens[index_N, self._padding : self._padding + max(counts)].tolist()
        logprobs = places.logprobs[index_N, : max(counts)].tolist()
        rows = []
        for number, count, *said in zip(index_N.tolist(), counts, tokens, logprobs, strict=True):
            row = self._rows[number]
            assert row is not None
            had = len(row.answer.token_ids)
            row.answer.token_ids += said[0][had:count]
            row.answer.logprobs += said[1][had:count]
            row.answer.versions += [version] * (count - had)
            self._rows[number] = None
            rows.append(row)
        self.num_rows -= len(rows)
        self._num_greedy -= sum(row.prompt.greedy for row in rows)
        places.give_up(index_N)
        if self.num_rows:
            self._longest = int(places.position.max()) + 1
        else:
            self._clear()
        return rows

    def shrink(self) -> None:
        """Gives up free places where there are many of them."""
        num_places = max(self.num_rows, _MIN_ROWS)
        if self._cache is None or num_places > _LEAVE_SHARE * len(self._rows):
            return
        numbers = sorted(range(len(self._rows)), key=lambda number: self._rows[number] is None)[:num_places]
        index_R = torch.tensor(numbers, device=self._device)
        self._rows = [self._rows[number] for number in numbers]
        self._places = self._places.take(index_R)
        self._cache.take(index_R)
