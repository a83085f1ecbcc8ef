"""The recurrent net of a talk by Baidu, on the characters of a folder of text files."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

import allstep
from allstep import Communicator, Task
from allstep.recipes.text import LanguageModelling, log_frequencies
from allstep.recipes.texts import TextRecipe

_NUM_CHARACTERS = 256  # the bytes of UTF-8; 0, which no text has, ends each text


@dataclass(frozen=True, kw_only=True)
class Gru(TextRecipe):
    """Reads `folder/**/*.txt` and learns to predict each character (a byte) from those before it.

    With `width=3000` and `micro_batch=16` it is the benchmark of the talk: 5 layers of 3,000 units,
    100 steps, 16 samples per worker. The texts are kept in memory; the end of each is held out.

    Source: "Effectively scaling deep learning frameworks (to 40 GPUs and beyond)", Baidu SVAIL,
    2017.
    """

    name: ClassVar[str] = "gru"
    summary: ClassVar[str] = "the characters of a folder of text files, Baidu's 5 layers of GRU"
    warmup_share: ClassVar[float] = 0.1

    epochs: int = 1
    global_batch: int = 16
    micro_batch: int = 8
    optimizer: allstep.optim.OptimizerName = "adamw"
    lr: float = 3e-3
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0

    layers: int = 5
    """Number of stacked GRU layers."""

    width: int = 256
    """Units of each layer; the talk has 3,000."""

    sequence_length: int = 100
    """Characters of a sample, which are the net's time steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("layers", "width", "sequence_length"):
            allstep.errors.check_integer(name, getattr(self, name))

    @property
    def num_weights(self) -> int:
        """Number of weights of the GRU's matrices, as in the talk: layers x (2 width) x (3 width).

        >>> Gru(width=3000).num_weights
        270000000
        """
        return self.layers * 2 * self.width * 3 * self.width

    @property
    def forward_flops(self) -> int:
        """Operations of a micro-batch's forward pass with these; a step takes three times as many.

        2 x weights x sequence_length x micro_batch

        >>> Gru(width=3000, micro_batch=16).forward_flops
        864000000000
        """
        return 2 * self.num_weights * self.sequence_length * self.micro_batch

    def describe(self) -> str:
        """The net's size, as stated in the talk."""
        return (
            f"{self.layers} layers x {self.width:,} units x {self.sequence_length} steps, batch"
            f" {self.micro_batch}: {self.num_weights / 1e6:,.1f} M weights of the GRU"
            f" ({4 * self.num_weights / 1e9:.3g} GB in float32),"
            f" {self.forward_flops / 1e12:.3g} TFLOP forward and"
            f" {3 * self.forward_flops / 1e12:.3g} with backward"
        )

    def build(self, comm: Communicator) -> Task:
        """The task on the folder's texts."""
        train, test = map(_characters, self.read_texts())
        self.check_enough(len(train), "bytes", "to train on")
        self.check_enough(len(test), "bytes", "held out")
        sequences = allstep.data.text_folder.CausalSequences
        return self.make_task(
            CharacterGru(self.width, self.layers),
            sequences(train, self.sequence_length),
            sequences(test, self.sequence_length),
            LanguageModelling(log_frequencies(train, _NUM_CHARACTERS)),
        )


def _characters(texts: list[str]) -> Tensor:
    """The texts' bytes, uint8, with a 0 after each text."""
    data = "".join(f"{text}\0" for text in texts).encode()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class CharacterGru(nn.Module):
    """An embedding, GRU layers of the same width, and a linear layer for the next character.

    Args:
        width: units of each layer.
        layers: number of GRU layers.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_NUM_CHARACTERS, width)
        self.gru = nn.GRU(width, width, layers, batch_first=True)
        self.scores = nn.Linear(width, _NUM_CHARACTERS)
        self._initialise()

    def _initialise(self) -> None:
        """Sets larger weights than torch's defaults, with which the signal fades in five layers.

        With the defaults the loss stays at that of the characters' frequencies for hundreds of
        steps.
        """
        for name, weight in self.gru.named_parameters():
            for gate in weight.chunk(3) if weight.ndim == 2 else ():
                if "_hh_" in name:
                    nn.init.orthogonal_(gate)
                else:
                    nn.init.xavier_normal_(gate, gain=1.4)

    def forward(self, characters: Tensor) -> Tensor:
        """Characters int64 [batch, steps] -> logits [batch, steps, characters]."""
        hidden, _ = self.gru(self.embedding(characters))
        logits: Tensor = self.scores(hidden)
        return logits
