"""Signals become requests, and all workers stop after the same step."""

import signal
import threading

import pytest

from allstep.comm import Communicator
from allstep.train.stop import SIGNALS, Interrupts, StopAgreement
from tests.helpers.ranks import run_ranks


class Clock:
    """Moved by hand."""

    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def earlier():
    """Signals that reached the handler that was there before `Interrupts`."""
    seen = []
    previous = {n: signal.signal(n, lambda n, _: seen.append(n)) for n in SIGNALS}
    yield seen
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupts_turn_a_signal_into_a_request(number, earlier):
    with Interrupts() as asked:
        assert asked.requested is None
        signal.raise_signal(number)
        assert asked.requested == number
    assert earlier == []


def test_interrupts_ignore_a_repeat_within_two_seconds(earlier):
    clock = Clock()
    with Interrupts(clock) as asked:
        signal.raise_signal(signal.SIGINT)
        clock.now_s += 1.9
        signal.raise_signal(signal.SIGTERM)
        assert asked.requested == signal.SIGINT
    assert earlier == []


def test_interrupts_hand_a_late_repeat_to_the_earlier_handler(earlier):
    clock = Clock()
    with Interrupts(clock):
        signal.raise_signal(signal.SIGTERM)
        clock.now_s += 2.1
        signal.raise_signal(signal.SIGTERM)
    assert earlier == [signal.SIGTERM]


def test_interrupts_let_a_late_ctrl_c_raise_keyboard_interrupt(earlier):
    clock = Clock()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it may be ignored
    with pytest.raises(KeyboardInterrupt), Interrupts(clock):
        signal.raise_signal(signal.SIGINT)
        clock.now_s += 2.1
        signal.raise_signal(signal.SIGINT)


def test_interrupts_restore_the_handlers(earlier):
    with Interrupts():
        pass
    signal.raise_signal(signal.SIGINT)
    assert earlier == [signal.SIGINT]


def test_interrupts_install_nothing_off_the_main_thread():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def run():
        with Interrupts() as asked:
            seen.extend([signal.getsignal(signal.SIGINT), asked.requested])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before, None]


def test_stop_agreement_reaches_all_workers_one_step_later():
    def run(comm: Communicator):
        agree = StopAgreement(comm)
        asked = [None, signal.SIGTERM if comm.rank == 1 else None, None, None]
        return [agree(number) for number in asked] + [agree.drain()]

    for told in run_ranks(3, run):
        assert told == [None, None, signal.SIGTERM, None, None]


def test_stop_agreement_drains_the_last_step():
    def run(comm: Communicator):
        agree = StopAgreement(comm)
        return [agree(signal.SIGINT if comm.rank == 0 else None), agree.drain(), agree.drain()]

    assert run_ranks(2, run) == [[None, signal.SIGINT, None]] * 2
