import pytest

from benchmarks.published_runs import RESNET50_READY, backcasts

ALL = backcasts()


def test_published_runs_with_known_inputs_are_predicted_within_a_tenth():
    told = [found for found in ALL if found.inputs != "guessed"]
    assert len(told) >= 8
    for found in told:
        assert abs(found.error) < 0.10, found


def test_published_runs_off_by_a_tenth_name_their_guesses():
    """What is off by more than a tenth says what was guessed."""
    for found in ALL:
        assert found.guesses
        assert found.source
        if abs(found.error) >= 0.10:
            assert found.inputs == "guessed", found


@pytest.mark.parametrize("name", ["ChainerMN", "Goyal", "Akiba", "Baidu", "DistBelief"])
def test_published_runs_are_complete(name):
    assert any(found.run.startswith(name) for found in ALL)


def test_published_order_of_networks_is_reproduced():
    """InfiniBand, then 10 GbE with fp16 and double buffering, then plain 10 GbE."""

    def predicted(run):
        (found,) = (cast for cast in ALL if cast.run == run and "32 P100" in cast.what)
        return found.predicted

    infiniband = predicted("ChainerMN, FDR InfiniBand")
    buffered = predicted("ChainerMN, 10 GbE, fp16 + double buffering")
    plain = predicted("ChainerMN, 10 GbE as fast as on 16 GPUs")
    assert infiniband > buffered > 2 * plain


def test_resnet50_gradient_is_ready_early():
    assert all(time <= gradient for gradient, time in RESNET50_READY)
