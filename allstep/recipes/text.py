"""Trains a small transformer on any folder of text files, to fill in or to continue text."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

import allstep
from allstep import Communicator, Metrics, Task, UsageError
from allstep.recipes.base import names_kept
from allstep.recipes.texts import TokenRecipe
from allstep.recipes.token_loss import most_likely, summed_cross_entropy
from allstep.recipes.transformer import (
    Experts,
    Transformer,
    TransformerConfig,
    TransformerStage,
)

if TYPE_CHECKING:  # its import takes seconds
    from torch.distributed.device_mesh import DeviceMesh

_MIN_VOCAB_SIZE = 258

_ACTIVATION_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Text(TokenRecipe):
    """Reads `folder/**/*.txt`, learns tokens from the texts, and trains a transformer on them.

    The texts are kept in memory as tokens. The end of each text is held out.
    """

    name: ClassVar[str] = "text"
    summary: ClassVar[str] = "any folder of text files, a small transformer; minutes"
    warmup_share: ClassVar[float] = 0.125

    epochs: int = 2
    global_batch: int = 32
    micro_batch: int = 16
    optimizer: allstep.optim.OptimizerName = "adamw"
    lr: float = 3e-3
    weight_decay: float = 0.05
    clip_norm: float | None = 1.0

    objective: Literal["masked", "causal"] = "causal"
    """Predict masked tokens (15 %) from all others, or each token from those before it."""

    samples: Literal["pieces", "paragraphs"] = "pieces"
    """Cut the running text into equal pieces; or use each paragraph (up to an empty line) as a
    sample, padded in its micro-batch, and average over the tokens of a global batch."""

    width: int = 128
    """Features of a token."""

    depth: int = 4
    """Blocks of the transformer."""

    heads: int = 4
    """Attention heads; they divide `width`."""

    experts: int | None = None
    """Feed-forward networks of each block, divided over the data-parallel workers; a token goes
    through `top_k` of them. None for a single network."""

    expert_copies: int | None = None
    """Copies of each expert, on as many data-parallel workers; a copy of all experts is on
    neighbouring workers, whose number divides `experts`. None for the fewest copies. A single
    worker always has one."""

    top_k: int = 2
    """Experts per token, each with 1 / top_k of the hidden features of a single network."""

    capacity_factor: float | None = None
    """Largest number of a micro-batch's tokens that an expert accepts, relative to an equal share,
    with any number of workers; the others are dropped from its sum, second choices first, then
    later tokens. None for no limit."""

    balance_weight: float = 0.01
    """Weight of the balance loss, which makes the router use all experts equally."""

    tensor_parallel: int = 1
    """Workers that share a copy of the model, each with a part of the heads, hidden features and
    vocabulary, and of each sequence's tokens between the halves of a block; these are padded to a
    multiple. Copies are data-parallel. A single worker always has the whole model."""

    pipeline: int = 1
    """Parts of a copy of the model with equally many blocks, one after the other on different
    workers; each part is also divided by `tensor_parallel`. Divides `depth`. Above 1 the logits
    aren't tied to the embeddings. A single worker always has the whole model."""

    shard: bool = False
    """Shard parameters, gradients and optimizer state by torch's FSDP2, which gathers a block's
    parameters when it computes, over the data-parallel workers: all workers, or with
    `tensor_parallel` and `pipeline` those with the same part. Experts stay on their worker. A
    single worker always has the whole state."""

    replicate: int = 1
    """Copies of the shards (HSDP), each on as many neighbouring data-parallel workers. With as many
    copies as workers nothing is sharded."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer = allstep.errors.check_integer
        check_integer(
            "vocab_size", self.vocab_size, _MIN_VOCAB_SIZE, "a token for each byte and two more"
        )
        if self.samples == "paragraphs" and self.objective != "causal":
            raise UsageError(
                f"`samples` (={self.samples!r}) needs `objective` 'causal', not {self.objective!r}."
            )
        for name in ("width", "depth", "heads"):
            check_integer(name, getattr(self, name))
        allstep.errors.check_multiple("width", self.width, "heads", self.heads)
        if self.experts is not None:
            self._check_experts(self.experts)
        for name in ("tensor_parallel", "pipeline", "replicate"):
            check_integer(name, getattr(self, name))
        if self.expert_copies is not None:
            check_integer("expert_copies", self.expert_copies)
            if self.experts is None:
                raise UsageError(
                    f"`expert_copies` (={self.expert_copies}) counts copies of experts: give"
                    " `experts`, too."
                )
        self._check_copies()
        if self.replicate > 1 and not self.shard:
            raise UsageError(
                f"`replicate` (={self.replicate}) counts the copies of shards: give `shard`, too."
            )
        if self.shard:
            self._check_shard()

    @property
    def divides_model(self) -> bool:
        return self.copy_size > 1 or self.shard

    @property
    def copy_size(self) -> int:
        return self.tensor_parallel * self.pipeline

    @property
    def transformer(self) -> allstep.plan.TransformerSpec | None:
        if self.experts is not None:
            return None
        return allstep.plan.TransformerSpec(
            depth=self.depth,
            width=self.width,
            heads=self.heads,
            sequence_length=self.sequence_length,
            activation_bytes=_ACTIVATION_BYTES[self.precision],
        )

    def divided_layers(self, model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
        layers = dict(model.named_modules())
        halves = [m for name, m in layers.items() if name.endswith((".attention", ".mlp"))]
        return halves, [layers["logits"]]

    def with_mesh(self, *, pipeline: int, tensor: int) -> "Text":
        return replace(self, pipeline=pipeline, tensor_parallel=tensor)

    def _check_copies(self) -> None:
        """Checks that the options allow copies of the model on several workers."""
        for name, divided, reason in (
            ("tensor_parallel", "heads", "divides it"),
            ("pipeline", "depth", "has its blocks on several workers"),
        ):
            length = getattr(self, name)
            if length == 1:
                continue
            allstep.errors.check_multiple(divided, getattr(self, divided), name, length)
            allstep.train.check_sharded(self, f"`{name}` (={length}) {reason}")
        num_hidden = 4 * self.width // self.top_k
        if self.experts is not None and num_hidden % self.tensor_parallel:
            raise UsageError(
                f"`tensor_parallel` (={self.tensor_parallel}) must divide the {num_hidden} hidden"
                f" features of an expert, four times `width` (={self.width}) by `top_k`"
                f" (={self.top_k})."
            )
        if self.tensor_parallel > 1 and self.pipeline == 1:
            for name in ("vocab_size", "sequence_length", "second_sequence_length"):
                if (length := getattr(self, name)) is not None:
                    workers = self.tensor_parallel
                    allstep.errors.check_multiple(name, length, "tensor_parallel", workers)
        if self.pipeline > 1 and self.samples == "paragraphs":
            raise UsageError(
                f"`samples` (={self.samples!r}) have another length in each micro-batch, and those"
                f" of one shape go together through `pipeline` (={self.pipeline}); take 'pieces'."
            )

    def _check_shard(self) -> None:
        reason = f"`shard` (={self.shard}) does"
        if self.compression not in ("fp32", "exact"):
            raise UsageError(
                f"`compression` (={self.compression!r}) is for a model that FSDP2 has not sharded,"
                f" and {reason}; leave one of them out."
            )
        allstep.train.check_sharded(self, reason)

    def _check_experts(self, num_experts: int) -> None:
        for name, least in (("experts", 2), ("top_k", 1)):
            allstep.errors.check_integer(name, getattr(self, name), least)
        if self.top_k > num_experts:
            raise UsageError(f"`top_k` (={self.top_k}) must be at most `experts` (={num_experts}).")
        if 4 * self.width % self.top_k:
            raise UsageError(
                f"`top_k` (={self.top_k}) must divide the {4 * self.width} hidden features of a"
                f" block, four times `width` (={self.width}): 1, 2 or 4 always do."
            )
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            raise UsageError(
                f"`capacity_factor` (={self.capacity_factor}) must be positive, 1.25 say, or None"
                " for no limit."
            )
        if not 0 <= self.balance_weight < math.inf:
            raise UsageError(f"`balance_weight` (={self.balance_weight}) must be 0 or more.")
        for name in ("staleness", "sync_every"):
            if value := getattr(self, name):
                raise UsageError(
                    f"`{name}` (={value!r}) is for models that are whole on every worker, and"
                    f" `experts` (={num_experts}) are divided over them; leave one of them out."
                )

    def check_workers(self, num_workers: int) -> None:
        """Checks that experts and copies of the model divide evenly among the workers."""
        if num_workers > 1 and num_workers % self.copy_size:
            nearest = allstep.errors.nearest_multiples(num_workers, self.copy_size)
            axes = [
                f"`{name}` (={getattr(self, name)})"
                for name in ("pipeline", "tensor_parallel")
                if getattr(self, name) > 1
            ]
            raise UsageError(
                f"{' x '.join(axes)} must divide the {num_workers}"
                f" workers, as that many share a copy of the model; start {nearest}, or 1."
            )
        if num_workers > 1 and self.pipeline > 1:
            self._check_micro_batches(num_workers // self.copy_size)
        num_copies = max(1, num_workers // self.copy_size)
        if num_workers > 1 and num_copies % self.replicate:
            nearest = allstep.errors.nearest_multiples(num_copies, self.replicate)
            raise UsageError(
                f"`replicate` (={self.replicate}) must divide the {num_copies} workers that share"
                f" out the samples, as every copy of the shards has as many; nearest: {nearest}."
            )
        if self.experts is not None and self.expert_copies is not None and num_copies > 1:
            self._check_division(self.experts, self.expert_copies, num_copies)

    def _check_division(self, num_experts: int, expert_copies: int, num_copies: int) -> None:
        """Checks that experts divide evenly among the data-parallel workers."""
        which = "workers" if self.copy_size == 1 else "copies of the model"
        if num_copies % expert_copies:
            raise UsageError(
                f"`expert_copies` (={expert_copies}) must divide the {num_copies} {which}."
            )
        size = num_copies // expert_copies
        if num_experts % size:
            nearest = allstep.errors.nearest_multiples(num_experts, size)
            if expert_copies > 1:
                which += " that have one of `expert_copies`"
            raise UsageError(
                f"`experts` (={num_experts}) must be a multiple of the {size} {which}, as each has"
                f" as many; nearest: {nearest}. Or leave `expert_copies` out."
            )

    def _check_micro_batches(self, num_copies: int) -> None:
        """Checks that each copy has enough micro-batches for the pipeline's schedule."""
        num = -(-self.global_batch // self.micro_batch) // num_copies
        if num < self.pipeline:
            copies = f"each of {num_copies} copies" if num_copies > 1 else "the copy"
            raise UsageError(
                f"`pipeline` (={self.pipeline}) needs {self.pipeline} micro-batches of {copies} in"
                f" a step, or more, and there are {num}: take a larger `global_batch`"
                f" (={self.global_batch}) or a smaller `micro_batch` (={self.micro_batch})."
            )

    def build(self, comm: Communicator) -> Task:
        """The task on the folder's texts."""
        tokenizer, train_tokens, test_tokens = self._tokens(comm)

        def make_sets(length: int) -> tuple[Any, Any]:
            return self._sequences(train_tokens, length), self._sequences(test_tokens, length)

        objective = LanguageModelling(
            log_frequencies(train_tokens, self.vocab_size),
            self.samples == "paragraphs",
            self.balance_weight,
            self.depth * self.top_k,
        )
        return self.make_task(
            self._model(comm) if self.pipeline == 1 else self._pipeline(comm, objective),
            *make_sets(self.sequence_length),
            objective,
            self.later_stages(make_sets),
            partial(allstep.data.text_folder.collate_padded, multiple=self.tensor_parallel)
            if self.samples == "paragraphs"
            else None,
            names_kept("vocabulary", allstep.data.text_folder.tokens_of(tokenizer)),
        )

    @property
    def _config(self) -> TransformerConfig:
        return TransformerConfig(
            vocab_size=self.vocab_size,
            sequence_length=self.longest_sequence,
            width=self.width,
            depth=self.depth,
            heads=self.heads,
            dropout=self.dropout,
            causal=self.objective == "causal",
        )

    def _mesh(self, comm: Communicator) -> allstep.comm.Mesh[Communicator]:
        """The mesh of copies of the model, and of the axes along which each is divided."""
        axes = {"pipeline": self.pipeline, "tensor": self.tensor_parallel}
        axes = {name: length for name, length in axes.items() if length > 1}
        if comm.size == 1:
            axes = dict.fromkeys(axes, 1)
        return comm.mesh(data=max(1, comm.size // self.copy_size), **axes)

    def _model(self, comm: Communicator) -> nn.Module:
        mesh = self._mesh(comm)
        model = Transformer(self._config, self._experts(mesh["data"]))
        if comm.size == 1 or not self.divides_model:
            return model
        from allstep.recipes.transformer_parallel import shard_blocks, tensor_parallel_plan

        if self.tensor_parallel > 1:
            allstep.nn.tensor_parallel(model, mesh, tensor_parallel_plan(model))
        if (sharding := self._sharding_mesh(mesh)) is not None:
            shard_blocks(model.to(comm.device), sharding)
        return model

    def _sharding_mesh(self, mesh: allstep.comm.Mesh[Communicator]) -> "DeviceMesh | None":
        """The data-parallel workers; copies x shards if there are several copies of the shards.

        It is None if there is nothing to shard. Collective.
        """
        num_shards = mesh["data"].size // self.replicate
        if not self.shard or num_shards <= 1:
            return None
        if self.replicate == 1:
            return mesh.device_mesh()["data"]
        others = {name: length for name, length in mesh.shape.items() if name != "data"}
        axes = mesh.comm.mesh(replicate=self.replicate, shard=num_shards, **others)
        return axes.device_mesh()["replicate", "shard"]

    def _pipeline(self, comm: Communicator, objective: "LanguageModelling") -> nn.Module:
        """A pipeline with a stage per block; so initial weights don't depend on the workers."""
        from allstep.recipes.transformer_parallel import divide_stage, shard_blocks

        mesh, is_divided = self._mesh(comm), comm.size > 1 and self.tensor_parallel > 1
        experts, sharding = self._experts(mesh["data"]), self._sharding_mesh(mesh)

        def make(number: int) -> nn.Module:
            stage = TransformerStage(self._config, number, experts)
            if is_divided:
                divide_stage(stage, mesh)
            if sharding is not None:
                shard_blocks(stage.to(comm.device), sharding)
            return stage

        return allstep.nn.Pipeline(
            [partial(make, number) for number in range(self.depth)],
            mesh,
            inputs=objective.inputs,
            loss=objective.loss_of,
            weight=objective.weight_of,
        )

    def _experts(self, comm: Communicator) -> Experts | None:
        if self.experts is None:
            return None
        least = comm.size // math.gcd(self.experts, comm.size)
        return Experts(
            comm=comm,
            num=self.experts,
            top_k=self.top_k,
            capacity_factor=self.capacity_factor,
            copies=min(self.expert_copies or least, comm.size),
        )

    def _tokens(self, comm: Communicator) -> tuple[str, Tensor, Tensor]:
        """Rank 0's tokenizer, the training tokens and the held-out tokens."""
        reader = allstep.data.text_folder
        train_texts, test_texts = self.read_texts()
        if self.samples == "paragraphs":
            split = reader.split_paragraphs
            train_texts = [part for text in train_texts for part in split(text)]
            test_texts = [part for text in test_texts for part in split(text)]
        trained = reader.train_tokenizer(train_texts, self.vocab_size) if comm.rank == 0 else None
        tokenizer = comm.broadcast_object(trained)
        train_tokens = reader.encode(tokenizer, train_texts, self.vocab_size)
        test_tokens = reader.encode(tokenizer, test_texts, self.vocab_size)
        self.check_enough(len(train_tokens), "tokens", "to train on")
        self.check_enough(len(test_tokens), "tokens", "held out")
        return tokenizer, train_tokens, test_tokens

    def _sequences(self, tokens: Tensor, sequence_length: int) -> Any:
        reader = allstep.data.text_folder
        if self.samples == "paragraphs":
            return reader.Paragraphs(tokens, sequence_length, end=self.vocab_size - 2)
        if self.objective == "causal":
            return reader.CausalSequences(tokens, sequence_length)
        return reader.MaskedSequences(tokens, sequence_length, self.vocab_size)


@dataclass(frozen=True)
class LanguageModelling:
    """The cross-entropy of predicted tokens, and that of a guess by frequency.

    A micro-batch is (inputs, targets) or (inputs, targets, positions). Targets that are `PADDING`
    of `data.text_folder` are ignored.

    Args:
        unigram_log_probs: logarithm of each token's frequency in the training set, [vocab_size].
        is_padded: whether some targets are padding.
        balance_weight: weight of a mixture's balance loss relative to the mean cross-entropy.
        num_choices: number of experts chosen per token, in all blocks together.
    """

    unigram_log_probs: Tensor
    is_padded: bool = False
    balance_weight: float = 0.0
    num_choices: int = 0

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, float]:
        """The sum of the targets' cross-entropies in nats, and the number of targets.

        The balance loss is multiplied by the number of targets, so that micro-batches are weighted
        by their targets.
        """
        return self.loss_of(model(*self.inputs(batch)), batch), self.weight_of(batch)

    def inputs(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The model's arguments for a micro-batch."""
        tokens, _, *positions = batch
        return (tokens, *positions)

    def loss_of(self, output: Any, batch: tuple[Tensor, ...]) -> Tensor:
        """The summed loss, from the model's output."""
        logits, *use = _parts(output)
        total = summed_cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        for balance_loss in use[:1]:
            total = total + self.balance_weight * self.weight_of(batch) * balance_loss
        return total

    def weight_of(self, batch: tuple[Tensor, ...]) -> float:
        """The number of targets that aren't padding."""
        if self.is_padded:
            return float((batch[1] != allstep.data.text_folder.PADDING).sum())
        return float(batch[1].numel())

    def metrics(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Metrics:
        """Sums and counts of `loss` and `unigram` (nats per target), and of `accuracy`.

        With experts also of `balance`, the balance loss per token, and `dropped`, the share of
        choices that exceeded an expert's capacity.
        """
        inputs, targets, *_ = batch
        logits, *use = _parts(model(*self.inputs(batch)))
        logits, targets = logits.flatten(0, 1), targets.flatten()
        counted = targets[targets != allstep.data.text_folder.PADDING]
        unigram = self.unigram_log_probs.to(targets.device)[counted]
        found: dict[str, tuple[float | Tensor, float | Tensor]] = {
            "loss": (summed_cross_entropy(logits, targets), len(counted)),
            "unigram": (-unigram.sum(), len(counted)),
            "accuracy": ((most_likely(logits) == targets).sum(), len(counted)),
        }
        if use:
            num_tokens = inputs.numel()
            balance_loss, *dropped = use  # only a pipeline returns the number of dropped choices
            layers = (m for m in model.modules() if isinstance(m, allstep.nn.MixtureOfExperts))
            num_dropped = dropped[0] if dropped else sum(layer.num_dropped for layer in layers)
            found["balance"] = (balance_loss * num_tokens, num_tokens)
            found["dropped"] = (num_dropped, num_tokens * self.num_choices)
        return found


def _parts(output: Any) -> tuple[Tensor, ...]:
    """The logits; if the model has experts also the balance loss, and maybe dropped choices."""
    return output if isinstance(output, tuple) else (output,)


def log_frequencies(tokens: Tensor, vocab_size: int) -> Tensor:
    """log((count + 1) / (number of tokens + vocab_size)) of each token, so that all are finite."""
    counts = torch.bincount(tokens, minlength=vocab_size).double() + 1
    return (counts / counts.sum()).log()
