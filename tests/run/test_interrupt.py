"""One signal is noted, two end it now; and the signals are given back."""

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from flowrl.run.interrupt import Interrupted, Interruption

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """After each test both signals are whoever's they were before it."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_the_first_signal_is_noted_and_told_and_the_second_raises() -> None:
    said, reached = [], False
    with pytest.raises(Interrupted) as caught, Interruption(said.append) as asked:
        asked.hold("stopping after step 3", "in step 3 of 9; results: there")
        signal.raise_signal(signal.SIGINT)
        reached = asked.signal is signal.SIGINT
        time.sleep(0.4)
        signal.raise_signal(signal.SIGINT)
    assert reached and said == ["stopping after step 3; Ctrl-C again ends it now"]
    assert str(caught.value) == "interrupted in step 3 of 9; results: there" and caught.value.exit_code == 130


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_before_anything_is_held_raises_at_once(number: signal.Signals) -> None:
    with pytest.raises(Interrupted, match="before the first step; nothing was kept") as caught, Interruption(print):
        signal.raise_signal(number)
        pytest.fail("it went on")
    assert caught.value.exit_code == 128 + number


def test_a_run_that_was_asked_to_end_says_so_when_it_has_ended() -> None:
    with pytest.raises(Interrupted, match=r"^ended by SIGTERM after step 4$"), Interruption(lambda line: None) as asked:
        asked.hold("stopping", "in step 4")
        signal.raise_signal(signal.SIGTERM)
        asked.hold("stopping", "after step 4")


def test_one_request_that_comes_twice_in_an_instant_is_one() -> None:
    with pytest.raises(Interrupted, match=r"^ended by SIGTERM after step 4$"), Interruption(lambda line: None) as asked:
        asked.hold("stopping", "in step 4")
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        asked.hold("stopping", "after step 4")


def test_another_error_stays_what_it_is() -> None:
    with pytest.raises(ValueError, match="mine"), Interruption(lambda line: None) as asked:
        asked.hold("stopping", "")
        signal.raise_signal(signal.SIGINT)
        raise ValueError("mine")


def test_signals_that_were_ignored_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interruption(print) as asked:
            signal.raise_signal(signal.SIGINT)
            assert asked.signal is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_was_set_in_between_is_taken_over_and_not_kept() -> None:
    with pytest.raises(Interrupted), Interruption(lambda line: None) as asked:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        asked.take()
        asked.hold("stopping", "")
        signal.raise_signal(signal.SIGTERM)


def test_on_another_thread_no_signal_is_taken() -> None:
    found = []

    def on_a_thread() -> None:
        with Interruption(print) as asked:
            asked.take()
            found.append([signal.getsignal(number) for number in SIGNALS])

    before = [signal.getsignal(number) for number in SIGNALS]
    thread = threading.Thread(target=on_a_thread)
    thread.start()
    thread.join()
    assert found == [before]
