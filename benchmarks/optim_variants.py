"""The optimizers that `bench_optim` compares, and the weights that they update."""

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from allstep.optim import LAMB, LARS

__all__ = ["FAMILIES", "SHAPES", "Groups", "make_groups"]

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
    variants: dict[str, Make] = {
        "AdamW, fused": lambda groups: torch.optim.AdamW(groups, 1e-4, fused=True),
        "LAMB": lambda groups: LAMB(groups, 1e-4),
        'LAMB, nonfinite="skip"': lambda groups: LAMB(groups, 1e-4, nonfinite="skip"),
        "LAMB, foreach": lambda groups: LAMB(groups, 1e-4, foreach=True),
        "LAMB, plain": lambda groups: LAMB(groups, 1e-4, fused=False),
    }
    peers: dict[str, Callable[[], Make]] = {
        "pytorch_optimizer": lambda: _pytorch_optimizer("Lamb"),
        "torch_optimizer": lambda: _torch_optimizer("Lamb"),
        "timm": lambda: _timm(),
    }
    return variants | _installed(peers)


def lars_variants() -> dict[str, Make]:
    variants: dict[str, Make] = {
        "SGD, fused": lambda groups: torch.optim.SGD(groups, 1e-4, momentum=0.9, fused=True),
        "LARS": lambda groups: LARS(groups, 1e-1),
        'LARS, variant="lamb_paper"': lambda groups: LARS(groups, 1e-4, variant="lamb_paper"),
        "LARS, foreach": lambda groups: LARS(groups, 1e-1, foreach=True),
        "LARS, plain": lambda groups: LARS(groups, 1e-1, fused=False),
    }
    peers: dict[str, Callable[[], Make]] = {
        "pytorch_optimizer": lambda: _pytorch_optimizer("LARS"),
        "torch_optimizer": lambda: _torch_optimizer("LARS"),
    }
    return variants | _installed(peers)


def _pytorch_optimizer(name: str) -> Make:
    module = importlib.import_module("pytorch_optimizer")
    options = {"weight_decouple": False} if name == "Lamb" else {}
    return lambda groups: getattr(module, name)(groups, 1e-4, **options)


def _torch_optimizer(name: str) -> Make:
    module = importlib.import_module("torch_optimizer")
    options = {} if name == "Lamb" else {"momentum": 0.9}
    return lambda groups: getattr(module, name)(groups, 1e-4, **options)


def _timm() -> Make:
    lamb = timm_lamb()
    return lambda groups: lamb(groups, 1e-4, max_grad_norm=None)


def _installed(peers: dict[str, Callable[[], Make]]) -> dict[str, Make]:
    found = {}
    for name, load in peers.items():
        try:
            found[name] = load()
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return found


FAMILIES = {"lamb": (lamb_variants, "bert", 0.01), "lars": (lars_variants, "resnet50", 1e-4)}
