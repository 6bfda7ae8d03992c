"""Spread a frozen target over the processes that train its drafter."""

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from .target import decoder_layers


def shard_target(target: Any, device: torch.device) -> None:
    """Shard the target's decoder layers with FSDP2; each is gathered while it runs.

    Embeddings and head stay whole: drafter and loss use them outside the target's forward, and
    not equally often in every process.

    Args:
        target: The target model, not placed yet.
        device: Of this process.

    Raises:
        RuntimeError: There is one process only.
    """
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not is_distributed or torch.distributed.get_world_size() < 2:
        raise RuntimeError(
            "`shard_target` needs several processes, got one. Start the run with `accelerate "
            "launch -m hf_dflash.cli train ...`, or leave it out."
        )
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for layer in decoder_layers(target):
        fully_shard(layer, mesh=mesh)


def check_one_forward_a_batch(rows: Any, name: str) -> None:
    """Refuse packed rows, whose documents are run in a number of forwards of their own.

    Processes that run a sharded target must do so equally often, or each waits for the others
    for ever.

    Args:
        rows: A data set of rows.
        name: Of it, for the message.

    Raises:
        NotImplementedError: The rows are packed.
    """
    if len(rows) and "document_ids" in rows[0]:
        raise NotImplementedError(
            f"`{name}` holds packed rows, which `shard_target` cannot run. Prepare them without "
            "`--pack`, or cache the target's taps."
        )
