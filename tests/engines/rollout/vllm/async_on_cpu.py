"""vLLM's asynchronous scheduling on a CPU, for tests. Imports vLLM only in the process of the rollout.

vLLM disables asynchronous scheduling on CPUs. This engine enables it again after vLLM has checked its settings. vLLM's
scheduler, queue of steps and model runner then work as on a GPU. Each step still computes as soon as it is scheduled,
because a CPU has no streams. vLLM's runner for CPUs replaces some operations on streams by placeholders, and this
module replaces the others.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from flowrl.config.engines.rollout_engines import ENGINES
from flowrl.engines.models.weight_samples import WeightSamples
from flowrl.engines.rollout.base import EngineContext, Request, Response, RolloutEngine
from flowrl.workers import Rollout
from tests.engines.vllm_checks import engine_of

NAME = f"{__name__}:AsyncOnCpu"
LIMIT = 40
"""Maximum number of tokens of a response."""

Weights = dict[str, Any]


class AsyncOnCpu:
    """Starts the engine `vllm` with asynchronous scheduling on a CPU."""

    capabilities = ENGINES["vllm"]

    @classmethod
    def start(cls, context: EngineContext) -> RolloutEngine:
        # Only this process imports vLLM.
        from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415

        from flowrl.engines.rollout.vllm.engine import VllmRollout  # noqa: PLC0415

        original: Any = CpuPlatform.check_and_update_config

        def check_and_enable(config: Any) -> None:
            original(config)
            config.scheduler_config.async_scheduling = True

        names: Any = torch.cuda
        CpuPlatform.check_and_update_config = staticmethod(check_and_enable)  # pyright: ignore[reportAttributeAccessIssue]
        names.Event = names.current_stream = _Placeholder
        names.stream = nullcontext
        return VllmRollout.start(context)


class _Placeholder:
    """An event or a stream. All operations on a CPU are complete when they return."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def describe_scheduler(worker: Rollout) -> tuple[str, str, bool]:
    """Returns the names of the scheduler and of the method that runs a step, and whether the runner is asynchronous."""
    client: Any = engine_of(worker)._engine.engine_core
    core = client.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    return type(core.scheduler).__name__, core.step_fn.__name__, runner.use_async_scheduling


def count_scheduled_steps(worker: Rollout) -> int:
    """Returns the number of steps whose results are not processed."""
    client: Any = engine_of(worker)._engine.engine_core
    return len(client.engine_core.batch_queue or ())


def add_requests(worker: Rollout, prompts: Sequence[Sequence[int]], temperature: float | None = None) -> None:
    engine_of(worker).add(
        Request(f"row-{row}", ids, key=row, temperature=temperature, max_tokens=LIMIT)
        for row, ids in enumerate(prompts)
    )


def generate(
    worker: Rollout, prompts: Sequence[Sequence[int]], temperature: float | None = None
) -> list[dict[str, Any]]:
    """Returns the responses to prompts."""
    add_requests(worker, prompts, temperature)
    return finish(worker)


def generate_and_count(worker: Rollout, prompts: Sequence[Sequence[int]]) -> tuple[list[dict[str, Any]], int]:
    """Returns the responses to prompts, and the number of preemptions."""
    return generate(worker, prompts), engine_of(worker).pop_preemptions()


def stream_through_updates(
    worker: Rollout, prompts: Sequence[Sequence[int]], updates: Mapping[int, Weights], num_steps: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Streams requests. The engine receives the weights of each version after `num_steps` steps.

    Between two steps, one request is aborted and another one gets its id. Returns the responses, and the first,
    unfinished response after each update.
    """
    engine, partial = engine_of(worker), list[Response]()
    engine.add(
        Request(f"row-{row}", ids, key=row, max_tokens=LIMIT, is_streamed=row % 2 == 0)
        for row, ids in enumerate(prompts)
    )
    for version, weights in updates.items():
        for step in range(num_steps):
            engine._step()
            if step == 0:
                engine.abort(["row-3"])
                engine.add([Request("row-3", prompts[3], key=100 + version, max_tokens=LIMIT)])
        engine.begin_update(version)
        engine.receive(weights)
        engine.commit()
        partial += engine.read_partial(["row-0"])
    return finish(worker), [vars(response) for response in partial]


def compare_between_steps(worker: Rollout, samples: WeightSamples, num_steps: int) -> int:
    """Compares the weights after some steps. Returns the number of compared weights."""
    for _ in range(num_steps):
        engine_of(worker)._step()
    return engine_of(worker).compare_weights(samples).count


def finish(worker: Rollout) -> list[dict[str, Any]]:
    """Returns the responses to all requests."""
    engine, responses = engine_of(worker), list[Response]()
    while engine.num_running:
        responses += engine.poll()
    return [vars(response) for response in responses]
