"""What a seed decides, checked; a failure names the seed and its faults."""

from tests.helpers.simulation.saving import Lives
from tests.helpers.simulation.scratch import scratch
from tests.helpers.simulation.training import Simulation


def check_training(seed: int) -> None:
    """A training whose processes and connections fail.

    Raises:
        AssertionError: naming the seed.
    """
    simulation = Simulation(seed)
    try:
        simulation.run()
    except Exception as error:
        raise AssertionError(f"seed {seed}: {simulation.faults}: {error}") from error


def check_checkpoints(seed: int) -> None:
    """One whose disk fails, too, and which is resumed.

    Raises:
        AssertionError: naming the seed.
    """
    with scratch() as folder:
        lives = Lives(seed, folder)
        try:
            lives.run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {lives.faults}: {error}") from error


CHECKS = {"training": check_training, "checkpoints": check_checkpoints}
