"""The trainings that bench_gpu.py steps through: the recipes' own nets on random data."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gpu_timing import Setting
from torch import Tensor, nn

from allstep.recipes.bert import Bert
from allstep.recipes.bert_model import BertConfig, BertForPreTraining
from allstep.recipes.gru import CharacterGru
from allstep.recipes.resnet import ResNet, resnet

__all__ = ["WORKLOADS", "Batch", "Workload", "bert_large", "make_workload"]

Batch = tuple[Tensor, ...]
NUM_CLASSES = 1_000
BERT_VOCABULARY, SEQUENCE, NUM_PREDICTED = 30_522, 128, 20


@dataclass(frozen=True)
class Workload:
    """A net, what it is trained on, and how.

    Attributes:
        make: the net on its device, random.
        data: a batch of so many samples, random.
        loss: its mean.
        optimizer: of a net.
        batch: samples of a step.
        shared_batch: the same where two workers share a GPU.
        small_batch: so few that the host is slower than the device.
        dtype: of the products; the parameters are float32. TF32 is used for float32.
    """

    make: Callable[[], nn.Module]
    data: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: int
    shared_batch: int
    small_batch: int
    dtype: torch.dtype

    def mean_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Under autocast, where products are not float32."""
        with self._autocast(batch[0].device):
            return self.loss(model, batch)

    def _autocast(self, device: torch.device) -> AbstractContextManager[object]:
        is_used = self.dtype != torch.float32
        return torch.autocast(device.type, self.dtype if is_used else None, enabled=is_used)


def _cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    scores = model(batch[0])
    return F.cross_entropy(scores.flatten(0, -2).float(), batch[1].flatten())


def resnet50(setting: Setting) -> Workload:
    """224 x 224 pictures, channels last, bf16."""
    side = 16 if setting.tiny else 224

    def make() -> nn.Module:
        with setting.torch_device:
            tiny = ResNet((1, 1, 1, 1), NUM_CLASSES, is_deep=True, stem="small")
            model = tiny if setting.tiny else resnet(50, NUM_CLASSES)
            return model.to(memory_format=torch.channels_last)

    def data(size: int) -> Batch:
        pictures = torch.randn(size, 3, side, side, device=setting.torch_device)
        labels = torch.randint(NUM_CLASSES, (size,), device=setting.torch_device)
        return pictures.contiguous(memory_format=torch.channels_last), labels

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 1e-3, 0.9, fused=True)

    sizes = (2, 2, 2) if setting.tiny else (256, 64, 2)
    return Workload(make, data, _cross_entropy, optimizer, *sizes, _half(setting))


def bert_large(setting: Setting) -> BertConfig:
    """The recipe's size, with the published number of tokens."""
    size = "tiny" if setting.tiny else "large"
    words = 1_000 if setting.tiny else BERT_VOCABULARY
    recipe = Bert(
        size=size, vocab_size=words, sequence_length=SEQUENCE, second_sequence_length=None
    )
    return recipe.config


def bert(setting: Setting) -> Workload:
    """BERT-large, both heads, sequences of 128 tokens, bf16; parameters that AdamW moves."""
    config, device = bert_large(setting), setting.torch_device

    def make() -> nn.Module:
        with device:
            return BertForPreTraining(config)

    def data(size: int) -> Batch:
        def draw(high: int, *shape: int) -> Tensor:
            return torch.randint(high, (size, *shape), device=device)

        tokens = draw(config.vocab_size - 1, SEQUENCE) + 1  # none is padding
        positions = draw(SEQUENCE, NUM_PREDICTED)
        targets = draw(config.vocab_size, NUM_PREDICTED)
        return tokens, draw(2, SEQUENCE), positions, targets, draw(2)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        tokens, segments, positions, targets, is_random = batch
        scores, relations = model(tokens, segments, positions)
        hidden = F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())
        return hidden + F.cross_entropy(relations.float(), is_random)

    sizes = (2, 2, 1) if setting.tiny else (32, 4, 1)
    return Workload(make, data, loss, _adamw, *sizes, _half(setting))


def gru(setting: Setting) -> Workload:
    """The recipe's net as Baidu's talk has it: 5 layers x 3,000 units x 100 steps; TF32."""
    width, length = (16, 10) if setting.tiny else (3000, 100)
    device = setting.torch_device

    def make() -> nn.Module:
        with torch.device("meta"):  # the recipe's orthogonal weights would take a minute
            model = CharacterGru(width, 5)
        model = model.to_empty(device=device)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
        return model

    def data(size: int) -> Batch:
        text = torch.randint(256, (size, length + 1), device=device)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    sizes = (2, 2, 1) if setting.tiny else (16, 16, 1)
    return Workload(make, data, _cross_entropy, _adamw, *sizes, torch.float32)


def _half(setting: Setting) -> torch.dtype:
    """Most CPUs are slow with it."""
    return torch.float32 if setting.tiny else torch.bfloat16


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-4, fused=True)


WORKLOADS = {"resnet50": resnet50, "bert_large": bert, "gru": gru}


def make_workload(name: str, setting: Setting) -> Workload:
    """A workload by its name."""
    return WORKLOADS[name](setting)
