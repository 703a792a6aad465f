"""Counts preemptions in vLLM's schedulers, and pauses scheduling until the results of scheduled steps are processed.

A scheduler preempts a running request if the KV cache has no free block for its next token. Later, vLLM computes the
keys and values of all tokens of the request again. vLLM's own counter needs statistics, which are disabled.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm import LLMEngine
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler


class CountingScheduler(Scheduler):
    """vLLM's scheduler with a counter of preemptions."""

    _num_preemptions = 0

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:  # Any: those of the base class
        # Requests that a weight update has preempted, to discard old keys and values, are already in the set.
        before = len(self.reset_preempted_req_ids)
        output = super().schedule(*args, **kwargs)
        self._num_preemptions += len(output.preempted_req_ids or ()) - before
        return output

    def pop_preemptions(self) -> int:
        """Returns the number of preemptions since the last call."""
        num_preemptions, self._num_preemptions = self._num_preemptions, 0
        return num_preemptions


class CountingAsyncScheduler(CountingScheduler, AsyncScheduler):
    """vLLM's asynchronous scheduler with a counter of preemptions."""


def scheduler_of(engine: LLMEngine) -> CountingScheduler:
    """Returns the scheduler of an engine whose core runs in this process."""
    scheduler = _core_of(engine).scheduler
    assert isinstance(scheduler, CountingScheduler)
    return scheduler


def has_scheduled_steps(engine: LLMEngine) -> bool:
    """Returns whether a scheduled step has unprocessed results. Always false without pipeline stages and without the
    asynchronous scheduler.
    """
    return bool(_core_of(engine).batch_queue)


@contextmanager
def pause_scheduling(engine: LLMEngine) -> Iterator[None]:
    """Inside the `with` block, the engine's steps process the results of scheduled steps, and schedule no tokens."""
    core = _core_of(engine)
    core.pause_scheduler(mode="keep", clear_cache=False)
    try:
        yield
    finally:
        core.resume_scheduler()


def _core_of(engine: LLMEngine) -> Any:  # Any: vLLM's EngineCore, which its in-process client does not type
    client: Any = engine.engine_core
    return client.engine_core
