"""Functions that tests run in the process of a vLLM rollout with `group.run`; the test process never imports vLLM."""

import itertools
import os
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flowrl.config import CheckFailed, UserError
from flowrl.controller.worker import Worker
from flowrl.engines.models.weight_samples import WeightSamples
from flowrl.engines.models.weights import to_tensors
from flowrl.engines.rollout.base import Request, Response, Segment, find_missing_methods
from flowrl.engines.rollout.cuda_ipc import IpcSender
from flowrl.engines.rollout.response_tensors import make_requests, stack_responses
from flowrl.engines.rollout.weight_metadata import WeightMetadata
from flowrl.workers import Rollout

if TYPE_CHECKING:
    from flowrl.engines.rollout.vllm.engine import VllmRollout

ResponseLists = dict[str, list[Any]]
"""Column -> one entry per row: tokens, log-probabilities, versions, truncated."""


def engine_of(worker: Rollout) -> "VllmRollout":
    engine: Any = worker.engine
    return engine


def generate(
    worker: Rollout, prompts: Sequence[Sequence[int]], rows: Sequence[int], *, greedy: bool = False
) -> ResponseLists:
    """Generates responses; `rows` are the prompt ids."""
    row_B = torch.tensor(rows, dtype=torch.int64)
    requests = make_requests(prompts, row_B, torch.zeros_like(row_B), seed=7, temperature=0.0 if greedy else None)
    results = stack_responses(engine_of(worker).generate(requests))
    lengths = results.lengths.tolist()
    return {
        "tokens": results.token_lists(),
        "logprobs": [x.tolist() for x in results.logprobs.split(lengths)],
        "versions": [x.tolist() for x in results.versions.split(lengths)],
        "truncated": results.truncated.tolist(),
    }


def count_steps(worker: Rollout, prompt: Sequence[int]) -> tuple[list[int], int]:
    """Generates a greedy response. Returns its tokens, and the number of steps of the engine."""
    engine, num_steps = engine_of(worker), 0
    step = engine._engine.step

    def counted() -> list:
        nonlocal num_steps
        num_steps += 1
        return step()

    engine._engine.step = counted  # pyright: ignore[reportAttributeAccessIssue] (of one object)
    try:
        (tokens,) = generate(worker, [prompt], [0], greedy=True)["tokens"]
    finally:
        del engine._engine.step
    return tokens, num_steps


def engine_arguments(worker: Rollout) -> tuple[int, str | None]:
    """Returns the number of tokens per step, and the method of speculative decoding."""
    config = engine_of(worker)._engine.vllm_config
    assert config.speculative_config is not None
    return config.scheduler_config.max_num_batched_tokens, config.speculative_config.method


def missing_methods(worker: Rollout) -> list[str]:
    return find_missing_methods(type(worker.engine))


