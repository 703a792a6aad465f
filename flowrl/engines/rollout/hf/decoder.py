"""Batched decode loop of continuous batching.

Shape suffixes: R slots of the cache, N rows of a call, U distinct rows of a prefill, L tokens, V vocabulary.

A response depends only on the weights, the prompt and the request's key. It does not depend on the other rows of the
batch. In tests on the CPU in float32, responses were bitwise identical for layer widths that are multiples of 32. With
other widths, log-probabilities can differ in the last bit.

A prefill processes all tokens of a prompt except the last. The next decode step processes the last token, so that the
same code samples every token. Rows with equal prompts share a prefill. It runs once for the rows that join together. A
row that joins later copies the keys and values of a row that still decodes. A new row reuses the slot of a finished
row, because removing a slot would copy the complete cache.

The keys and values of a finished row whose episode may continue are copied out of its slot (`TurnCaches`). The row of
the next turn copies them into its own slot, and an extension processes only the new tokens.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flowrl.config import RolloutConfig
from flowrl.engines.rollout.base import Request, Response
from flowrl.engines.rollout.hf.decode_step import ShortStep, has_short_step
from flowrl.engines.rollout.hf.kv_cache import SLOT_MULTIPLE, LayerStates, SlotCache, TurnCache, TurnCaches, round_up
from flowrl.engines.rollout.hf.routes import RouteRecorder
from flowrl.engines.rollout.sampling import sample_tokens, uniforms

_MIN_ROWS = 16
"""Minimum number of slots. With about 12 rows or fewer, matrix products on the CPU use a different summation order."""

_PROMPT_MULTIPLE = 16
"""Prefill lengths are padded to a multiple of this number. The summation order of matrix products then stays the
same.
"""

_PREFILL_TOKENS = 16384
"""Maximum number of tokens of one prefill pass, including padding."""

_EXTENSION_TOKENS = 256
"""Maximum number of tokens that one extension pass processes per row. The tokens of a longer observation are split at
multiples of this number, so that the split does not depend on other rows.
"""

_EXTENSION_LOGITS = 2**26
"""Maximum number of attention logits of one layer in an extension pass. A pass with one row may exceed it."""

_RANDOM_STEPS = 16
"""Number of decode steps whose random numbers are computed together."""

_SHRINK_SHARE = 0.75
"""The cache shrinks if at most this fraction of its slots is in use."""

History = tuple[int, ...]
"""Tokens of a row: first the prompt, then the response so far."""


_Piece = tuple[History, int, int]
"""Consecutive tokens of a row for one extension pass, the slot of the row, and the position of the first token."""


@dataclass
class Row:
    """A request and the segment that is being sampled for it."""

    request: Request
    response: Response
    """The segment that is being sampled. It is updated only when the decoder removes the row."""
    continues_cache: bool = False
    """Whether the row has joined with keys and values of earlier turns. Other rows do not copy these, because decode
    steps have computed them.
    """

    @property
    def history(self) -> History:
        """Tokens of the prompt, of the earlier segments, and of the segment that is being sampled."""
        return (*self.request.context, *self.response.token_ids)

    @property
    def num_response_tokens(self) -> int:
        """Number of response tokens so far, which count toward `max_response_tokens`."""
        return self.request.num_response_tokens + len(self.response.token_ids)


@dataclass
class _Slots:
    """Decode state of the R cache slots. Decode steps also compute free slots, and the results of free slots are
    discarded.
    """

    is_used: Tensor
    """bool [R], whether a row occupies the slot."""
    key: Tensor
    """int64 [R], random-number key of the row, from `sampling.row_keys`."""
    next_token: Tensor
    """int64 [R], input token of the next decode step."""
    position: Tensor
    """int64 [R], position of the input token in the row. The position is 0 for a free slot."""
    count: Tensor
    """int64 [R], number of response tokens so far of the row in each slot. The number is 0 for a free slot."""
    limit: Tensor
    """int64 [R], maximum number of response tokens of the row in each slot, at most `max_response_tokens`."""
    tokens: Tensor
    """int64 [R, P + max_response_tokens]. P padding values of -1 precede the response tokens. Tokens of earlier
    segments are replaced by -1. P is the length of the longest stop sequence minus 1."""
    logprobs: Tensor
    """float32 [R, max_response_tokens], log-probabilities of the response tokens that were sampled since the row
    joined.
    """

    @staticmethod
    def free(num_slots: int, padding: int, limit: int, device: torch.device) -> "_Slots":
        zeros = torch.zeros(num_slots, dtype=torch.int64, device=device)
        return _Slots(
            is_used=zeros.bool(),
            key=zeros,
            next_token=zeros.clone(),
            position=zeros.clone(),
            count=zeros.clone(),
            limit=zeros + limit,
            tokens=torch.full((num_slots, padding + limit), -1, device=device),
            logprobs=torch.zeros(num_slots, limit, device=device),
        )

    def select(self, index: Tensor) -> "_Slots":
        return _Slots(*(getattr(self, field.name)[index] for field in fields(self)))

    def extend(self, others: "_Slots") -> "_Slots":
        pairs = ((getattr(self, field.name), getattr(others, field.name)) for field in fields(self))
        return _Slots(*map(torch.cat, pairs))

    def release(self, index: Tensor) -> None:
        for column in (self.is_used, self.position, self.count):
            column[index] = 0


class Decoder:
    """Decodes a batch of rows with a common KV cache."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: RolloutConfig,
        end_ids: Sequence[int],
        max_length: int,
        device: torch.device,
        *,
        routes: RouteRecorder | None = None,
    ) -> None:
        """Stores the settings. The first call of `join` allocates the cache.

        Args:
            model: result of `with_slot_attention`.
            config: sampling settings.
            end_ids: tokens that end a response, in addition to `config.stop_ids`.
            max_length: maximum number of tokens of prompt and response.
            device: device of the model.
            routes: records the routes of all tokens. None records no routes.
        """
        self._model, self._config, self._device, self._max_length = model, config, device, max_length
        self._num_layers: int = model.config.get_text_config().num_hidden_layers
        self._short_step = ShortStep(model) if has_short_step(model) else None
        self._routes = routes
        self._end_ids = torch.tensor(list(end_ids), dtype=torch.int64, device=device)
        self._num_heads: int = model.config.get_text_config().num_attention_heads
        self.turn_caches = TurnCaches()
        """Keys and values of the rows that have finished a turn and may continue."""
        self._stops = [torch.tensor(stop, dtype=torch.int64, device=device) for stop in config.stop_ids]
        self._padding = max((len(stop) for stop in config.stop_ids), default=1) - 1
        self._clear()

    def _clear(self) -> None:
        self._rows: list[Row | None] = []
        self._cache: SlotCache | None = None
        self._slots = _Slots.free(0, self._padding, self._config.max_response_tokens, self._device)
        self._uniforms: deque[Tensor] = deque()
        """Random numbers of the next steps, float64 [R] each. Empty after rows have joined or changed their slots."""
        self.num_rows = 0
        self._temperatures = Counter[float]()
        """Number of rows per sampling temperature."""
        self._longest = 0
        """Number of tokens of the longest row, including the input token of the next decode step."""

    # Join.

    def join(self, rows: Sequence[Row]) -> None:
        """Adds rows to the batch and prefills their tokens."""
        histories = [row.history for row in rows]
        slots = self._allocate(len(rows), max(map(len, histories)))
        assert self._cache is not None
        fresh: list[tuple[History, int]] = []
        continued: list[tuple[History, int, TurnCache]] = []
        for row, history, slot in zip(rows, histories, slots, strict=True):
            turn_cache = self.turn_caches.take(row.request.request_id, history)
            row.continues_cache = turn_cache is not None
            if turn_cache is None:
                fresh.append((history, slot))
            else:
                continued.append((history, slot, turn_cache))
        self._prefill_shared(self._cache, fresh)
        self._extend(self._cache, continued)
        self._start(rows, histories, slots)

    def _prefill_shared(self, cache: SlotCache, rows: Sequence[tuple[History, int]]) -> None:
        """Prefills histories in their slots. Equal histories share a prefill."""
        lengths = [len(history) for history, _ in rows]
        sources = self._prefilled_slots(set(lengths))
        first: dict[History, int] = {}
        for history, slot in rows:
            if history not in sources:
                sources[history] = first[history] = slot
        self._prefill(cache, first)
        copies = [(sources[history], slot) for history, slot in rows if sources[history] != slot]
        if copies:
            source_N, target_N = torch.tensor(copies, device=self._device).unbind(1)
            cache.copy(source_N, target_N, max(lengths))

    def _prefilled_slots(self, lengths: Collection[int]) -> dict[History, int]:
        """Returns history -> slot of the decoding rows whose prefill had one of these lengths.

        Excludes rows that joined with a partial response or with the keys and values of earlier turns. Their keys and
        values can differ in the last bit from those of a prefill.
        """
        return {
            row.history: slot
            for slot, row in enumerate(self._rows)
            if row is not None
            and not (row.response.token_ids or row.continues_cache)
            and len(row.request.context) in lengths
        }

    def _allocate(self, count: int, longest: int) -> list[int]:
        """Returns `count` free slots for rows of up to `longest` tokens. Grows the cache if necessary."""
        free = [slot for slot, row in enumerate(self._rows) if row is None]
        missing = max(count - len(free), _MIN_ROWS - len(self._rows), 0)
        if self._cache is None:
            # Routes of tokens are stored, copied and kept like the keys and values of an additional layer.
            num_layers = self._num_layers + (self._routes is not None)
            self._cache = SlotCache(num_layers, missing, longest, self._device)
        self._cache.grow(len(self._rows) + missing, longest)
        free += range(len(self._rows), len(self._rows) + missing)
        self._rows += [None] * missing
        if missing:
            added = _Slots.free(missing, self._padding, self._config.max_response_tokens, self._device)
            self._slots = self._slots.extend(added)
        return free[:count]

    def _prefill(self, cache: SlotCache, slots: Mapping[History, int]) -> None:
        """For each history, computes the keys and values of all tokens except the last, and stores them in the
        history's slot.
        """
        for chunk in self._prefill_chunks(sorted(slots, key=len)):
            width = self._prefill_width(chunk[-1])
            if width == 0:
                continue
            ids_UL, _ = _pad([history[:width] for history in chunk], width)
            cache.begin_prefill(torch.tensor([slots[history] for history in chunk], device=self._device))
            with self._recording_routes(cache):
                self._model.base_model(input_ids=ids_UL.to(self._device), past_key_values=cache, use_cache=True)

    def _prefill_chunks(self, histories: Sequence[History]) -> Iterator[list[History]]:
        """Splits histories, sorted by length, into forward passes of at most `_PREFILL_TOKENS` tokens."""
        chunk: list[History] = []
        for history in histories:
            if chunk and (len(chunk) + 1) * self._prefill_width(history) > _PREFILL_TOKENS:
                yield chunk
                chunk = []
            chunk.append(history)
        if chunk:
            yield chunk

    def _prefill_width(self, history: History) -> int:
        return min(round_up(len(history) - 1, _PROMPT_MULTIPLE), self._max_length)

    def _extend(self, cache: SlotCache, rows: Sequence[tuple[History, int, TurnCache]]) -> None:
        """Restores kept keys and values. Computes the keys and values of all later tokens, except the last token of
        each history.
        """
        for _, slot, turn_cache in rows:
            cache.write(slot, turn_cache.layers)
        num_new = [len(history) - 1 - len(turn_cache.tokens) for history, _, turn_cache in rows]
        for offset in range(0, max(num_new, default=0), _EXTENSION_TOKENS):
            starts = [(history[:-1], slot, len(turn_cache.tokens) + offset) for history, slot, turn_cache in rows]
            pieces = [
                (tokens[start : start + _EXTENSION_TOKENS], slot, start)
                for tokens, slot, start in starts
                if start < len(tokens)
            ]
            for chunk in self._extension_chunks(sorted(pieces, key=lambda piece: len(piece[0]))):
                tokens, slots, starts_of_chunk = zip(*chunk, strict=True)
                ids_UL, is_token_UL = _pad(tokens, round_up(len(tokens[-1]), _PROMPT_MULTIPLE))
                slots_U, starts_U = (torch.tensor(x, device=self._device) for x in (slots, starts_of_chunk))
                positions_UL = cache.begin_extension(slots_U, starts_U, is_token_UL.to(self._device))
                with self._recording_routes(cache):
                    self._model.base_model(
                        input_ids=ids_UL.to(self._device),
                        position_ids=positions_UL,
                        attention_mask=cache.mask(self._model.dtype),
                        past_key_values=cache,
                        use_cache=True,
                    )

    def _extension_chunks(self, pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
        """Splits pieces, sorted by length, into forward passes with at most `_EXTENSION_LOGITS` attention logits and
        `_PREFILL_TOKENS` tokens.
        """
        chunk: list[_Piece] = []
        attended = 0
        for piece in pieces:
            tokens, _, start = piece
            attended = max(attended, round_up(start + len(tokens), SLOT_MULTIPLE))
            num_tokens = (len(chunk) + 1) * round_up(len(tokens), _PROMPT_MULTIPLE)
            if chunk and num_tokens > min(_PREFILL_TOKENS, _EXTENSION_LOGITS // (self._num_heads * attended)):
                yield chunk
                chunk, attended = [], round_up(start + len(tokens), SLOT_MULTIPLE)
            chunk.append(piece)
        if chunk:
            yield chunk

    def _start(self, rows: Sequence[Row], histories: Sequence[History], indices: Sequence[int]) -> None:
        slots, device = self._slots, self._device
        self._uniforms.clear()
        index_N = torch.tensor(indices, device=device)
        lengths_N = torch.tensor([len(history) for history in histories], device=device)
        slots.is_used[index_N] = True
        slots.key[index_N] = torch.tensor([row.request.key for row in rows], device=device)
        slots.next_token[index_N] = torch.tensor([history[-1] for history in histories], device=device)
        slots.position[index_N] = lengths_N - 1
        slots.count[index_N] = torch.tensor([row.num_response_tokens for row in rows], device=device)
        limits = [row.request.response_limit(self._config.max_response_tokens) for row in rows]
        slots.limit[index_N] = torch.tensor(limits, device=device)
        for index, row in zip(indices, rows, strict=True):
            self._rows[index] = row
            end = self._padding + row.num_response_tokens
            start = end - len(row.response.token_ids)
            # -1 matches no stop sequence, so it hides earlier segments and the tokens of the slot's previous row.
            slots.tokens[index, self._padding : start] = -1
            if start < end:
                slots.tokens[index, start:end] = torch.tensor(row.response.token_ids, device=device)
        self._longest = max(self._longest, int(lengths_N.max()))
        self.num_rows += len(rows)
        self._temperatures.update(map(self._temperature, rows))

    # Decode.

    def step(self, version: int) -> list[Row]:
        """Decodes one token of every row with the weights of `version`. Removes the finished rows from the batch and
        returns them.
        """
        slots, cache = self._slots, self._cache
        assert cache is not None, "no row has joined"
        tokens_R, logprobs_R = self._sample(self._forward(cache))
        slots.tokens[cache.row_numbers, self._padding + slots.count] = tokens_R
        slots.logprobs[cache.row_numbers, slots.count] = logprobs_R.float()
        is_stop_R = self._ends_response(tokens_R, cache.row_numbers)
        slots.next_token = tokens_R
        slots.count += slots.is_used
        slots.position += slots.is_used
        self._longest += 1
        is_full_R = slots.count == slots.limit
        index_N = (slots.is_used & (is_stop_R | is_full_R)).nonzero().squeeze(1)
        if not len(index_N):
            return []
        is_stop_N = is_stop_R[index_N].tolist()
        kept = self._copy_continuing(cache, index_N[~is_full_R[index_N]])
        rows = self._remove(index_N, version)
        for row, is_stop in zip(rows, is_stop_N, strict=True):
            row.response.truncated = not is_stop
            request_id = row.request.request_id
            if request_id in kept:
                self.turn_caches.keep(request_id, TurnCache(row.history[:-1], kept[request_id]))
        return rows

    def _copy_continuing(self, cache: SlotCache, index_N: Tensor) -> dict[str, list[LayerStates]]:
        """Copies the keys and values of finished rows that may continue. Returns the copies by request id."""
        copies = {}
        if self._config.keep_turn_cache:
            for slot, position in zip(index_N.tolist(), self._slots.position[index_N].tolist(), strict=True):
                row = self._rows[slot]
                # The token at `position` has just been sampled and has no keys and values.
                if row is not None and row.request.may_continue:
                    copies[row.request.request_id] = cache.read(slot, position)
        return copies

    def _forward(self, cache: SlotCache) -> Tensor:
        """Runs one token per slot and returns the logits [R, V] of the next token."""
        position_R = self._slots.position.clone()
        cache.begin_step(position_R, self._longest)
        if self._short_step is not None:
            return self._short_step.logits(self._slots.next_token, position_R, cache)
        with self._recording_routes(cache):
            output = self._model(
                input_ids=self._slots.next_token[:, None],
                position_ids=position_R[:, None],
                attention_mask=cache.mask(self._model.dtype),
                past_key_values=cache,
                use_cache=True,
            )
        return output.logits[:, -1]

    def _recording_routes(self, cache: SlotCache) -> AbstractContextManager[None]:
        return nullcontext() if self._routes is None else self._routes.recording(cache)

    def _sample(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        config = self._config
        if not self._uniforms:
            steps_S = torch.arange(1, _RANDOM_STEPS + 1, device=self._device)
            self._uniforms.extend(uniforms(self._slots.key, self._slots.position + steps_S[:, None]))
        random_R = self._uniforms.popleft()
        by_temperature = {
            temperature: sample_tokens(
                logits_RV, random_R, temperature=temperature, top_k=config.top_k, top_p=config.top_p
            )
            for temperature in self._temperatures
        }
        tokens_R, logprobs_R = next(iter(by_temperature.values()))
        if len(by_temperature) > 1:
            row_temperatures = [None if row is None else self._temperature(row) for row in self._rows]
            for temperature, (own_tokens_R, own_logprobs_R) in by_temperature.items():
                is_own_R = torch.tensor([value == temperature for value in row_temperatures], device=self._device)
                tokens_R = torch.where(is_own_R, own_tokens_R, tokens_R)
                logprobs_R = torch.where(is_own_R, own_logprobs_R, logprobs_R)
        return tokens_R, logprobs_R

    def _temperature(self, row: Row) -> float:
        temperature = row.request.temperature
        return self._config.temperature if temperature is None else temperature

    def _ends_response(self, tokens_R: Tensor, row_numbers: Tensor) -> Tensor:
        """Returns a bool tensor [R]: true if the sampled token is an end token or completes a stop sequence."""
        ends_R = torch.isin(tokens_R, self._end_ids)
        for stop in self._stops:
            last_RL = self._padding + self._slots.count[:, None] + torch.arange(1 - len(stop), 1, device=self._device)
            ends_R |= (self._slots.tokens[row_numbers[:, None], last_RL] == stop).all(-1)
        return ends_R

    def read_partial(self, request_ids: Collection[str]) -> list[Response]:
        """Returns copies of the responses to these requests. Ignores ids without a decoding row."""
        rows = [(i, r) for i, r in enumerate(self._rows) if r is not None and r.request.request_id in request_ids]
        if not rows:
            return []
        index_N = torch.tensor([slot for slot, _ in rows], device=self._device)
        tokens, logprobs, counts = self._read_slots(index_N)
        return [
            replace(
                row.response,
                token_ids=[*row.response.token_ids, *tokens[i][row.num_response_tokens : counts[i]]],
                logprobs=[*row.response.logprobs, *logprobs[i][row.num_response_tokens : counts[i]]],
            )
            for i, (_, row) in enumerate(rows)
        ]

    def _read_slots(self, index_N: Tensor) -> tuple[list[list[int]], list[list[float]], list[int]]:
        """Returns the response tokens of each slot, their log-probabilities, and the number of response tokens."""
        counts = self._slots.count[index_N].tolist()
        tokens = self._slots.tokens[index_N, self._padding : self._padding + max(counts)].tolist()
        return tokens, self._slots.logprobs[index_N, : max(counts)].tolist(), counts

    # Leave.

    def drop(self, request_ids: Collection[str]) -> None:
        """Removes the rows of these requests and discards their responses."""
        slots = [i for i, row in enumerate(self._rows) if row is not None and row.request.request_id in request_ids]
        if slots:
            self._remove(torch.tensor(slots, device=self._device), 0)

    def remove_all(self, version: int) -> list[Row]:
        """Removes all rows from the batch and returns them, so that they can join again later. Drops all kept caches,
        because new weights follow.

        `version` is the weight version before the change.
        """
        self.turn_caches.clear()
        slots = [slot for slot, row in enumerate(self._rows) if row is not None]
        return self._remove(torch.tensor(slots, device=self._device), version) if slots else []

    def _remove(self, index_N: Tensor, version: int) -> list[Row]:
        """Frees slots and returns their rows, each with all tokens sampled so far."""
        slots = self._slots
        tokens, logprobs, counts = self._read_slots(index_N)
        rows = []
        for slot, count, row_tokens, row_logprobs in zip(index_N.tolist(), counts, tokens, logprobs, strict=True):
            row = self._rows[slot]
            assert row is not None
            start = row.num_response_tokens
            row.response.token_ids += row_tokens[start:count]
            row.response.logprobs += row_logprobs[start:count]
            row.response.versions += [version] * (count - start)
            if self._routes is not None and self._cache is not None:
                # The last token has been sampled, but not processed.
                row.response.routes = self._routes.read(self._cache, slot, len(row.history) - 1)
            self._rows[slot] = None
            rows.append(row)
        self.num_rows -= len(rows)
        self._temperatures -= Counter(map(self._temperature, rows))
        slots.release(index_N)
        if self.num_rows:
            self._longest = int(slots.position.max()) + 1
        else:
            self._clear()
        return rows

    def shrink(self) -> None:
        """Removes free slots from the cache if at most `_SHRINK_SHARE` of the slots is in use."""
        num_slots = max(self.num_rows, _MIN_ROWS)
        if self._cache is None or num_slots > _SHRINK_SHARE * len(self._rows):
            return
        kept = sorted(range(len(self._rows)), key=lambda slot: self._rows[slot] is None)[:num_slots]
        index_R = torch.tensor(kept, device=self._device)
        self._rows = [self._rows[slot] for slot in kept]
        self._slots = self._slots.select(index_R)
        self._uniforms.clear()
        self._cache.select(index_R)


def _pad(rows: Sequence[History], width: int) -> tuple[Tensor, Tensor]:
    """Returns token ids [U, L], padded with 0 on the right to L = `width`, and a bool mask of the tokens."""
    lengths_U = torch.tensor([len(tokens) for tokens in rows])
    is_token_UL = torch.arange(width) < lengths_U[:, None]
    ids_UL = torch.zeros(len(rows), width, dtype=torch.int64)
    ids_UL[is_token_UL] = torch.tensor([token for tokens in rows for token in tokens])
    return ids_UL, is_token_UL
