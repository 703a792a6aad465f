"""Rollout engine on vLLM. vLLM's engine core runs in the caller's process.

vLLM schedules steps only in `poll` and `generate`. With asynchronous scheduling, one step can still run when these
calls return. Operations on weights and memory first process the results of this step (`_finish_steps`). Generation and
weight updates therefore never overlap and need no locks.

vLLM changes torch.distributed and the environment variables of its process, so the process must be dedicated to the
rollout.

As in `HfRollout`, log-probabilities refer to the renormalized distribution after temperature, top-k and top-p. Greedy
log-probabilities refer to the unscaled logits.
"""

import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from flowrl.config import ONE_DEVICE, Follower, ModelConfig, ReplicaSizes, RolloutConfig, VllmConfig
from flowrl.config.engines.rollout_engines import ENGINES
from flowrl.config.engines.vllm_settings import PlannedVllmConfig
from flowrl.devices.device import get_device, has_gpu
from flowrl.engines.models.file_layout import converted_parts
from flowrl.engines.models.loading import load_policy
from flowrl.engines.models.parameters import unique_parameters
from flowrl.engines.models.weights import to_tensors
from flowrl.engines.rollout.base import (
    TAGS,
    WEIGHTS,
    EngineContext,
    EngineState,
    Request,
    Response,
    RolloutError,
    ServingState,
    check_request_ids,
    check_requests,
    eos_ids,
    generate_in_batch,
)
from flowrl.engines.rollout.broadcast import TransferGroup
from flowrl.engines.rollout.cuda_ipc import IpcBucket
from flowrl.engines.rollout.sampling import segment_key
from flowrl.engines.rollout.vllm.quantization import quantization_options
from flowrl.engines.rollout.weight_metadata import WeightMetadata

_SETTINGS = {
    # Run the engine core in this process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Forked workers would inherit locked locks.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Other processes use the same CPU cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # As in the trainer, products of float32 numbers do not use TF32. By default, vLLM's attention uses TF32.
    "VLLM_FLOAT32_MATMUL_PRECISION": "highest",
    "TRITON_F32_DEFAULT": "ieee",
}
if not has_gpu():
    # Compiling the sampler takes seconds and does not speed up the CPU.
    _SETTINGS["TORCHDYNAMO_DISABLE"] = "1"

# Overrides existing values, because this module depends on these settings.
os.environ |= _SETTINGS

from vllm import EngineArgs, SamplingParams  # noqa: E402 (reads the environment at import)
from vllm.config import WeightTransferConfig  # noqa: E402
from vllm.inputs import TokensPrompt  # noqa: E402
from vllm.logprobs import FlatLogprobs  # noqa: E402
from vllm.outputs import RequestOutput  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402

from flowrl.engines.rollout.vllm.leader import call_workers, run_workers, start_engine  # noqa: E402
from flowrl.engines.rollout.vllm.scheduling import (  # noqa: E402
    CountingAsyncScheduler,
    CountingScheduler,
    has_scheduled_steps,
    pause_scheduling,
    scheduler_of,
)
from flowrl.engines.rollout.vllm.vllm_check import Compared, WeightSamples, compare_weights  # noqa: E402
from flowrl.engines.rollout.vllm.worker_extension import TRANSFER, SharedTensors, WorkerExtension  # noqa: E402

_STEP_TOKENS = 8192
"""Maximum number of tokens per engine step, most of which are prefill tokens. A larger number needs more memory."""


