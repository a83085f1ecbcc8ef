"""Messages between workers that gradients flow back through.

[Note: mirrored calls] Each function here is called by the ranks that its verb on a `Communicator`
is called by, and its backward is the mirrored call: a gradient that meets `recv` is sent to where
the tensor came from. What is differentiated is the sum of all ranks' losses.

- A result needs a gradient whatever the arguments do: no rank can see whether another one needs
  it. Call the verbs of the communicator, or stay in `torch.no_grad()`, for what needs none.
- Every rank that took part in a call takes part in its backward. Autograd runs backward in the
  reversed order of the calls, so the same order on all ranks is enough, as in the forward pass.
- A rank that only gives (`send`; `gather` away from the root) gets a *delegate*, a zero whose
  backward waits for the gradient. It must end up in what `backward` is called on:
  `delegate.backward()`, `loss + delegate` or `pseudo_connect`.
- A rank that only takes may pass a delegate in, so that calls are ordered or differentiated twice.
- A rank that does not come to a backward call is named by an error within `timeout_s`.
"""

from allstep.comm.autograd.collectives import all_gather, all_to_all, broadcast, gather, scatter
from allstep.comm.autograd.point_to_point import pseudo_connect, recv, send
from allstep.comm.autograd.reductions import all_reduce, reduce_scatter

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "pseudo_connect",
    "recv",
    "reduce_scatter",
    "scatter",
    "send",
]
