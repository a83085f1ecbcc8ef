import pytest
import torch
from torch import nn

from allstep.recipes.resnet import Depth, ResNet, resnet

# The numbers of parameters that are published for 1,000 classes.
PUBLISHED = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}


@pytest.mark.parametrize("depth", PUBLISHED)
def test_resnet_number_of_parameters(depth: Depth) -> None:
    with torch.device("meta"):
        model = resnet(depth)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[depth]


def residual_scales(model: ResNet) -> list[nn.Parameter]:
    return [block.residual[-1].weight for block in model.blocks]  # type: ignore[index, union-attr]


@pytest.mark.parametrize("depth", [18, 50])
def test_resnet_block_starts_as_the_identity(depth: Depth) -> None:
    torch.manual_seed(0)
    model = resnet(depth, num_classes=5, stem="small").eval()
    assert all(not scale.any() for scale in residual_scales(model))
    x = torch.rand(2, 256 if depth == 50 else 64, 8, 8)
    block = model.blocks[1]
    torch.testing.assert_close(block(x), x)
    nn.init.ones_(residual_scales(model)[1])
    assert (block(x) - x).abs().max() > 0.1


@pytest.mark.parametrize(("stem", "size"), [("large", 64), ("small", 16)])
def test_resnet_shapes(stem: str, size: int) -> None:
    model = resnet(18, num_classes=5, stem=stem).eval()  # type: ignore[arg-type]
    assert model(torch.rand(2, 3, size, size)).shape == (2, 5)


def test_resnet_stride_is_on_the_3x3_convolution() -> None:
    model = resnet(50, num_classes=5)
    strided = [m for m in model.blocks.modules() if isinstance(m, nn.Conv2d) and m.stride == (2, 2)]
    assert sorted(m.kernel_size[0] for m in strided) == [1, 1, 1, 3, 3, 3]
    assert all(m.in_channels == m.out_channels for m in strided if m.kernel_size == (3, 3))
