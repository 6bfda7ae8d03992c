"""A moving average of the weights, which often drafts better than the last step's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import TrainerCallback

EMA_NAME = "ema.safetensors"


class MovingAverage:
    """The average of a model's trained parameters over its steps.

    The decay grows with the steps, min(decay, (1 + n) / (10 + n)), so that the first weights do
    not linger.

    Args:
        model: Whose parameters to follow; all those that get gradients now.
        decay: Its final value.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.n_updates = 0
        self._live = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._average = {name: p.detach().clone() for name, p in self._live.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the parameters as they are after a step."""
        self.n_updates += 1
        decay = min(self.decay, (1 + self.n_updates) / (10 + self.n_updates))
        for name, parameter in self._live.items():
            average = self._average[name]
            if average.device != parameter.device:  # the trainer may have moved the model
                average = self._average[name] = average.to(parameter.device)
            average.lerp_(parameter.detach(), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model have the average for a while."""
        kept = {name: p.detach().clone() for name, p in self._live.items()}
        self._fill(self._average)
        try:
            yield
        finally:
            self._fill(kept)

    @torch.no_grad()
    def _fill(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self._live.items():
            parameter.copy_(values[name])

    def save(self, folder: Path) -> None:
        """Write the average to a checkpoint."""
        tensors = {name: average.contiguous() for name, average in self._average.items()}
        save_file(tensors, folder / EMA_NAME, metadata={"n_updates": str(self.n_updates)})

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint's average.

        Raises:
            ValueError: It averages other parameters than this one.
        """
        with safe_open(folder / EMA_NAME, framework="pt") as file:
            if set(file.keys()) != set(self._average):
                raise ValueError(
                    f"{folder / EMA_NAME} must hold the average of the {len(self._average)} "
                    f"trained parameters, got {len(list(file.keys()))} others. Resume with the "
                    "drafter and the adapter that the run was started with."
                )
            for name, average in self._average.items():
                average.copy_(file.get_tensor(name))
            self.n_updates = int(file.metadata()["n_updates"])


class EMACallback(TrainerCallback):
    """Keeps a `MovingAverage` up to date."""

    def __init__(self, average: MovingAverage) -> None:
        self.average = average

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Take in the weights of this step."""
        self.average.update()
