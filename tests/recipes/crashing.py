"""The KL estimator k1, which raises or presses Ctrl-C in the step that the environment names."""

import os
import signal

from torch import Tensor

from flowrl.config import UserError

CRASH_AT, ASK_AT = "FLOWRL_TEST_CRASH_AT", "FLOWRL_TEST_ASK_AT"
"""Environment variables: the call of `kl` in this process that raises, and the one in which Ctrl-C is pressed."""

_calls = [0]


def reset_calls() -> None:
    """Resets the number of calls to 0."""
    _calls[0] = 0


def kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Returns the estimate. Inline runs call it in the process of the driver: once per step for the penalty of PPO, and
    once per minibatch for the loss.
    """
    _calls[0] += 1
    if str(_calls[0]) == os.environ.get(CRASH_AT):
        raise UserError("crash requested by the environment")
    if str(_calls[0]) == os.environ.get(ASK_AT):
        signal.raise_signal(signal.SIGINT)
    return logprobs - ref_logprobs
