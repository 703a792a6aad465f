import signal
import time

import pytest

from flowrl.data.time_limit import TimeLimitError, time_limit


def test_a_library_that_catches_exceptions_is_interrupted() -> None:
    """The interruption itself may be lost as well."""
    num_interruptions = 0
    with pytest.raises(TimeLimitError), time_limit(0.01):
        while True:
            try:
                while True:
                    time.sleep(0.001)
            except Exception:  # noqa: BLE001 - as sympy does
                pass
            except TimeLimitError:
                num_interruptions += 1
                if num_interruptions == 2:
                    raise


def test_the_timer_of_the_caller_continues() -> None:
    fired: list[int] = []
    handler = signal.signal(signal.SIGALRM, lambda number, frame: fired.append(number))
    before = signal.setitimer(signal.ITIMER_REAL, 60)
    try:
        with time_limit(5):
            pass
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        while not fired:
            signal.pause()
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *before)