def cpu_head_sizes(worker: Rollout) -> tuple[int, ...]:
    """Returns the head sizes that vLLM's attention supports on a CPU."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # noqa: PLC0415 (only in this process)

    return tuple(CPUAttentionBackend.get_supported_head_sizes())


def state(worker: Rollout) -> str:
    return engine_of(worker).state.value


def error_of(worker: Rollout, method: str, arguments: Sequence[Any] = ()) -> str:
    """Returns the error message of an engine method; empty if it succeeds."""
    try:
        getattr(engine_of(worker), method)(*arguments)
    except UserError as error:
        return str(error)
    return ""


def prompt_error(worker: Rollout, prompt: Sequence[int]) -> str:
    try:
        generate(worker, [prompt], [0])
    except UserError as error:
        return str(error)
    return ""


def send_unknown_weight(worker: Rollout, weights: dict[str, Any]) -> str:
    """Sends an unknown weight at the end of an update; returns the error message."""
    engine = engine_of(worker)
    engine.begin_update(50)
    engine.receive(weights)
    try:
        engine.receive({"model.nothing.weight": np.zeros(3, np.float32)})
    except Exception as error:  # noqa: BLE001 (vLLM's own, of whatever kind)
        return str(error)
    raise AssertionError("an unknown weight was taken")


def commit_incomplete_update(worker: Rollout, weights: dict[str, Any]) -> str:
    """Commits an incomplete update; returns the error message."""
    engine = engine_of(worker)
    engine.begin_update(52)
    engine.receive(weights)
    return error_of(worker, "commit")


def add_invalid_requests(worker: Rollout, longest: int) -> list[str]:
    """Returns the errors of invalid requests, and the number of requests left afterwards."""
    engine = engine_of(worker)
    errors = [error_of(worker, "add", ([Request("long", [2] * longest, key=1)],))]
    engine.add([Request("one", [2, 3], key=1)])
    errors += [error_of(worker, "add", ([Request("one", [2, 3], key=1)],))]
    engine.abort(["one"])
    return [*errors, str(engine.num_running)]


def abort_update(worker: Rollout, weights: dict[str, Any]) -> None:
    engine = engine_of(worker)
    engine.begin_update(51)
    engine.receive(weights)
    engine.abort_update()


def keep_stale_cache(worker: Rollout, is_kept: bool) -> None:
    """Disables or restores the reset of the prefix cache."""
    inner: Any = engine_of(worker)._engine
    if is_kept:
        inner.reset_prefix_cache = lambda **_: True
    else:
        del inner.reset_prefix_cache


def finish_with_new_weights(engine: Any, weights: dict[str, Any], version: int, steps: int) -> list[Response]:
    """Polls until all requests have finished. The engine receives new weights after `steps` steps."""
    results: list[Response] = []
    for _ in range(steps):
        results += engine.poll(0.0)
    engine.begin_update(version)
    engine.receive(weights)
    engine.commit()
    while engine.num_running:
        results += engine.poll()
    return results


def stream_requests(
    worker: Rollout, prompts: Sequence[Sequence[int]], weights: dict[str, Any], version: int, steps: int
) -> list[dict[str, Any]]:
    """Streams requests with new weights after some steps; aborts the last request."""
    engine = engine_of(worker)
    engine.add(Request(f"row-{row}", ids, key=row) for row, ids in enumerate(prompts))
    engine.abort([f"row-{len(prompts) - 1}"])
    return [vars(response) for response in finish_with_new_weights(engine, weights, version, steps)]


def stream_segments(
    worker: Rollout, prompts: Sequence[Sequence[int]], weights: dict[str, Any], version: int, steps: int
) -> list[dict[str, Any]]:
    """Continues responses after three tokens of the policy and two of an environment, with new weights after some
    steps. Returns the responses with the tokens before them (`context`).
    """
    engine = engine_of(worker)
    whole = engine.generate([Request(f"row-{row}", ids, key=row) for row, ids in enumerate(prompts)])
    requests = {}
    for row, (ids, response) in enumerate(zip(prompts, whole, strict=True)):
        policy = Segment(response.token_ids[:3], response.logprobs[:3], response.versions[:3])
        segments = (policy, Segment.environment([7, 9]))
        requests[response.request_id] = Request(response.request_id, ids, key=row, segments=segments)
    engine.add(requests.values())
    results = finish_with_new_weights(engine, weights, version, steps)
    repeated = engine.generate(list(requests.values()))
    again = engine.generate(list(requests.values()))
    assert [vars(response) for response in repeated] == [vars(response) for response in again]
    return [vars(response) | {"context": requests[response.request_id].context} for response in results]


def count_cached_tokens(worker: Rollout, prompt: Sequence[int], observation: Sequence[int]) -> tuple[int, int]:
    """Generates two turns of an episode. Returns the length of the context of the second turn, and how many of its
    tokens came from the prefix cache.
    """
    engine = engine_of(worker)
    (response,) = engine.generate([Request("episode", prompt, key=0)])
    policy = Segment(response.token_ids[:5], response.logprobs[:5], response.versions[:5])
    following = Request("episode", prompt, key=0, segments=(policy, Segment.environment(observation)))
    inner: Any = engine._engine
    original, cached = inner.step, []

    def step() -> Any:
        outputs = original()
        cached.extend(output.num_cached_tokens for output in outputs)
        return outputs

    inner.step = step
    try:
        engine.generate([following])
    finally:
        inner.step = original
    return len(following.context), max(cached)


def generate_while_streaming(
    worker: Rollout, prompts: Sequence[Sequence[int]], rows: Sequence[int]
) -> tuple[ResponseLists, list[str]]:
    """Generates a batch while requests are streaming and one is aborted; returns the batch and the finished ids."""
    engine = engine_of(worker)
    engine.add(Request(f"row-{row}", ids, key=row) for row, ids in enumerate(prompts))
    names = [answer.request_id for answer in engine.poll(0.0)]
    results = generate(worker, prompts, rows)
    engine.abort(["row-0"])
    # Requests that finished during the batch are returned at once.
    names += [answer.request_id for answer in engine.poll(0.0)]
    while engine.num_running:
        names += [answer.request_id for answer in engine.poll()]
    return results, sorted(names)


def dies_while_generating(worker: Rollout, num_steps: int) -> None:
    """Lets the process kill itself after `num_steps` further steps of the engine."""
    inner: Any = engine_of(worker)._engine
    original, steps = inner.step, itertools.count()

    def step() -> Any:
        if next(steps) == num_steps:
            os.kill(os.getpid(), signal.SIGKILL)
        return original()

    inner.step = step


def updates(worker: Rollout, weights: dict[str, Any], count: int) -> list[int]:
    """Returns the resident bytes of the process after each update."""
    engine, sizes = engine_of(worker), []
    for version in range(count):
        engine.begin_update(version)
        engine.receive(weights)
        engine.commit()
        generate(worker, [[2, 3, 4]], [version])
        with open("/proc/self/statm") as file:
            sizes.append(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    return sizes


def weight_fault(worker: Rollout, samples: WeightSamples) -> str:
    """Returns the error message of a weight check; empty if it passes."""
    try:
        worker.check_weights(samples)
    except CheckFailed as error:
        return str(error)
    return ""


def comparison(worker: Rollout, samples: WeightSamples) -> tuple[int, tuple[str, ...], float]:
    """Returns the number of compared weights, the unreached ones, and the time in milliseconds."""
    started_s = time.perf_counter()
    compared = worker.check_weights(samples)
    return compared.count, compared.unreached, 1e3 * (time.perf_counter() - started_s)


def set_tied(worker: Rollout, is_sent: bool) -> None:
    """Makes the engine send tied weights under one name only, or under all of them again."""
    engine: Any = engine_of(worker)
    if is_sent:
        engine._tied = engine._all_tied
    else:
        engine._all_tied, engine._tied = engine._tied, {}


def zero_biases(worker: Rollout) -> None:
    """Zeroes the attention biases of vLLM's first layer."""
    engine_of(worker)._engine.collective_rpc(_zero_biases)


