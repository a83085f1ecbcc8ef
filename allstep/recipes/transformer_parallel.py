"""Divides the transformer among workers; separate, as importing torch's part takes seconds."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
)

import allstep
from allstep import Communicator
from allstep.recipes.transformer import Block, Transformer, TransformerStage


def tensor_parallel_plan(model: Transformer) -> dict[str, ParallelStyle]:
    """A plan for torch's `parallelize_module`, for heads, hidden features, tokens and vocabulary.

    Between the halves of blocks (norms, dropout and sums) each worker has a part of each sequence's
    tokens. Embeddings and logits are sharded along the vocabulary, and the logits stay sharded.
    """
    tokens, whole, vocabulary = Shard(1), Replicate(), Shard(0)
    plan: dict[str, ParallelStyle] = {
        "token_embedding": RowwiseParallel(input_layouts=whole, output_layouts=tokens),
        "add": PrepareModuleInputOutput(
            input_layouts=(tokens, whole),
            desired_input_layouts=(tokens, Shard(0)),
            output_layouts=tokens,
            desired_output_layouts=tokens,
        ),
        "dropout": SequenceParallel(use_local_output=True),
        "norm": SequenceParallel(use_local_output=True),
        "logits": PrepareModuleInput(
            input_layouts=(tokens, vocabulary),
            desired_input_layouts=(whole, vocabulary),
            input_kwarg_layouts={"positions": whole},
            desired_input_kwarg_layouts={"positions": whole},
        ),
    }
    for i in range(len(model.blocks)):
        plan |= _block_plan(f"blocks.{i}", model.blocks[i], tokens)
        for name in ("attention_norm", "mlp_norm", "dropout"):
            plan[f"blocks.{i}.{name}"] = SequenceParallel(use_local_output=True)
    return plan


def divide_stage(stage: TransformerStage, mesh: allstep.comm.Mesh[Communicator]) -> nn.Module:
    """Divides heads and hidden features of a stage's block along `tensor`; returns the stage."""
    return allstep.nn.tensor_parallel(stage, mesh, _block_plan("block", stage.block, Replicate()))


def _block_plan(name: str, block: nn.Module, between: Placement) -> dict[str, ParallelStyle]:
    """The plan for a block's heads and hidden features.

    Args:
        name: the block's name in the model.
        block: the block.
        between: placement of the features before and after each half.
    """
    attention = f"{name}.attention"
    plan: dict[str, ParallelStyle] = {
        # The gradients of query, key and value are added locally, then summed in one all-reduce.
        attention: PrepareModuleInput(
            input_layouts=(between,), desired_input_layouts=(Replicate(),)
        )
    }
    plan |= {f"{attention}.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    plan |= {f"{attention}.output": RowwiseParallel(output_layouts=between)}
    return plan | _mlp_plan(f"{name}.mlp", block.get_submodule("mlp"), between)


def _mlp_plan(name: str, mlp: nn.Module, between: Placement) -> dict[str, ParallelStyle]:
    """The plan for an MLP's hidden features; routers have all tokens, so all workers choose alike.

    Args:
        name: the layer's name in the model.
        mlp: a single network, or this worker's experts.
        between: placement of the features before and after the layer.
    """
    if not isinstance(mlp, allstep.nn.MixtureOfExperts):
        return {
            f"{name}.hidden": ColwiseParallel(input_layouts=between),
            f"{name}.output": RowwiseParallel(output_layouts=between),
        }
    plan: dict[str, ParallelStyle] = {
        name: PrepareModuleInputOutput(
            input_layouts=(between,),
            desired_input_layouts=(Replicate(),),
            use_local_input=True,
            output_layouts=(Replicate(), None),  # the other output is the balance loss
            desired_output_layouts=(between, Replicate()),
        )
    }
    for number in mlp.experts:
        plan |= _mlp_plan(f"{name}.experts.{number}", mlp.experts[number], Replicate())
    return plan


def shard_blocks(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shards each block separately by FSDP2, so that only one is whole at a time; then the rest.

    Experts that are divided among workers are not sharded.

    Args:
        model: a transformer or a stage of one, on its device.
        mesh: the data-parallel workers: shards, or copies x shards.
    """
    mixtures = [m for m in model.modules() if isinstance(m, allstep.nn.MixtureOfExperts)]
    divided = [mixture.experts for mixture in mixtures if mixture.experts.comm.size > 1]
    own = {p for experts in divided for p in experts.parameters()}
    for module in (*(m for m in model.modules() if isinstance(m, Block)), model):
        fully_shard(module, mesh=mesh, ignored_params=own)
