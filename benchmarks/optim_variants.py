"""The optimizers that `bench_optim` compares, and the weights that they update."""

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from allstep.optim import LAMB, LARS

__all__ = ["FAMILIES", "SHAPES", "Groups", "make_groups", "with_own_gradients"]

Groups = list[dict[str, Any]]
Make = Callable[[Groups], torch.optim.Optimizer]


def bert_shapes() -> list[tuple[int, ...]]:
    """BERT-base with 30,522 words: 108 M parameters without the output layer."""
    d, hidden = 768, 3072
    layer = [*[(d, d), (d,)] * 4, (d,), (d,), (hidden, d), (hidden,), (d, hidden), (d,), (d,), (d,)]
    return [(30522, d), (512, d), (2, d), (d,), (d,), *layer * 12]


def resnet_shapes() -> list[tuple[int, ...]]:
    """ResNet-50: 25.6 M parameters."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            for out, inner, kernel in (
                (width, channels, 1),
                (width, width, 3),
                (4 * width, width, 1),
            ):
                shapes += [(out, inner, kernel, kernel), (out,), (out,)]
            if block == 0:
                shapes += [(4 * width, channels, 1, 1), (4 * width,), (4 * width,)]
            channels = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


SHAPES = {"bert": bert_shapes, "resnet50": resnet_shapes}


def make_groups(shapes: Iterable[tuple[int, ...]], device: str, weight_decay: float) -> Groups:
    """Random weights with gradients: matrices and kernels decayed and adapted, vectors not."""
    generator = torch.Generator().manual_seed(0)
    groups: Groups = [
        {"params": [], "weight_decay": weight_decay, "adapt": True},
        {"params": [], "weight_decay": 0.0, "adapt": False},
    ]
    for shape in shapes:
        parameter = nn.Parameter((0.02 * torch.randn(shape, generator=generator)).to(device))
        parameter.grad = 1e-3 * torch.randn_like(parameter)
        groups[len(shape) < 2]["params"].append(parameter)
    return groups


def with_own_gradients(groups: Groups) -> Groups:
    """The same memory for weights; gradients are copied, because peers' steps change them."""
    own: Groups = []
    for group in groups:
        params = [nn.Parameter(p.detach()) for p in group["params"]]
        for parameter, source in zip(params, group["params"], strict=True):
            parameter.grad = source.grad.clone()
        own.append({**group, "params": params})
    return own


def timm_lamb() -> Any:
    """timm's file of LAMB without its front doors, which need torchvision."""
    spec = importlib.util.find_spec("timm")
    if spec is None:
        raise ImportError("No module named 'timm'")
    (folder,) = spec.submodule_search_locations or []
    for name, path in (("timm", folder), ("timm.optim", f"{folder}/optim")):
        door = types.ModuleType(name)
        door.__path__ = [path]
        sys.modules[name] = door
    return importlib.import_module("timm.optim.lamb").Lamb


def lamb_variants() -> dict[str, Make]:
    """By name; those that are not installed are left out, and said so."""
    return {
        "AdamW, fused": partial(torch.optim.AdamW, lr=1e-4, fused=True),
        **_all_ways("LAMB", partial(LAMB, lr=1e-4)),
        'LAMB, nonfinite="skip"': partial(LAMB, lr=1e-4, nonfinite="skip"),
        **_installed(
            pytorch_optimizer=partial(_peer, "pytorch_optimizer", "Lamb", weight_decouple=False),
            torch_optimizer=partial(_peer, "torch_optimizer", "Lamb"),
            timm=lambda: partial(timm_lamb(), lr=1e-4, max_grad_norm=None),
        ),
    }


def lars_variants() -> dict[str, Make]:
    return {
        "SGD, fused": partial(torch.optim.SGD, lr=1e-4, momentum=0.9, fused=True),
        **_all_ways("LARS", partial(LARS, lr=1e-1)),
        'LARS, variant="lamb_paper"': partial(LARS, lr=1e-4, variant="lamb_paper"),
        **_installed(
            pytorch_optimizer=partial(_peer, "pytorch_optimizer", "LARS"),
            torch_optimizer=partial(_peer, "torch_optimizer", "LARS", momentum=0.9),
        ),
    }


def _all_ways(name: str, make: Callable[..., torch.optim.Optimizer]) -> dict[str, Make]:
    return {
        name: make,
        f"{name}, plain": partial(make, fused=False),
    }


def _peer(module: str, name: str, **options: Any) -> Make:
    return partial(getattr(importlib.import_module(module), name), lr=1e-4, **options)


def _installed(**peers: Callable[[], Make]) -> dict[str, Make]:
    found = {}
    for name, load in peers.items():
        try:
            found[name] = load()
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return found


FAMILIES = {"lamb": (lamb_variants, "bert", 0.01), "lars": (lars_variants, "resnet50", 1e-4)}
