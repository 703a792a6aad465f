"""Generation with vLLM, in this process: every call into vLLM is in this module and the others named vllm_*.

vLLM's own engine core runs in the caller's process and computes in `poll` only, so a call, a weight update and a look
at what is finished never meet: there is nothing to lock. It binds the process to itself (torch.distributed,
environment), so the process is a rollout's own.

Log-probabilities are those of the distribution that a token was sampled from: after temperature, top-k and top-p, and
renormalised over what these leave, as the hf engine's are. Greedy ones are the model's own.
"""

import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from flowrl.config import ModelConfig, RolloutConfig, VllmConfig
from flowrl.engines.models.loading import load_policy
from flowrl.engines.models.parameters import unique_parameters
from flowrl.engines.rollout.requests import Prompt, Response, prompts_of, refuse_running, responses_of
from flowrl.engines.rollout.responses import Responses, RolloutError, check_prompts, end_ids
from flowrl.engines.rollout.serving import PARTS, WEIGHTS, Serving, State
from flowrl.engines.rollout.vllm.quantization import quantization_options

_SETTINGS = {
    # The engine core runs in this process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Processes that it starts begin anew: one that is forked would have this one's threads' locks without the threads.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Left to itself vLLM would bind the process's threads to cores, which other processes use too.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
if not torch.cuda.is_available():
    # Compiling the sampler takes seconds to start with, and gains nothing on the CPU.
    _SETTINGS["TORCHDYNAMO_DISABLE"] = "1"

# Not as defaults: what they say is what this module is written for.
os.environ |= _SETTINGS

from vllm import EngineArgs, SamplingParams  # noqa: E402 (reads its environment when it is imported)
from vllm.config import WeightTransferConfig  # noqa: E402
from vllm.inputs import TokensPrompt  # noqa: E402
from vllm.logprobs import FlatLogprobs  # noqa: E402
from vllm.outputs import RequestOutput  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402

from flowrl.engines.rollout.vllm.engine_workers import TRANSFER, SharedTensors, WorkerMethods  # noqa: E402
from flowrl.engines.rollout.vllm.leader import call_workers, start_engine  # noqa: E402
from flowrl.engines.rollout.vllm.links import Described, Link, SharedPart  # noqa: E402
from flowrl.engines.rollout.vllm.vllm_check import Compared, WeightSamples, compare_weights  # noqa: E402

_STEP_TOKENS = 8192
"""Tokens that one step runs, most of them of prompts: more take more memory."""


class VllmRollout:
    """Answers prompts, all at once (`generate`) or as they come (`add`, `poll`)."""

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig,
        *,
        tp: int = 1,
        sleeps: bool = False,
    ) -> None:
        """Loads the model of a folder. A response ends at the tokenizer's or the model's end-of-sequence tokens.

        Args:
            model: where it is.
            tokenizer: its own.
            config: how it samples, and the engine's settings.
            tp: devices of this node that share each layer; this process leads them.
            sleeps: whether `sleep` is to free memory of GPUs; on the CPU it frees nothing.
        Raises:
            ModelError: as `load_policy`, before vLLM starts.
        """
        self._config = config
        self._serving = Serving()
        empty = load_policy(model, on_meta=True)
        self._also = {names[0]: names[1:] for names, _ in unique_parameters(empty)}
        """Name of a weight -> its other names: vLLM is given a tied weight under each."""
        ends = end_ids(tokenizer, empty.generation_config)
        self._end_ids = sorted({*ends, *(stop[0] for stop in config.stop_ids if len(stop) == 1)})
        self._sequences = _by_last(stop for stop in config.stop_ids if len(stop) > 1)
        """Stops of several tokens, which vLLM does not know, by the last of them."""
        self._running: dict[str, Response] = {}
        self._finished: dict[str, Response] = {}
        """What was finished while a batch was generated, until a poll gives it."""
        self._tp = tp
        self._engine = start_engine(_engine_args(model, config, tp, sleeps))
        call_workers(self._engine, "init_weight_transfer_engine", {})
        self._engine.set_weight_version(str(self.version))

    @property
    def state(self) -> State:
        return self._serving.state

    @property
    def version(self) -> int:
        """Of the weights that it serves."""
        return self._serving.version

    @property
    def asleep(self) -> frozenset[str]:
        """The `PARTS` that are away from the device."""
        return self._serving.asleep

    @property
    def awake(self) -> frozenset[str]:
        """The others."""
        return PARTS - self.asleep

    @property
    def max_length(self) -> int:
        """Tokens of the longest row that it takes, prompt and response."""
        return self._engine.vllm_config.model_config.max_model_len

    @property
    def num_running(self) -> int:
        """Requests that were added and whose answers were not given yet."""
        return len(self._running) + len(self._finished)

    # Generation.

    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        prompt_id: Tensor,
        sample: Tensor,
        *,
        seed: int,
        greedy: bool = False,
    ) -> Responses:
        """One response per prompt; arguments, result and errors as of `HfRollout.generate`.

        Requests that were added go on meanwhile, and the next `poll` gives the answers of those that finish.
        """
        prompts = prompts_of(prompt_ids, prompt_id, sample, seed=seed, greedy=greedy)
        self.add(prompts)
        names = [prompt.name for prompt in prompts]
        while not self._running.keys().isdisjoint(names):
            self._step()
        return responses_of([self._finished.pop(name) for name in names])

    def add(self, prompts: Iterable[Prompt]) -> None:
        """Takes requests, which `poll` works on.

        Raises RolloutError for one of a name that is running, or whose prompt does not fit.
        """
        self._serving.expect(State.SERVING, "take requests")
        prompts = list(prompts)
        check_prompts([prompt.token_ids for prompt in prompts], self._config.max_response_tokens, self.max_length)
        refuse_running([prompt.name for prompt in prompts], [*self._running, *self._finished])
        for prompt in prompts:
            ids = TokensPrompt(prompt_token_ids=list(prompt.token_ids))
            self._engine.add_request(prompt.name, ids, self._sampling(prompt))
            self._running[prompt.name] = Response(prompt.name)

    def poll(self, timeout_s: float | None = None) -> list[Response]:
        """Works until a response is finished, or for so long, and gives those that are; nothing running gives none."""
        self._serving.expect(State.SERVING, "generate")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._running and not self._finished:
            self._step()
            if deadline is not None and time.monotonic() >= deadline:
                break
        finished, self._finished = self._finished, {}
        return list(finished.values())

    def _step(self) -> None:
        """A token more of the rows that vLLM has chosen, or a part of their prompts."""
        for output in self._engine.step():
            assert isinstance(output, RequestOutput)
            answer = self._told(output)
            if answer is not None:
                self._finished[answer.name] = answer

    def abort(self, names: Iterable[str]) -> None:
        """Drops requests, finished or not; names that no request has are none."""
        names = set(names)
        self._engine.abort_request([name for name in names if self._running.pop(name, None) is not None])
        for name in names:
            self._finished.pop(name, None)

    def _told(self, output: RequestOutput) -> Response | None:
        """Adds what an output says to its row; gives the row if it is finished."""
        answer = self._running.get(output.request_id)
        if answer is None:
            return None
        said = output.outputs[0]
        assert isinstance(said.logprobs, FlatLogprobs)
        if self._sequences:
            for token, logprob in zip(said.token_ids, said.logprobs.logprobs, strict=True):
                answer.token_ids.append(token)
                answer.logprobs.append(logprob)
                answer.versions.append(self.version)
                if any(answer.token_ids[-len(stop) :] == stop for stop in self._sequences.get(token, ())):
                    self.abort([answer.name])
                    return answer
            if not output.finished:
                return None
        else:
            assert said.weight_versions is not None
            spans = [(int(span.version), span.end - span.start) for span in said.weight_versions]
            answer.token_ids, answer.logprobs = list(said.token_ids), said.logprobs.logprobs
            answer.versions = [version for version, count in spans for _ in range(count)]
        if said.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended a row by {said.finish_reason}, which makes no response")
        answer.truncated = said.finish_reason == "length"
        return self._running.pop(answer.name)

    def _sampling(self, prompt: Prompt) -> SamplingParams:
        config = self._config
        return SamplingParams(
            temperature=0.0 if prompt.greedy else config.temperature,
            top_k=0 if prompt.greedy else config.top_k,
            top_p=1.0 if prompt.greedy else config.top_p,
            seed=None if prompt.greedy else prompt.key & (2**62 - 1),
            max_tokens=config.max_response_tokens,
            stop_token_ids=self._end_ids,
            ignore_eos=True,  # `stop_token_ids` has them all
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            # Only stops that vLLM does not know need a look at every token: a twentieth of a small model's time.
            output_kind=RequestOutputKind.DELTA if self._sequences else RequestOutputKind.FINAL_ONLY,
        )

    # Weights.

    def begin_update(self, version: int) -> None:
        """Begins to take the weights of a version. What is running waits, and goes on with the new weights."""
        self._serving.check_begin()
        with self._or_broken():
            call_workers(self._engine, "start_weight_update")
        self._serving.begin(version, self._also)

    def join_link(self, link: Mapping[str, Any], first_rank: int) -> None:  # Any: the fields of `Link`
        """Has each worker join a link, from this rank of it on, for `receive`."""
        call_workers(self._engine, "join_link", Link(**link), first_rank)

    def receive(self, weights: Mapping[str, Tensor] | SharedPart | Described) -> None:
        """Takes some of the weights, under the names that `save_pretrained` gives them, or where they lie."""
        self._serving.expect_update("receive weights")
        if isinstance(weights, SharedPart | Described):
            with self._or_broken():
                call_workers(self._engine, "update_weights", {"weights": weights, "also": self._also})
            self._serving.took(weights.names)
            return
        named = {also: weight for name, weight in weights.items() for also in (name, *self._also.get(name, ()))}
        shared = SharedTensors.of(named) if self._tp > 1 else nullcontext(named)
        with self._or_broken(), shared as given:
            call_workers(self._engine, "update_weights", {"weights": given})
        self._serving.took(weights)

    def commit(self) -> None:
        """Goes on with the weights that have come. Keys and values of the old ones are computed anew."""
        self._serving.expect_update("commit weights")
        with self._or_broken():
            # vLLM would leave what has not come as it was, and a part of a fused layer as it found the memory.
            self._serving.check_whole()
            call_workers(self._engine, "finish_weight_update")
            # Also of requests that are running: they would go on from states that the old weights left.
            if not self._engine.reset_prefix_cache(reset_running_requests=True):
                raise RuntimeError("vLLM kept its prefix cache, which is that of the old weights")
        self._serving.commit()
        self._engine.set_weight_version(str(self.version))

    def abort_update(self) -> None:
        """Gives up an update that has begun; only a whole one makes the engine serve again."""
        self._serving.abort()
        call_workers(self._engine, "end_update")

    def compare_weights(self, samples: WeightSamples) -> Compared:
        """Compares what is served with samples of the actor's weights."""
        self._serving.expect(State.SERVING, "compare weights", WEIGHTS)
        return compare_weights(self._engine, samples)

    @contextmanager
    def _or_broken(self) -> Iterator[None]:
        try:
            with self._serving.mark_failed_on_error():
                yield
        except BaseException:
            call_workers(self._engine, "end_update")
            raise

    # Memory.

    def sleep(self) -> None:
        """Gives the device's memory away: weights move to the CPU, keys and values are dropped.

        In the middle of an update and after one that failed too; waking then leads back to there. vLLM's other way of
        sleeping drops the weights, and would serve whatever then lies in their memory.

        Raises RolloutError while requests are running.
        """
        self._serving.check_sleep()
        if self._running:
            raise RolloutError(f"{len(self._running)} requests are running; wait for them, or abort them, before sleep")
        self._engine.sleep(level=1)
        self._serving.asleep = PARTS

    def wake(self, parts: Collection[str] = PARTS) -> None:
        """Comes back, whole or in some of the `PARTS`: to take weights these are enough."""
        coming = self._serving.waking(parts)
        self._engine.wake_up(tags=sorted(coming))
        self._serving.asleep -= coming


