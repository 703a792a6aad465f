"""Generates text with a rollout engine in this process, for many prompts or for one streamed response.

The random numbers of a token depend only on (seed, prompt index, sample, position). With engine hf on a CPU in
float32, a response therefore does not depend on the other requests, on their order, or on the batch size.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol

import torch

from flowrl.config import ModelConfig, RolloutConfig, UserError, VllmConfig
from flowrl.config.base import DeviceKind
from flowrl.config.engines.rollout_engines import DEFAULT_ENGINE, get_capabilities, name_alternatives
from flowrl.config.engines.vllm_settings import find_speculation_problem
from flowrl.controller.placement.cpu_threads import default_threads, use_threads
from flowrl.data.chat import ChatTokenizer
from flowrl.data.template import ConversationTemplate
from flowrl.devices.device import count_gpus, has_gpu
from flowrl.engines.models.loading import stored_dtype
from flowrl.engines.rollout.base import (
    EngineContext,
    PartialResponses,
    Request,
    Response,
    RolloutEngine,
    StreamingEngine,
    load_engine_class,
)
from flowrl.engines.rollout.sampling import row_keys
from flowrl.inference.generation_settings import EngineSettings, SamplingSettings, check_num_gpus
from flowrl.inference.model_source import ModelSource
from flowrl.inference.stop_strings import StopStrings
from flowrl.memory.device_settings import default_dtype, fit_engine
from flowrl.memory.model_fit import find_head_size_problem, find_replica_problem

_STOP_CHECK_S = 0.2
"""Interval in which unfinished responses are searched for stop strings. It changes only the time of the search."""

_STREAM_S = 0.02
"""Interval between two states of a streamed response."""


@dataclass(frozen=True)
class TextRequest:
    """One response to generate."""

    index: int
    """Index of the prompt, which selects the random numbers."""
    sample: int
    """Index among the samples of the prompt."""
    token_ids: Sequence[int]
    """Tokens of the prompt."""
    max_tokens: int | None = None
    """Maximum number of tokens of the response. None is that of the settings, which it may not exceed."""

    @property
    def request_id(self) -> str:
        return f"{self.index}-{self.sample}"


@dataclass(frozen=True)
class GeneratedText:
    """A complete response."""

    request: TextRequest
    token_ids: Sequence[int]
    """Response tokens up to the end of the first stop string, including the tokens that ended the response."""
    text: str
    """Text without special tokens, without the end of the turn, and without the stop string."""
    tagged_text: str
    """Tags at the end of the prompt, then the text with special tokens and without the stop string."""
    finish_reason: Literal["stop", "length", "interrupted"]
    logprob: float
    """Sum of the log-probabilities of `token_ids`."""


@dataclass
class PartialText:
    """The state of a streamed response."""

    text: str = ""
    """Text so far. It only grows: characters that later tokens may change are not included."""
    num_tokens: int = 0
    result: GeneratedText | None = field(default=None, repr=False)
    """The complete response, at the end."""


class _TextEngine(RolloutEngine, StreamingEngine, PartialResponses, Protocol):
    """The methods of the included engines that a `TextGenerator` calls."""


class TextGenerator:
    """An engine that generates text with one model."""

    def __init__(
        self,
        source: ModelSource,
        sampling: SamplingSettings,
        settings: EngineSettings | None = None,
        *,
        chat: ChatTokenizer | None = None,
        uses_full_context: bool = False,
    ) -> None:
        """Loads the model and starts the engine.

        Args:
            source: the model.
            sampling: settings of the responses.
            settings: settings of the engine; None is `EngineSettings()`.
            chat: tokenizer and template of the model; None opens them.
            uses_full_context: responses of `stream` may be longer than `sampling.max_tokens`.
        Raises:
            UserError: the model cannot be loaded, or the engine does not support a setting.
        """
        settings = settings or EngineSettings()
        self.source, self.sampling, self.settings = source, sampling, settings
        self.chat = chat or open_chat(source)
        use_threads(default_threads())
        self._kind: DeviceKind = "cuda" if has_gpu() else "cpu"
        kind = self._kind
        self._device = "cuda:0" if kind == "cuda" else "cpu"
        self._stops = StopStrings(self.chat, sampling.stop)
        stored = source.model_config("float32" if kind == "cpu" else stored_dtype(source.path))
        dtype = settings.dtype or default_dtype(settings.engine, stored, kind)
        check_engine(settings, source.path, self._device, dtype, sampling)
        model = source.model_config(dtype)
        config = engine_config(model, sampling, settings, kind, self.chat.stop_ids)
        if uses_full_context:
            limit = self.chat.max_positions() or sampling.max_tokens
            config = config.model_copy(update={"max_response_tokens": limit})
        self._num_seqs = config.num_seqs
        context = EngineContext(config, model, self.chat.tokenizer, self._device, replica=settings.replica)
        engine = load_engine_class(settings.engine).start(context)
        assert isinstance(engine, StreamingEngine) and isinstance(engine, PartialResponses)
        self._engine: _TextEngine = engine  # pyright: ignore[reportAttributeAccessIssue] (an intersection of protocols)
        self._streams = itertools.count()

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of prompt and response together."""
        return self._engine.max_length

    def check_temperature(self, temperature: float) -> None:
        """Raises UserError if the engine cannot sample at a temperature."""
        _check_temperature(self.settings, self._kind, temperature)

    def generate(self, requests: Iterable[TextRequest]) -> Iterator[GeneratedText]:
        """Yields the response to each request, in the order in which they finish.

        Reads the requests as the engine needs them. Each prompt and `max_tokens` together fit into `max_length`.
        """
        waiting, running = iter(requests), dict[str, TextRequest]()
        searched = Counter[str]()
        engine, interval_s = self._engine, _STOP_CHECK_S if self.sampling.stop else None
        next_search_s = time.monotonic() + _STOP_CHECK_S
        try:
            while True:
                added = list(itertools.islice(waiting, 2 * self._num_seqs - len(running)))
                running |= {request.request_id: request for request in added}
                engine.add(self._requests(added))
                if not running:
                    return
                finished = engine.poll(interval_s)
                if interval_s is not None and time.monotonic() >= next_search_s:
                    finished = [*finished, *self._stopped(running, searched)]
                    next_search_s = time.monotonic() + interval_s
                for response in finished:
                    yield self._complete(running.pop(response.request_id), response)
        finally:
            engine.abort(running)

    def stream(
        self,
        token_ids: Sequence[int],
        *,
        index: int,
        sample: int,
        max_tokens: int,
        temperature: float,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> Iterator[PartialText]:
        """Yields the state of one response while it is generated; the last state has the result.

        Closing the iterator ends the generation.

        Args:
            token_ids: all tokens before the response.
            index: index of the prompt, which selects the random numbers together with `sample`.
            sample: index among the samples of the prompt.
            max_tokens: maximum number of tokens of the response.
            temperature: 0 selects the most likely tokens.
            is_interrupted: called between tokens; true ends the response.
        """
        request, engine = TextRequest(index, sample, token_ids), self._engine
        request_id = f"stream-{next(self._streams)}"
        settings = {"max_tokens": max_tokens, "temperature": temperature, "is_streamed": True}
        engine.add([replace(self._requests([request])[0], request_id=request_id, **settings)])
        state = PartialText()
        try:
            while True:
                finished = engine.poll(_STREAM_S)
                partial = finished or engine.read_partial([request_id])
                if not partial:
                    continue
                response = partial[0]
                has_stop = self._stops.find(response.token_ids) is not None
                is_ended = bool(finished) or has_stop
                if is_ended or is_interrupted():
                    result = self._complete(request, response)
                    result = result if is_ended else replace(result, finish_reason="interrupted")
                    yield PartialText(result.text, len(result.token_ids), result)
                    return
                text = self._stops.settled_text(response.token_ids)
                if len(text) > len(state.text):
                    state = PartialText(text, len(response.token_ids))
                    yield state
        finally:
            engine.abort([request_id])

    def _requests(self, requests: Sequence[TextRequest]) -> list[Request]:
        index_B = torch.tensor([request.index for request in requests], dtype=torch.int64)
        sample_B = torch.tensor([request.sample for request in requests], dtype=torch.int64)
        keys = row_keys(self.sampling.seed, index_B, sample_B).tolist()
        temperature = 0.0 if self.sampling.temperature == 0 else None
        return [
            Request(
                request.request_id,
                request.token_ids,
                key,
                temperature,
                max_tokens=request.max_tokens,
                is_streamed=bool(self.sampling.stop),
            )
            for request, key in zip(requests, keys, strict=True)
        ]

    def _stopped(self, running: Iterable[str], searched: Counter[str]) -> list[Response]:
        """Returns the unfinished responses that have a stop string, and ends their requests.

        `searched` has the number of tokens of each response that earlier calls have searched.
        """
        stopped = []
        for response in self._engine.read_partial(list(running)):
            ids = response.token_ids
            if self._stops.can_contain(ids, searched[response.request_id]) and self._stops.find(ids) is not None:
                stopped.append(response)
            searched[response.request_id] = len(ids)
        self._engine.abort([response.request_id for response in stopped])
        return stopped

    def _complete(self, request: TextRequest, response: Response) -> GeneratedText:
        stop = self._stops.find(response.token_ids)
        ids = response.token_ids if stop is None else response.token_ids[: stop.num_tokens]
        text = self.chat.decode_response(ids) if stop is None else stop.text
        tagged = self._stops.cut(self.chat.decode_tags([()], [ids], [text])[0])
        tagged = self.chat.opened_tags(request.token_ids, tagged) + tagged
        reason = "length" if response.truncated and stop is None else "stop"
        return GeneratedText(request, ids, text, tagged, reason, sum(response.logprobs[: len(ids)]))


def open_chat(source: ModelSource, template: ConversationTemplate | None = None) -> ChatTokenizer:
    """Returns the tokenizer of a model. `template` replaces the conversation template of the model."""
    return ChatTokenizer(source.tokenizer_path, template, model=source.path)


def engine_config(
    model: ModelConfig,
    sampling: SamplingSettings,
    settings: EngineSettings,
    device: DeviceKind,
    stop_ids: tuple[tuple[int, ...], ...] = (),
) -> RolloutConfig:
    """Returns the settings of the engine on a device. A null KV cache holds at least one response."""
    vllm = VllmConfig(
        dtype=None if model.dtype == "float64" else model.dtype,
        kv_cache_gb=settings.kv_cache_gb,
        engine_args=settings.engine_args,
    )
    config = RolloutConfig(
        engine=settings.engine,
        quantization=settings.quantization,
        max_response_tokens=sampling.max_tokens,
        temperature=sampling.temperature or 1.0,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        stop_ids=stop_ids,
        max_num_seqs=settings.max_num_seqs,
        vllm=vllm if settings.engine == "vllm" else None,
    )
    return fit_engine(config, model, device, "--kv-cache-gb", settings.replica)


def check_engine(settings: EngineSettings, model: Path, device: str, dtype: str, sampling: SamplingSettings) -> None:
    """Raises UserError if the engine does not support the model or a setting on the device."""
    known = get_capabilities(settings.engine)
    kind: DeviceKind = "cuda" if device.startswith("cuda") else "cpu"
    _check_quantization(settings, kind, dtype)
    if problem := find_head_size_problem(settings.engine, model, kind):
        raise UserError(f"{problem}: set engine {DEFAULT_ENGINE}, or use another model")
    if dtype not in known.dtypes:
        raise UserError(f"dtype {dtype} is not supported by engine {settings.engine}: use {' or '.join(known.dtypes)}")
    _check_temperature(settings, kind, sampling.temperature)
    _check_replica(settings, count_gpus() if kind == "cuda" else None)
    if problem := find_replica_problem(model, settings.replica):
        raise UserError(f"the engine has {problem}")
    if settings.engine_args and settings.engine != "vllm":
        raise UserError(
            f"engine arguments {', '.join(settings.engine_args)} are those of vLLM, but the engine is "
            f"{settings.engine}: choose engine vllm, or remove them"
        )
    quantized = known.quantizations.get(settings.quantization or "")
    for package in (*known.packages, *(quantized.packages if quantized else ())):
        if find_spec(package.module) is None:
            raise UserError(
                f"engine {settings.engine}{f' with quantization {settings.quantization}' if quantized else ''} needs "
                f"the package {package.module}, which is not installed: {package.install}"
            )


def _check_quantization(settings: EngineSettings, kind: DeviceKind, dtype: str) -> None:
    known, name = get_capabilities(settings.engine), settings.quantization
    if name is None:
        return
    if name not in known.quantizations:
        others = name_alternatives(lambda engine: name in engine.quantizations)
        supported = " and ".join(known.quantizations)
        raise UserError(
            f"quantization {name} is not supported by engine {settings.engine}, which supports {supported}: choose "
            f"another quantization, or engine {others}"
        )
    quantization = known.quantizations[name]
    if kind not in quantization.devices:
        others = " or ".join(n for n, each in known.quantizations.items() if kind in each.devices)
        raise UserError(
            f"quantization {name} of engine {settings.engine} needs a {' or '.join(quantization.devices)} device, "
            f"but this machine has none: use {others}, or no quantization"
        )
    if quantization.dtypes is not None and dtype not in quantization.dtypes:
        raise UserError(
            f"quantization {name} of engine {settings.engine} needs weights in {' or '.join(quantization.dtypes)}, "
            f"but the dtype is {dtype}: set dtype {quantization.dtypes[0]}"
        )


def _check_replica(settings: EngineSettings, num_gpus: int | None) -> None:
    """Raises UserError if the engine cannot use several devices, or if there are too few GPUs."""
    replica = settings.replica
    for name in ("tp", "pp"):
        if getattr(replica, name) > 1 and name not in get_capabilities(settings.engine).dimensions:
            others = name_alternatives(lambda engine, name=name: name in engine.dimensions)
            raise UserError(
                f"{name} is {getattr(replica, name)}, but engine {settings.engine} uses one device: use engine {others}"
            )
    if num_gpus is not None:
        check_num_gpus(replica, num_gpus)


def _check_temperature(settings: EngineSettings, kind: DeviceKind, temperature: float) -> None:
    """Raises UserError if the engine cannot sample at a temperature."""
    smallest = get_capabilities(settings.engine).min_temperature
    if 0 < temperature < smallest:
        raise UserError(
            f"temperature {temperature:g} is below the smallest of engine {settings.engine}, {smallest:g}: use 0 for "
            f"the most likely tokens, or a larger temperature"
        )
    problem = find_speculation_problem(settings.engine_args, kind)
    if problem is not None and temperature > 0:
        raise UserError(f"{problem} at temperature {temperature:g}: set temperature 0, or remove speculative_config")
