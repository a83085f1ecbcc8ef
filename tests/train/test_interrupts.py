import signal
import threading
from types import SimpleNamespace

import pytest

from allstep.train import interrupts
from allstep.train.interrupts import Interrupts


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves by hand."""
    now_s = [100.0]
    monkeypatch.setattr(interrupts, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    return now_s


@pytest.fixture
def earlier():
    """Signals that reached the handler that was there before `Interrupts`."""
    seen = []
    previous = {n: signal.signal(n, lambda n, _: seen.append(n)) for n in interrupts.SIGNALS}
    yield seen
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_becomes_a_request(number, earlier):
    with Interrupts() as asked:
        assert asked.requested is None
        signal.raise_signal(number)
        assert asked.requested == number
    assert earlier == []


def test_a_quick_repeat_is_ignored_and_the_first_signal_counts(clock, earlier):
    with Interrupts() as asked:
        signal.raise_signal(signal.SIGINT)
        clock[0] += 1.9
        signal.raise_signal(signal.SIGTERM)
        assert asked.requested == signal.SIGINT
    assert earlier == []


def test_a_late_repeat_goes_to_the_earlier_handler(clock, earlier):
    with Interrupts():
        signal.raise_signal(signal.SIGTERM)
        clock[0] += 2.1
        signal.raise_signal(signal.SIGTERM)
    assert earlier == [signal.SIGTERM]


def test_a_late_ctrl_c_raises_where_python_would_have_raised(clock, earlier):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it may be ignored
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(signal.SIGINT)
        clock[0] += 2.1
        signal.raise_signal(signal.SIGINT)


def test_handlers_are_back_afterwards(earlier):
    with Interrupts():
        pass
    signal.raise_signal(signal.SIGINT)
    assert earlier == [signal.SIGINT]


def test_off_the_main_thread_nothing_is_installed():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def run():
        with Interrupts() as asked:
            seen.extend([signal.getsignal(signal.SIGINT), asked.requested])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before, None]
