"""The first signal is deferred, the second one aborts, and the previous handlers are restored."""

import signal
import threading
from collections.abc import Iterator

import pytest

from flowrl.run import interrupt
from flowrl.run.interrupt import Interrupted, Interruption

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Clock:
    """A virtual clock in place of the module `time`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    replacement = Clock()
    monkeypatch.setattr(interrupt, "time", replacement)
    return replacement


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Checks that every test restores the handlers."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_the_first_signal_is_deferred_and_the_second_raises(clock: Clock) -> None:
    """The messages are the feature: they tell the user how to abort."""
    lines, reached = [], False
    with pytest.raises(Interrupted) as caught, Interruption(lines.append) as interruption:
        interruption.defer("finishing step 3 and saving", "in step 3 of 9; results: there")
        signal.raise_signal(signal.SIGINT)
        reached = interruption.signal is signal.SIGINT
        clock.now_s += 0.4
        signal.raise_signal(signal.SIGINT)
    assert reached and lines == ["interrupt received: finishing step 3 and saving (Ctrl-C again to abort)"]
    assert str(caught.value) == "interrupted in step 3 of 9; results: there" and caught.value.exit_code == 130


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_before_defer_raises_at_once(number: signal.Signals) -> None:
    with pytest.raises(Interrupted, match="first step") as caught, Interruption(print):
        signal.raise_signal(number)
        pytest.fail("the signal did not raise")
    assert caught.value.exit_code == 128 + number


def test_a_deferred_signal_raises_at_the_end() -> None:
    with (
        pytest.raises(Interrupted, match=r"SIGTERM .*step 4$"),
        Interruption(lambda line: None) as interruption,
    ):
        interruption.defer("finishing", "in step 4")
        signal.raise_signal(signal.SIGTERM)
        interruption.defer("finishing", "after step 4")


def test_a_duplicate_signal_does_not_abort() -> None:
    with (
        pytest.raises(Interrupted, match=r"SIGTERM .*step 4$"),
        Interruption(lambda line: None) as interruption,
    ):
        interruption.defer("finishing", "in step 4")
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        interruption.defer("finishing", "after step 4")


def test_another_error_is_not_replaced() -> None:
    with pytest.raises(ValueError, match="mine"), Interruption(lambda line: None) as interruption:
        interruption.defer("finishing", "")
        signal.raise_signal(signal.SIGINT)
        raise ValueError("mine")


def test_signals_that_were_ignored_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interruption(print) as interruption:
            signal.raise_signal(signal.SIGINT)
            assert interruption.signal is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_install_replaces_a_handler_that_was_set_in_between() -> None:
    with pytest.raises(Interrupted), Interruption(lambda line: None) as interruption:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        interruption.install()
        interruption.defer("finishing", "")
        signal.raise_signal(signal.SIGTERM)


def test_no_handler_is_installed_on_another_thread() -> None:
    handlers_on_thread = []

    def on_a_thread() -> None:
        with Interruption(print) as interruption:
            interruption.install()
            handlers_on_thread.append([signal.getsignal(number) for number in SIGNALS])

    before = [signal.getsignal(number) for number in SIGNALS]
    thread = threading.Thread(target=on_a_thread)
    thread.start()
    thread.join()
    assert handlers_on_thread == [before]


class SignalsWhenDeleted:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_whose_exception_python_ignores_ends_the_run_at_the_next_installation() -> None:
    is_ignored = False
    with pytest.raises(Interrupted) as caught, Interruption(print) as interruption:
        _ = SignalsWhenDeleted()
        del _
        is_ignored = True
        interruption.install()
        pytest.fail("the signal did not raise")
    assert is_ignored and caught.value.exit_code == 143
