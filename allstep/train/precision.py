"""The compute dtype of a run: plain, autocast, or autocast with a gradient scaler."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from allstep.exchange import Exchange
from allstep.train.devices import map_tensors

_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Precision:
    """Applies a precision to the model, the data, the loss and the step.

    Args:
        name: "float32", "float64", "bfloat16" or "float16".
        device: the model's device.
        channels_last: whether images and convolution weights are kept channels-last.
    """

    def __init__(self, name: str, device: torch.device, *, channels_last: bool = False) -> None:
        self._device = device
        self._autocast_dtype = _AUTOCAST.get(name)
        self._dtype = torch.float64 if name == "float64" else torch.float32
        self._channels_last = channels_last
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "float16")

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """The model on its device, in its dtype and layout (changed in place)."""
        model.to(self._device, self._dtype)
        if self._channels_last:
            # Module.to converts 4-D tensors only; its overload for layouts is not typed.
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def prepare_data(self, data: Any) -> Any:
        """A micro-batch with its floating tensors in the model's dtype and layout."""
        return map_tensors(data, self._prepare_tensor)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which the forward pass runs."""
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, self._autocast_dtype)

    def step(self, optimizer: Optimizer, exchange: Exchange, clip_norm: float | None) -> None:
        """Makes one update with the global gradient in `p.grad`, clipped if `clip_norm` is set."""
        exchange.unscale_(self.scaler, optimizer)
        if clip_norm is not None:
            exchange.clip_grad_norm_(clip_norm)
        self.scaler.step(optimizer)
        self.scaler.update()

    def _prepare_tensor(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        if self._channels_last and tensor.dim() == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor
