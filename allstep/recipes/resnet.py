"""Residual networks of 18 to 152 layers, as in their paper with the usual refinements."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

Depth = Literal[18, 34, 50, 101, 152]

_NUM_BLOCKS: dict[int, tuple[int, int, int, int]] = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}


def resnet(
    depth: Depth, num_classes: int = 1000, stem: Literal["large", "small"] = "large"
) -> "ResNet":
    """Makes the ResNet with a number of layers.

    Args:
        depth: number of layers; with 18 and 34 the blocks are two 3x3 convolutions, else
            bottlenecks.
        num_classes: number of outputs.
        stem: "large" as in the paper (7x7, stride 2, max pooling); "small" for one 3x3
            convolution, for images of 64 pixels and less.

    Example:
        >>> sum(p.numel() for p in resnet(18).parameters())
        11689512

    Source: He et al., 2015, arXiv:1512.03385, table 1; the stride on the bottleneck's 3x3
    convolution and the zero-initialised last scale of each block as in Goyal et al., 2017,
    arXiv:1706.02677, section 5.1.
    """
    return ResNet(_NUM_BLOCKS[depth], num_classes, is_deep=depth >= 50, stem=stem)


class ResNet(nn.Module):
    """A stem, four stages of residual blocks, global average pooling, one linear layer."""

    def __init__(
        self, num_blocks: Sequence[int], num_classes: int, *, is_deep: bool, stem: str
    ) -> None:
        super().__init__()
        if stem == "large":
            self.stem = nn.Sequential(*_conv(3, 64, 7, stride=2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        else:
            self.stem = nn.Sequential(*_conv(3, 64, 3), nn.ReLU())
        blocks: list[nn.Module] = []
        num_in = 64
        for stage, count in enumerate(num_blocks):
            width = 64 * 2**stage
            num_out = 4 * width if is_deep else width
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(_Block(num_in, width, num_out, stride, is_deep=is_deep))
                num_in = num_out
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(num_in, num_classes)
        _initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        """Pictures [batch, 3, height, width] -> logits [batch, classes]."""
        logits: Tensor = self.classifier(self.pool(self.blocks(self.stem(images))).flatten(1))
        return logits


class _Block(nn.Module):
    """relu(residual(x) + shortcut(x))."""

    def __init__(
        self, num_in: int, width: int, num_out: int, stride: int, *, is_deep: bool
    ) -> None:
        super().__init__()
        if is_deep:
            layers = [
                *_conv(num_in, width, 1),
                nn.ReLU(),
                *_conv(width, width, 3, stride),
                nn.ReLU(),
                *_conv(width, num_out, 1),
            ]
        else:
            layers = [*_conv(num_in, width, 3, stride), nn.ReLU(), *_conv(width, num_out, 3)]
        self.residual = nn.Sequential(*layers)
        self.shortcut = nn.Sequential()
        if stride != 1 or num_in != num_out:
            self.shortcut = nn.Sequential(*_conv(num_in, num_out, 1, stride))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.relu(self.residual(x) + self.shortcut(x))
        return result


def _conv(num_in: int, num_out: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(num_in, num_out, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(num_out),
    ]


def _initialise(model: ResNet) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, _Block):
            last = module.residual[-1]
            assert isinstance(last, nn.BatchNorm2d)
            nn.init.zeros_(last.weight)  # the block starts as the identity
    nn.init.normal_(model.classifier.weight, std=0.01)
    nn.init.zeros_(model.classifier.bias)
