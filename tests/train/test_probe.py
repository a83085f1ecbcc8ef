"""How often a micro-batch is timed at the end of a run."""

import pytest

from allstep.train.probe import shortest_s


@pytest.mark.parametrize(("call_s", "num_calls"), [(1.0, 5), (8.0, 3), (300.0, 1)])
def test_long_calls_are_timed_less_often(call_s: float, num_calls: int) -> None:
    """The other workers wait for the measurement, and not for ever."""
    calls: list[float] = []

    def now_s() -> float:
        return sum(calls)

    assert shortest_s(lambda: calls.append(call_s), clock=now_s) == call_s
    assert len(calls) == num_calls