class VllmRollout:
    """Generates responses for batches (`generate`) or a stream of requests (`add`, `poll`)."""

    capabilities = ENGINES["vllm"]

    @classmethod
    def start(cls, context: EngineContext) -> "VllmRollout":
        return cls(
            context.model,
            context.tokenizer,
            context.config,
            replica=context.replica,
            followers=context.followers,
            address=context.address,
            can_sleep=context.can_sleep,
        )

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig,
        *,
        replica: ReplicaSizes = ONE_DEVICE,
        followers: Sequence[Follower] = (),
        address: str = "127.0.0.1",
        can_sleep: bool = False,
    ) -> None:
        """Loads the model. Responses end at the end-of-sequence tokens of the tokenizer and of the model.

        Args:
            model: path and dtype of the model.
            tokenizer: tokenizer of the model.
            config: sampling and engine settings.
            replica: parallel sizes. The engine uses tp x pp devices, divided equally between this process's node and
                the nodes of the followers.
            followers: processes on other nodes.
            address: IP address of this process for the followers.
            can_sleep: True enables `sleep`, which frees GPU memory.
        Raises ModelError if the model cannot be loaded, and RolloutError if vLLM disables asynchronous scheduling.
        """
        self._config = config
        self._serving = ServingState()
        empty = load_policy(model, on_meta=True)
        self._tied = {names[0]: names[1:] for names, _ in unique_parameters(empty)}
        """Maps a weight name to its tied names. vLLM receives a tied weight under each of its names."""
        self._parts = converted_parts(empty)
        """Maps a weight name to the weight's file entries, if their names or shapes differ from the model. vLLM
        receives the file entries.
        """
        ends = eos_ids(tokenizer, empty.generation_config)
        self._end_ids = sorted({*ends, *(stop[0] for stop in config.stop_ids if len(stop) == 1)})
        self._stop_sequences: dict[int, list[list[int]]] = {}
        """Maps the last token of a stop sequence to all stop sequences that end with it. Contains only sequences of
        several tokens, which vLLM does not support.
        """
        for stop in config.stop_ids:
            if len(stop) > 1:
                self._stop_sequences.setdefault(stop[-1], []).append(list(stop))
        self.batched_ids: set[str] = set()
        """Ids of unfinished requests of `open_batch`, whose responses `poll` does not return."""
        self._running: dict[str, Response] = {}
        self._deltas: set[str] = set()
        """Ids of running requests whose tokens vLLM reports in each step, not only at the end."""
        self._finished: dict[str, Response] = {}
        """Finished responses that `poll` has not yet returned."""
        self._shares_memory = replica.num_devices > 1 and not followers
        """Whether the workers receive weights in shared memory, because they are other processes on this node."""
        # In torch's deterministic mode, vLLM's sampler would raise an error. vLLM's batch-invariant mode replaces
        # torch's mode.
        torch.use_deterministic_algorithms(False)
        try:
            args = _engine_args(model, config, replica, can_sleep)
            runs = [partial(follower.run, run_follower) for follower in followers]
            self._engine = start_engine(args, runs, address)
        except (TypeError, ValueError) as error:
            if given := (config.vllm or VllmConfig()).engine_args:
                raise RolloutError(
                    f"vLLM does not start with engine_args {dict(given)} ({_reason(error)}): correct these arguments, "
                    f"or the setting that the error names"
                ) from error
            raise
        if args.async_scheduling and not self._engine.vllm_config.scheduler_config.async_scheduling:
            raise RolloutError("vllm.async_scheduling is true, which vLLM supports on GPUs only: set auto or false")
        call_workers(self._engine, "init_weight_transfer_engine", {})
        self._engine.set_weight_version(str(self.version))

    @property
    def state(self) -> EngineState:
        return self._serving.state

    @property
    def version(self) -> int:
        return self._serving.version

    @property
    def asleep(self) -> frozenset[str]:
        """Subset of `TAGS` that is offloaded."""
        return self._serving.asleep

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of prompt and response together."""
        return self._engine.vllm_config.model_config.max_model_len

    @property
    def num_running(self) -> int:
        return len(self._running) + len(self._finished) - len(self.batched_ids)

    # Generation.

    def generate(self, requests: Sequence[Request]) -> list[Response]:
        """Returns the response to each request, in order. Requests from `add` continue during the call."""
        return generate_in_batch(self.open_batch(), requests)

    def open_batch(self) -> "OwnRequests":
        """Returns an empty batch of requests. Requests from `add` continue while the batch is polled."""
        return OwnRequests(self)

    def add(self, requests: Iterable[Request]) -> None:
        """Queues requests for `poll`.

        Raises RolloutError if a request id is in use, or if a prompt or the segments of a response are too long.
        """
        self._serving.require(EngineState.SERVING, "add requests")
        requests = list(requests)
        check_requests(requests, self._config.max_response_tokens, self.max_length)
        check_request_ids([request.request_id for request in requests], [*self._running, *self._finished])
        for request in requests:
            prompt = TokensPrompt(prompt_token_ids=list(request.context))
            self._engine.add_request(request.request_id, prompt, self._sampling_params(request))
            self._running[request.request_id] = Response(request.request_id)
            if self._has_deltas(request):
                self._deltas.add(request.request_id)

    def poll(self, timeout_s: float | None = None) -> list[Response]:
        """Generates until a response has finished or the timeout has expired. Returns all finished responses."""
        own = [name for name in (*self._running, *self._finished) if name not in self.batched_ids]
        return self.poll_requests(own, timeout_s)

    def poll_requests(self, request_ids: Collection[str], timeout_s: float | None) -> list[Response]:
        """Generates until one of these requests has finished or the timeout has expired. Returns their finished
        responses.
        """
        self._serving.require(EngineState.SERVING, "generate")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._finished.keys().isdisjoint(request_ids) and not self._running.keys().isdisjoint(request_ids):
            self._step()
            if deadline is not None and time.monotonic() >= deadline:
                break
        finished = [self._finished.pop(i) for i in request_ids if i in self._finished]
        self.batched_ids.difference_update(response.request_id for response in finished)
        return finished

    def _step(self) -> None:
        for output in self._engine.step():
            assert isinstance(output, RequestOutput)
            response = self._process_output(output)
            if response is not None:
                self._finished[response.request_id] = response

    def _finish_steps(self) -> None:
        """Processes the results of all scheduled steps. Their tokens get the current weight version. Unfinished
        requests continue with the next step.
        """
        if has_scheduled_steps(self._engine):
            with pause_scheduling(self._engine):
                while has_scheduled_steps(self._engine):
                    self._step()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drops the requests with these ids, even if they have finished. Ignores unknown ids."""
        request_ids = set(request_ids)
        self._engine.abort_request([i for i in request_ids if self._running.pop(i, None) is not None])
        self._deltas -= request_ids
        self.batched_ids -= request_ids
        for request_id in request_ids:
            self._finished.pop(request_id, None)

    def read_partial(self, request_ids: Collection[str]) -> list[Response]:
        """Returns copies of the unfinished responses to these requests, which have `is_streamed`."""
        return [deepcopy(self._running[i]) for i in request_ids if i in self._running]

    def _has_deltas(self, request: Request) -> bool:
        # Stop sequences need every token, which costs 5 % of a small model's time.
        return request.is_streamed or bool(self._stop_sequences)

    def _process_output(self, output: RequestOutput) -> Response | None:
        """Appends a vLLM output to the response of its request. Returns the response if it has finished, otherwise
        None.
        """
        response = self._running.get(output.request_id)
        if response is None:
            return None
        completion = output.outputs[0]
        assert isinstance(completion.logprobs, FlatLogprobs)
        if response.request_id in self._deltas:
            for token, logprob in zip(completion.token_ids, completion.logprobs.logprobs, strict=True):
                response.token_ids.append(token)
                response.logprobs.append(logprob)
                response.versions.append(self.version)
                if any(response.token_ids[-len(stop) :] == stop for stop in self._stop_sequences.get(token, ())):
                    self.abort([response.request_id])
                    return response
            if not output.finished:
                return None
        else:
            assert completion.weight_versions is not None
            spans = [(int(span.version), span.end - span.start) for span in completion.weight_versions]
            response.token_ids, response.logprobs = list(completion.token_ids), completion.logprobs.logprobs
            response.versions = [version for version, count in spans for _ in range(count)]
        if completion.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended a request with finish_reason {completion.finish_reason}")
        response.truncated = completion.finish_reason == "length"
        self._deltas.discard(response.request_id)
        return self._running.pop(response.request_id)

    def _sampling_params(self, request: Request) -> SamplingParams:
        config, seed = self._config, segment_key(request.key, request.num_response_tokens)
        return SamplingParams(
            temperature=config.temperature if request.temperature is None else request.temperature,
            top_k=0 if request.greedy else config.top_k,
            top_p=1.0 if request.greedy else config.top_p,
            seed=None if request.greedy else seed & (2**62 - 1),
            max_tokens=request.response_limit(config.max_response_tokens) - request.num_response_tokens,
            stop_token_ids=self._end_ids,
            ignore_eos=True,  # stop_token_ids has all end tokens
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if self._has_deltas(request) else RequestOutputKind.FINAL_ONLY,
        )

    def pop_preemptions(self) -> int:
        return scheduler_of(self._engine).pop_preemptions()

    # Weights.

    def begin_update(self, version: int) -> None:
        """Begins an update to `version`. Running requests pause and continue with the new weights."""
        self._serving.check_begin()
        self._finish_steps()
        with self._end_update_on_error():
            call_workers(self._engine, "start_weight_update")
        self._serving.begin(version, self._tied)

    def join_transfer_group(self, group: TransferGroup, first: int) -> None:
        """Makes all workers of the replica join a broadcast as receivers. Their receiver indices are consecutive,
        starting at `first`.
        """
        call_workers(self._engine, "join_transfer_group", group, first)

    def receive(self, weights: Mapping[str, np.ndarray] | IpcBucket | WeightMetadata) -> None:
        """Loads some of the weights. They arrive as exported arrays, as an IPC bucket, or by a broadcast."""
        self._serving.require_update("receive weights")
        if isinstance(weights, IpcBucket | WeightMetadata):
            with self._end_update_on_error():
                names = {"tied": self._tied, "parts": self._parts}
                call_workers(self._engine, "update_weights", {"weights": weights} | names)
            self._serving.mark_received(weights.names)
            return
        received = to_tensors(weights)
        named = {alias: weight for name, weight in received.items() for alias in (name, *self._tied.get(name, ()))}
        context = SharedTensors.of(named) if self._shares_memory else nullcontext(named)
        with self._end_update_on_error(), context as tensors:
            call_workers(self._engine, "update_weights", {"weights": tensors, "parts": self._parts})
        self._serving.mark_received(received)

    def commit(self) -> None:
        """Completes the running update and discards all cached keys and values. Raises RolloutError if weights are
        missing.
        """
        self._serving.require_update("commit weights")
        with self._end_update_on_error():
            # vLLM itself would keep the old values of missing weights.
            self._serving.check_complete()
            call_workers(self._engine, "finish_weight_update")
            # Includes running requests, which would otherwise continue with keys and values of the old weights.
            if not self._engine.reset_prefix_cache(reset_running_requests=True):
                raise RuntimeError("vLLM did not reset its prefix cache, which holds keys and values of old weights")
        self._serving.commit()
        self._engine.set_weight_version(str(self.version))

    def abort_update(self) -> None:
        """Abandons the running update. The engine is broken until an update completes."""
        self._serving.abort()
        call_workers(self._engine, "end_update")

    def compare_weights(self, samples: WeightSamples) -> Compared:
        self._serving.require(EngineState.SERVING, "compare weights", WEIGHTS)
        self._finish_steps()
        return compare_weights(self._engine, samples)

    @contextmanager
    def _end_update_on_error(self) -> Iterator[None]:
        with ExitStack() as on_error:
            # Also after an interrupt, so that another update can begin.
            on_error.callback(call_workers, self._engine, "end_update")
            with self._serving.mark_failed_on_error():
                yield
            on_error.pop_all()

    # Memory.

    def sleep(self, *, keep_weights: bool = True) -> None:
        """Frees device memory: offloads the weights to host memory and drops the KV cache (vLLM's sleep level 1).

        Without `keep_weights`, drops the weights, too (level 2). An engine may also sleep during an update, if it keeps
        its weights, and after a failed update. Raises RolloutError if requests are running.
        """
        self._serving.check_sleep()
        if self._running:
            raise RolloutError(f"{len(self._running)} requests are running: finish or abort them before sleep")
        self._finish_steps()
        if not keep_weights:
            self._serving.drop_weights()
        self._engine.sleep(level=1 if keep_weights else 2)
        self._serving.asleep = TAGS

    def wake(self, tags: Collection[str] = TAGS) -> None:
        """Restores the memory named by `tags`, by default all memory. A weight update needs only the tag of the
        weights.
        """
        waking = self._serving.tags_to_wake(tags)
        self._engine.wake_up(tags=sorted(waking))
        self._serving.asleep -= waking


