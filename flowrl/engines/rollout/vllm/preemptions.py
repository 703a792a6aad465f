"""Counts the preemptions of vLLM's scheduler.

The scheduler preempts a running request if the KV cache has no free block for its next token. Later, vLLM computes the
keys and values of all its tokens again. vLLM's own counter needs the statistics of every step, which are disabled.
"""

from typing import Any

from vllm import LLMEngine
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler


class CountingScheduler(Scheduler):
    """vLLM's scheduler with a counter of preemptions."""

    _num_preemptions = 0

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:  # Any: those of the base class
        # The set already contains requests that a weight update has preempted, to discard the old keys and values.
        before = len(self.reset_preempted_req_ids)
        output = super().schedule(*args, **kwargs)
        self._num_preemptions += len(output.preempted_req_ids or ()) - before
        return output

    def pop_preemptions(self) -> int:
        """Returns the number of preemptions since the last call."""
        num_preemptions, self._num_preemptions = self._num_preemptions, 0
        return num_preemptions


def scheduler_of(engine: LLMEngine) -> CountingScheduler:
    """Returns the scheduler of an engine whose core runs in this process."""
    client: Any = engine.engine_core  # the in-process client, which vLLM does not type
    scheduler = client.engine_core.scheduler
    assert isinstance(scheduler, CountingScheduler)
    return scheduler
