"""Generation with transformers: batched sampling over a key-value cache.

Shape suffixes: B rows of a batch, U different prompts of a batch, L tokens, N rows of a call, V vocabulary.

What a row says is a function of the weights, its prompt and its key, and of nothing beside it: random numbers are
keyed (`sampling`), a row's tokens stand in the same slots in any batch (`kv_cache`), and shapes are chosen so that the
same arithmetic runs for few rows as for many. On the CPU in float32 this holds bit for bit where it was tried: rows of
up to a hundred tokens, layer widths that are multiples of 32 (others now and then differ in the last bit of a
log-probability). Prompts are prefilled without their last token, once per different prompt; the last token is the first
decode step, so that every sampled token comes out of the same code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from flowrl.config import RolloutConfig
from flowrl.data.table import row_positions
from flowrl.engines.kv_cache import SlotCache, round_up, with_slot_attention
from flowrl.engines.responses import Responses, RolloutError, check_prompts, end_ids
from flowrl.engines.sampling import row_keys, sample_tokens, uniforms
from flowrl.engines.serving import Serving, State
from flowrl.engines.weight_check import Compared, WeightSamples, compare_model
from flowrl.engines.weights import WeightTargets

_MIN_ROWS = 16
"""Fewer rows are filled up to this: CPU matrix products sum in another order for a dozen rows or less."""

_PROMPT_MULTIPLE = 16
"""Prompts are padded to a multiple of this, for the same reason."""

_PREFILL_TOKENS = 16384
"""Prompt tokens of one forward pass, padding included."""

_LEAVE_SHARE = 0.75
"""Finished rows leave when at most this share of the rows goes on: leaving copies the cache of those that stay."""


@dataclass
class _Rows:
    """The rows of a batch that are still in the cache; B falls as rows finish."""

    number: Tensor
    """int64 [B], the row's number in its batch; fillers repeat a row that is there."""
    key: Tensor
    """int64 [B], of `sampling.row_keys`."""
    position: Tensor
    """int64 [B], where the next token will stand."""
    done: Tensor
    """bool [B]."""

    def take(self, index: Tensor) -> "_Rows":
        return _Rows(self.number[index], self.key[index], self.position[index], self.done[index])


@dataclass
class _Output:
    """What a batch has said so far; [B, max_response_tokens] and [B]."""

    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    stopped: Tensor


