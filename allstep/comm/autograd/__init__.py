"""Calls between workers through which autograd sends gradients back.

[Note: mirrored calls] Each function here must be called by the same ranks as its namesake on a
`Communicator`. Its backward is the mirrored call: the gradient of a tensor that `recv` returned is
sent to the rank that the tensor came from. What is differentiated is the sum of all ranks' losses.

- Results require a gradient whether or not the arguments do: no rank can see whether another one
  needs it. If none does, call the communicator's verbs, or call these in `torch.no_grad()`.
- Every rank that took part in a call takes part in its backward. Autograd runs backward in the
  reversed order of the calls, so the same order on all ranks is enough, as in the forward pass.
- A rank that only sends (`send`; `gather` away from the root) gets a *delegate*, a zero whose
  backward waits for the gradient. The delegate must be part of what `backward` is called on:
  `delegate.backward()`, `loss + delegate` or `pseudo_connect`.
- A rank that only receives may pass a delegate in, to order calls or to differentiate them twice.
- If a rank does not make a backward call, an error names it within `timeout_s`.
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
