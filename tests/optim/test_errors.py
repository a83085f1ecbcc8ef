"""Bad options, groups and gradients are refused with a clear error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from allstep.errors import UsageError
from allstep.optim import (
    LAMB,
    LARS,
    Adam,
    LayerWise,
    RMSprop,
    RMSpropWarmup,
    SGDRule,
    TrustRatio,
)
from tests.optim.table import (
    Make,
    for_all,
    one,
    parameters,
    set_gradients,
)


@for_all
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, r"`lr` \(=-0.1\) must be a finite number, 0 or more"),
        ({"lr": float("nan")}, r"`lr` \(=nan\) must be a finite number"),
        ({"lr": torch.tensor(-1.0)}, r"`lr` \(=-1.0\) must be a finite number"),
        ({"weight_decay": -1.0}, r"`weight_decay` \(=-1.0\) must be finite and 0 or more"),
        ({"lr": torch.tensor(float("inf"))}, r"`lr` \(=inf\) must be a finite number"),
        ({"lr": "0.1"}, r"`lr` \(='0.1'\) must be a finite number"),
        ({"weight_decay": None}, r"`weight_decay` \(=None\) must be finite and 0 or more"),
        ({"nonfinite": "ignore"}, r"`nonfinite` \(='ignore'\): valid: `raise`, `skip`"),
    ],
)
def test_options_out_of_range(make: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(one(), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LAMB(one(), betas=(0.9, 1.0)), r"`betas` \(=\(0.9, 1.0\)\) must be two numbers"),
        (lambda: LAMB(one(), betas=0.9), r"`betas` \(=0.9\) must be two numbers"),
        (lambda: LAMB(one(), eps=-1.0), r"`eps` \(=-1.0\) must be finite and 0 or more"),
        (
            lambda: TrustRatio(weight_norm_bounds=(2.0, 1.0)),
            r"`weight_norm_bounds` \(=\(2.0, 1.0\)\) must be \(low, high\)",
        ),
        (lambda: TrustRatio(clip=0.0), r"`clip` \(=0.0\) must be positive"),
        (lambda: TrustRatio(eps=-1.0), r"`eps` \(=-1.0\) must be finite"),
        (lambda: TrustRatio(norm="l3"), r"`norm` \(='l3'\) must be one of l1, l2, linf"),  # type: ignore[arg-type]
        (
            lambda: LAMB(one(), trust_ratio=10.0),  # type: ignore[arg-type]
            r"`trust_ratio` \(=10.0\) must be a `TrustRatio`",
        ),
        (
            lambda: LAMB([{"params": one(), "trust_ratio": 10.0}]),
            r"`trust_ratio` \(=10.0\) of a group must be a `TrustRatio`",
        ),
        (
            lambda: LAMB([{"params": one(), "trust_clip": 0.0}]),
            r"`trust_clip` \(=0.0\) must be positive",
        ),
        (lambda: LAMB(one(), capturable=True), r"`nonfinite` \(='raise'\) looks at numbers"),
        (
            lambda: RMSpropWarmup(one(), 0.1, center_steps=1, period_steps=1, rmsprop_lr=-1.0),
            r"`rmsprop_lr` \(=-1.0\) must be finite and 0 or more",
        ),
        (
            lambda: LAMB([{"params": torch.ones(2, dtype=torch.complex64)}]),
            r"params'\]\[0\] \(=torch.complex64\) must be a tensor of real",
        ),
        (lambda: LARS(one(), momentum=1.0), r"`momentum` \(=1.0\) must be at least 0"),
        (lambda: LARS(one(), variant="apex"), r"`variant` \(='apex'\): did you mean `paper`"),
        (lambda: TrustRatio(coefficient=0.0), r"`coefficient` \(=0.0\)"),
        (lambda: LARS(one(), momentum=0.0, nesterov=True), r"`nesterov` \(=True\) needs a"),
        (
            lambda: LARS(one(), variant="lamb_paper", momentum_correction=True),
            r"`momentum_correction` \(=True\) needs the ratio on the gradient",
        ),
        (
            lambda: LARS([{"params": one(), "momentum_correction": True}], variant="lamb_paper"),
            r"`momentum_correction` \(=True\) needs the ratio on the gradient",
        ),
        (
            lambda: LARS([{"params": one(), "nesterov": True}], variant="lamb_paper"),
            r"`nesterov` \(=True\) needs a",
        ),
        (
            lambda: LAMB([{"params": one(), "capturable": True}]),
            r"`nonfinite` \(='raise'\) looks at numbers",
        ),
        (
            lambda: RMSpropWarmup(
                [{"params": one(), "period_steps": -3}], 0.1, center_steps=1, period_steps=1
            ),
            r"`period_steps` \(=-3\) must be positive",
        ),
        (
            lambda: LayerWise(one(), Adam),
            r"`base` \(=<class .*Adam'>\) must be a base update, such",
        ),  # type: ignore[arg-type]
        (lambda: LayerWise(one(), "adam"), r"`base` \(='adam'\) must be a base update, such as"),  # type: ignore[arg-type]
        (
            lambda: LayerWise(one(), Adam(), ratio_on="loss"),
            r"`ratio_on` \(='loss'\): valid: `update`",
        ),
        (lambda: LayerWise(one(), Adam(), ratio_on="gradient"), r"must be `SGDRule` when the"),
        (lambda: SGDRule(momentum=-0.1), r"`momentum` \(=-0.1\)"),
        (lambda: Adam(eps=-0.1), r"`eps` \(=-0.1\)"),
        (lambda: RMSprop(alpha=1.0), r"`alpha` \(=1.0\)"),
        (
            lambda: RMSpropWarmup(one(), 0.1, center_steps=1, period_steps=0),
            r"`period_steps` \(=0\) must be positive",
        ),
        (
            lambda: RMSpropWarmup(one(), 0.1, center_steps=-1, period_steps=1),
            r"`center_steps` \(=-1\) must be 0 or more",
        ),
        (
            lambda: RMSpropWarmup(one(), 0.1, center_steps=None, period_steps=1),  # type: ignore[arg-type]
            r"`center_steps` \(=None\) must be 0 or more",
        ),
        (
            lambda: RMSpropWarmup(one(), 0.1, center_steps=float("inf"), period_steps=1),
            r"`center_steps` \(=inf\) must be 0 or more",
        ),
    ],
)
def test_options_of_single_optimizers_out_of_range(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


@for_all
def test_bad_groups(make: Make) -> None:
    with pytest.raises(UsageError, match="`params` is empty; pass"):
        make([])
    with pytest.raises(UsageError, match="`params` of group 1 is empty; leave the group out"):
        make([{"params": one()}, {"params": []}])
    shared = one()
    with pytest.raises(UsageError, match="group 0 holds a parameter twice; list tied parameters"):
        make(shared * 2)
    overlap = r"group 1 overlaps .* also holds param_groups\[0\]\['params'\]\[0\]"
    with pytest.raises(UsageError, match=overlap):
        make([{"params": shared}, {"params": [*one(), *shared]}])
    with pytest.raises(UsageError, match=r"\(=torch.complex64\) must be a tensor of real"):
        make([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    with pytest.raises(UsageError, match=r"\(=int\) must be a tensor of real"):
        make([1])
    with pytest.raises(UsageError, match=r"\(=torch.float8_e4m3fn\) must be a tensor of real"):
        make([nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn))])
    with pytest.raises(UsageError, match=r"`params` \(=None\) must be parameters or groups"):
        make(None)
    with pytest.raises(UsageError, match=r"`lr` \(=-1\)"):
        make(one()).add_param_group({"params": one(), "lr": -1})
    with pytest.raises(TypeError, match="should be an iterable"):
        make(torch.ones(2))
    with pytest.raises(UsageError, match=r"group 0 \(='lr'\) lacks `params`"):
        make([{"lr": 0.1}])
    with pytest.raises(UsageError, match=r"`nonfinite` \(='skip'\) of a group must be the opt"):
        make([{"params": one(), "nonfinite": "skip"}])


@for_all
def test_negative_lr_from_a_schedule(make: Make) -> None:
    params = parameters()
    optimizer = make(params)
    LambdaLR(optimizer, lambda step: -1.0)
    set_gradients(params, 0)
    with pytest.raises(UsageError, match=r"`lr` \(=-0.01\)"):
        optimizer.step()


@for_all
def test_sparse_gradients(make: Make) -> None:
    embedding = nn.Embedding(4, 3, sparse=True)
    optimizer = make(list(embedding.named_parameters()))
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match=r"gradient of weight \(=torch.sparse_coo\) must be dense"):
        optimizer.step()
