"""Generation with transformers: all at once (`generate`) or as requests come (`add`, `poll`), by one way of decoding.

Rows decode together in a cache of keys and values and come and go as they like (`hf_decode`, `hf_stream`); what a row
says is a function of the weights, its prompt and its key, and of nothing beside it.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from flowrl.config import RolloutConfig
from flowrl.engines.models.weights import WeightTargets
from flowrl.engines.rollout.hf.decoder import Decoder
from flowrl.engines.rollout.hf.kv_cache import with_slot_attention
from flowrl.engines.rollout.hf.stream import Stream
from flowrl.engines.rollout.requests import Prompt, Response, prompts_of, responses_of
from flowrl.engines.rollout.responses import Responses, RolloutError, check_prompts, end_ids
from flowrl.engines.rollout.serving import Serving, State
from flowrl.engines.rollout.weight_check import Compared, WeightSamples, compare_model


class HfRollout:
    """Answers prompts with a model that others may be training: nothing of it is changed or copied.

    Requests that run on (`add`, `poll`) are for weights of its own, which change by an update and not by training.
    """

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
        self._max_length = _max_length(model.config.get_text_config())
        self._end_ids = end_ids(tokenizer, model.generation_config)
        self._stream = self._new_stream()

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
        """Begins to take the weights of a version. Requests that are running wait, and go on with the new weights.

        Raises RolloutError in the middle of another update.
        """
        self._serving.check_begin()
        self._stream.pause(self.version)
        self._targets = WeightTargets(self.model)
        self._serving.begin(version, self._targets.names)

    def receive(self, weights: Mapping[str, np.ndarray]) -> None:
        """Takes some of them, as `export_weights` gives them.

        Raises:
            RolloutError: no update has begun.
            WeightsError: they do not fit the model; it answers again after a whole update.
        """
        self._serving.expect(State.UPDATING, "receive weights")
        with self._serving.mark_failed_on_error():
            self._targets.write(weights)
        self._serving.took(weights.keys())

    def commit(self) -> None:
        """Goes on with the weights that have come. Raises RolloutError where some have not."""
        self._serving.expect(State.UPDATING, "commit weights")
        with self._serving.mark_failed_on_error():
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

    @property
    def num_running(self) -> int:
        """Requests that were added and whose answers were not given yet."""
        return self._stream.num_running

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
        """One response per prompt. Requests that were added wait meanwhile, with their keys and values.

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
        prompts = prompts_of(prompt_ids, prompt_id, sample, seed=seed, greedy=greedy)
        stream = self._new_stream()
        # Equal prompts join side by side, so that their prefill is shared.
        stream.add(sorted(prompts, key=lambda prompt: (len(prompt.token_ids), tuple(prompt.token_ids))))
        found: dict[str, Response] = {}
        while stream.num_running:
            found |= {answer.name: answer for answer in stream.poll(self.version)}
        return responses_of([found[prompt.name] for prompt in prompts])

    def add(self, prompts: Iterable[Prompt]) -> None:
        """Takes requests, which `poll` works on, `max_num_seqs` at a time in the order in which they came.

        What a row says is bit for bit what `generate` says for its prompt and key, whatever comes and goes beside it.

        Raises RolloutError for one of a name that is running, or whose prompt does not fit.
        """
        self._serving.expect(State.SERVING, "take requests")
        prompts = list(prompts)
        check_prompts([prompt.token_ids for prompt in prompts], self._config.max_response_tokens, self._max_length)
        self._stream.add(prompts)

    @torch.no_grad()
    def poll(self, timeout_s: float | None = None) -> list[Response]:
        """Works until a response is finished, or for so long and the step that is running then, and gives those that
        are; nothing running gives none. Raises RolloutError in the middle of an update."""
        self._serving.expect(State.SERVING, "generate")
        return self._stream.poll(self.version, timeout_s)

    def abort(self, names: Iterable[str]) -> None:
        """Drops requests; names that no request has are none."""
        self._stream.abort(names)

    def _new_stream(self) -> Stream:
        decoder = Decoder(self.model, self._config, self._end_ids, self._max_length, self._device)
        return Stream(decoder, self._config.max_num_seqs)


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