def _by_last(stops: Iterable[Sequence[int]]) -> dict[int, list[list[int]]]:
    found: dict[int, list[list[int]]] = {}
    for stop in stops:
        found.setdefault(stop[-1], []).append(list(stop))
    return found


def _engine_args(model: ModelConfig, config: RolloutConfig, tp: int, sleeps: bool) -> EngineArgs:
    settings = config.vllm or VllmConfig()
    return EngineArgs(
        model=str(model.path),
        skip_tokenizer_init=True,
        dtype=settings.dtype or model.dtype,
        tensor_parallel_size=tp,
        # Left to itself vLLM would ask Ray, in whose placement group this process is, for devices of its own.
        distributed_executor_backend="mp" if tp > 1 else "uni",
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max(_STEP_TOKENS, config.max_num_seqs),
        # -1: as long as the model takes and the cache holds.
        max_model_len=settings.max_model_len or -1,
        enforce_eager=not settings.graphs or not torch.cuda.is_available(),
        enable_prefix_caching=settings.prefix_caching,
        kv_cache_memory_bytes=int(settings.kv_cache_gb * 1e9),
        # With the line above it sets nothing but the part of a GPU without which vLLM does not start.
        gpu_memory_utilization=0.01,
        enable_sleep_mode=sleeps and torch.cuda.is_available(),
        logprobs_mode="processed_logprobs",
        # A step's result belongs to that step: with weights that change between steps it must say which it had.
        async_scheduling=False,
        weight_transfer_config=WeightTransferConfig(backend=TRANSFER),
        worker_extension_cls=f"{WorkerMethods.__module__}.{WorkerMethods.__name__}",
        disable_log_stats=True,
        **quantization_options(config.quantization),
    )
