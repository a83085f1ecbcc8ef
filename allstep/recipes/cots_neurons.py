"""Scores how well single neurons distinguish faces from distractors."""

from dataclasses import dataclass

import torch
from torch import Tensor

_AT_ONCE = 256  # neurons


@dataclass(frozen=True)
class Responses:
    """Responses of some neurons to one half of the stimuli.

    Attributes:
        faces: responses to faces, [num_faces, num_neurons].
        distractors: responses to distractors, [num_distractors, num_neurons].
    """

    faces: Tensor
    distractors: Tensor

    def of(self, neuron: int, sign: float) -> "Responses":
        """The responses of one neuron, multiplied by `sign`."""
        place = slice(neuron, neuron + 1)
        return Responses(sign * self.faces[:, place], sign * self.distractors[:, place])


@dataclass(frozen=True)
class Score:
    """The result of a neuron that was chosen on one half of the stimuli, on both halves.

    Attributes:
        neuron: index of the neuron.
        sign: 1 if it responds more to faces, -1 if more to distractors.
        chosen_auc, chosen_accuracy: results on the half on which neuron and threshold were chosen.
        auc, accuracy: results on the other half.
    """

    neuron: int
    sign: float
    chosen_auc: float
    chosen_accuracy: float
    auc: float
    accuracy: float


def score(choose: Responses, report: Responses) -> Score:
    """The neuron with the best AUC in `choose`, and its AUC and accuracy in `report`."""
    areas = auc(choose.faces, choose.distractors)
    neuron = int((areas - 0.5).abs().argmax())
    sign = 1.0 if areas[neuron] >= 0.5 else -1.0
    choose, report = choose.of(neuron, sign), report.of(neuron, sign)
    threshold, chosen_accuracy = best_threshold(choose.faces[:, 0], choose.distractors[:, 0])
    num_right = (report.faces > threshold).sum() + (report.distractors <= threshold).sum()
    return Score(
        neuron=neuron,
        sign=sign,
        chosen_auc=float(auc(choose.faces, choose.distractors)[0]),
        chosen_accuracy=chosen_accuracy,
        auc=float(auc(report.faces, report.distractors)[0]),
        accuracy=float(num_right) / (len(report.faces) + len(report.distractors)),
    )


def auc(faces: Tensor, distractors: Tensor) -> Tensor:
    """Each neuron's share of pairs in which the face's response is larger; a tie counts half.

    Args:
        faces: responses to faces, [num_faces, num_neurons].
        distractors: responses to distractors, [num_distractors, num_neurons].

    >>> auc(torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [1.0]]))
    tensor([0.8750], dtype=torch.float64)
    """
    areas = []
    for some, others in zip(
        torch.split(faces, _AT_ONCE, dim=1), torch.split(distractors, _AT_ONCE, dim=1), strict=True
    ):
        ordered, values = others.T.contiguous().sort(dim=1).values, some.T.contiguous()
        below = torch.searchsorted(ordered, values)
        not_above = torch.searchsorted(ordered, values, right=True)
        areas.append((below + not_above).double().mean(1) / (2 * len(distractors)))
    return torch.cat(areas)


def best_threshold(faces: Tensor, distractors: Tensor) -> tuple[float, float]:
    """The best threshold above which to answer "face", and its accuracy, for one neuron.

    >>> best_threshold(torch.tensor([2.0, 3.0]), torch.tensor([0.0, 1.0, 2.5]))
    (1.5, 0.8)
    """
    values = torch.unique(torch.cat([faces, distractors]))  # sorted
    lowest = values[:1] - 1  # at the lowest threshold all are called faces, at the last one none
    thresholds = torch.cat([lowest, (values[:-1] + values[1:]) / 2, values[-1:]])
    num_missed = torch.searchsorted(faces.sort().values, thresholds, right=True)
    num_rejected = torch.searchsorted(distractors.sort().values, thresholds, right=True)
    num_right = len(faces) - num_missed + num_rejected
    best = int(num_right.argmax())
    return float(thresholds[best]), float(num_right[best]) / (len(faces) + len(distractors))
