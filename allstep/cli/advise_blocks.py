"""What `--mesh` has to know of a model that is no recipe: blocks, and the optimizer's states."""

from argparse import Namespace
from dataclasses import replace
from math import ceil

import torch
from torch.optim import Optimizer

from allstep.cli.quantities import parse_named_counts
from allstep.errors import UsageError
from allstep.plan import MeshSpec, PipelineSpec, TransformerSpec, Workload

_NAMES = ("depth", "width", "heads", "sequence-length")
_ADAMW_STATES = 2.0


class GivenBlocks:
    """Blocks as `--transformer` says them.

    Args:
        known: the flags of `allstep advise`.
    """

    def __init__(self, known: Namespace) -> None:
        self._known = known

    def check_mesh(self, mesh: MeshSpec) -> None:
        """Refuses what doesn't divide, and blocks that aren't given."""
        blocks = self._blocks()
        blocks.check_tensor(mesh.tensor)
        check_pipeline(blocks, mesh, self._micro_batch, self._known.global_batch)

    @property
    def longest_pipeline(self) -> int:
        """As many workers as there are blocks; 1 without a batch of several micro-batches."""
        return 1 if self._known.global_batch is None else self._blocks().depth

    @property
    def _micro_batch(self) -> int | None:
        """Its samples, where that is known before anything is measured."""
        return None

    def model(self, micro: Workload) -> tuple[TransformerSpec, float]:
        """Its blocks, and the optimizer's states of a parameter."""
        blocks = replace(self._blocks(), activation_bytes=micro.element_bytes)
        given = self._known.states_per_param
        return blocks, _ADAMW_STATES if given is None else given

    def _blocks(self) -> TransformerSpec:
        text = self._known.transformer
        if text is None:
            raise UsageError(
                f"`mesh` (={self._known.mesh}) divides a transformer, of which the number of"
                " parameters doesn't say the blocks; give `--transformer"
                " depth=24,width=1024,heads=16,sequence-length=512`, or name the recipe `text`."
            )
        found = parse_named_counts("transformer", text, _NAMES)
        for name in _NAMES:
            if name not in found:
                raise UsageError(f"`transformer` (={text}) doesn't say `{name}`.")
        return TransformerSpec(**{name.replace("-", "_"): count for name, count in found.items()})


def check_pipeline(
    blocks: TransformerSpec,
    mesh: MeshSpec,
    micro_batch: int | None,
    global_batch: int | None,
) -> None:
    """Refuses more stages than blocks, and fewer micro-batches than workers along `pipeline`."""
    if mesh.pipeline == 1:
        return
    stages = PipelineSpec(transformer=blocks, mesh=mesh)
    if micro_batch is not None:
        copy_samples = micro_batch if global_batch is None else ceil(global_batch / mesh.data)
        stages.check_micro_batches(ceil(copy_samples / micro_batch))


def num_states(optimizer: Optimizer) -> int:
    """Numbers that it keeps, but for single ones such as counts of steps."""
    states = (state for of in optimizer.state.values() for state in of.values())
    return sum(state.numel() for state in states if torch.is_tensor(state) and state.dim())
