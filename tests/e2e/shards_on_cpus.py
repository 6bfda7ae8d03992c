"""Run `hf-dflash` with FSDP on CPUs, which accelerate by itself does on accelerators only.

torch shards on CPUs as it does on GPUs. So accelerate is told that its processes have GPUs, and
everything but the kernels is what runs there.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["ACCELERATE_USE_CPU"] = "true"

from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from train_and_leave import run_and_leave

from hf_dflash.trainer import DFlashTrainer

_init = PartialState.__init__
_train = DFlashTrainer.train


def pretend(self: PartialState, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def train_and_look(self: DFlashTrainer, *args: Any, **kwargs: Any) -> Any:
    result = _train(self, *args, **kwargs)
    assert self.is_fsdp_enabled
    assert all(isinstance(p, DTensor) for p in self.model.parameters())
    return result


if __name__ == "__main__":
    PartialState.__init__ = pretend
    DFlashTrainer.train = train_and_look
    run_and_leave()