class OwnRequests:
    """Requests of one caller on an engine that also runs the requests of other callers."""

    def __init__(self, engine: VllmRollout) -> None:
        self._engine = engine
        self._request_ids: dict[str, None] = {}

    @property
    def num_running(self) -> int:
        return len(self._request_ids)

    def add(self, requests: Iterable[Request]) -> None:
        requests = list(requests)
        self._engine.add(requests)
        self._request_ids |= dict.fromkeys(request.request_id for request in requests)
        self._engine.batched_ids.update(request.request_id for request in requests)

    def poll(self, timeout_s: float | None = None) -> list[Response]:
        """Generates until a response has finished or the timeout has expired. Returns all finished responses."""
        responses = self._engine.poll_requests(tuple(self._request_ids), timeout_s)
        for response in responses:
            del self._request_ids[response.request_id]
        return responses

    def abort(self, request_ids: Iterable[str]) -> None:
        own = [request_id for request_id in request_ids if self._request_ids.pop(request_id, self) is None]
        self._engine.abort(own)


def _reason(error: TypeError | ValueError) -> str:
    """Returns the cause of an error of vLLM as a part of a sentence."""
    # Errors of pydantic list their causes.
    causes = error.errors() if hasattr(error, "errors") else ()  # pyright: ignore[reportAttributeAccessIssue]
    message = causes[0]["msg"] if causes else str(error)
    return message.strip().splitlines()[0].removeprefix("Value error, ").rstrip(".")


