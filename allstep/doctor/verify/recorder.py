"""Watches an attached model in training and writes down what each step does."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _pytree as pytree

from allstep.comm import Communicator, DividedModules, Mesh, divided_modules, stages_of
from allstep.doctor.script import Attach, ScriptRefusedError
from allstep.doctor.verify.ablation import Ablation, Factor, called_modules
from allstep.doctor.verify.checksums import checksum, checksums_of_samples, random_states
from allstep.doctor.verify.outputs import OutputSum, OutputWatch
from allstep.doctor.verify.parts import Parts, join_sketches
from allstep.doctor.verify.record import StepRecord, WorkerRecord
from allstep.doctor.verify.sketch import Sketch, Sketcher, pieces
from allstep.exchange import (
    AccumulationHook,
    Exchange,
    ExchangePolicy,
    FunctionHook,
    LocalSGD,
    Removable,
)
from allstep.torch_classes import is_dtensor


class Recorder:
    """One worker's record of its first steps.

    A step is a call of `step` of an optimizer that has parameters of an attached model. All it
    takes are public hooks, which change nothing in the training.

    Args:
        rank: of the worker.
        num_steps: steps to write down.
        on_end: called after the last of them.
        without: factors to take out of the training.
        axes: name -> length, of the mesh that the script has to make; empty for any, or none.
        shapes: of whole parameters, from the record of another run. [Note: parts by shape]

    Attributes:
        record: what was written down.
        ablation: takes the factors out.
        num_events: forwards and steps so far, from which one can see that the script lives.
    """

    def __init__(
        self,
        rank: int,
        num_steps: int,
        on_end: Callable[[], None],
        without: Sequence[Factor] = (),
        *,
        axes: Mapping[str, int] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.record = WorkerRecord(rank=rank)
        self.ablation = Ablation(without, self.record)
        self.num_events = 0
        self._num_steps = num_steps
        self._on_end = on_end
        self._parts = Parts(self.record, axes or {}, shapes or {})
        self._outputs: list[OutputWatch] = []
        self._sketch = Sketcher()
        self._models: list[nn.Module] = []
        self._exchanges: dict[nn.Module, Exchange] = {}  # of what is called
        self._later_stages: set[nn.Module] = set()
        self._optimizers: list[Optimizer] = []
        self._device_types: set[str] = set()
        self._samples: list[int] = []
        self._input_shapes: list[list[int]] = []
        self._local: dict[nn.Parameter, Tensor] = {}
        self._gradients: dict[str, Sketch] = {}
        self._options: list[dict[str, float]] = []
        self._hooks: list[Removable] = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def see_mesh(self, mesh: Mesh[Communicator]) -> None:
        """Takes note of a mesh that the script has made."""
        self._parts.see_mesh(mesh)

    def attach(
        self,
        attach: Attach,
        model: nn.Module,
        comm: Communicator,
        policy: ExchangePolicy | None = None,
        **options: Any,
    ) -> Exchange:
        """Attaches without the factors, and watches the model from then on."""
        self.ablation.prepare(getattr(model, "_orig_mod", model))
        if not self._models:
            self.record.torch_seeds = [torch.initial_seed()]
            self.record.random_states = random_states()
        if stages_of(model) and divided_modules(model):
            raise ScriptRefusedError(
                "attaches a pipeline whose stages have experts on several workers, which each run"
                " samples of others, too: compare it without experts, or without a pipeline."
            )
        self._parts.check_mesh()
        exchange = attach(model, comm, self.ablation.policy(policy), **options)
        self.ablation.apply(exchange)
        model, record = exchange.model, self.record
        record.num_attached += 1
        record.num_batch_norms += sum(isinstance(m, _BatchNorm) for m in model.modules())
        if exchange.comm.size > 1 and (name := _inexact(exchange.policy)):
            record.policies.append(name)
        self.num_events += 1
        self._models.append(model)
        self._parts.add(model, exchange.comm, f"model {len(self._models) - 1}: ")
        self._outputs.append(OutputWatch(model, self._sketch))
        self._hooks += self._outputs[-1].hooks
        hook = FunctionHook(self, self._before_forward)
        for name, module in called_modules(model).items():
            self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            self._exchanges[module] = exchange
            if name not in ("", "0"):
                self._later_stages.add(module)
        precision = FunctionHook(self, self._note_precision)
        self._hooks += [
            module.register_forward_pre_hook(precision)
            for module in model.modules()
            if module is not model
        ]
        for p in model.parameters():
            if p.requires_grad and not is_lazy(p):
                self._hook_gradient(p, exchange)
        return exchange

    def close(self) -> None:
        """Removes all hooks."""
        self.ablation.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # -- hooks ---------------------------------------------------------------------------------

    def _hook_gradient(self, p: nn.Parameter, exchange: Exchange) -> None:
        def add(gradient: Tensor | None) -> None:
            if gradient is None:
                return
            if exchange.batch.step is None:
                self.record.is_in_steps = False
            with torch.no_grad():
                earlier = self._local.get(p)
                kept = gradient  # a part, until the step: others may not be there to gather it
                if not self._parts.is_cut(p):
                    kept = torch.tensor(self._sketch(gradient).products, dtype=torch.float64)
                kept = kept * exchange.batch.scale * exchange.comm.size  # the mean counts
                self._local[p] = kept if earlier is None else earlier + kept

        self._hooks.append(AccumulationHook(p, add))

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self.num_events += 1
        if not (torch.is_grad_enabled() and model.training):
            return
        in_steps = self._exchanges[model].batch.step is not None  # which seeds each micro-batch
        if len(self.record.torch_seeds) == 1 and not in_steps:
            self.record.torch_seeds.append(torch.initial_seed())
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        self._device_types |= {p.device.type for p in model.parameters()}
        self._note(dtypes | self._autocast_dtypes())
        if model in self._later_stages:  # which take what others made of the samples
            return
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        samples = checksums_of_samples(leaves)
        exchange = self._exchanges[model]
        may_repeat = exchange.is_fully_sharded or model is not exchange.model
        if may_repeat and samples == self._samples[-len(samples) :]:
            return  # a pass for others, or in which a pipeline finds out shapes: the same samples
        self._samples += samples
        self._input_shapes += [_shape(leaf) for leaf in leaves[:1]]

    def _note_precision(self, _module: nn.Module, _args: Any) -> None:
        """Autocast may begin inside of the model's forward."""
        if torch.is_grad_enabled():
            self._note(self._autocast_dtypes())

    def _autocast_dtypes(self) -> set[torch.dtype]:
        if self.ablation.is_float64:  # which autocast leaves as it is
            return set()
        enabled = filter(torch.is_autocast_enabled, self._device_types)
        return {torch.get_autocast_dtype(device_type) for device_type in enabled}

    def _note(self, dtypes: Iterable[torch.dtype]) -> None:
        """The coarsest format that the models compute in counts."""
        epsilons = (torch.finfo(dtype).eps for dtype in dtypes)
        self.record.epsilon = max(self.record.epsilon, *epsilons, 0.0)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        own = dict(self._own(optimizer))
        if not own:
            return
        if not self.record.steps:
            everything = (named for model in self._models for named in self._named(model))
            self.record.initial_parameters = self._sketches((n, p, p) for n, p in everything)
            self._parts.note_shapes(named for model in self._models for named in self._named(model))
        self._options = [_numbers(group) for group in optimizer.param_groups]
        self._gradients = self._sketches(
            (name, p, p.grad) for name, p in own.items() if p.grad is not None
        )
        for p in own.values():
            if is_dtensor(p.grad):  # FSDP2 has summed them: nobody sees one worker's
                products = self._sketch(self._parts.whole(p, p.grad)).products
                self._local[p] = torch.tensor(products, dtype=torch.float64)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        own = dict(self._own(optimizer))
        if not own:
            return
        self.num_events += 1
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        divided = self._divided()
        shared = {name: p for name, p in own.items() if p not in divided}
        if len(self.record.steps) < self._num_steps:
            self.record.steps.append(
                StepRecord(
                    options=self._options,
                    samples=self._samples,
                    local_gradients=self._join(
                        {
                            name: Sketch(0.0, self._local_products(p))
                            for name, p in shared.items()
                            if p in self._local
                        }
                    ),
                    gradients=self._gradients,
                    parameters=self._sketches((name, p, p) for name, p in own.items()),
                    checksum=reduce(
                        lambda c, p: checksum(self._parts.whole(p, p), c), shared.values(), 0
                    ),
                    optimizer=self._optimizers.index(optimizer),
                    input_shapes=self._input_shapes,
                    outputs=self._take_outputs(),
                )
            )
        self._samples, self._input_shapes = [], []
        self._local.clear()
        if len(self.record.steps) == self._num_steps:
            self._on_end()

    def _local_products(self, p: nn.Parameter) -> list[float]:
        kept = self._local[p]
        if self._parts.is_cut(p):
            return self._sketch(self._parts.whole(p, kept)).products
        products: list[float] = kept.tolist()
        return products

    def _take_outputs(self) -> dict[str, OutputSum]:
        return {
            self._prefix(model) + name: found
            for model, watch in zip(self._models, self._outputs, strict=True)
            for name, found in watch.take().items()
        }

    def _sketches(self, tensors: Iterable[tuple[str, nn.Parameter, Tensor]]) -> dict[str, Sketch]:
        """Of parameters or their gradients, by the parameters' names."""
        return self._join(
            {
                name: self._sketch(piece)
                for of, p, tensor in tensors
                for name, piece in pieces(of, self._parts.whole(p, tensor))
            }
        )

    def _join(self, sketches: dict[str, Sketch]) -> dict[str, Sketch]:
        for model in self._models:
            sketches = join_sketches(sketches, model, self._prefix(model))
        return sketches

    def _divided(self) -> set[nn.Parameter]:
        """What only one worker has, whose gradient is of all workers' samples.

        On one worker, too, which is compared with several.
        """
        modules = (module for model in self._models for module in model.modules())
        divided = (module for module in modules if isinstance(module, DividedModules))
        return {p for module in divided for p in module.parameters()}

    def _own(self, optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the optimizer's parameters that are attached."""
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for model in self._models:
            yield from ((name, p) for name, p in self._named(model) if id(p) in known)

    def _named(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        for name, p in model.named_parameters():
            if not is_lazy(p):
                yield self._prefix(model) + name, p

    def _prefix(self, model: nn.Module) -> str:
        return f"model {self._models.index(model)}: " if len(self._models) > 1 else ""


def _inexact(policy: ExchangePolicy) -> str | None:
    """What keeps an exchange's policy from giving every step the mean of its own gradients.

    >>> from allstep.exchange import Stale
    >>> _inexact(Stale(compression="fp16"))
    'compression="fp16", staleness=1'
    """
    words = []
    if not policy.wire_format.is_lossless:
        words.append(f'compression="{policy.wire_format.name}"')
    if policy.staleness:
        words.append(f"staleness={policy.staleness}")
    if isinstance(policy, LocalSGD):
        words.append(f"sync_every={policy.sync_every}")
    return ", ".join(words) or None


def _numbers(group: dict[str, Any]) -> dict[str, float]:
    """A parameter group's options that are numbers.

    >>> _numbers({"params": [], "lr": torch.tensor(0.5), "betas": (0.5, 0.25), "fused": None})
    {'lr': 0.5, 'betas[0]': 0.5, 'betas[1]': 0.25}
    """
    numbers: dict[str, float] = {}
    for key, value in group.items():
        if key == "params" or key.endswith("_lr"):  # what a scheduler starts from, or aims at
            continue
        is_pair = isinstance(value, (tuple, list))
        items = [(f"{key}[{i}]", v) for i, v in enumerate(value)] if is_pair else [(key, value)]
        for name, item in items:
            is_scalar = isinstance(item, Tensor) and item.numel() == 1
            if is_scalar or (isinstance(item, (int, float)) and not isinstance(item, bool)):
                numbers[name] = float(item)
    return numbers


def _shape(tensor: Tensor) -> list[int]:
    """Of a nested tensor only the number of samples: they may differ in the rest."""
    return [tensor.size(0)] if tensor.is_nested else list(tensor.shape)
