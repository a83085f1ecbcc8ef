"""What a step of a user's own script takes: the script is run for a few steps and watched.

[Note: watched script] `allstep.attach` is replaced by one that also hooks the model. A step goes
from one `optimizer.step()` of the model's parameters to the next, whatever happens between: data,
several micro-batches, clipping. Its last backward pass begins where a gradient first reaches the
model's output and ends with the last parameter's; what comes after it is the update, what comes
before counts as forward. After enough steps the script is left by SystemExit.
"""

import json
import runpy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import allstep
from allstep.doctor.timing import synchronize
from allstep.doctor.workload import TimedStep, make_workload
from allstep.errors import UsageError
from allstep.plan.workload import Workload, read_workload

__all__ = ["profile_script"]

_NUM_WARM, _NUM_TIMED = 3, 7


def profile_script(script: Path, arguments: Sequence[str], folder: Path) -> Workload:
    """Runs a script as a lone worker for a few steps. See [Note: watched script].

    Args:
        script: any that calls `allstep.attach`.
        arguments: the script's own.
        folder: for the result; what the script prints goes there, too.

    Raises:
        UsageError: if there is no such file, it fails, doesn't call `attach`, or ends too early.
    """
    if not script.is_file():
        raise UsageError(f"`script` (={script}) is no file.")
    result, log = folder / "profile.json", folder / "log.txt"
    command = [sys.executable, "-m", "allstep.doctor.script_profile", str(result), str(script)]
    with log.open("wb") as output:
        code = subprocess.run(
            [*command, *arguments], stdout=output, stderr=output, stdin=subprocess.DEVNULL
        ).returncode
    if not result.is_file():
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise UsageError(
            f"`script` (={script}) failed with exit code {code}: {' '.join(last)}"
            f" Run `python {script}` to see where."
        )
    table = json.loads(result.read_text(encoding="utf-8"))
    if "mistake" in table:
        raise UsageError(f"`script` (={script}) {table['mistake']}")
    return read_workload(table)


class _Watch:
    """Hooks of one attached model, and the steps that they have seen."""

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.steps: list[TimedStep] = []
        self.num_samples = 0
        self._own: set[int] = set()
        self._start_s = self._core_start_s = self._backward_s = self._last_s = 0.0
        self._gradients: list[tuple[int, float]] = []
        self._handle = register_optimizer_step_post_hook(self._on_step)

    def attach(self, model: nn.Module, *args: Any, **options: Any) -> Any:
        """`allstep.attach`, watched; the first model counts."""
        exchange = _attach(model, *args, **options)
        if self.model is None:
            self.model = getattr(model, "_orig_mod", model)
            self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            self.model.register_forward_hook(self._after_forward)
            for p in self.model.parameters():
                if p.requires_grad:
                    self._own.add(id(p))
                    p.register_post_accumulate_grad_hook(self._on_gradient)
        return exchange

    def _now(self) -> float:
        synchronize(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        return perf_counter()

    def _before_forward(self, model: nn.Module, args: Any, options: Any) -> None:
        if model.training:
            tensors = [x for x in (*args, *options.values()) if isinstance(x, Tensor) and x.dim()]
            self.num_samples += len(tensors[0]) if tensors else 0

    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        tensors = output if isinstance(output, (tuple, list)) else [output]
        for x in tensors:
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(self._on_backward)  # type: ignore[no-untyped-call]

    def _on_backward(self, _: Tensor) -> None:
        """Another backward pass: what the one before has noted is of an earlier micro-batch."""
        self._backward_s, self._gradients = self._now(), []

    def _on_gradient(self, p: Tensor) -> None:
        now_s = perf_counter()
        self._gradients.append((p.numel(), now_s - (self._backward_s or now_s)))
        self._last_s = now_s

    def _on_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if self.optimizer not in (None, optimizer) or not owned & self._own:
            return
        self.optimizer = optimizer
        now_s, core_s = self._now(), process_time()
        if self._start_s and self._gradients and self._backward_s:
            self.steps.append(
                TimedStep(
                    forward_s=self._backward_s - self._start_s,
                    backward_s=self._last_s - self._backward_s,
                    optimizer_s=now_s - self._last_s,
                    core_s=core_s - self._core_start_s,
                    gradients=self._gradients,
                )
            )
        if len(self.steps) == _NUM_WARM + _NUM_TIMED:
            raise SystemExit(0)
        self._start_s, self._core_start_s = self._now(), core_s
        self._backward_s, self._gradients, self.num_samples = 0.0, [], 0

    @property
    def mistake(self) -> str | None:
        """Why there is nothing to say about the script."""
        if self.model is None:
            return (
                "never calls `allstep.attach`: attach the model, or describe it by `--params` and"
                " `--step-ms` instead."
            )
        if len(self.steps) < _NUM_WARM + _NUM_TIMED:
            return (
                f"ended after {len(self.steps)} steps of the attached model's optimizer; let it"
                f" make at least {_NUM_WARM + _NUM_TIMED + 1}."
            )
        return None


_attach = allstep.attach


def main(arguments: Sequence[str]) -> None:
    """Runs a script here, and writes what was seen of it."""
    result, script = Path(arguments[0]), arguments[1]
    watch = _Watch()
    allstep.attach = allstep.exchange.attach = watch.attach
    sys.argv = list(arguments[1:])
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise
    mistake = watch.mistake
    if mistake is not None:
        table: dict[str, Any] = {"mistake": mistake}
    else:
        table = asdict(make_workload(watch.steps[_NUM_WARM:], max(1, watch.num_samples)))
    result.write_text(json.dumps(table), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