def run_follower(address: str, args: EngineArgs, variables: Mapping[str, str]) -> None:
    """Runs the workers of a replica on this node, for a leader on another node. `variables` are the leader's
    environment variables.

    The import of this module has set the other environment variables for vLLM. Raises RolloutError when a worker ends.
    """
    os.environ |= variables
    torch.use_deterministic_algorithms(False)
    run_workers(address, args)


def _cache_bytes(settings: VllmConfig, num_devices: int) -> int:
    """Returns the bytes of the KV cache on each device. Raises ConfigError if a GPU has too little free memory."""
    # With several devices, a measurement would create a CUDA context in the leader, which takes memory of the first
    # worker.
    is_planned = num_devices > 1 and settings.kv_cache_gb is not None
    if is_planned or not isinstance(settings, PlannedVllmConfig):
        return settings.cache_bytes
    gpu = get_device("cuda").memory()
    return settings.measured_cache(gpu.total, gpu.free)


def _engine_args(model: ModelConfig, config: RolloutConfig, replica: ReplicaSizes, can_sleep: bool) -> EngineArgs:
    settings = config.vllm or VllmConfig()
    schedules_ahead = settings.uses_async_scheduling(on_gpus=has_gpu())
    return EngineArgs(
        model=str(model.path),
        skip_tokenizer_init=True,
        dtype=settings.dtype or model.dtype,  # pyright: ignore[reportArgumentType] (vLLM names fewer types; it rejects float64 itself)
        tensor_parallel_size=replica.tp,
        pipeline_parallel_size=replica.pp,
        # By default vLLM would request devices of its own from Ray.
        distributed_executor_backend="mp" if replica.num_devices > 1 else "uni",
        max_num_seqs=config.num_seqs,
        # -1: vLLM derives the limit from the model and the KV cache size.
        max_model_len=settings.max_model_len or -1,
        enforce_eager=not settings.graphs or not has_gpu(),
        enable_prefix_caching=settings.prefix_caching,
        kv_cache_memory_bytes=_cache_bytes(settings, replica.num_devices),
        # Only a lower bound for free GPU memory at start, since kv_cache_memory_bytes is set.
        gpu_memory_utilization=0.01,
        enable_sleep_mode=can_sleep and has_gpu(),
        logprobs_mode="processed_logprobs",
        async_scheduling=schedules_ahead,
        scheduler_cls=CountingAsyncScheduler if schedules_ahead else CountingScheduler,
        weight_transfer_config=WeightTransferConfig(backend=TRANSFER),
        worker_extension_cls=f"{WorkerExtension.__module__}.{WorkerExtension.__name__}",
        **{
            "max_num_batched_tokens": max(_STEP_TOKENS, config.num_seqs),
            "disable_log_stats": True,
            **quantization_options(config.quantization),
            **settings.engine_args,
        },
    )
