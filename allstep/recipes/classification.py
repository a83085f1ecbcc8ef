"""Loss, metrics and a small net for the recipes with pictures."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from allstep import Metrics


@dataclass(frozen=True)
class Classifier:
    """Cross-entropy and accuracy of a model on uint8 pictures, normalised on the device.

    Args:
        mean: mean of each channel, in units of the uint8 values.
        std: standard deviation of each channel, in the same units.
        label_smoothing: share of the target spread over all classes in training, 0 to 1.
        top_k: k of an additional top-k accuracy; 0 for none.
    """

    mean: Sequence[float]
    std: Sequence[float]
    label_smoothing: float = 0.0
    top_k: int = 0

    def normalise(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """(images - mean) / std per channel, [batch, channels, height, width] in `dtype`."""
        units = torch.tensor([self.mean, self.std], dtype=dtype)
        mean, std = units.to(images.device, non_blocking=True).view(2, -1, 1, 1).unbind()
        return (images.to(dtype) - mean) / std

    def logits(self, model: nn.Module, images: Tensor) -> Tensor:
        """The model's logits, [batch, classes], computed in the dtype of its parameters."""
        logits: Tensor = model(self.normalise(images, next(model.parameters()).dtype))
        return logits

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy of (images, labels)."""
        images, labels = batch
        return F.cross_entropy(
            self.logits(model, images), labels, label_smoothing=self.label_smoothing
        )

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Metrics:
        """Sums and counts of `accuracy`, `loss` (nats, unsmoothed) and the top-k accuracy."""
        images, labels = batch
        logits = self.logits(model, images)
        count = len(labels)
        metrics: dict[str, tuple[float | Tensor, float | Tensor]] = {
            "accuracy": ((logits.argmax(1) == labels).sum(), count),
            "loss": (F.cross_entropy(logits, labels, reduction="sum"), count),
        }
        if self.top_k:
            best = logits.topk(min(self.top_k, logits.shape[1]), dim=1).indices
            metrics[f"top{self.top_k}"] = ((best == labels[:, None]).sum(), count)
        return metrics


class ConvNet(nn.Module):
    """Convolutions with batch norm and ReLU, pooling after each group, dropout, a linear layer.

    Args:
        groups: channels of each 3 x 3 convolution, in groups that end in pooling; input is grey.
        pixels: rows and columns after the last pooling.
        dropout: probability of dropping a feature before the linear layer.
        num_classes: number of outputs.
    """

    def __init__(
        self, groups: Sequence[Sequence[int]], pixels: int, dropout: float, num_classes: int = 10
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        num_in = 1
        for group in groups:
            for num_out in group:
                convolution = nn.Conv2d(num_in, num_out, 3, padding=1, bias=False)
                layers += [convolution, nn.BatchNorm2d(num_out), nn.ReLU()]
                num_in = num_out
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(num_in * pixels * pixels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Pictures [batch, 1, height, width] -> logits [batch, classes]."""
        logits: Tensor = self.classifier(self.dropout(self.features(images).flatten(1)))
        return logits
