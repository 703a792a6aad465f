"""Extracts the final answers of responses with the user's function `evaluation.extract_answer`."""

from collections.abc import Sequence

from flowrl.rewards.processes.pool import ScoringPool
from flowrl.rewards.processes.pool_settings import FunctionSpec, Outcome, PoolLimits
from flowrl.rewards.reward_function import SHORT_REPR, RewardError


def extract_answers(name: str, responses: Sequence[str], limits: PoolLimits) -> list[str | None]:
    """Returns the final answer of each response. The function `name` runs in separate processes with these limits.

    Raises RewardError if a call fails, for example because the function raises an exception, returns neither text nor
    None, exceeds the timeout, or ends its process.
    """
    with ScoringPool([FunctionSpec(name, name, kind="answer function")], limits) as pool:
        futures = [pool.submit(name, {"response": response}) for response in responses]
        return [_answer(future.result(), response) for future, response in zip(futures, responses, strict=True)]


def _answer(outcome: Outcome, response: str) -> str | None:
    if outcome.failure is None:
        return outcome.answer
    text = SHORT_REPR.repr(response)
    row = "" if text in outcome.message or outcome.failure == "not_loaded" else f" for response {text}"
    fix = ": make it faster, or increase timeout_s of reward or environment" if outcome.failure == "timeout" else ""
    raise RewardError(f"{outcome.message}{row}{fix}")
