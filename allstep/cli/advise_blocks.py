"""The blocks and optimizer states of a model that is no recipe, for `--mesh`."""

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
    """The blocks that `--transformer` describes.

    Args:
        known: the flags of `allstep advise`.
    """

    def __init__(self, known: Namespace) -> None:
        self._known = known

    def check_mesh(self, mesh: MeshSpec) -> None:
        """Raises UsageError for a mesh that does not divide the blocks, or without blocks."""
        blocks = self._blocks()
        blocks.check_tensor(mesh.tensor)
        check_pipeline(blocks, mesh, self._micro_batch, self._known.global_batch)

    @property
    def longest_pipeline(self) -> int:
        """The number of blocks; 1 without a batch of several micro-batches."""
        return 1 if self._known.global_batch is None else self._blocks().depth

    @property
    def _micro_batch(self) -> int | None:
        """The samples of a micro-batch, if that is known before measuring."""
        return None

    def model(self, micro: Workload) -> tuple[TransformerSpec, float]:
        """The blocks, and the optimizer's states of a parameter."""
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
    """Raises UsageError for too many stages for the blocks or the micro-batches."""
    if mesh.pipeline == 1:
        return
    stages = PipelineSpec(transformer=blocks, mesh=mesh)
    if micro_batch is not None:
        copy_samples = micro_batch if global_batch is None else ceil(global_batch / mesh.data)
        stages.check_micro_batches(ceil(copy_samples / micro_batch))


def num_states(optimizer: Optimizer) -> int:
    """How many numbers an optimizer keeps for each parameter, without counts of steps."""
    states = (state for of in optimizer.state.values() for state in of.values())
    return sum(state.numel() for state in states if torch.is_tensor(state) and state.dim())
