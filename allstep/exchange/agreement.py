"""Checks that all workers make the same exchange, before they make it."""

from collections.abc import Mapping
from functools import partial

from allstep.comm import Communicator
from allstep.comm import agreement as messages

CURE = (
    "Build and change the model in the same way, and make the same calls in the same order, on"
    " every worker."
)

agree = partial(messages.agree, cure=CURE)
"""Before each collective of an exchange, whatever follows; see `comm.agreement.agree`."""

explain = partial(messages.explain, cure=CURE)
"""As `comm.agreement.explain`."""


def check_same_policy(comm: Communicator, words: Mapping[str, str]) -> None:
    """Checks that all workers attach in the same way. Collective.

    Args:
        comm: the workers.
        words: name -> value in words, of equal names on every worker.

    Raises:
        DisagreementError: names the arguments that differ, their values and the ranks.
    """
    cure = "Pass the same policy on every worker."
    messages.agree(comm, "attach a model", sorted(words.items()), cure=cure)
