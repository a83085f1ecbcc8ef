import pytest
import torch
from torch import Tensor, nn

import allstep.optim
from allstep import Communicator
from allstep.errors import UsageError
from allstep.nn import LocallyConnected2d
from allstep.nn.windows import Grid
from allstep.optim import LAMB, LARS, groups


class Scale(nn.Module):
    """A normalisation that torch does not know."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class MyBatchNorm(nn.BatchNorm2d):
    pass


class Block(nn.Module):
    """Nested modules, a parameter of its own, a tied weight, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, 4, 6))
        self.offset = nn.Parameter(torch.zeros(6))
        self.embedding = nn.Embedding(9, 6)
        self.body = nn.ModuleList(
            [
                nn.MultiheadAttention(6, 2, add_bias_kv=True),
                nn.Sequential(nn.Conv2d(3, 6, 3), MyBatchNorm(6), nn.PReLU()),
                nn.LayerNorm([4, 6]),
                nn.RMSNorm([4, 6]),
                nn.GroupNorm(2, 6),
                nn.InstanceNorm1d(6, affine=True),
                nn.LSTM(6, 6),
                Scale(1, 6, 1, 1),
            ]
        )
        self.head = nn.Linear(6, 9)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)


DECAYED = {
    "position",
    "embedding.weight",
    "body.0.in_proj_weight",
    "body.0.out_proj.weight",
    "body.1.0.weight",
    "body.6.weight_ih_l0",
    "body.6.weight_hh_l0",
    "body.7.gain",
}


def test_groups_by_kind_of_module() -> None:
    model = Block()
    decayed, others = groups(model, weight_decay=0.3)
    assert {name for name, _ in decayed["params"]} == DECAYED
    assert (decayed["weight_decay"], decayed["adapt"]) == (0.3, True)
    assert (others["weight_decay"], others["adapt"]) == (0.0, False)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name, _ in others["params"]} == trainable - DECAYED
    # The number of dimensions alone would decay these.
    flat = {name for name, p in others["params"] if p.ndim > 1}
    assert flat == {
        "body.0.bias_k",
        "body.0.bias_v",
        "body.2.weight",
        "body.2.bias",
        "body.3.weight",
    }


def test_groups_ignore_names() -> None:
    class Misnamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Linear(3, 3)
            self.norm = nn.Linear(3, 3, bias=False)
            self.weight = nn.LayerNorm(3)

    decayed, others = groups(Misnamed())
    assert [name for name, _ in decayed["params"]] == ["bias.weight", "norm.weight"]
    assert [name for name, _ in others["params"]] == ["bias.bias", "weight.weight", "weight.bias"]


def test_groups_with_own_normalisation() -> None:
    decayed, _ = groups(Block(), normalisation=(Scale,))
    assert {name for name, _ in decayed["params"]} == DECAYED - {"body.7.gain"}


def test_groups_with_bias_names() -> None:
    """Each place of a locally connected layer has a bias of its own."""
    grid = Grid(Communicator.single_process())
    layer = LocallyConnected2d(grid, grid.split((9, 9)), 3, 5, stride=2, block=(4, 2, 2))
    assert layer.bias is not None and layer.bias.ndim > 1
    decayed, others = groups(layer)
    assert [name for name, _ in decayed["params"]] == ["weight"]
    assert [name for name, _ in others["params"]] == ["bias"]


def test_groups_of_weight_norm_magnitudes() -> None:
    """w = g * v / norm(v): to decay g would be to decay a normalisation's gain."""
    model = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 2))
    decayed, others = groups(model)
    assert [p.shape for _, p in decayed["params"]] == [(4, 3, 2, 2)]
    assert sorted(p.ndim for _, p in others["params"]) == [1, 4]


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_groups_of_old_weight_norm_magnitudes() -> None:
    model = nn.Sequential(torch.nn.utils.weight_norm(nn.Conv2d(3, 4, 2)))
    decayed, others = groups(model)
    assert [name for name, _ in decayed["params"]] == ["0.weight_v"]
    assert sorted(name for name, _ in others["params"]) == ["0.bias", "0.weight_g"]


def test_groups_list_tied_parameters_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = Scale(3, 3)
            self.linear = nn.Linear(3, 3, bias=False)
            self.linear.weight = self.scale.gain

    (group,) = groups(Tied(), normalisation=(Scale,))
    assert [name for name, _ in group["params"]] == ["scale.gain"] and group["adapt"]


def test_optimizers_of_torch_and_allstep_take_the_groups() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    for make in (LAMB, LARS, torch.optim.AdamW, torch.optim.SGD):
        optimizer = make(groups(model), lr=0.1)
        model(torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
        assert [len(group["params"]) for group in optimizer.param_groups] == [1, 3]
        if isinstance(optimizer, LAMB | LARS):
            assert list(optimizer.trust_ratios()) == ["0.weight"]


def test_groups_of_a_single_module_or_none() -> None:
    decayed, others = groups(nn.Linear(2, 2))
    assert decayed["params"][0][0] == "weight" and others["params"][0][0] == "bias"
    assert len(groups(nn.LayerNorm(2))) == 1
    with pytest.raises(UsageError, match="`model` has no trainable parameter"):
        groups(nn.ReLU())


def test_groups_refuse_lazy_parameters() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(UsageError, match=r"parameter `0.weight` has no shape yet; call the model"):
        groups(model)
    model(torch.ones(2, 4))
    assert [name for name, _ in groups(model)[0]["params"]] == ["0.weight"]


def test_groups_refuse_normalisation_that_is_no_tuple() -> None:
    with pytest.raises(UsageError, match=r"`normalisation` \(=<class .*must be a tuple"):
        groups(nn.Linear(2, 2), normalisation=nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"`normalisation` \(=\(3,\)\) must be a tuple of module"):
        groups(nn.Linear(2, 2), normalisation=(3,))  # type: ignore[arg-type]


def test_groups_refuse_parameters_and_negative_decay() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"`model` \(a generator\) must be the module itself"):
        groups(model.parameters())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"`weight_decay` \(=-1\)"):
        groups(model, weight_decay=-1)


def test_lazy_names_of_the_package() -> None:
    for name in allstep.optim.__all__:
        assert hasattr(allstep.optim, name) and name in dir(allstep.optim)
    with pytest.raises(AttributeError, match="has no attribute 'Lamb'"):
        allstep.optim.Lamb  # noqa: B018
