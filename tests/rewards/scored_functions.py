"""Reward functions for the tests of the scoring process. They import little, so the process imports them quickly."""

import signal


def interrupt_is_blocked(**_: object) -> float:
    return float(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
