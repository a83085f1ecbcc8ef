"""Workers make sure that they came for the same thing before they exchange it."""

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from allstep.comm import Communicator
from allstep.comm import agreement as messages
from allstep.exchange.parameters import signature

_CURE = (
    "Build and change the model in the same way, and make the same calls in the same order, on"
    " every worker."
)

agree = partial(messages.agree, cure=_CURE)
"""Before each collective of an exchange, whatever follows; see `comm.agreement.agree`."""

explain = partial(messages.explain, cure=_CURE)
"""As `comm.agreement.explain`."""


def check_same_arguments(comm: Communicator, arguments: Mapping[str, str]) -> None:
    """Checks that all workers were given the same. Collective.

    Args:
        comm: the workers.
        arguments: name -> value in words, of equal names on every worker.

    Raises:
        DisagreementError: names the arguments that differ, their values and the ranks.
    """
    details = sorted(arguments.items())
    messages.agree(comm, "attach a model", details, cure="Pass the same policy on every worker.")


def check_same_tensors(comm: Communicator, tensors: dict[str, Tensor]) -> None:
    """Checks that all workers have the same tensors, but for their values. Collective.

    Names, shapes, dtypes, the order in memory and whether parameters are frozen; see `signature`.

    Raises:
        DisagreementError: names the first tensors that differ and the ranks.
    """
    agree(comm, "attach a model", signature(tensors))