def _zero_biases(wrapped: Any) -> None:
    wrapped.worker.model_runner.model.model.layers[0].self_attn.qkv_proj.bias.data.zero_()


def drop_weights(worker: Rollout) -> None:
    engine_of(worker).sleep(keep_weights=False)


def update_asleep(worker: Rollout, weights: dict[str, Any], version: int) -> list[str]:
    """Runs an update with only the weights awake and a sleep in between; returns the state or error at each step."""
    engine, states = engine_of(worker), list[str]()
    arrays = list(weights.items())
    engine.sleep()
    states += [state(worker), error_of(worker, "poll"), error_of(worker, "begin_update", (version,))]
    engine.wake(("weights",))
    states += [state(worker), error_of(worker, "poll")]
    engine.begin_update(version)
    engine.receive(dict(arrays[:5]))
    states += [state(worker)]
    engine.sleep()
    states += [state(worker), error_of(worker, "receive", ({},)), error_of(worker, "commit")]
    engine.wake(("weights",))
    engine.receive(dict(arrays[5:]))
    engine.commit()
    states += [state(worker), error_of(worker, "poll"), error_of(worker, "wake", (("weights",),))]
    engine.wake(("kv_cache",))
    return [*states, state(worker)]


def load_from_buffers(worker: Rollout, weights: dict[str, Any], version: int) -> None:
    """Runs an update with three weights per shared buffer, as the transport `cuda_ipc` does on a GPU."""
    engine, sender, named = engine_of(worker), IpcSender(torch.device("cpu")), list(to_tensors(weights).items())
    engine.begin_update(version)
    for start in range(0, len(named), 3):
        chunk = named[start : start + 3]
        metadata = WeightMetadata.of((name, weight.dtype, weight.shape) for name, weight in chunk)
        engine.receive(sender.share(chunk, metadata))
    engine.commit()
    sender.release()


def process_id(worker: Rollout) -> int:
    return os.getpid()


def free_memory(worker: Worker) -> int:
    """Returns the free bytes of the GPU."""
    return torch.cuda.mem_get_info()[0]


def use_memory(worker: Worker, num_bytes: int) -> int:
    """Returns the free bytes of the GPU, and uses some of them for a tensor, which stays in torch's cache."""
    free = torch.cuda.mem_get_info()[0]
    torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    return free


def quantization_errors(worker: Rollout, weights: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Returns per layer kind the largest error (in int8 steps, relative for fp8) and the largest stored magnitude."""
    inner: Any = engine_of(worker)._engine
    (results,) = inner.collective_rpc(_quantization_errors, args=(dict(to_tensors(weights)),))
    return results


def _quantization_errors(wrapped: Any, weights: dict[str, torch.Tensor]) -> dict[str, tuple[float, float]]:
    results: dict[str, tuple[float, float]] = {}
    for name, layer in wrapped.worker.get_model().named_modules():
        weight = getattr(layer, "weight", None)
        if not name.endswith("_proj") or weight is None:
            continue
        parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
        prefix, _, kind = name.rpartition(".")
        exact = torch.cat([weights[f"{prefix}.{part}.weight"].float() for part in parts.get(kind, (kind,))])
        if weight.dtype == torch.float8_e4m3fn:
            stored, scale = weight.float().t(), layer.weight_scale
            # Below the smallest normal number steps are no share of it.
            errors = (stored * scale - exact).abs() / exact.abs().clamp_min(scale * 2**-6)
        else:
            stored, scale = weight.qdata.float(), weight.scale.float().reshape(-1, 1)
            errors = (stored * scale - exact).abs() / scale
        worst, top = results.get(kind, (0.0, 0.0))
        results[kind] = max(worst, float(errors.max())), max(top, float(stored.abs().max()))
    return results