class HfRollout:
    """Answers prompts with a model that others may be training: nothing of it is changed or copied."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig,
        device: torch.device | str = "cpu",
    ) -> None:
        """Moves the model to the device, unless its weights are yet to come. A response ends at the tokenizer's or the
        model's end-of-sequence tokens.

        Raises:
            RolloutError: the model has layers without keys and values, so that there is nothing to cache.
        """
        if not any(parameter.is_meta for parameter in model.parameters()):
            model.to(device)  # pyright: ignore[reportArgumentType] (transformers narrows `to`)
        model.eval()
        self.model = with_slot_attention(model)
        """A frame of its own around the model's weights."""
        self._serving = Serving()
        self._config = config
        self._device = torch.device(device)
        text_config = model.config.get_text_config()
        self._num_layers: int = text_config.num_hidden_layers
        self._max_length = _max_length(text_config)
        ends = end_ids(tokenizer, model.generation_config)
        self._end_ids = torch.tensor(ends, dtype=torch.int64, device=device)
        self._stops = [torch.tensor(stop, dtype=torch.int64, device=device) for stop in config.stop_ids]
        self._longest_stop = max((len(stop) for stop in config.stop_ids), default=1)

    # Weights: those of the model, where it is this engine's own.

    @property
    def version(self) -> int:
        """Of the weights that it serves."""
        return self._serving.version

    @version.setter
    def version(self, version: int) -> None:
        self._serving.version = version

    @property
    def state(self) -> State:
        return self._serving.state

    def begin_update(self, version: int) -> None:
        """Begins to take the weights of a version. Raises RolloutError in the middle of another update."""
        self._serving.check_begin()
        self._targets = WeightTargets(self.model)
        self._serving.begin(version, self._targets.names)

    def receive(self, weights: Mapping[str, np.ndarray]) -> None:
        """Takes some of them, as `export_weights` gives them.

        Raises:
            RolloutError: no update has begun.
            WeightsError: they do not fit the model; it answers again after a whole update.
        """
        self._serving.expect(State.UPDATING, "receive weights")
        with self._serving.or_broken():
            self._targets.write(weights)
        self._serving.took(weights.keys())

    def commit(self) -> None:
        """Goes on with the weights that have come. Raises RolloutError where some have not."""
        self._serving.expect(State.UPDATING, "commit weights")
        with self._serving.or_broken():
            self._serving.check_whole()
        self._serving.commit()

    def abort_update(self) -> None:
        """Gives up an update that has begun; only a whole one makes the engine answer again."""
        self._serving.abort()

    def compare_weights(self, samples: WeightSamples) -> Compared:
        """Compares the weights with samples of the actor's."""
        self._serving.expect(State.SERVING, "compare weights")
        return compare_model(self.model, samples)

    # Generation.

    @torch.no_grad()
    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        prompt_id: Tensor,
        sample: Tensor,
        *,
        seed: int,
        greedy: bool = False,
    ) -> Responses:
        """One response per prompt.

        Args:
            prompt_ids: N prompts as token ids, each of at least one token; several samples of a prompt repeat it.
            prompt_id: int64 [N], identity of the prompt.
            sample: int64 [N], number of the sample among those of its prompt.
            seed: of this call. The same (seed, prompt_id, sample) draws the same random numbers.
            greedy: take the likeliest token instead of sampling; temperature, top-k and top-p are then not used.
        Returns: see `Responses`; no prompts give no responses.
        Raises:
            RolloutError: a prompt is empty, or with its response longer than the model takes, or not all weights are of
                one version.
        """
        self._serving.expect(State.SERVING, "generate")
        check_prompts(prompt_ids, self._config.max_response_tokens, self._max_length)
        num_rows, longest = len(prompt_ids), self._config.max_response_tokens
        output = _Output(
            tokens=torch.zeros(num_rows, longest, dtype=torch.int64),
            logprobs=torch.zeros(num_rows, longest),
            lengths=torch.full((num_rows,), longest),
            stopped=torch.zeros(num_rows, dtype=torch.bool),
        )
        keys_N = row_keys(seed, prompt_id.cpu(), sample.cpu())
        # Equal prompts stand side by side, so that their prefill is shared.
        order = sorted(range(num_rows), key=lambda row: (len(prompt_ids[row]), tuple(prompt_ids[row])))
        for start in range(0, num_rows, self._config.max_rows):
            index = order[start : start + self._config.max_rows]
            part = self._generate([prompt_ids[row] for row in index], keys_N[index], greedy)
            output.tokens[index] = part.tokens.cpu()
            output.logprobs[index] = part.logprobs.cpu()
            output.lengths[index] = part.lengths.cpu()
            output.stopped[index] = part.stopped.cpu()
        said_NL = row_positions(output.lengths)
        width = said_NL.shape[1]
        tokens_T = output.tokens[:, :width][said_NL]
        versions_T = torch.full_like(tokens_T, self.version, dtype=torch.int32)
        logprobs_T = output.logprobs[:, :width][said_NL]
        return Responses(tokens_T, logprobs_T, output.lengths, ~output.stopped, versions_T)

    def _generate(self, prompts: list[Sequence[int]], keys_B: Tensor, greedy: bool) -> _Output:
        """One batch: prefill its different prompts, give each row its copy, and decode until all rows are done."""
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        num_rows, num_prompts = max(_MIN_ROWS, len(prompts)), max(_MIN_ROWS, len(numbers))
        fillers_U = [list(numbers)[-1]] * (num_prompts - len(numbers))
        cache, logits_UV = self._prefill([*numbers, *fillers_U])
        # A filler repeats the first row and is done from the start.
        source_B = torch.arange(num_rows) * (torch.arange(num_rows) < len(prompts))
        prompt_B = torch.tensor([numbers[tuple(prompt)] for prompt in prompts])[source_B].to(self._device)
        lengths_B = torch.tensor([len(prompt) for prompt in prompts])[source_B]
        rows = _Rows(
            number=source_B.to(self._device),
            key=keys_B[source_B].to(self._device),
            position=lengths_B.to(self._device),
            done=(torch.arange(num_rows) >= len(prompts)).to(self._device),
        )
        cache.take(prompt_B)
        return self._decode(rows, cache, logits_UV[prompt_B], int(lengths_B.max()), len(prompts), greedy)

    def _prefill(self, prompts: list[tuple[int, ...]]) -> tuple[SlotCache, Tensor]:
        """Keys and values of the prompts, and the logits [U, V] of the tokens that follow them."""
        lengths_U = torch.tensor([len(prompt) for prompt in prompts])
        longest = int(lengths_U.max())
        width = min(round_up(longest - 1, _PROMPT_MULTIPLE), self._max_length)
        ids_UL = torch.zeros(len(prompts), max(width, longest), dtype=torch.int64)
        ids_UL[:, :longest][row_positions(lengths_U)] = torch.tensor([token for prompt in prompts for token in prompt])
        ids_UL, lengths_U = ids_UL.to(self._device), lengths_U.to(self._device)
        cache = SlotCache(self._num_layers, len(prompts), max(width, longest), self._device)
        rows_at_once = max(1, _PREFILL_TOKENS // max(1, width))
        for start in range(0, len(prompts) if width else 0, rows_at_once):
            rows = slice(start, start + rows_at_once)
            cache.begin_prefill(rows)
            self.model.base_model(input_ids=ids_UL[rows, :width], past_key_values=cache, use_cache=True)
        last_U = ids_UL.gather(1, lengths_U[:, None] - 1).squeeze(1)
        return cache, self._step(last_U, lengths_U - 1, longest, cache)

    def _step(self, tokens_B: Tensor, positions_B: Tensor, longest: int, cache: SlotCache) -> Tensor:
        """Feeds one token per row and gives the logits [B, V] of the next."""
        cache.begin_step(positions_B, longest)
        output = self.model(
            input_ids=tokens_B[:, None],
            position_ids=positions_B[:, None],
            attention_mask=cache.mask(self.model.dtype),
            past_key_values=cache,
            use_cache=True,
        )
        return output.logits[:, -1]

    def _decode(
        self, rows: _Rows, cache: SlotCache, logits_BV: Tensor, longest: int, num_rows: int, greedy: bool
    ) -> _Output:
        limit = self._config.max_response_tokens
        # -1 is no token: a stop sequence cannot match before it was said.
        output = _Output(
            tokens=torch.full((num_rows, limit), -1, device=self._device),
            logprobs=torch.zeros(num_rows, limit, device=self._device),
            lengths=torch.full((num_rows,), limit, device=self._device),
            stopped=torch.zeros(num_rows, dtype=torch.bool, device=self._device),
        )
        for step in range(limit):
            tokens_B, logprobs_B = self._choose(logits_BV, rows, greedy)
            going = ~rows.done
            number = rows.number[going]
            output.tokens[number, step] = tokens_B[going]
            output.logprobs[number, step] = logprobs_B[going].float()
            ended = number[self._ends(output.tokens[number, max(0, step + 1 - self._longest_stop) : step + 1])]
            output.lengths[ended] = step + 1
            output.stopped[ended] = True
            rows.done = rows.done | output.stopped[rows.number]
            num_going = len(number) - len(ended)
            if num_going == 0 or step + 1 == limit:
                break
            if max(num_going, _MIN_ROWS) <= _LEAVE_SHARE * len(rows.done):
                staying = torch.argsort(rows.done, stable=True)[: max(num_going, _MIN_ROWS)]
                rows, tokens_B = rows.take(staying), tokens_B[staying]
                cache.take(staying)
            logits_BV = self._step(tokens_B, rows.position, longest + step + 1, cache)
            rows.position = rows.position + 1
        return output

    def _choose(self, logits_BV: Tensor, rows: _Rows, greedy: bool) -> tuple[Tensor, Tensor]:
        numbers_B = uniforms(rows.key, rows.position)
        if greedy:
            return sample_tokens(logits_BV, numbers_B, temperature=0)
        config = self._config
        return sample_tokens(
            logits_BV, numbers_B, temperature=config.temperature, top_k=config.top_k, top_p=config.top_p
        )

    def _ends(self, tokens_BL: Tensor) -> Tensor:
        """Bool [B]: the last token ends the response, by itself or as the end of a stop sequence."""
        ends_B = torch.isin(tokens_BL[:, -1], self._end_ids)
        for stop in self._stops:
            if len(stop) <= tokens_BL.shape[1]:
                ends_B |= (tokens_BL[:, -len(stop) :] == stop).all(-1)
        return ends_B


def _max_length(settings: PreTrainedConfig) -> int:
    """The longest row that the model takes, and that all its layers see whole."""
    layer_types = getattr(settings, "layer_types", None) or []
    without_cache = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if without_cache:
        raise RolloutError(
            f"the model has {', '.join(without_cache)} layers, but the hf rollout keeps keys and values only; use a "
            f"model with attention in every layer"
        )
    # By attribute, which GPT-2 has under another name.
    limits = [getattr(settings, "max_position_embeddings", None)]
    if "sliding_attention" in layer_types or not layer_types:
        limits.append(getattr(settings, "sliding_window", None))
    return min((limit for limit in limits if limit is not None), default=2**31)
