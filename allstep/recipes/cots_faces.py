"""The face neuron test, for every neuron of every stage and for baselines."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import allstep
from allstep.files import from_plain
from allstep.recipes.cots_data import draw_patches
from allstep.recipes.cots_neurons import Responses, Score, score
from allstep.recipes.cots_pictures import PictureFormat

Layer = Callable[[Tensor], Tensor]

_AT_ONCE = 500  # stimuli
_NUM_SHOWN = 24
_TEMPLATES_AT_ONCE, _MOST_TEMPLATES = 512, 8192


@dataclass(frozen=True)
class Stimuli:
    """One half of the test's stimuli: unnormalised grey squares, uint8 [num, side, side]."""

    faces: Tensor
    distractors: Tensor


@dataclass(frozen=True)
class Best:
    """The best of some neurons.

    Attributes:
        name: name of their layer, or of a baseline.
        num_neurons: number of neurons to choose from.
        score: score of the chosen one.
        shown: indices of the stimuli of the second half to which it responds most; faces are
            numbered before distractors.
    """

    name: str
    num_neurons: int
    score: Score
    shown: list[int]

    def as_dict(self) -> dict[str, Any]:
        """The name, the number of neurons and the score as plain data, for a report."""
        return {"name": self.name, "num_neurons": self.num_neurons, **asdict(self.score)}


class FaceTest:
    """A test of faces against distractors; neurons are chosen on one half, tested on the other.

    Args:
        grid: the workers that share the net.
        form: format of the net's pictures.
        choose, report: the two halves of the stimuli, the same on all workers.
    """

    def __init__(
        self,
        grid: "allstep.nn.Grid",
        form: PictureFormat,
        choose: Stimuli,
        report: Stimuli,
    ) -> None:
        self.grid = grid
        self.form = form
        self.halves = (choose, report)

    @property
    def all_negative(self) -> float:
        """The accuracy of the constant answer that nothing is a face."""
        report = self.halves[1]
        return len(report.distractors) / (len(report.faces) + len(report.distractors))

    def layer(self, name: str, net: Layer) -> Best:
        """The best neuron of a layer that is divided among the workers. Collective.

        Args:
            name: name of the layer.
            net: this worker's part of pictures -> its neurons, [num, maps, height, width].
        """
        halves = [self._responses(half, net, own_part=True) for half in self.halves]
        own = asdict(_best(name, *halves))  # each worker knows only its own neurons
        everyone = [from_plain(Best, best) for best in self.grid.comm.all_gather_object(own)]
        return _best_of(everyone, sum(best.num_neurons for best in everyone))

    def feature(self, name: str, feature: Layer) -> Best:
        """The best of a baseline's features.

        Args:
            name: name of the baseline.
            feature: uint8 squares [num, side, side] -> features [num, num_features].
        """
        halves = [Responses(feature(half.faces), feature(half.distractors)) for half in self.halves]
        return _best(name, *halves)

    def mean_face(self) -> Best:
        """The supervised baseline: the mean of the first half's normalised faces as a filter."""
        faces = next(self._pictures(self.halves[0].faces, len(self.halves[0].faces)))
        template = faces.flatten(1).mean(0, keepdim=True)
        halves = [self._responses(half, _products_with(template)) for half in self.halves]
        return _best("mean face (supervised)", *halves)

    def random_templates(
        self, num_templates: int, photographs: list[list[Tensor]], generator: torch.Generator
    ) -> Best:
        """The best of `num_templates` random patches of photographs as filters, at most 8,192."""
        num_templates = min(num_templates, _MOST_TEMPLATES)
        found = []
        for first in range(0, num_templates, _TEMPLATES_AT_ONCE):
            num = min(_TEMPLATES_AT_ONCE, num_templates - first)
            patches = draw_patches(photographs, num, self.form.pixels, generator)
            products = _products_with(self.form.normalised(patches).flatten(1))
            halves = [self._responses(half, products) for half in self.halves]
            found.append(_best("random patches", *halves))
        return _best_of(found, num_templates)

    def shown(self, best: Best) -> tuple[Tensor, Tensor]:
        """The stimuli a neuron responds to most, [num, side, side], and which of them are faces."""
        report = self.halves[1]
        numbers = torch.tensor(best.shown)
        stimuli = torch.cat([report.faces, report.distractors])
        return stimuli[numbers], numbers < len(report.faces)

    def _pictures(self, stimuli: Tensor, at_once: int = _AT_ONCE) -> Iterator[Tensor]:
        """Stimuli in the format of the net's pictures, some at a time, not divided."""
        for some in torch.split(stimuli, at_once):
            yield self.form.normalised(self.form.resized(some))

    @torch.no_grad()
    def _responses(self, half: Stimuli, net: Layer, *, own_part: bool = False) -> Responses:
        def respond(stimuli: Tensor) -> Tensor:
            parts = []
            for pictures in self._pictures(stimuli):
                if own_part:
                    pictures = self.form.own_part(self.grid, pictures).to(self.grid.comm.device)
                parts.append(net(pictures).flatten(1).cpu())
            return torch.cat(parts)

        return Responses(respond(half.faces), respond(half.distractors))


def _best(name: str, choose: Responses, report: Responses) -> Best:
    found = score(choose, report)
    one = report.of(found.neuron, found.sign)
    responses = torch.cat([one.faces, one.distractors])[:, 0]
    shown = responses.argsort(descending=True)[:_NUM_SHOWN].tolist()
    return Best(name, choose.faces.shape[1], found, shown)


def _best_of(some: Sequence[Best], num_neurons: int) -> Best:
    """The best of several parts' best neurons; the parts have `num_neurons` in total."""
    return replace(max(some, key=lambda best: best.score.chosen_auc), num_neurons=num_neurons)


def _products_with(templates: Tensor) -> Layer:
    return lambda pictures: pictures.flatten(1) @ templates.T


def parts_of(stages: "list[allstep.nn.AutoencoderStage]") -> Iterator[tuple[str, Layer]]:
    """Two layers of neurons per stage: the filters, and the output after pooling and norm."""
    for index, stage in enumerate(stages):
        below = nn.Sequential(*stages[:index])
        yield f"stage {index + 1} filters", partial(_filters, below, stage)
        yield f"stage {index + 1} output", nn.Sequential(*below, stage)


def _filters(below: nn.Module, stage: "allstep.nn.AutoencoderStage", x: Tensor) -> Tensor:
    return stage.responses(below(x))
